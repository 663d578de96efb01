# SPDX-License-Identifier: Apache-2.0
"""LoRA training: ``y = base + scale * (drop(x) @ A.T) @ B.T`` with its gradients.

Beside a frozen layer, in place of four lines and about ten kernels::

    y = linear_layer(x)                                             # [..., N]
    y = mortar.lora.linear(x, A, B, alpha / r, base=y, dropout=0.05, training=self.training)

``linear`` takes one adapter, or several slices that share x (q/k/v, gate/up), whose x is then read
once and whose dx is written once. ``mixed_linear`` takes several adapters in one batch, by
contiguous segments of rows or by a ``mortar.lora.plan``, each with its own rank, scale and dropout;
ranks are not padded and nothing waits for the device.

x, base and the weights are float32, float16 or bfloat16 in any mixture (the weights of one call
have one dtype), on CPU or CUDA. Sums are float32, products of float32 are true float32; h = scale *
drop(x) @ A.T and ds = scale * dy @ B are rounded once to the dtype of the weights, results once to
their own (docs/numerics.md). Results are bitwise repeatable. Beside x only h [M, r] is kept for the
backward, nothing of the mask. Gradients of frozen tensors are not computed. float64 tensors take
the formulas in plain PyTorch, for ``torch.autograd.gradcheck``.

Dropout draws its seed and offset, 16 bytes, from PyTorch's generator of the device, once per call
and only if 0 < p < 1 while training: ``torch.manual_seed``, ``fork_rng`` and checkpointing behave
as with ``nn.Dropout``. The mask is Philox of (seed, offset, index of the element): it depends on
neither dtype nor strides nor machine, and is made again in the backward.

The ops are ``torch.ops.mortar.lora_train`` (with a gradient), ``lora_train_out``,
``lora_train_backward`` and ``lora_train_backward_out``; all may be traced by
``torch.compile(fullgraph=True)``. A wrong argument raises ValueError or TypeError before anything
is written.

The method is that of Hu et al. (arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _lora_train_ops as ops
from ._ffi import lib
from ._library import any_negation, refuse_nested
from ._lora_train_arguments import (
    NUMBERS,
    as_list,
    as_probability,
    as_rows_of,
    as_scales,
    check_count,
    check_matrices,
    check_shape,
    check_written,
    drops_delta,
    read_adapters,
    result_dtype,
)
from ._lora_train_calls import NO_ROWS, draw, known_layer

__all__ = ["backward", "check", "linear", "mixed_linear"]


def linear(
    x: Tensor,
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    scale: float | Sequence[float] = 1.0,
    *,
    base: Tensor | Sequence[Tensor] | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    dropout: float = 0.0,
    dropout_on: str = "input",
    training: bool = True,
    dtype: torch.dtype | None = None,
    save_h: bool = True,
) -> Tensor | tuple[Tensor, ...]:
    """``base + scale * (drop(x) @ a.T) @ b.T``, differentiable in x, a, b and base.

    Args:
        x: [..., K], float32, float16 or bfloat16.
        a: [r, K], r from 1 to 512; or one for each of S slices, 1 to 8.
        b: [N, r], of the dtype of a; or one for each slice.
        scale: alpha / r, or what takes its place; one number, or one for each slice.
        base: [..., N] (one for each slice), what is added to, in one rounding; usually the output
            of the frozen layer. None: nothing.
        out: written and returned. May be the base itself, which then changes in place, with or
            without gradients; any other tensor only while no gradient is wanted.
        dropout: p in [0, 1], in effect rounded to a multiple of 2^-16. p = 1 gives the base.
        dropout_on: "input" drops elements of x, as PEFT does; "delta" drops elements of what is
            added to the base. The slices share the mask of x.
        training: False drops nothing.
        dtype: of the result without a base. None: that of autocast where it is on, else that of x.
        save_h: False keeps no h for the backward, which then computes it again from x.

    Returns:
        [..., N], or a tuple of S such tensors if a and b are sequences.

    Raises:
        ValueError: a shape, number or overlap is wrong; nothing has been written then.
        TypeError: a dtype or device is wrong.
        RuntimeError: a gradient is wanted, and out is not the base, or is one that autograd lets
            nobody change: a leaf that requires a gradient, a tensor of inference mode.
    """
    single = isinstance(a, Tensor)
    a, b = as_list("linear", "a", a, None), as_list("linear", "b", b, None)
    slices = len(a)
    if len(b) != slices:
        raise ValueError(f"linear: b must have one matrix per slice = {slices}, got {len(b)}")
    scales = as_scales("linear", scale, slices)
    check_matrices("linear", x, a, b)
    p = as_probability("linear", dropout, training)
    widths = tuple([m.shape[0] for m in b])
    on_delta = drops_delta("linear", dropout_on)
    layer = known_layer(widths, tuple(range(slices)), scales, (p,), on_delta)
    rows = ops.Rows(draw(x), None, None) if 0 < p < 1 else NO_ROWS
    y = _run("linear", layer, rows, x, a, b, base, out, dtype, save_h)
    return y[0] if single else tuple(y)


def mixed_linear(
    x: Tensor,
    adapters: Sequence,
    rows,
    scales: Sequence[float],
    *,
    base: Tensor | Sequence[Tensor] | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    dropout: float | Sequence[float] = 0.0,
    dropout_on: str = "input",
    training: bool = True,
    widths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    save_h: bool = True,
) -> Tensor | tuple[Tensor, ...]:
    """``linear`` with an adapter of its own for every row: what trains several adapters in a step.

    Gradients equal those of separate steps. An adapter without rows gets zeros, one whose tensors
    require no gradient costs nothing.

    Args:
        x: [..., K]; rows are its leading dimensions, flattened to M.
        adapters: L adapters, each a pair (A [r, K], B [N, r]), or with slices a list of S such
            pairs, None where the adapter leaves a slice alone. Ranks may differ.
        rows: a ``mortar.lora.Plan`` of M tokens and L adapters, whose base rows take the base
            alone; or int32 [L + 1] on the device of x: adapter l has the rows offsets[l] to
            offsets[l + 1] - 1, and the last offset is M. Offsets on CUDA are not read by the host:
            see ``check``.
        scales: one number per adapter.
        dropout: p, or one for each adapter.
        widths: N of every slice, where no adapter has a pair that would tell.
        base, out, dropout_on, training, dtype, save_h: as for ``linear``.

    Returns:
        [..., N], or a tuple of S such tensors if the adapters are lists.

    Raises:
        As ``linear``; ValueError as well, on the CPU, for offsets that do not cover M rows.
    """
    found = read_adapters(x, adapters, scales, widths)
    count = len(adapters)
    p = (dropout,) * count if isinstance(dropout, NUMBERS) else dropout
    check_count("dropout", p, count)
    p = tuple(as_probability("mixed_linear", q, training) for q in p)
    on_delta = drops_delta("mixed_linear", dropout_on)
    layer = ops.Layer(found.widths, found.places, found.scales, p, on_delta)
    rows = as_rows_of(draw(x) if any(0 < q < 1 for q in p) else None, rows, x, count)
    y = _run("mixed_linear", layer, rows, x, found.a, found.b, base, out, dtype, save_h)
    return tuple(y) if found.sliced else y[0]


def backward(
    dy: Tensor | Sequence[Tensor],
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    scale: float | Sequence[float] = 1.0,
    *,
    x: Tensor | None = None,
    h: Tensor | None = None,
    dx: Tensor | None = None,
    da: Tensor | Sequence[Tensor | None] | None = None,
    db: Tensor | Sequence[Tensor | None] | None = None,
    add: bool = False,
    dropout: float = 0.0,
    dropout_on: str = "input",
    rng: Tensor | None = None,
) -> None:
    """The gradients of ``linear`` into given tensors, for those who write their own backward.

    Args:
        dy: [M, N], or one for each slice, as a and b.
        x: [M, K]; needed for da, and for db without h.
        h: what the forward op returned; None: computed again where db needs it.
        dx: [M, K], any float dtype. None: not wanted, as da and db.
        da, db: of the shapes of a and b, any float dtype (a float32 or 16-bit ``.grad``).
        add: True adds to what dx, da and db hold, in float32, rounded once.
        rng: int64 [2], seed and offset of the forward; needed if 0 < dropout < 1.
    """
    a = as_list("backward", "a", a, None)
    slices = len(a)
    b, dy = (as_list("backward", name, ts, slices) for name, ts in (("b", b), ("dy", dy)))
    da, db = (
        as_list("backward", name, [None] * slices if g is None else g, slices)
        for name, g in (("da", da), ("db", db))
    )
    given = {"a": a, "b": b, "dy": dy, "da": da, "db": db, "x": [x], "h": [h], "dx": [dx],
             "rng": [rng]}  # fmt: skip
    for name, tensors in given.items():
        for t in tensors:
            if not isinstance(t, Tensor) and not (t is None and name not in ("a", "b", "dy")):
                raise TypeError(f"backward: {name} must be a tensor, got {type(t).__name__}")
            refuse_nested("backward", **{name: t})
    for name, tensors in (("dx", [dx]), ("da", da), ("db", db)):
        for t in tensors:
            if t is not None and t.ndim == 2 and not is_compiling():
                check_written("backward", t, name)
    for name, tensors in (("a", a), ("b", b)):
        for t in tensors:
            if t.ndim != 2:
                shape = tuple(t.shape)
                raise ValueError(f"backward: {name} must have 2 dimensions, got shape {shape}")
    if not isinstance(add, bool):
        raise TypeError(f"backward: add must be a bool, got {type(add).__name__}")
    scales = as_scales("backward", scale, slices)
    p = as_probability("backward", dropout, True)
    widths = tuple(m.shape[0] for m in b)
    on_delta = drops_delta("backward", dropout_on)
    layer = ops.Layer(widths, tuple(range(slices)), scales, (p,), on_delta)
    adds = [add] * slices
    ops.accumulate(
        layer, ops.Rows(rng, None, None), dy, x, h, dx, add, a, b, da, db, adds, adds
    )  # fmt: skip


def check(offsets: Tensor, num_adapters: int, num_rows: int) -> None:
    """Reads the offsets of ``mixed_linear`` back and checks them; waits for the device, so for
    debugging only.

    Raises:
        ValueError: they do not start at 0, decrease, or do not end at num_rows.
    """
    lib.lora_train_check(offsets, num_adapters, num_rows)


def _run(op: str, layer, rows, x, a, b, base, out, dtype, save_h) -> list[Tensor]:
    slices = len(layer.widths)
    base = [] if base is None else as_list(op, "base", base, slices)
    for t, width in zip(base, layer.widths, strict=len(base) > 0):
        check_shape(op, "base", t, (*x.shape[:-1], width))
    if out is not None:
        out = as_list(op, "out", out, slices)
        for t, width in zip(out, layer.widths, strict=True):
            check_shape(op, "out", t, (*x.shape[:-1], width))
            if not is_compiling():
                check_written(op, t)
    if not is_compiling() and any_negation((x, *base, *a, *b)):
        x, (base, a, b) = x.resolve_neg(), ([t.resolve_neg() for t in ts] for ts in (base, a, b))
    if out is None:
        dtype = result_dtype(op, x, base, dtype)
        return ops.train(op, ops.Call(layer, rows, len(base), dtype, save_h, False), x, base, a, b)
    if len(base) == slices and all(y is t for y, t in zip(out, base, strict=True)):
        call = ops.Call(layer, rows, slices, base[0].dtype, save_h, True)
        return ops.train(op, call, x, base, a, b)
    ops.train_into(op, layer, rows, x, base, a, b, out)
    return out
