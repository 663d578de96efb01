# SPDX-License-Identifier: Apache-2.0
"""What a plan is beside its tensor: the workspace that its layers share, and ids of any width."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from lora_cases import Problem, make
from mortar import _lora_memory, lora

SMALL = Problem(tokens=40, hidden=300, widths=(24,), ranks=(8, 3))
LARGE = Problem(tokens=40, hidden=600, widths=(24, 9), ranks=(64, 3))
NUM_GROUPS = 4  # the word of a plan that holds it


def kept(plan):
    """The workspaces that a plan holds on to."""
    return [memory for memory, _ in plan.memory.kept.values()]


def test_layers_share_one_workspace(device):
    """The first layer takes it; a layer that needs more gets more, and the others use that."""
    layers = [make(problem, device) for problem in (SMALL, SMALL, LARGE, SMALL)]
    plan, sizes = layers[0].plan(), []
    wants = [lora.apply(t.y.clone(), t.x, t.table(), layers[0].plan()) for t in layers]
    for t, want in zip(layers, wants, strict=True):
        assert torch.equal(lora.apply(t.y.clone(), t.x, t.table(), plan), want)
        lora.shrink(t.x, t.table(), plan)
        (memory,) = kept(plan)
        assert memory.dtype == torch.uint8 and memory.device == t.x.device
        assert memory.numel() >= t.table().workspace_size(t.x)
        sizes.append(memory.numel())
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]


def test_a_given_workspace_is_used_alone(device):
    t = make(SMALL, device)
    weights, plan = t.table(), t.plan()
    memory = torch.empty(weights.workspace_size(t.x), dtype=torch.uint8, device=device)
    lora.apply(t.y, t.x, weights, plan, workspace=memory)
    assert not kept(plan)


def test_the_workspace_goes_with_the_plan(device):
    t = make(SMALL, device)
    plan = t.plan()
    lora.apply(t.y, t.x, t.table(), plan)
    memory = weakref.ref(kept(plan)[0])
    again = lora.plan(t.token_adapter, t.num_adapters, out=plan)
    assert again is plan and kept(plan)[0] is memory()
    del plan, again
    gc.collect()
    assert memory() is None


def as_of_another_stream(plan):
    """Makes a plan's workspace look as if another stream had used it last."""
    (thread, (memory, stream)), *_ = plan.memory.kept.items()
    plan.memory.kept[thread] = (memory, stream + 8)
    return plan.memory.kept[thread]


def test_another_stream_takes_another_workspace(device):
    t = make(SMALL, device)
    weights, plan, seen = t.table(), t.plan(), []
    want = lora.apply(t.y.clone(), t.x, weights, t.plan())
    for changes in (False, False, True, True, False):
        if changes:
            as_of_another_stream(plan)
        assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
        seen += kept(plan)  # kept alive here, so that no address comes twice
    assert len(seen) == 5, "one at a time"
    assert seen[0] is seen[1] and seen[3] is seen[4]
    assert len({memory.data_ptr() for memory in seen}) == 3


def test_nothing_is_kept_of_a_graph(device, monkeypatch):
    """While a stream is captured every call takes its own: what was kept before stays out of the
    graph, and the graph's memory out of the plan."""
    t = make(SMALL, device)
    weights, plan = t.table(), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    before, given = as_of_another_stream(plan), []
    more = _lora_memory.Memory.more
    monkeypatch.setattr(_lora_memory, "stream_of", lambda x: None)
    monkeypatch.setattr(_lora_memory.Memory, "more",
                        lambda *args: given.append(more(*args)) or given[-1])  # fmt: skip
    for _ in range(2):
        assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
    assert len(given) == 2 and all(memory is not before[0] for memory in given)
    assert [*plan.memory.kept.values()][0] is before


def test_threads_that_share_a_plan_do_not_share_memory(device):
    """cudaStreamPerThread is one handle for the streams of all threads."""
    t = make(SMALL, device)
    weights, plan = t.table(), t.plan()
    barrier = threading.Barrier(4)

    def run():
        barrier.wait()
        for _ in range(20):
            lora.apply(t.y.clone(), t.x, weights, plan)
        barrier.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({memory.data_ptr() for memory in kept(plan)}) == 4


def test_the_launch_plan_as_text(device):
    t = make(SMALL, device)
    text = lora.launch_plan(t.y, t.x, t.table())
    assert text.startswith("lora_apply of 40 tokens")
    if "cuda" in str(device):
        assert "; shrink: " in text and "; expand: " in text and "workspace" in text
    with pytest.raises(TypeError, match="weights must be a mortar.lora.Weights, got None"):
        lora.launch_plan(t.y, t.x, None)
    with pytest.raises(ValueError, match="lora_launch_plan: "):
        lora.launch_plan(t.y[:-1], t.x, t.table())


def test_wide_ids(device):
    """int64, which torch.tensor([0, 1]) gives: the plan and the zeroed rows of int32."""
    t = make(SMALL, device)
    ids = t.token_adapter.clone()
    ids[::7] = torch.tensor([3, -2, 99, 2**31 - 1, -(2**31), 2], dtype=torch.int32).to(device)
    wide = ids.long()
    wide[7] = 2**32  # low half: an adapter
    weights = t.table()
    want = lora.shrink(t.x, weights, lora.plan(ids, t.num_adapters), zero_rows=ids)
    plan = lora.plan(wide, t.num_adapters)
    assert torch.equal(lora.shrink(t.x, weights, plan, zero_rows=wide), want)
    with pytest.raises(ValueError, match="got 6 others, the first at token 0"):
        lora.check(plan)


def test_a_plan_is_a_tuple(device):
    t = make(SMALL, device)
    data, num_tokens, num_adapters = plan = t.plan()
    assert data is plan.data
    assert (num_tokens, num_adapters) == (plan.num_tokens, plan.num_adapters) == (40, 2)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_take_a_workspace_of_their_own(device, way):
    """Two processes that torch.multiprocessing sends a plan to would write to one else."""
    t = make(SMALL, device)
    plan, weights = t.plan(), t.table()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    assert plan.memory.kept
    other = way(plan)
    assert not other.memory.kept
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, other), want)


def bare_calls(t, data, y, h):
    """Calls of the ops with a plan's tensor alone."""
    w = t.table()
    return [
        ("lora_apply", (t.x, data, *w.apply_args, y)),
        ("lora_shrink", (t.x, data, *w.shrink_args, h)),
        ("lora_expand", (h, data, *w.expand_args, y)),
    ]


def run_bare(name, args):
    getattr(torch.ops.mortar, name).table(*args)


def test_a_bare_plan_for_another_batch(device):
    """A plan's tensor knows what it was made for, by the function or by the op. Of a copy the CPU
    looks at the header; on a GPU, where nobody may wait, the kernels write nothing."""
    t = make(SMALL, device)
    ids = t.token_adapter.repeat(2)
    plan = lora.plan(ids, t.num_adapters)
    bare = torch.empty_like(plan.data)
    torch.ops.mortar.lora_plan(ids, t.num_adapters, bare)
    y, h = t.y.clone(), torch.full((1, 40, 8), 7.0, device=device)
    for data in (plan.data, bare):
        for name, args in bare_calls(t, data, y, h):
            message = f"^{name}: plan must be made for 40 tokens and 2 adapters, got one for 80 and"
            with pytest.raises(ValueError, match=message):
                run_bare(name, args)
    for name, args in bare_calls(t, plan.data.clone(), y, h):
        if device.type == "cpu":
            with pytest.raises(ValueError, match="plan must be made for 40 tokens and 2 adapters"):
                run_bare(name, args)
        else:
            run_bare(name, args)
    assert torch.equal(y, t.y) and (h == 7.0).all()


@pytest.mark.parametrize("inference", [False, True])
def test_a_plan_tensor_that_is_written_again(device, inference):
    """By a plan of other sizes, or by PyTorch: what was known of it before does not count."""
    t = make(SMALL, device)
    want = lora.apply(t.y.clone(), t.x, t.table(), t.plan())
    twice = t.token_adapter.repeat(2)
    with torch.inference_mode(inference):
        long = lora.plan(twice, t.num_adapters)
        lora.plan(t.token_adapter, t.num_adapters, out=long)
    copied = lora.plan(twice, t.num_adapters)
    short = t.plan().data
    copied.data[: short.numel()].copy_(short)
    for plan in (long, copied):
        y = t.y.clone()
        run_bare(*bare_calls(t, plan.data, y, None)[0])
        assert torch.equal(y, want)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # nothing is read back from a GPU
def test_a_number_of_groups_that_was_written_over(device):
    """Nothing behind the plan is read as a group, though all of it would pass for one."""
    t = make(SMALL, device)
    room = torch.ones(4_000_000, dtype=torch.int32)
    plan = lora.plan(t.token_adapter, t.num_adapters, out=lora.Plan(room, 0, 0))
    weights = t.table()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    assert plan.data[NUM_GROUPS] == lora.check(plan).num_groups
    plan.data[NUM_GROUPS] = 1_000_000
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
