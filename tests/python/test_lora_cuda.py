# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: CUDA graphs, streams, devices, sizes past 2^31, host cost. Collected
only where there is one."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lora_cases import BF16, Problem, apply_bound, assert_within, make
from mortar import lora, reference

PROBLEM = Problem(tokens=64, hidden=512, widths=(256, 64), ranks=(8, 16, 32, 5))
FORMS = ["table", "stacked"]


def capture(body) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


@pytest.mark.parametrize("form", FORMS)
def test_graph_replays_with_another_map(form):
    """Captured with one map, replayed with others: other tokens, other adapters, none at all."""
    t = make(PROBLEM, "cuda")
    weights, ids, y = t.weights(form), t.token_adapter, t.y.clone()
    plan = lora.plan(ids, 4)

    def body():
        y.copy_(t.y)
        lora.plan(ids, 4, out=plan)
        lora.apply(y, t.x, weights, plan)

    graph = capture(body)
    for new in (ids.clone(), ids.flip(0), ids * 0 + 2, ids * 0 - 1, ids.clamp(max=1), ids * 0 + 9):
        ids.copy_(new)
        graph.replay()
        assert_within(
            y,
            want := reference.lora.apply(t.y, t.x, t.adapters, ids, t.widths, t.scales),
            apply_bound(t, want),
        )
        eager = lora.apply(t.y.clone(), t.x, weights, lora.plan(ids, 4))
        assert torch.equal(y, eager)


def test_graph_sees_an_updated_adapter():
    t = make(PROBLEM, "cuda")
    weights, plan, y = t.table(), t.plan(), t.y.clone()

    def body():
        y.copy_(t.y)
        lora.apply(y, t.x, weights, plan)

    graph = capture(body)
    t.adapters[2] = [
        (torch.randn(9, 512, device="cuda").to(BF16), torch.randn(n, 9, device="cuda").to(BF16))
        for n in t.widths
    ]
    t.scales[2] = -0.5
    weights.update(2, t.adapters[2], -0.5)
    graph.replay()
    want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
    t.scales[2] = 0.5  # the bound wants sizes
    assert_within(y, want, apply_bound(t, want))


def test_graph_of_a_compiled_layer():
    t = make(PROBLEM, "cuda")
    weights, plan = t.table(), t.plan()
    want = lora.apply(t.y * 2, t.x, weights, plan)
    torch._dynamo.reset()
    layer = torch.compile(
        lambda x, y, plan: lora.apply(y * 2, x, weights, plan),
        fullgraph=True,
        mode="reduce-overhead",
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(layer(t.x, t.y, plan), want)


def test_two_streams_at_once():
    """Different problems on two streams, many times over: nothing is shared behind the scenes."""
    problems = [make(Problem(tokens=300, hidden=1024, seed=s), "cuda") for s in (1, 2)]
    calls = [(t, t.table(), t.plan()) for t in problems]
    wants = [lora.apply(t.y.clone(), t.x, weights, plan) for t, weights, plan in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    got = [[], []]
    for _ in range(50):
        for stream, (t, weights, _), out in zip(streams, calls, got, strict=True):
            with torch.cuda.stream(stream):
                out.append(lora.apply(t.y.clone(), t.x, weights, t.plan()))
    torch.cuda.synchronize()
    for results, want in zip(got, wants, strict=True):
        assert all(torch.equal(result, want) for result in results)


def test_threads_that_share_a_stream():
    """Their calls alternate on the stream, between the two kernels of a call as well."""
    problems = [make(Problem(tokens=40, hidden=1024, seed=s), "cuda") for s in range(4)]
    calls = [(t, t.table(), t.plan()) for t in problems]
    wants = [lora.apply(t.y.clone(), t.x, weights, plan) for t, weights, plan in calls]

    def run(call):
        t, weights, plan = call
        return [lora.apply(t.y.clone(), t.x, weights, plan) for _ in range(200)]

    with ThreadPoolExecutor(len(calls)) as pool:
        for results, want in zip(pool.map(run, calls), wants, strict=True):
            assert all(torch.equal(result, want) for result in results)


def test_threads_with_a_stream_each_of_one_handle():
    """cudaStreamPerThread, handle 2, is another stream in every thread; a plan shared by them must
    not give them one workspace."""
    t = make(Problem(tokens=64, hidden=4096, widths=(1024,), ranks=(16, 64)), "cuda")
    weights, plan = t.table(), t.plan()
    xs = [t.x * scale for scale in (1, 2, -1, 0.5)]
    wants = [lora.apply(t.y.clone(), x, weights, t.plan()) for x in xs]
    outs = [torch.empty_like(t.y) for _ in xs]
    torch.cuda.synchronize()

    def run(i):
        wrong = 0
        with torch.cuda.stream(torch.cuda.ExternalStream(2)):
            for _ in range(200):
                outs[i].copy_(t.y)
                lora.apply(outs[i], xs[i], weights, plan)
                torch.cuda.current_stream().synchronize()
                wrong += int(not torch.equal(outs[i].cpu(), wants[i].cpu()))
        return wrong

    with ThreadPoolExecutor(len(xs)) as pool:
        assert list(pool.map(run, range(len(xs)))) == [0] * len(xs)


def test_workspaces_are_pytorchs_and_few():
    """What a plan keeps is counted by PyTorch, one piece however many streams come by, and goes
    with the plan."""
    t = make(Problem(tokens=64, hidden=4096, widths=(1024,), ranks=(64,)), "cuda")
    weights, plan, y = t.table(), t.plan(), t.y.clone()
    size = weights.workspace_size(t.x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            lora.apply(y, t.x, weights, plan)
    torch.cuda.synchronize()
    assert size <= torch.cuda.memory_allocated() - before <= size + 512
    del plan
    assert torch.cuda.memory_allocated() <= before


def test_a_graph_has_memory_of_its_own():
    """Captured calls leave a plan's workspace alone, and replay without the plan's memory."""
    t = make(PROBLEM, "cuda")
    weights, plan, y = t.table(), t.plan(), t.y.clone()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    kept = [memory.data_ptr() for memory, _ in plan.memory.kept.values()]

    def body():
        y.copy_(t.y)
        lora.apply(y, t.x, weights, plan)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    assert [memory.data_ptr() for memory, _ in plan.memory.kept.values()] == kept
    plan.memory.kept.clear()
    poison = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, want)
    assert all((memory == 255).all() for memory in poison)


@pytest.mark.alone  # the host must come to the end before the side stream does
def test_runs_on_the_current_stream():
    """x is written late on a side stream; the ops must wait for it and the default stream not."""
    t = make(PROBLEM, "cuda")
    weights = t.table()
    want = lora.apply(t.y.clone(), t.x, weights, t.plan())
    x, ids = torch.zeros_like(t.x), torch.full_like(t.token_adapter, -1)
    y = t.y.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(t.x)
        ids.copy_(t.token_adapter)
        lora.apply(y, x, weights, lora.plan(ids, 4))
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(y, want)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("late", ["x", "y", "map", "a", "b", "table", "scales"])
def test_sees_what_was_written_just_before(late, between):
    """Kernels that start early (programmatic dependent launch) must not read too early: every
    input is rewritten, in turn with two contents, right before the plan, which the call or one of
    another layer follows."""
    t = make(PROBLEM, "cuda")
    u = make(Problem(**{**vars(PROBLEM), "seed": 1}), "cuda")
    stacked, table = t.stacked(0.0), t.table()
    weights = table if late == "table" else stacked
    a, b, _, scales = stacked.apply_args
    row = t.adapters[1]
    y = torch.empty_like(t.y)
    targets = {"x": t.x, "y": y, "map": t.token_adapter, "a": a[0], "b": b[1], "scales": scales}
    contents = {"x": (t.x.clone(), u.x), "y": (t.y, u.y), "map": (t.token_adapter.clone(),
                u.token_adapter), "a": (a[0].clone(), a[0] * 2), "b": (b[1].clone(), b[1] * 2),
                "scales": (scales.clone(), scales * 2)}  # fmt: skip
    plan = t.plan()
    other = (u.y.clone(), u.x.clone(), u.table(), u.plan())

    def run(which: int, wait: bool) -> torch.Tensor:
        if late != "y":
            y.copy_(t.y)
        if late == "table":
            weights.update(1, row if which == 0 else None)
        else:
            targets[late].copy_(contents[late][which])
        if wait:
            torch.cuda.synchronize()
        lora.plan(t.token_adapter, 4, out=plan)
        if between:
            lora.apply(*other)
        if wait:
            torch.cuda.synchronize()
        return lora.apply(y, t.x, weights, plan).clone()

    wants = [run(which, wait=True) for which in (0, 1)]
    assert not torch.equal(*wants)
    results = [run(i % 2, wait=False) for i in range(300)]
    assert all(torch.equal(result, wants[i % 2]) for i, result in enumerate(results))


@pytest.mark.parametrize("ranks", [(8, 16, 32, 5), (200, 64, 5)])
@pytest.mark.parametrize("tokens", [1, 64, 300, 5000])
def test_each_layer_sees_the_ones_before(tokens, ranks):
    """A layer's y is x of the next and y of the one after that: a kernel may start while several
    before it run, and must wait for all of them before it reads x and y."""
    t = make(Problem(tokens=tokens, hidden=512, widths=(512,), ranks=ranks), "cuda")
    weights, plan = t.table(), t.plan()

    def run(wait: bool) -> list[torch.Tensor]:
        rows = [t.x.clone(), t.y.clone(), t.y.flip(0)]
        for i in range(12):
            x, y = rows[i % 3], rows[(i + 1) % 3]
            lora.apply(y, x, weights, plan, scale=1 / 512)  # smaller than what it is added to
            if wait:
                torch.cuda.synchronize()
        return rows

    wants = run(wait=True)
    assert all(want.isfinite().all() for want in wants)
    for _ in range(50):
        assert all(map(torch.equal, run(wait=False), wants))


if torch.cuda.device_count() > 1:

    def test_runs_on_the_device_of_its_tensors():
        t = make(PROBLEM, "cuda:1")
        with torch.cuda.device(0):
            want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
            y = lora.apply(t.y, t.x, t.table(), t.plan())
            assert torch.cuda.current_device() == 0
        assert_within(y, want, apply_bound(t, want))


@pytest.mark.parametrize("which", ["x", "y", "plan", "weights"])
def test_mixed_devices(which):
    t = make(PROBLEM, "cuda")
    args = {"x": t.x, "y": t.y, "plan": t.plan(), "weights": t.table()}
    other = make(PROBLEM, "cpu")
    args[which] = {"x": other.x, "y": other.y, "plan": other.plan(), "weights": other.table()}[
        which
    ]
    before = args["y"].clone()
    with pytest.raises(TypeError, match="^lora_apply: .* must be on c.*, got c"):
        lora.apply(**args)
    assert torch.equal(args["y"], before)


def test_more_than_2_to_the_31_elements():
    """x and y beyond 2^31 elements; the rows at the far end are right."""
    tokens, hidden = 2**20, 2064
    x = torch.zeros(tokens, hidden, dtype=BF16, device="cuda")
    y = torch.zeros(tokens, hidden, dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    some = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    t = make(Problem(tokens=5, hidden=hidden, widths=(hidden,), ranks=(8, 16)), "cuda")
    t.token_adapter.copy_(torch.tensor([0, 1, 1, 0, 1]))
    ids = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    x[some], y[some], ids[some] = t.x, t.y, t.token_adapter
    want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
    weights = t.table()
    lora.apply(y, x, weights, lora.plan(ids, 2))
    assert_within(y[some], want, apply_bound(t, want))
    y[some] = 0
    assert not y.any()
    ids.fill_(1)
    ids[some] = t.token_adapter
    y[some] = t.y
    lora.apply(y, x, weights, lora.plan(ids, 2))
    assert_within(y[some], want, apply_bound(t, want))


def host_costs(*functions, bursts: int = 200, calls: int = 100) -> list[float]:
    """Host time of a call of each, in us: bursts that a stream's queue can hold take turns, with a
    wait outside the clock; the best burst counts, as other work of the machine only ever adds to
    it."""
    best = [float("inf")] * len(functions)
    for _ in range(bursts):
        for i, function in enumerate(functions):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], 1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best


def host_cost_and_limit(function, times: float = 1.6) -> tuple[float, float]:
    """Host time of a call and what it may be, in us: so many times that of torch.mul into a given
    tensor, which launches one kernel, in the same run."""
    x = torch.zeros(8, 1024, device="cuda")
    y = torch.empty_like(x)

    def yardstick():
        torch.mul(x, x, out=y)

    cost, unit = host_costs(function, yardstick)
    return cost, times * unit


def in_turn(functions):
    """Calls one after the other, as a model does with its layers: a call must not profit from the
    one before it."""
    turns = itertools.cycle(functions)
    return lambda: next(turns)()


@pytest.mark.alone
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["plan", "shrink", "expand", "apply"])
def test_host_cost(op, form):
    def call():
        t = make(Problem(tokens=8, hidden=1024, widths=(1024, 256, 256), ranks=(16, 16)), "cuda")
        weights, plan = t.weights(form), t.plan()
        h = torch.zeros(3, 8, 16, device="cuda")
        return {
            "plan": lambda: lora.plan(t.token_adapter, 2, out=plan),
            "shrink": lambda: lora.shrink(t.x, weights, plan, h),
            "expand": lambda: lora.expand(t.y, h, weights, plan),
            "apply": lambda: lora.apply(t.y, t.x, weights, plan),
        }[op]

    with torch.no_grad():
        times = 2.0 if op == "apply" else 1.6  # apply launches two kernels
        cost, limit = host_cost_and_limit(in_turn([call() for _ in range(4)]), times)
    print(f"host cost of {op} ({form}): {cost:.1f} us, at most {limit:.1f}")
    assert cost <= limit
