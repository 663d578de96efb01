# SPDX-License-Identifier: Apache-2.0
"""The operators `torch.ops.mortar.dynamic_conv*` and their gradient; users want dynamic_conv.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._ffi import lib, torch_function
from ._library import (
    any_negation,
    define,
    differentiable_once,
    increment_version,
    is_eager,
    negation,
    note_writes,
    refuse_transforms,
    shortcut,
)

_forward = lib.dynamic_conv_forward
_backward = lib.dynamic_conv_backward
_step = lib.dynamic_conv_step
# These cost the host less, and return 0 for what only the others can take or refuse.
_forward_now = torch_function("torch_dynamic_conv_forward")
_backward_now = torch_function("torch_dynamic_conv_backward")
_step_now = torch_function("torch_dynamic_conv_step")
_empty_like, _is_grad_enabled = torch.empty_like, torch.is_grad_enabled


def _wants_gradient(x: Tensor, kernels: Tensor, state: Tensor | None) -> bool:
    return _is_grad_enabled() and (
        x.requires_grad or kernels.requires_grad or (state is not None and state.requires_grad)
    )


_INSTEAD = {
    "dynamic_conv_out": "dynamic_conv",
    "dynamic_conv_step": "dynamic_conv with initial_state",
}


def _refuse_gradient(op: str, *tensors: Tensor | None) -> None:
    if _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{op}: has no gradient, but an argument requires one; use {_INSTEAD[op]} or call it "
            "under torch.no_grad()"
        )


def _outputs(x: Tensor, cu_seqlens: Tensor | None, state_len: int) -> tuple[Tensor, Tensor | None]:
    """Unfilled y and final state [N, D, state_len], or None for the state where that is -1."""
    y = torch.empty_like(x)
    if state_len < 0:
        return y, None
    sequences = x.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    return y, x.new_empty(sequences, x.shape[2], state_len)


def _dense_in_channels(gradient: Tensor) -> Tensor:
    """A gradient as the library reads it. Autograd may hand over an expanded one, such as that of
    `y.sum()`: one number under every index. Only such a gradient, not dense in its channels, is
    copied, as PyTorch's own backward formulas do."""
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def _gradients(
    x: Tensor, kernels: Tensor, initial_state: Tensor | None, state_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Unfilled dx, dk and dinitial_state, the last one only if it is wanted."""
    dinitial_state = torch.empty_like(initial_state) if state_gradient else None
    return torch.empty_like(x), torch.empty_like(kernels), dinitial_state


# ---- operators ---------------------------------------------------------------------------------


def renamed(op: str, error: Exception) -> Exception:
    """The library's own sentence with the name that the user typed; any other error as it is."""
    name, colon, sentence = str(error).partition(": ")
    ours = isinstance(error, (RuntimeError, TypeError, ValueError)) and colon
    if ours and name.startswith("dynamic_conv_"):
        return type(error)(f"{op}: {sentence}")
    return error


def _forward_as(op: str, *args) -> None:
    try:
        _forward(*args)
    except (TypeError, ValueError) as error:
        raise renamed(op, error) from None


def _dynamic_conv_out(x, kernels, cu_seqlens, initial_state, y, final_state, silu):
    op = "dynamic_conv_out"
    _refuse_gradient(op, x, kernels, initial_state, y, final_state)
    _forward_as(op, x, kernels, cu_seqlens, initial_state, y, final_state, silu)
    note_writes((y, final_state))


def _dynamic_conv(x, kernels, cu_seqlens, initial_state, state_len, silu):
    y, final_state = _outputs(x, cu_seqlens, state_len)
    _forward_as("dynamic_conv", x, kernels, cu_seqlens, initial_state, y, final_state, silu)
    return y, _or_empty(final_state, x)


def _dynamic_conv_fake(x, kernels, cu_seqlens, initial_state, state_len, silu):
    y, final_state = _outputs(x, cu_seqlens, state_len)
    return y, _or_empty(final_state, x)


def _or_empty(state: Tensor | None, x: Tensor) -> Tensor:
    """Operators return tensors only: an empty one stands for no state."""
    return x.new_empty(0) if state is None else state


def _dynamic_conv_backward(
    dy, dfinal_state, x, kernels, cu_seqlens, initial_state, silu, state_gradient
):
    gradients = _gradients(x, kernels, initial_state, state_gradient)
    dy = _dense_in_channels(dy)
    _backward(x, kernels, cu_seqlens, initial_state, dy, dfinal_state, *gradients, silu)
    dx, dk, dinitial_state = gradients
    return dx, dk, _or_empty(dinitial_state, x)


def _dynamic_conv_backward_fake(
    dy, dfinal_state, x, kernels, cu_seqlens, initial_state, silu, state_gradient
):
    dx, dk, dinitial_state = _gradients(x, kernels, initial_state, state_gradient)
    return dx, dk, _or_empty(dinitial_state, x)


def _dynamic_conv_step(x, kernels, state, slots, y, silu):
    _refuse_gradient("dynamic_conv_step", x, kernels, state, y)
    _step(x, kernels, state, slots, y, silu)
    note_writes((state, y))


_out_op = define(
    "dynamic_conv_out(Tensor x, Tensor kernels, Tensor? cu_seqlens, Tensor? initial_state, "
    "Tensor(a!) y, Tensor(b!)? final_state, bool silu) -> ()",
    _dynamic_conv_out,
)
_step_op = define(
    "dynamic_conv_step(Tensor x, Tensor kernels, Tensor(a!) state, Tensor? slots, Tensor(b!) y, "
    "bool silu) -> ()",
    _dynamic_conv_step,
)
_backward_op = define(
    "dynamic_conv_backward(Tensor dy, Tensor? dfinal_state, Tensor x, Tensor kernels, "
    "Tensor? cu_seqlens, Tensor? initial_state, bool silu, bool state_gradient) "
    "-> (Tensor, Tensor, Tensor)",
    _dynamic_conv_backward,
    _dynamic_conv_backward_fake,
)

_convolve_into = shortcut(_out_op, _dynamic_conv_out)
_decode_into = shortcut(_step_op, _dynamic_conv_step)


class _Derivative(torch.autograd.Function):
    """Makes outputs that have been computed depend on the inputs. Keeps the inputs and nothing
    else. What has no gradient comes in one tuple, as every argument costs the host time."""

    @staticmethod
    def forward(ctx, x, kernels, initial_state, others):
        cu_seqlens, ctx.silu, outputs = others
        ctx.save_for_backward(x, kernels, initial_state, cu_seqlens)
        if type(outputs) is tuple:  # one output without a gradient has no backward
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, dy, dfinal_state=None):
        x, kernels, initial_state, cu_seqlens = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        inputs = (x, kernels, cu_seqlens, initial_state)
        gradients = _differentiate(dy, dfinal_state, *inputs, ctx.silu, ctx.needs_input_grad[2])
        return *gradients, None


def _differentiate(dy, dfinal_state, x, kernels, cu_seqlens, initial_state, silu, state_gradient):
    """dx, dk and dinitial_state, which is None unless it is wanted."""
    plain = type(dy) is Tensor and (dfinal_state is None or type(dfinal_state) is Tensor)
    if plain and is_eager(x) and not any_negation((dy, dfinal_state, kernels, initial_state)):
        gradients = _gradients(x, kernels, initial_state, state_gradient)
        inputs = (x, kernels, cu_seqlens, initial_state, _dense_in_channels(dy), dfinal_state)
        tensors = (*inputs, *gradients)
        if _backward_now(id(tensors), silu):
            return gradients
        del gradients, tensors
    dx, dk, dinitial_state = _backward_op(
        dy, dfinal_state, x, kernels, cu_seqlens, initial_state, silu, state_gradient
    )
    return dx, dk, dinitial_state if state_gradient else None


class _DynamicConv(_Derivative):
    """The convolution with its gradient."""

    @staticmethod
    def forward(ctx, x, kernels, initial_state, others):
        cu_seqlens, silu, state_len = others
        y, final_state = outputs = _outputs(x, cu_seqlens, state_len)
        _convolve_into(x, kernels, cu_seqlens, initial_state, y, final_state, silu)
        return _Derivative.forward(ctx, x, kernels, initial_state, (cu_seqlens, silu, outputs))


def _dynamic_conv_autograd(x, kernels, cu_seqlens, initial_state, state_len, silu):
    if _wants_gradient(x, kernels, initial_state):
        others = (cu_seqlens, silu, state_len)
        y, final_state = _DynamicConv.apply(x, kernels, initial_state, others)
        return y, _or_empty(final_state, x)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(x, kernels, cu_seqlens, initial_state, state_len, silu)


_op = define(
    "dynamic_conv(Tensor x, Tensor kernels, Tensor? cu_seqlens, Tensor? initial_state, "
    "int state_len, bool silu) -> (Tensor, Tensor)",
    _dynamic_conv,
    _dynamic_conv_fake,
    autograd=_dynamic_conv_autograd,
)


# ---- calls of the friendly layer ---------------------------------------------------------------

# Function.apply but for its look for transforms of torch.func, 2 of 6 us: is_eager has done that.
_make_differentiable = super(torch.autograd.Function, _Derivative).apply


def convolve_now(x, kernels, cu_seqlens, initial_state, state_len, silu):
    """What an eager call returns; None if only `convolve` can take or refuse the arguments."""
    if state_len < 0:  # the usual case, in as few steps as there can be
        outputs = _empty_like(x)
        tensors = (x, kernels, cu_seqlens, initial_state, outputs, None)
    else:
        outputs = _outputs(x, cu_seqlens, state_len)
        tensors = (x, kernels, cu_seqlens, initial_state, *outputs)
    if any_negation((kernels, initial_state)) or not _forward_now(id(tensors), silu):
        return None
    if _wants_gradient(x, kernels, initial_state):
        return _make_differentiable(x, kernels, initial_state, (cu_seqlens, silu, outputs))
    return outputs


def convolve(x, kernels, cu_seqlens, initial_state, state_len, silu):
    """y and the final state, if there is one, by way of the ops."""
    refuse_transforms("dynamic_conv")
    if not _wants_gradient(x, kernels, initial_state):
        y, final_state = _outputs(x, cu_seqlens, state_len)
        _convolve_into(x, kernels, cu_seqlens, initial_state, y, final_state, silu)
        return y, final_state
    if is_compiling():
        return _op(x, kernels, cu_seqlens, initial_state, state_len, silu)
    # What _op comes to, without its way through the dispatcher.
    return _DynamicConv.apply(x, kernels, initial_state, (cu_seqlens, silu, state_len))


def step_into(
    x: Tensor, kernels: Tensor, state: Tensor, slots: Tensor | None, y: Tensor, silu: bool
) -> Tensor:
    """`dynamic_conv_step` into y, which may be [N, D] where x is [N, 1, D]. Returns y."""
    # Here as well as in the op: a compiled op gets tensors that no longer say.
    if _is_grad_enabled() and (x.requires_grad or kernels.requires_grad or state.requires_grad):
        _refuse_gradient("dynamic_conv_step", x, kernels, state)
    tensors = (x, kernels, state, slots, y)
    if is_eager(x) and not any_negation((kernels, state)) and _step_now(id(tensors), silu):
        increment_version((state,))
    elif not is_compiling() and state.is_neg():
        raise negation("dynamic_conv_step", "state")
    else:
        _decode_into(x, kernels, state, slots, y, silu)
    return y
