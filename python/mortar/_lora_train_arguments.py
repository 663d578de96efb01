# SPDX-License-Identifier: Apache-2.0
"""What ``mortar.lora.linear`` and ``mixed_linear`` are given, checked and brought into one form.

What is needed before sizes can be read is checked here, the rest by the library. Every error names
the function and the argument as the caller wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ._library import negation, refuse_nested
from ._lora_train_calls import Rows, as_written

_DROPS = {"input": False, "delta": True}
NUMBERS = (float, int, Real)  # what is usual first: an abstract class takes long to ask


def as_list(op: str, name: str, given, count: int | None) -> list:
    """One tensor or a sequence of them as a list, of `count` entries unless that is None."""
    try:
        listed = [given] if isinstance(given, Tensor) else list(given)
    except TypeError:
        raise TypeError(f"{op}: {name} must be a tensor, got {type(given).__name__}") from None
    if count is not None and len(listed) != count:
        raise ValueError(
            f"{op}: {name} must have one tensor per slice = {count}, got {len(listed)}"
        )
    return listed


def as_scales(op: str, scale: float | Sequence[float], slices: int) -> tuple[float, ...]:
    if isinstance(scale, NUMBERS):
        return (float(scale),) * slices
    if isinstance(scale, Tensor) and scale.ndim == 0:
        return (as_number(op, "scale", scale),) * slices
    try:
        scales = tuple(scale)
    except TypeError:
        got = type(scale).__name__
        raise TypeError(f"{op}: scale must be a number, or one for each slice, got {got}") from None
    if len(scales) != slices:
        raise ValueError(f"{op}: scale must have one entry per slice = {slices}, got {len(scales)}")
    return tuple(as_number(op, "scale", s) for s in scales)


def as_number(op: str, name: str, value) -> float:
    if isinstance(value, NUMBERS):
        return float(value)
    if isinstance(value, Tensor) and value.ndim == 0:
        if value.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{op}: {name} must be a number, which has no gradient, got a tensor that requires "
                "one (detach() it, or multiply by it elsewhere)"
            )
        return float(value)
    raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_count(name: str, values: Sequence, count: int) -> None:
    if not hasattr(values, "__len__") or (isinstance(values, Tensor) and values.ndim == 0):
        raise TypeError(f"mixed_linear: {name} must be a list, got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(
            f"mixed_linear: {name} must have one entry per adapter = {count}, got {len(values)}"
        )


def check_matrices(op: str, x, a: Sequence, b: Sequence) -> None:
    if isinstance(x, Tensor) and x.ndim > 0 and not x.is_nested:
        for t in (*a, *b):
            if not isinstance(t, Tensor) or t.ndim != 2:
                break
        else:
            return
    for name, tensors in (("x", (x,)), ("a", a), ("b", b)):
        for t in tensors:
            if not isinstance(t, Tensor):
                raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
            refuse_nested(op, **{name: t})
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least 1 dimension, got shape ()")
    for name, tensors in (("a", a), ("b", b)):
        for t in tensors:
            if t.ndim != 2:
                raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {tuple(t.shape)}")


def as_probability(op: str, p: float, training: bool) -> float:
    p = as_number(op, "dropout", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: dropout must be 0 to 1, got {p}")
    return p if training else 0.0


def drops_delta(op: str, dropout_on: str) -> bool:
    if not isinstance(dropout_on, str) or dropout_on not in _DROPS:
        raise ValueError(f'{op}: dropout_on must be "input" or "delta", got {dropout_on!r}')
    return _DROPS[dropout_on]


def as_rows_of(rng: Tensor | None, rows, x: Tensor, num_adapters: int) -> Rows:
    if isinstance(rows, Tensor):
        return Rows(rng, rows, None)
    from .lora import Plan  # which imports lora_train

    if not isinstance(rows, Plan):
        raise TypeError(
            "mixed_linear: rows must be a mortar.lora.Plan or a tensor of offsets, got "
            f"{type(rows).__name__}"
        )
    num_rows = x[..., 0].numel() if x.shape[-1] else rows.num_tokens
    if rows[1:] != (num_rows, num_adapters):
        raise ValueError(
            f"mixed_linear: rows must be a plan for {num_rows} tokens and {num_adapters} adapters, "
            f"got one for {rows.num_tokens} and {rows.num_adapters}"
        )
    return Rows(rng, None, rows.data)


def result_dtype(op: str, x: Tensor, base: list[Tensor], dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if base:
        return base[0].dtype
    if dtype is not None:
        return dtype
    kind = x.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def check_written(op: str, out: Tensor, name: str = "out") -> None:
    if out.is_neg():
        raise negation(op, name)
    try:
        as_written(out)
    except RuntimeError:
        raise ValueError(
            f"{op}: {name} must have leading dimensions that one stride steps through, got shape "
            f"{tuple(out.shape)} with strides {out.stride()}"
        ) from None


def check_shape(op: str, name: str, t, shape: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.ndim != len(shape):
        refuse_nested(op, **{name: t})
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {tuple(t.shape)}")


class Adapters(NamedTuple):
    """The adapters of ``mixed_linear``, an entry for every pair that is there."""

    sliced: bool
    """Whether they are lists of slices."""
    widths: tuple[int, ...]
    """Of every slice."""
    places: tuple[int, ...]
    """Of every pair: adapter * slices + slice."""
    a: list[Tensor]
    b: list[Tensor]
    scales: tuple[float, ...]


def read_adapters(x, adapters, scales, widths) -> Adapters:
    op = "mixed_linear"
    if isinstance(adapters, Tensor) or not hasattr(adapters, "__len__"):
        raise TypeError(f"{op}: adapters must be a list, got {type(adapters).__name__}")
    if not len(adapters):
        raise ValueError(f"{op}: adapters must hold at least one adapter, got none")
    listed = [row if isinstance(row, list) else [row] for row in adapters]
    slices = max(len(row) for row in listed)
    listed = [[None] * slices if row == [None] else row for row in listed]
    if any(len(row) != slices for row in listed):
        raise ValueError(
            f"{op}: adapters must have {slices} slices each, got {[len(row) for row in listed]}"
        )
    check_count("scales", scales, len(listed))
    found: list[int | None] = [None] * slices if widths is None else _integers(op, widths)
    if len(found) != slices:
        raise ValueError(f"{op}: widths must have one entry per slice = {slices}, got {len(found)}")
    places, a, b, pair_scales = [], [], [], []
    for number, row in enumerate(listed):
        for s, pair in enumerate(row):
            if pair is None:
                continue
            _check_pair(op, number, s, x, pair)
            places.append(number * slices + s)
            a.append(pair[0])
            b.append(pair[1])
            pair_scales.append(as_number(op, "scales", scales[number]))
            if found[s] is None:
                found[s] = pair[1].shape[0]
    if not places:
        raise ValueError(f"{op}: adapters must hold at least one pair (A, B), got none")
    if None in found:
        raise ValueError(
            f"{op}: adapters must hold a pair for every slice, or widths say how wide it is, got "
            f"widths {found}"
        )
    sliced = any(isinstance(row, list) for row in adapters)
    return Adapters(sliced, tuple(found), tuple(places), a, b, tuple(pair_scales))


def _integers(op: str, widths) -> list[int]:
    widths = list(widths) if isinstance(widths, Sequence) else [widths]
    for width in widths:
        if not isinstance(width, int | torch.SymInt) or not 0 <= width < 2**63:
            got = type(width).__name__ if not isinstance(width, int) else width
            raise TypeError(f"{op}: widths must be a list of sizes, got {got}")
    return widths


def _check_pair(op: str, adapter: int, slice_: int, x, pair) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = type(pair).__name__
        if isinstance(pair, tuple | list):
            got += f" of {len(pair)}"
        raise TypeError(
            f"{op}: adapter {adapter}, slice {slice_} must be a pair (A, B) or None, got {got}"
        )
    check_matrices(op, x, pair[:1], pair[1:])
