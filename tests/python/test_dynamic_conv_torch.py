# SPDX-License-Identifier: Apache-2.0
"""How the ops behave as citizens of PyTorch: autograd, opcheck, compile, checkpointing, streams."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from conftest import DEVICES
from dynamic_conv_cases import (
    Recorder,
    assert_bitwise,
    boundaries,
    random_case,
    run,
    with_mortar,
)
from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step

ops = torch.ops.mortar


def leaves(case):
    """The case with inputs that require gradients."""
    for name in ("x", "kernels", "initial_state"):
        if getattr(case, name) is not None:
            getattr(case, name).requires_grad_()
    return case


# ---- opcheck: schema, autograd registration, fake tensors, AOT dispatch with dynamic shapes -----


@pytest.mark.parametrize("state_len", [-1, 3, 4])
@pytest.mark.parametrize("lengths", [None, [2, 0, 3]], ids=["dense", "packed"])
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck_functional(device, state_len, lengths, gradient):
    state = None if state_len < 0 else state_len
    case = random_case(device, 2, 5, 3, 4, lengths=lengths, state_len=state)
    if gradient:
        leaves(case)
    args = (case.x, case.kernels, case.cu_seqlens, case.initial_state, state_len, True)
    opcheck(ops.dynamic_conv.default, args)


def test_opcheck_backward(device):
    case = random_case(device, 2, 5, 3, 4, state_len=3)
    dense = (case.x, case.kernels, None, case.initial_state, True, True)
    opcheck(ops.dynamic_conv_backward.default, (case.dy, case.dfinal_state, *dense))
    packed = random_case(device, 1, channels=3, width=2, lengths=[4, 0, 1])
    inputs = (packed.x, packed.kernels, packed.cu_seqlens, None)
    opcheck(ops.dynamic_conv_backward.default, (packed.dy, None, *inputs, False, False))


def test_opcheck_mutating(device):
    case = random_case(device, 2, 5, 3, 4, state_len=3)
    y, final = torch.empty_like(case.x), torch.empty_like(case.initial_state)
    opcheck(ops.dynamic_conv_out.default,
            (case.x, case.kernels, None, case.initial_state, y, final, True))  # fmt: skip
    opcheck(ops.dynamic_conv_out.default, (case.x, case.kernels, None, None, y, None, False))
    x, kernels = torch.randn(2, 3, device=device), torch.randn(2, 3, 4, device=device)
    state, out = torch.randn(5, 3, 4, device=device), torch.empty(2, 3, device=device)
    slots = torch.tensor([4, -1], dtype=torch.int32, device=device)
    opcheck(ops.dynamic_conv_step.default, (x, kernels, state, slots, out, True))
    opcheck(ops.dynamic_conv_step.default, (x, kernels, state[:2], None, out, False))


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "broadcast", "transposed", "double"])
def test_any_upstream_gradient(device, mode):
    """Gradients as autograd hands them over: expanded, broadcast, dense in another order."""
    case = random_case(device, 2, 6, 5, 3)
    steps = torch.arange(6.0, device=device)
    reduce = {
        "sum": lambda y: y.sum(),
        "broadcast": lambda y: (y.sum(-1) * steps).sum(),
        "transposed": lambda y: (y.transpose(1, 2).contiguous() * steps).sum(),
        "double": lambda y: (y * y + y).sum(),
    }[mode]
    with torch.no_grad():
        y = dynamic_conv(case.x, case.kernels)
    y.requires_grad_()
    case.dy = torch.autograd.grad(reduce(y), y)[0].contiguous()
    expected = run(case)
    leaves(case)
    reduce(dynamic_conv(case.x, case.kernels)).backward()
    assert_bitwise(case.x.grad, expected["dx"], "dx")
    assert_bitwise(case.kernels.grad, expected["dkernels"], "dkernels")


def test_negated_upstream_gradients(device):
    """Negative-bit views, whose memory holds other values."""
    case = leaves(random_case(device, 2, 6, 5, 3, state_len=3))
    inputs = (case.x, case.kernels, case.initial_state)
    outputs = with_mortar(case)
    given = [torch.randn_like(t) for t in outputs]
    want = torch.autograd.grad(outputs, inputs, given, retain_graph=True)
    for i in range(2):
        negated = [torch._neg_view(-g) if i == j else g for j, g in enumerate(given)]
        got = torch.autograd.grad(outputs, inputs, negated, retain_graph=True)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("wanted", [("x",), ("kernels",), ("initial_state",), ("x", "kernels")])
def test_gradients_of_some_inputs(device, wanted):
    case = random_case(device, 2, 6, 5, 4, state_len=4, activation="silu")
    expected = run(case)
    tensors = [getattr(case, name).requires_grad_() for name in wanted]
    y, final = with_mortar(case)
    if final.requires_grad:
        outputs, upstream = (y, final), (case.dy, case.dfinal_state)
    gradients = torch.autograd.grad(outputs, tensors, upstream)
    for name, gradient in zip(wanted, gradients, strict=True):
        assert_bitwise(gradient, expected[f"d{name}"], name)


def test_gradient_through_the_final_state_alone(device):
    """y unused: its gradient is zero, and the state's still reaches x."""
    case = leaves(random_case(device, 1, 6, 5, 4, state_len=4))
    _, final = with_mortar(case)
    final.backward(case.dfinal_state)
    expected = torch.zeros_like(case.x)
    expected[:, 2:] = case.dfinal_state.transpose(1, 2)
    assert torch.equal(case.x.grad, expected)
    assert (case.kernels.grad == 0).all() and (case.initial_state.grad == 0).all()


def test_chained_chunks_have_the_gradients_of_the_whole(device):
    """A sequence cut in two, the state handed over: gradients flow back through the cut."""
    case = random_case(device, 2, 9, 5, 4, activation="silu")
    expected = run(case)
    leaves(case)
    first, state = dynamic_conv(case.x[:, :2], case.kernels[:, :2], output_final_state=True,
                                activation="silu")  # fmt: skip
    second = dynamic_conv(case.x[:, 2:], case.kernels[:, 2:], initial_state=state,
                          activation="silu")  # fmt: skip
    torch.cat([first, second], 1).backward(case.dy)
    torch.testing.assert_close(case.x.grad, expected["dx"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.kernels.grad, expected["dkernels"], rtol=1e-5, atol=1e-6)


def test_backward_keeps_inputs_only_and_runs_one_op(device):
    """No zero-filled buffers, no copies, no read-back: the backward is one op and its outputs."""
    case = leaves(random_case(device, 1, channels=5, lengths=[4, 0, 3], activation="silu"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = with_mortar(case)[0]
    assert {t.data_ptr() for t in saved} == {
        t.data_ptr() for t in (case.x, case.kernels, case.cu_seqlens)
    }
    with Recorder() as backward:
        torch.autograd.grad(y, (case.x, case.kernels), case.dy)
    ran = [name for name in backward.names if "detach" not in name and "view" not in name]
    assert ran == ["mortar.dynamic_conv_backward.default"]


def test_forward_runs_one_op_and_reads_nothing_back(device):
    case = random_case(device, 1, channels=5, lengths=[4, 0, 3], state_len=4)
    with Recorder() as forward, torch.no_grad():
        with_mortar(case)
    assert forward.names == ["aten.empty_like.default", "aten.new_empty.default",
                             "mortar.dynamic_conv_out.default"]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_double_use_under_checkpointing(device, reentrant):
    """The same layer twice in a checkpointed block: recomputed, and bitwise the same."""
    case = random_case(device, 2, 8, 6, 4, activation="silu")

    def block(x, kernels):
        return dynamic_conv(
            dynamic_conv(x, kernels, activation="silu") + x, kernels, activation="silu"
        )

    def gradients(function):
        x = case.x.clone().requires_grad_()
        kernels = case.kernels.clone().requires_grad_()
        function(x, kernels).backward(case.dy)
        return x.grad, kernels.grad

    plain = gradients(block)
    again = gradients(lambda x, k: checkpoint(block, x, k, use_reentrant=reentrant))
    for a, b in zip(plain, again, strict=True):
        assert_bitwise(a, b)


def test_step_refuses_gradients(device):
    x, kernels = torch.randn(2, 3, device=device), torch.randn(2, 3, 4, device=device)
    for which in range(3):
        args = [x.clone(), kernels.clone(), torch.randn(2, 3, 4, device=device)]
        before = args[2].clone()
        args[which].requires_grad_()
        for call in (dynamic_conv_step, torch.compile(dynamic_conv_step, backend="aot_eager")):
            with pytest.raises(RuntimeError, match="dynamic_conv_step: has no gradient"):
                call(*args)
        assert torch.equal(args[2], before)
        with torch.no_grad():
            assert torch.isfinite(dynamic_conv_step(*args)).all()


def test_out_op_refuses_gradients(device):
    case = leaves(random_case(device))
    y = torch.full_like(case.x, 7.0).detach()
    with pytest.raises(RuntimeError, match="dynamic_conv_out: has no gradient"):
        ops.dynamic_conv_out(case.x, case.kernels, None, None, y, None, False)
    x, kernels, state = case.x.detach(), case.kernels.detach(), torch.zeros_like(case.x[..., :3])
    with pytest.raises(RuntimeError, match="dynamic_conv_out: has no gradient"):
        ops.dynamic_conv_out(x, kernels, None, None, y.requires_grad_(), None, False)
    with pytest.raises(RuntimeError, match="dynamic_conv_step: has no gradient"):
        ops.dynamic_conv_step(x[:, 0], kernels[:, 0], state, None, y[:, 0], False)
    assert (y == 7).all()


def test_transforms_of_torch_func_are_refused(device):
    """They cannot see the gradients, and must not return zeros for them."""
    x, kernels = torch.randn(2, 5, 3, device=device), torch.randn(2, 5, 3, 4, device=device)
    state = torch.zeros(2, 3, 4, device=device)

    def convolve(x):
        return dynamic_conv(x, kernels).sum()

    def decode(x):
        return dynamic_conv_step(x[:, 0], kernels[:, 0], state).sum()

    for function in (convolve, decode):
        for transform in (lambda f: torch.func.grad(f)(x), lambda f: torch.func.jvp(f, (x,), (x,))):
            with pytest.raises(RuntimeError, match="transforms of torch.func|has no gradient"):
                transform(function)
    with pytest.raises(RuntimeError, match="cannot run inside transforms of torch.func"):
        torch.vmap(lambda x, k: dynamic_conv(x[None], k[None]))(x, kernels)
    assert (state == 0).all()


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lengths", [None, [5, 0, 3]], ids=["dense", "packed"])
def test_compiled_training_is_the_same(device, lengths, backend):
    case = random_case(device, 2, 8, 6, 4, lengths=lengths, state_len=4, activation="silu")

    def loss(x, kernels, state, cu_seqlens):
        y, final = dynamic_conv(x, kernels, cu_seqlens=cu_seqlens, initial_state=state,
                                output_final_state=True, activation="silu")  # fmt: skip
        return (y * 2).sum() + (final * final).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    inputs = [case.x, case.kernels, case.initial_state]
    for tensor in inputs:
        tensor.requires_grad_()
    expected = torch.autograd.grad(loss(*inputs, case.cu_seqlens), inputs)
    results = torch.autograd.grad(compiled(*inputs, case.cu_seqlens), inputs)
    for a, b in zip(expected, results, strict=True):
        assert_bitwise(a, b)


def test_compiled_inference_updates_the_state(device):
    def decode(x, kernels, state, slots):
        y = dynamic_conv(x.unsqueeze(1) * 2, kernels.unsqueeze(1), activation="silu").squeeze(1)
        return dynamic_conv_step(y, kernels, state, slots=slots) + 1

    compiled = torch.compile(decode, fullgraph=True)
    for rows in (2, 5):
        x, kernels = torch.randn(rows, 3, device=device), torch.randn(rows, 3, 4, device=device)
        state = torch.randn(6, 3, 3, device=device)
        slots = torch.randperm(6, device=device)[:rows].int()
        again = state.clone()
        with torch.no_grad():
            assert_bitwise(decode(x, kernels, state, slots), compiled(x, kernels, again, slots))
        assert_bitwise(state, again, "state")


# ---- CUDA: streams, graphs, no synchronisation ---------------------------------------------------

if "cuda" in DEVICES:

    def test_nothing_waits_for_the_device():
        case = random_case(torch.device("cuda"), 1, channels=64, lengths=[5, 0, 9, 1],
                           state_len=4, activation="silu")  # fmt: skip
        run(case)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_graph_replay_with_changed_boundaries():
        """Training captured once replays after the sequences in the pack have changed."""
        device = torch.device("cuda")
        case = random_case(device, 1, channels=64, lengths=[5, 0, 9, 2], activation="silu")
        run(case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(case)
        for lengths in ([1, 1, 1, 13], [0, 0, 16, 0], [4, 4, 4, 4]):
            case.cu_seqlens.copy_(boundaries(lengths, device))
            graph.replay()
            for name, value in run(case).items():
                assert_bitwise(captured[name], value, name)

    def test_current_stream_is_used():
        """Work queued on two streams at once, each behind its own slow producer."""
        device = torch.device("cuda")
        case = random_case(device, 2, 512, 1024, 4, torch.bfloat16)
        expected = dynamic_conv(case.x, case.kernels)
        torch.cuda.synchronize()
        results = []
        for _ in range(2):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                late = torch.zeros_like(case.x)
                torch.cuda._sleep(20_000_000)
                late.copy_(case.x)
                results.append(dynamic_conv(late, case.kernels))
        torch.cuda.synchronize()
        for result in results:
            assert_bitwise(result, expected)
