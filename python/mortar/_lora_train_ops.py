# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.mortar.lora_train*`` and their gradient; users want lora_train.py.

A call has L adapters and S slices. ``a`` and ``b`` hold the matrices that are there, ``places``
tells of each pair where: l * S + s. ``scales`` has one entry per pair, ``p`` one per adapter,
``widths`` one per slice. Rows are 2-D here: [M, K] and [M, N_s].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.compiler import is_compiling

from ._library import (
    any_negation,
    define,
    differentiable_once,
    in_words_of,
    increment_version,
    is_eager,
    refuse_tangents,
    refuse_transforms,
)
from ._lora_train_calls import (
    Layer,
    Rows,
    as_read,
    as_rows,
    as_written,
    check_forward,
    exact_gradients,
    hidden_width,
    interleaved_adds,
    run_backward,
    run_forward,
)
from ._lora_train_in_place import check_changeable, overwrite
from ._new_tensors import allocator_like, dense_strides

_is_grad_enabled = torch.is_grad_enabled


# ---- operators -----------------------------------------------------------------------------------


def _outputs(x, a, layer: Layer, dtype, save_h) -> list[Tensor]:
    """Unfilled y of every slice, and h, which is empty unless it is saved."""
    rows = x.shape[0]
    y = [x.new_empty(rows, width, dtype=dtype) for width in layer.widths]
    columns = hidden_width(layer, a) if save_h else 0
    return [*y, x.new_empty(rows if save_h else 0, columns, dtype=a[0].dtype)]


def _layer(widths, places, scales, p, drops_delta) -> Layer:
    return Layer(tuple(widths), tuple(places), tuple(scales), tuple(p), drops_delta)


def _train(
    x, base, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, dtype, save_h
):
    layer = _layer(widths, places, scales, p, drops_delta)
    *y, h = outputs = _outputs(x, a, layer, dtype, save_h)
    h = h if save_h else None
    run_forward(layer, Rows(rng, offsets, plan), x, h, y, base, a, b, is_eager(x))
    return outputs


def _train_fake(
    x, base, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, dtype, save_h
):
    return _outputs(x, a, _layer(widths, places, scales, p, drops_delta), dtype, save_h)


def _train_autograd(
    x, base, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, dtype, save_h
):
    base = base or []  # AOTInductor gives None for an empty list
    if wants_gradient(x, base, a, b):
        if any_negation((x, *base, *a, *b)):  # which the dispatcher would resolve below autograd
            x, (base, a, b) = (
                x.resolve_neg(),
                ([t.resolve_neg() for t in ts] for ts in (base, a, b)),
            )
        layer = _layer(widths, places, scales, p, drops_delta)
        call = Call(layer, Rows(rng, offsets, plan), len(base), dtype, save_h, False)
        y = _Linear.apply(call, x, *base, *a, *b)
        # h has no gradient, and belongs to the node that has just been made.
        return [*(y if isinstance(y, tuple) else (y,)), x.new_empty(0, 0, dtype=a[0].dtype)]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(
            x, base, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, dtype, save_h
        )


def _train_out(x, base, a, b, y, h, rng, offsets, plan, widths, places, scales, p, drops_delta):
    refuse_gradient("lora_train_out", x, base, a, b)
    layer = _layer(widths, places, scales, p, drops_delta)
    run_forward(layer, Rows(rng, offsets, plan), x, h, y, base, a, b, is_eager(x))
    increment_version([*y, *([] if h is None else [h])])


def _gradient_buffers(dy, a, b, wants, dx_dtype, eager: bool) -> list[Tensor | None]:
    """dx, with the leading dimensions of dy, then every dA, then every dB; None where it is not
    wanted."""
    first = dy[0]
    empty = allocator_like(first, eager)
    found: list[Tensor | None] = [None] * len(wants)
    if wants[0]:
        shape = (*first.shape[:-1], a[0].shape[1])
        found[0] = empty(shape, dense_strides(shape), dx_dtype)
    for i, weight in enumerate((*a, *b), 1):
        if wants[i]:
            shape = tuple(weight.shape)
            found[i] = empty(shape, dense_strides(shape), weight.dtype)
    return found


def gradients(
    layer: Layer, rows: Rows, dy, x, h, a, b, wants, dx_dtype, eager: bool
) -> list[Tensor | None]:
    """New tensors: dx, with the leading dimensions of dy, then every dA, then every dB; None where
    it is not wanted."""
    if dy[0].dtype is torch.float64:
        lead, flat = dy[0].shape[:-1], [as_rows(g) for g in dy]
        dx, *found = exact_gradients(layer, rows, flat, None if x is None else as_rows(x), a, b)
        found = [dx.view(*lead, dx.shape[1]), *found]
        return [value if wanted else None for value, wanted in zip(found, wants, strict=True)]
    out = _gradient_buffers(dy, a, b, wants, dx_dtype, eager)
    dx, pairs = out[0], len(a)
    run_backward(
        layer, rows, [as_read(g) for g in dy], None if x is None else as_read(x), h,
        None if dx is None else as_read(dx), False, a, b, out[1 : 1 + pairs], out[1 + pairs :],
        layer.no_adds, eager,
    )  # fmt: skip
    return out


def _train_backward(
    dy, x, h, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, wants, dx_dtype
):
    layer = _layer(widths, places, scales, p, drops_delta)
    rows = Rows(rng, offsets, plan)
    found = gradients(layer, rows, dy, x, h, a, b, wants, dx_dtype, is_eager(dy[0]))
    return [g for g in found if g is not None]


def _train_backward_fake(
    dy, x, h, a, b, rng, offsets, plan, widths, places, scales, p, drops_delta, wants, dx_dtype
):
    return [g for g in _gradient_buffers(dy, a, b, wants, dx_dtype, False) if g is not None]


def _train_backward_out(
    dy, x, h, a, b, dx, da, db, da_pairs, db_pairs, add_dx, add_da, add_db,
    rng, offsets, plan, widths, places, scales, p, drops_delta,
):  # fmt: skip
    layer = _layer(widths, places, scales, p, drops_delta)
    grads, adds = [[None] * len(a), [None] * len(a)], [[False] * len(a), [False] * len(a)]
    for column, pairs, given, flags in ((0, da_pairs, da, add_da), (1, db_pairs, db, add_db)):
        for pair, grad, add in zip(pairs, given, flags, strict=True):
            grads[column][pair], adds[column][pair] = grad, add
    run_backward(layer, Rows(rng, offsets, plan), dy, x, h, dx, add_dx, a, b, *grads,
                 interleaved_adds(layer, *adds), is_eager(dy[0]))  # fmt: skip
    increment_version([*da, *db, *([] if dx is None else [dx])])


_ROWS = "Tensor? rng, Tensor? offsets, Tensor? plan"
_LAYER = f"{_ROWS}, int[] widths, int[] places, float[] scales, float[] p, bool drops_delta"
_op = define(
    f"lora_train(Tensor x, Tensor[] base, Tensor[] a, Tensor[] b, {_LAYER}, ScalarType dtype, "
    "bool save_h) -> Tensor[]",
    _train,
    _train_fake,
    autograd=_train_autograd,
)
_out_op = define(
    "lora_train_out(Tensor x, Tensor[] base, Tensor[] a, Tensor[] b, Tensor(a!)[] y, "
    f"Tensor(b!)? h, {_LAYER}) -> ()",
    _train_out,
)
_backward_op = define(
    f"lora_train_backward(Tensor[] dy, Tensor? x, Tensor? h, Tensor[] a, Tensor[] b, {_LAYER}, "
    "bool[] wants, ScalarType dx_dtype) -> Tensor[]",
    _train_backward,
    _train_backward_fake,
)
_backward_out_op = define(
    "lora_train_backward_out(Tensor[] dy, Tensor? x, Tensor? h, Tensor[] a, Tensor[] b, "
    "Tensor(a!)? dx, Tensor(b!)[] da, Tensor(c!)[] db, int[] da_pairs, int[] db_pairs, "
    f"bool add_dx, bool[] add_da, bool[] add_db, {_LAYER}) -> ()",
    _train_backward_out,
)
# By way of the dispatcher, but with its errors in words.
_run_out = in_words_of(_out_op, _out_op)
_run_backward_out = in_words_of(_backward_out_op, _backward_out_op)


# ---- autograd ------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What a node of autograd is made from, beside the tensors that have gradients."""

    layer: Layer
    rows: Rows
    num_base: int
    dtype: torch.dtype
    save_h: bool
    in_place: bool
    """The result takes the place of the base."""


def wants_gradient(x, base, a, b) -> bool:
    if _is_grad_enabled():
        for t in (x, *base, *a, *b):
            if t.requires_grad:
                return True
    return False


def refuse_gradient(op: str, x, base, a, b) -> None:
    if forward_ad._current_level >= 0 and not is_compiling():
        refuse_tangents(op, (x, *base, *a, *b))
    if wants_gradient(x, base, a, b):
        raise RuntimeError(
            f"{op}: out must be the base itself while a gradient is wanted, got another tensor; "
            "leave it away or call it under torch.no_grad()"
        )


def forward_outputs(call: Call, x, base, a, b, save_h: bool) -> tuple[list[Tensor], Tensor | None]:
    """y of every slice in the leading dimensions of x, and h if it is saved."""
    layer = call.layer
    eager = is_eager(x) and not x.is_meta
    if not (call.in_place or eager):
        args = (as_rows(x), [as_rows(t) for t in base], a, b, *call.rows, *layer)
        *flat, h = _op(*args, call.dtype, save_h)
        return [t.view(*x.shape[:-1], t.shape[-1]) for t in flat], h if save_h else None
    empty, lead = allocator_like(x, eager), tuple(x.shape[:-1])
    h = None
    if save_h:
        shape = (lead[0] if len(lead) == 1 else math.prod(lead), hidden_width(layer, a))
        h = empty(shape, dense_strides(shape), a[0].dtype)
    if call.in_place:
        y = list(base)
        flat_base = flat = [as_written(t) for t in y]
    else:
        shapes = [(*lead, width) for width in layer.widths]
        y = [empty(shape, dense_strides(shape), call.dtype) for shape in shapes]
        flat, flat_base = [as_read(t) for t in y], [as_read(t) for t in base]
    run_forward(layer, call.rows, as_read(x), h, flat, flat_base, a, b, eager)
    return y, h


def found_gradients(layer, rows, dy, x, h, a, b, wants, dx_dtype) -> list[Tensor | None]:
    """dx, with the leading dimensions of dy, then every dA, then every dB; None where it is not
    wanted. By way of the op where something traces."""
    if True not in wants:
        return [None] * len(wants)
    first = dy[0]
    if is_eager(first) and not first.is_meta and not any_negation(dy[1:]):
        return gradients(layer, rows, dy, x, h, a, b, wants, dx_dtype, True)
    flat, flat_x = [as_rows(g) for g in dy], None if x is None else as_rows(x)
    made = iter(_backward_op(flat, flat_x, h, a, b, *rows, *layer, wants, dx_dtype))
    found = [next(made) if wanted else None for wanted in wants]
    if wants[0] and first.ndim != 2:
        found[0] = found[0].view(*first.shape[:-1], found[0].shape[1])
    return found


class _Linear(torch.autograd.Function):
    """Saves x where dA needs it (or dB, without h), h where dB does, and the weights."""

    @staticmethod
    def forward(ctx, call, x, *tensors):
        pairs = len(call.layer.places)
        base, weights = tensors[: call.num_base], tensors[call.num_base :]
        a, b = weights[:pairs], weights[pairs:]
        needs = ctx.needs_input_grad[2 + call.num_base :]
        wants_a, wants_b = True in needs[:pairs], True in needs[pairs:]
        save_h = call.save_h and wants_b and x.dtype is not torch.float64
        y, h = forward_outputs(call, x, base, list(a), list(b), save_h)
        keep_x = wants_a or (wants_b and h is None)
        ctx.save_for_backward(x if keep_x else None, h, *call.rows, *weights)
        ctx.call, ctx.dtype = call, x.dtype
        if call.in_place:
            ctx.mark_dirty(*base)
        return y[0] if len(y) == 1 else tuple(y)

    @staticmethod
    def backward(ctx, *dy):
        # Gradients are enabled in here only with create_graph=True.
        return (_differentiable_once if _is_grad_enabled() else _node_gradients)(ctx, *dy)


def _node_gradients(ctx, *dy):
    call = ctx.call
    x, h, rng, offsets, plan, *weights = ctx.saved_tensors
    pairs = len(call.layer.places)
    a, b = weights[:pairs], weights[pairs:]
    base = 2 + call.num_base
    needs = ctx.needs_input_grad
    dbase = [g if wanted else None for g, wanted in zip(dy, needs[2:base])]  # noqa: B905
    wants = [needs[1], *needs[base:]]
    rows = Rows(rng, offsets, plan)
    dx, *dweights = found_gradients(call.layer, rows, dy, x, h, a, b, wants, ctx.dtype)
    return None, dx, *dbase, *dweights


_differentiable_once = differentiable_once(_node_gradients)
# Function.apply but for its look for transforms of torch.func, which is_eager has done.
_make_linear = super(torch.autograd.Function, _Linear).apply


# ---- calls of the friendly layer -----------------------------------------------------------------


def train(op: str, call: Call, x: Tensor, base, a, b) -> list[Tensor]:
    """y of every slice, with a gradient where one is wanted."""
    refuse_transforms(op)
    if call.in_place:
        traced = is_compiling() or x.is_meta or not is_eager(x)
        wanted = not is_compiling() and wants_gradient(x, base, a, b)
        are_views = wanted and any(t._is_view() for t in base)
        if wanted:
            check_changeable(op, base)
        if are_views and not traced and x.dtype is not torch.float64:
            check_forward(call.layer, call.rows, as_read(x), base, base, a, b)
        if traced or are_views:
            # What traces sees a result that is copied. And autograd takes the first input of a node
            # for the view that the node changes in place, of which there may be but one.
            y = train(op, call._replace(in_place=False), x, base, a, b)
            return overwrite(base, y, are_views)
    if is_compiling():
        args = (as_rows(x), [as_rows(t) for t in base], list(a), list(b), *call.rows, *call.layer)
        *flat, _ = _op(*args, call.dtype, call.save_h)
        return [t.view(*x.shape[:-1], t.shape[-1]) for t in flat]
    if forward_ad._current_level >= 0:
        refuse_tangents(op, (x, *base, *a, *b))
    if wants_gradient(x, base, a, b):
        connect = _make_linear if is_eager(x) else _Linear.apply
        y = connect(call, x, *base, *a, *b)
        return [y] if isinstance(y, Tensor) else list(y)
    y = forward_outputs(call, x, base, list(a), list(b), False)[0]
    if call.in_place:
        increment_version(y)
    return y


def train_into(op: str, layer: Layer, rows: Rows, x: Tensor, base, a, b, out: list[Tensor]) -> None:
    refuse_transforms(op)
    refuse_gradient(op, x, base, a, b)
    flat, flat_base = [as_written(t) for t in out], [as_rows(t) for t in base]
    _run_out(as_rows(x), flat_base, list(a), list(b), flat, None, *rows, *layer)


def accumulate(
    layer: Layer, rows: Rows, dy, x, h, dx, add_dx: bool, a, b, da, db, add_da, add_db
) -> None:
    """The backward into given tensors; da, db and their flags have an entry per pair."""
    refuse_transforms("backward")
    da_pairs, db_pairs = ([i for i, g in enumerate(gs) if g is not None] for gs in (da, db))
    _run_backward_out(
        dy, x, h, a, b, dx, [da[i] for i in da_pairs], [db[i] for i in db_pairs],
        da_pairs, db_pairs, add_dx, [add_da[i] for i in da_pairs], [add_db[i] for i in db_pairs],
        *rows, *layer,
    )  # fmt: skip
