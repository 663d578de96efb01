# SPDX-License-Identifier: Apache-2.0
"""A frozen linear layer with one adapter as one node of autograd.

The delta goes in place onto the base's product, and in the backward the delta's dx onto the base's:
one node instead of three, and no pass that adds two gradients of x. For eager calls; elsewhere the
base's product and ``lora_train.linear`` stay apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from ._library import differentiable_once, is_eager
from ._lora_train_calls import (
    NO_ROWS,
    Layer,
    Rows,
    as_read,
    draw,
    hidden_width,
    run_backward,
    run_forward,
    single_layer,
)
from ._lora_train_ops import found_gradients
from ._new_tensors import allocator_like, dense_strides

_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch._C._is_any_autocast_enabled


def takes(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether ``adapted_linear`` may be called: eagerly, and where autocast would cast nothing."""
    if not is_eager(x) or x.is_meta or a.is_neg() or b.is_neg():
        return False
    if not _is_autocast():
        return True
    return x.dtype is weight.dtype is torch.get_autocast_dtype(x.device.type)


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float,
    dropout: float,
) -> Tensor:  # fmt: skip
    """``x @ weight.T + bias + scale * (drop(x) @ a.T) @ b.T``, differentiable in x, a and b."""
    layer = single_layer(weight.shape[0], scale, dropout)
    rng = draw(x) if 0 < dropout < 1 else None
    if _is_grad_enabled() and (x.requires_grad or a.requires_grad or b.requires_grad):
        return _make_node((layer, rng, weight, bias), x, a, b)
    return _forward(layer, rng, x, weight, bias, a, b, False)[0]


def _rows(rng: Tensor | None) -> Rows:
    return NO_ROWS if rng is None else Rows(rng, None, None)


def _forward(
    layer: Layer, rng, x, weight, bias, a, b, save_h: bool
) -> tuple[Tensor, Tensor | None]:
    y, h = product(x, weight, bias), None
    if not y.is_contiguous():
        y = y.contiguous()
    if save_h:
        lead = x.shape[:-1]
        shape = (lead[0] if len(lead) == 1 else math.prod(lead), hidden_width(layer, (a,)))
        h = allocator_like(x, True)(shape, dense_strides(shape), a.dtype)
    flat = (as_read(y),)
    run_forward(layer, _rows(rng), as_read(x), h, flat, flat, (a,), (b,), True)
    return y, h


class _AdaptedLinear(torch.autograd.Function):
    """Saves x where dA needs it, h where dB does, and the weights."""

    @staticmethod
    def forward(ctx, call, x, a, b):
        layer, rng, weight, bias = call
        _, _, wants_a, wants_b = ctx.needs_input_grad
        y, h = _forward(layer, rng, x, weight, bias, a, b, wants_b)
        ctx.save_for_backward(x if wants_a else None, h, rng, weight, a, b)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx, dy):
        # Gradients are enabled in here only with create_graph=True.
        return (_differentiable_once if _is_grad_enabled() else _gradients)(ctx, dy)


def _gradients(ctx, dy):
    x, h, rng, weight, a, b = ctx.saved_tensors
    _, *wants = ctx.needs_input_grad
    wants_x, wants_a, wants_b = wants
    layer, rows, dtype = ctx.layer, _rows(rng), weight.dtype
    dx = dy.matmul(weight) if wants_x else None
    if wants_x and dx.dtype is not dtype:
        dx = dx.to(dtype)  # a backward under autocast
    if dy.is_meta or not is_eager(dy):
        delta, da, db = found_gradients(layer, rows, (dy,), x, h, [a], [b], wants, dtype)
        return None, dx + delta if wants_x else None, da, db
    empty, da, db = allocator_like(dy, True), None, None
    if wants_a:
        da = empty(tuple(a.shape), dense_strides(a.shape), a.dtype)
    if wants_b:
        db = empty(tuple(b.shape), dense_strides(b.shape), b.dtype)
    if wants_x and not dx.is_contiguous():
        dx = dx.contiguous()
    run_backward(
        layer, rows, (as_read(dy),), None if x is None else as_read(x), h,
        as_read(dx) if wants_x else None, wants_x, (a,), (b,), (da,), (db,), layer.no_adds, True,
    )  # fmt: skip
    return None, dx, da, db


_differentiable_once = differentiable_once(_gradients)
# Function.apply but for its look for transforms of torch.func, which is_eager has done.
_make_node = super(torch.autograd.Function, _AdaptedLinear).apply
