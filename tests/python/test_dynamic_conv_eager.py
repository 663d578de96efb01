# SPDX-License-Identifier: Apache-2.0
"""Eager calls, which pass tensors by the address of their objects: the same results, errors and
bookkeeping as the ops, whatever they are given."""

import threading
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import mortar._dynamic_conv_ops as module
from dynamic_conv_cases import assert_bitwise, random_case, run, with_mortar
from mortar._ffi import WRITTEN
from mortar.compat import jet
from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step

NOW = ("_forward_now", "_backward_now", "_step_now")
POISON = 7.0


def results(device):
    """What every eager call gives: dense, packed, with states, both ways, and the drop-ins."""
    torch.manual_seed(0)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        dense = random_case(device, 2, 9, 21, 4, dtype, activation="silu")
        packed = random_case(device, channels=8, width=3, dtype=dtype, lengths=[4, 0, 5],
                             state_len=3, index_dtype=torch.int64)  # fmt: skip
        for case in (dense, packed):
            outputs += run(case).values()
            with torch.no_grad():
                outputs += [t for t in with_mortar(case) if t is not None]
        x, kernels = dense.x[:, 0], dense.kernels[:, 0]
        state = torch.randn(3, 21, 4, device=device).to(dtype)
        slots = torch.tensor([2, -1], dtype=torch.int32, device=device)
        outputs += [dynamic_conv_step(x, kernels, state, slots=slots, activation="swish"), state]
        cache = state[:2].clone()
        outputs += [jet.causal_conv_step_triton(dense.x[:, :1], cache, kernels), cache]
        outputs += [jet.dynamic_conv_triton_autograd(dense.x, dense.kernels)]
        outputs += [jet.dynamic_conv_triton_cache(dense.x, dense.kernels, dense.x)]
    return outputs


@pytest.fixture
def calls(monkeypatch):
    """What each of NOW returned, by its name."""
    returned = {name: [] for name in NOW}

    def spy(function, log):
        def call(*args):
            log.append(function(*args))
            return log[-1]

        return call

    for name, log in returned.items():
        monkeypatch.setattr(module, name, spy(getattr(module, name), log))
    return returned


def test_the_ops_give_the_same(device, monkeypatch, calls):
    want = results(device)
    counts = {name: len(returned) for name, returned in calls.items()}
    assert counts == {"_forward_now": 12, "_backward_now": 4, "_step_now": 4}
    assert all(done == WRITTEN for returned in calls.values() for done in returned)
    for name in NOW:
        monkeypatch.setattr(module, name, lambda *args: 0)
    for got, expected in zip(results(device), want, strict=True):
        assert_bitwise(got, expected)


def test_gradients_without_the_shortcut_are_the_same(device, monkeypatch):
    """Where the forward is read by address and the backward is not, and the other way round."""
    case = random_case(device, 2, 9, 5, 4, state_len=4, activation="silu")
    want = run(case)
    for name in NOW[:2]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *args: 0)
            for key, value in run(case).items():
                assert_bitwise(value, want[key], key)


# ---- what cannot be read directly ----------------------------------------------------------------


def test_an_object_that_cannot_be_read_writes_nothing(device):
    x, kernels = torch.randn(2, 3, device=device), torch.randn(2, 3, 4, device=device)
    state, y = torch.full((2, 3, 4), POISON, device=device), torch.ones_like(x)
    for bad in (x.to("meta"), x.to_sparse(), "x", None.__class__):
        for tensors in ((bad, kernels, state, None, y), (x, kernels, state, bad, y), (x, kernels)):
            assert module._step_now(id(tensors), False) == 0
        tensors = (bad, kernels, None, None, y, None)
        assert module._forward_now(id(tensors), False) == 0
    assert (state == POISON).all() and (y == 1).all()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda k: None, "^dynamic_conv: kernels must be a torch.Tensor, got None$"),
        (lambda k: 3, "^dynamic_conv: kernels must be a torch.Tensor, got int$"),
        (lambda k: k.to_sparse(), "^dynamic_conv: kernels must be a dense tensor in memory, got"),
        (lambda k: FakeTensorMode().from_tensor(k), "must hold memory"),
    ],
    ids=["None", "int", "sparse", "fake"],
)
@torch.no_grad()
def test_what_is_no_plain_tensor(device, spoil, message):
    case = random_case(device)
    with pytest.raises((TypeError, ValueError, RuntimeError, BufferError), match=message):
        dynamic_conv(case.x, spoil(case.kernels))


def test_meta_tensors(device, calls):
    case = random_case(torch.device("meta"), 2, 6, 5, 4)
    assert dynamic_conv(case.x, case.kernels).is_meta
    assert dynamic_conv_step(case.x[:, 0], case.kernels[:, 0], case.x.transpose(1, 2)).is_meta
    y = dynamic_conv(case.x.requires_grad_(), case.kernels)
    assert torch.autograd.grad(y, case.x, case.dy)[0].is_meta
    assert WRITTEN not in sum(calls.values(), [])


def test_parameters_and_subclasses_go_through_the_ops(device, calls):
    class Named(torch.Tensor):
        pass

    case = random_case(device, 2, 6, 5, 4)
    want = run(case)
    for kind in (torch.nn.Parameter, lambda t: t.as_subclass(Named).requires_grad_()):
        for log in calls.values():
            log.clear()
        x = kind(case.x.clone())
        y = dynamic_conv(x, case.kernels)
        y.backward(case.dy)
        assert_bitwise(y.detach().as_subclass(torch.Tensor), want["y"])
        assert_bitwise(x.grad.as_subclass(torch.Tensor), want["dx"])
        assert not any(calls.values())


def test_parameters_as_kernels_or_state_take_the_shortcut(device, calls):
    case = random_case(device, 2, 6, 5, 4, state_len=4)
    want = run(replace(case, final_state_len=None))
    kernels, state = (torch.nn.Parameter(t.clone()) for t in (case.kernels, case.initial_state))
    dynamic_conv(case.x, kernels, initial_state=state).backward(case.dy)
    assert_bitwise(kernels.grad, want["dkernels"])
    assert_bitwise(state.grad, want["dinitial_state"])
    assert calls["_forward_now"][-1] == calls["_backward_now"][-1] == WRITTEN


def test_what_a_transform_of_torch_func_left_behind(device):
    """A dead wrapper looks like any tensor, but holds no memory."""
    case = random_case(device, 2, 6, 5, 4)
    want = run(case)
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(case.x)
    kernels = case.kernels.clone().requires_grad_()
    y = dynamic_conv(left[0], kernels)
    y.backward(case.dy)
    assert_bitwise(y.detach(), want["y"])
    assert_bitwise(kernels.grad, want["dkernels"])


def test_batched_gradients(device):
    """torch.autograd.grad vmaps the backward, whose dy then holds no memory."""
    case = random_case(device, 2, 6, 5, 4)
    kernels = case.kernels.clone().requires_grad_()
    y = dynamic_conv(case.x, kernels)
    dy = torch.randn(3, *case.dy.shape, device=device)
    rows = [torch.autograd.grad(y, kernels, row, retain_graph=True)[0] for row in dy]
    batched = torch.autograd.grad(y, kernels, dy, is_grads_batched=True)[0]
    assert_bitwise(batched, torch.stack(rows))


def test_jit_traces_record_the_call(device):
    case = random_case(device, 2, 6, 5, 4)
    traced = torch.jit.trace(lambda x, kernels: dynamic_conv(x, kernels), (case.x, case.kernels))
    other = torch.randn_like(case.x)
    assert_bitwise(traced(other, case.kernels), dynamic_conv(other, case.kernels))


# ---- errors --------------------------------------------------------------------------------------


def test_errors_leave_outputs_untouched(device):
    """As the ops do, with the same sentence."""
    case = random_case(device, 2, 6, 5, 4, state_len=4)
    y, final_state = (torch.full_like(t, POISON) for t in (case.x, case.initial_state))
    wide = case.kernels.double()
    tensors = (case.x, wide, None, case.initial_state, y, final_state)
    with pytest.raises(TypeError, match="^dynamic_conv_forward: kernels must have") as caught:
        module._forward_now(id(tensors), True)
    with pytest.raises(TypeError) as expected:
        torch.ops.mortar.dynamic_conv_out(*tensors, True)
    sentence = str(caught.value).replace("dynamic_conv_forward", "dynamic_conv_out")
    assert sentence == str(expected.value)
    gradients = [torch.full_like(t, POISON) for t in (case.x, wide, final_state)]
    inputs = (*tensors[:4], case.dy, None, *gradients)
    with pytest.raises(TypeError, match="^dynamic_conv_backward: kernels must have"):
        module._backward_now(id(inputs), True)
    for output in (y, final_state, *gradients):
        assert (output == POISON).all()


def test_a_step_that_fails_leaves_the_state_untouched(device, calls):
    x, kernels = torch.randn(2, 5, device=device), torch.randn(2, 5, 4, device=device)
    state = torch.full((2, 5, 3), POISON, device=device)
    for args, message in (
        ((x, kernels[:1], state), "dynamic_conv_step: kernels must have"),
        ((x, kernels.int(), state), "dynamic_conv_step: kernels must have dtype"),
        ((x[:1], kernels[:1], state), "dynamic_conv_step: state must have"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            dynamic_conv_step(*args)
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            jet.causal_conv_step_triton(args[0].unsqueeze(1), args[2], args[1])
    for tensor in (x, kernels, state):
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match="dynamic_conv_step: has no gradient"):
            dynamic_conv_step(x, kernels, state)
        tensor.requires_grad_(False)
    assert (state == POISON).all()
    assert calls["_step_now"] == []


# ---- autograd ------------------------------------------------------------------------------------


def test_saved_tensors_are_unpacked_once(device):
    case = random_case(device, 2, 6, 5, 4, state_len=4)
    unpacked = []
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in ("x", "kernels")}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t)
    with hooks:
        y, _ = with_mortar(replace(case, **leaves))
    y.backward(case.dy)
    assert len(unpacked) == 3


def test_inputs_changed_before_the_backward_are_found_out(device):
    case = random_case(device, 2, 6, 5, 4)
    kernels = case.kernels.clone().requires_grad_()
    y = dynamic_conv(case.x, kernels)
    case.x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(case.dy)


def test_second_derivatives_are_refused(device):
    case = random_case(device, 2, 6, 5, 4)
    x, dy = case.x.clone().requires_grad_(), case.dy.clone().requires_grad_()
    dx = torch.autograd.grad(dynamic_conv(x, case.kernels), x, dy, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0)], ids=str)
def test_gradients_of_empty_sums(device, shape):
    """PyTorch expands them with strides of 0."""
    x = torch.randn(shape, device=device, requires_grad=True)
    kernels = torch.randn(*shape, 4, device=device, requires_grad=True)
    dynamic_conv(x, kernels).sum().backward()
    assert x.grad.shape == shape and kernels.grad.shape == (*shape, 4)


def test_tangents_are_not_lost_in_silence(device):
    x, kernels = torch.ones(2, 3, 8, device=device), torch.ones(2, 3, 8, 4, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="^dynamic_conv: arguments must not have tangents"):
            dynamic_conv(dual, kernels)
        dynamic_conv(x, kernels)


def test_outputs_that_get_no_gradient(device):
    """A function may pass no gradient on: y counts as unused then."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    case = random_case(device, 2, 6, 5, 4, state_len=4)
    for name in ("x", "kernels"):
        getattr(case, name).requires_grad_()
    y, final_state = with_mortar(case)
    torch.autograd.backward([Stop.apply(y), final_state], [case.dy, case.dfinal_state])
    assert (case.kernels.grad == 0).all()
    assert torch.equal(case.x.grad[:, 2:], case.dfinal_state.transpose(1, 2))


def test_threads(device):
    """Calls from several threads at once, each giving the GIL away in the middle."""
    case = random_case(device, 2, 64, 256, 4, activation="silu")
    want = run(case)
    wrong = []

    def repeat():
        for _ in range(50):
            got = run(case)
            wrong.extend(name for name in want if not torch.equal(got[name], want[name]))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("op", [dynamic_conv_step, "op"], ids=["eager", "op"])
def test_a_backward_that_needs_the_old_state_says_so(device, op):
    x, kernels = torch.randn(2, 3, device=device), torch.randn(2, 3, 4, device=device)
    state, weight = torch.randn(2, 3, 4, device=device), torch.ones(1, device=device)
    total = (state * weight.requires_grad_()).sum()
    if op == "op":
        torch.ops.mortar.dynamic_conv_step(x, kernels, state, None, torch.empty_like(x), False)
    else:
        op(x, kernels, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
