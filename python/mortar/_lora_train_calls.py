# SPDX-License-Identifier: Apache-2.0
"""Calls of the library's LoRA training with flat arguments, as _lora_train_ops.py names them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, arange, float64, int64, randint, zeros
from torch.compiler import is_compiling

from ._ffi import lib, torch_function
from ._library import in_words, named
from .reference import lora_train as reference

_forward, _backward = lib.lora_train_forward, lib.lora_train_backward
# These cost the host less, and return 0 for what only the others can take or refuse.
_forward_now = torch_function("torch_lora_train_forward")
_backward_now = torch_function("torch_lora_train_backward")


class _LayerFields(NamedTuple):
    widths: tuple[int, ...]
    places: tuple[int, ...]
    scales: tuple[float, ...]
    p: tuple[float, ...]
    drops_delta: bool


class Layer(_LayerFields):
    """What describes a call beside its tensors."""

    @functools.cached_property
    def is_single(self) -> bool:
        """One adapter, one slice: what most calls are, and whose host time counts."""
        return len(self.places) == len(self.widths) == len(self.p) == 1

    @functools.cached_property
    def no_adds(self) -> tuple[bool, ...]:
        """add_a and add_b of every adapter and slice where gradients are new tensors."""
        return (False, False) * (len(self.widths) * len(self.p))

    @functools.cached_property
    def sizes(self) -> tuple[int, int, bool]:
        return len(self.widths), len(self.p), self.drops_delta

    @functools.cached_property
    def numbers(self) -> tuple:
        """p of every adapter, then the scale of every adapter and slice."""
        return (*self.p, *self.spread(self.scales, 1.0))

    @functools.cached_property
    def forward_numbers(self) -> tuple:
        """All that a forward's torch_function takes beside the tensors."""
        return (*self.sizes, *self.numbers)

    def spread(self, values: Sequence, absent) -> list:
        """One value per adapter and slice of one per pair."""
        if len(self.places) == len(self.widths) * len(self.p):
            return list(values)
        out = [absent] * (len(self.widths) * len(self.p))
        for place, value in zip(self.places, values, strict=True):
            out[place] = value
        return out


_made = functools.lru_cache(maxsize=4096)(Layer)


def known_layer(*fields) -> Layer:
    """Layer(*fields), made once for all calls of a layer, with what is derived from it."""
    if is_compiling():
        return Layer(*fields)
    try:
        return _made(*fields)
    except TypeError:  # sizes that are symbols of a tracer have no hash
        return Layer(*fields)


@functools.lru_cache(maxsize=4096)
def single_layer(width: int, scale: float, p: float) -> Layer:
    """One adapter, one slice, dropout on the input; for eager calls."""
    return Layer((width,), (0,), (float(scale),), (float(p),), False)


class Rows(NamedTuple):
    """Where masks and the adapter of a row come from."""

    rng: Tensor | None
    offsets: Tensor | None
    plan: Tensor | None


def draw(x: Tensor) -> Tensor:
    """Seed and offset, from PyTorch's generator of the device of x."""
    return randint(2**63 - 1, (2,), dtype=int64, device=x.device)


NO_ROWS = Rows(None, None, None)


def as_rows(t: Tensor) -> Tensor:
    """[..., C] as [M, C]; a view wherever the strides allow one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def as_read(t: Tensor) -> Tensor:
    """[..., C] as the library reads it, which costs no view where the rows are dense."""
    return t if t.ndim == 2 or (t.ndim > 2 and t.is_contiguous()) else as_rows(t)


def as_written(t: Tensor) -> Tensor:
    """[..., C] as a view that the library writes to."""
    if t.ndim == 2 or (t.ndim > 2 and t.is_contiguous()):
        return t
    return t.view(math.prod(t.shape[:-1]), t.shape[-1])


def hidden_width(layer: Layer, a: Sequence[Tensor]) -> int:
    """Columns of h: the ranks of the slices, each rounded up to a multiple of 8."""
    if len(a) == 1:
        return -(-a[0].shape[0] // 8) * 8
    ranks = [0] * len(layer.widths)
    for place, matrix in zip(layer.places, a, strict=True):
        s = place % len(ranks)
        ranks[s] = max(ranks[s], matrix.shape[0])
    return sum(-(-rank // 8) * 8 for rank in ranks)


def _interleave(*lists: Sequence) -> list:
    return [value for group in zip(*lists, strict=True) for value in group]


def _exact(layer: Layer, rows: Rows, a, b, num_rows: int, hidden: int) -> reference.Problem:
    """The call as the reference takes it: float64 is for gradcheck, and no kernel's business."""
    if rows.plan is not None:
        raise TypeError(
            "lora_train: x must be float32, float16 or bfloat16 with a plan, got float64"
        )
    for name, matrices in (("a", a), ("b", b)):
        for t in matrices:
            if t.dtype is not float64:
                raise TypeError(
                    f"lora_train: {name} must have dtype float64, as x has, got {t.dtype}"
                )
    slices, adapters, _ = layer.sizes
    for place, matrix, other in zip(layer.places, a, b, strict=True):
        rank = matrix.shape[0]
        shapes = (("a", matrix, (rank, hidden)), ("b", other, (layer.widths[place % slices], rank)))
        for name, t, wanted in shapes:
            if t.shape != wanted:
                got = f"{tuple(t.shape)} (adapter {place // slices}, slice {place % slices})"
                raise ValueError(f"lora_train: {name} must have shape {tuple(wanted)}, got {got}")
    if rows.offsets is None:
        row_adapter = zeros(num_rows, dtype=int64, device="cpu")
    else:
        lib.lora_train_check(rows.offsets, adapters, num_rows)
        counts = rows.offsets.cpu().long().diff()
        row_adapter = arange(adapters, device="cpu").repeat_interleave(counts)
    pairs = layer.spread(list(zip(a, b, strict=True)), None)
    scales = layer.spread(layer.scales, 0.0)
    cut = range(0, adapters * slices, slices)
    return reference.Problem(
        [pairs[i : i + slices] for i in cut], [scales[i : i + slices] for i in cut],
        row_adapter.to(a[0].device), layer.widths, layer.p, layer.drops_delta, rows.rng,
    )  # fmt: skip


def interleaved_adds(layer: Layer, add_a: Sequence, add_b: Sequence) -> list[bool]:
    """`adds` of run_backward from one flag of each for every pair."""
    return [bool(value) for value in _matrices(layer, add_a, add_b)]


def _matrices(layer: Layer, left: Sequence, right: Sequence) -> Sequence:
    """One of each in turn for every adapter and slice, of one for every pair."""
    if layer.is_single:
        return (left[0], right[0])
    return _interleave(layer.spread(left, None), layer.spread(right, None))


def run_forward(layer: Layer, rows: Rows, x, h, y, base, a, b, eager: bool) -> None:
    """Writes y (a list) and, unless it is None, h. What has more than two dimensions is dense.
    `eager`: is_eager(x)."""
    if x.dtype is float64:
        x, y, base = as_rows(x), [as_rows(t) for t in y], [as_rows(t) for t in base]
        results = reference.forward(_exact(layer, rows, a, b, *x.shape), x, base or None)
        for out, result in zip(y, results, strict=True):
            out.copy_(result)
        return
    base = base or [None] * len(y)
    tensors = (x, h, None, *rows, *y, *base, *_matrices(layer, a, b))
    if eager and _forward_now(id(tensors), *layer.forward_numbers):
        return
    try:
        _forward(*_forward_arguments(layer, rows, x, h, y, base, a, b))
    except RuntimeError as error:
        given = {"x": x, "h": h, **rows._asdict(), "y": y, "base": base, "a": a, "b": b}
        raise _in_words("lora_train_forward", given, error) from None


def _forward_arguments(layer: Layer, rows: Rows, x, h, y, base, a, b) -> tuple:
    pairs = _interleave(
        layer.spread(a, None), layer.spread(b, None), layer.spread(layer.scales, 1.0)
    )
    return (*layer.sizes, x, h, None, *rows, *layer.p, *y, *base, *pairs)


def check_forward(layer: Layer, rows: Rows, x, y, base, a, b) -> None:
    """Raises what run_forward would for sizes and memory, and writes nothing."""
    try:
        lib.lora_train_forward_workspace(*_forward_arguments(layer, rows, x, None, y, base, a, b))
    except ValueError as error:
        raise ValueError(str(error).replace("_workspace: ", ": ", 1)) from None
    except (RuntimeError, TypeError):
        pass  # of what run_forward has other words for


def run_backward(
    layer: Layer, rows: Rows, dy, x, h, dx, add_dx, a, b, da, db, adds: Sequence[bool], eager: bool
) -> None:
    """da, db: of every pair, None for a frozen one. adds: add_a and add_b in turn for every adapter
    and slice. What has more than two dimensions is dense. `eager`: is_eager(dy[0])."""
    tensors = (x, h, dx, None, *rows, *dy, *_matrices(layer, a, b), *_matrices(layer, da, db))
    if eager and _backward_now(id(tensors), *layer.sizes, add_dx, *layer.numbers, *adds):
        return
    pairs = _interleave(
        layer.spread(a, None), layer.spread(b, None), layer.spread(layer.scales, 1.0)
    )
    out = _interleave(layer.spread(da, None), layer.spread(db, None), adds[::2], adds[1::2])
    try:
        _backward(*layer.sizes, add_dx, x, h, dx, None, *rows, *layer.p, *dy, *pairs, *out)
    except RuntimeError as error:
        given = {"dy": dy, "x": x, "h": h, **rows._asdict(), "a": a, "b": b, "dx": dx, "da": da,
                 "db": db}  # fmt: skip
        raise _in_words("lora_train_backward", given, error) from None


def _in_words(op: str, given: dict, error: Exception) -> Exception:
    tensors = [pair for name, value in given.items() for pair in named(name, value)]
    return in_words(op, tensors, error)


def exact_gradients(layer: Layer, rows: Rows, dy, x, a, b) -> list[Tensor]:
    """dx, then every dA, then every dB, in float64."""
    shape = dy[0].shape[0], a[0].shape[1]
    problem = _exact(layer, rows, a, b, *shape)
    x = x if x is not None else dy[0].new_zeros(shape)
    dx, da, db = reference.backward(problem, x, dy)
    slices = len(layer.widths)
    pick = [divmod(place, slices) for place in layer.places]
    return [dx, *(da[i][s] for i, s in pick), *(db[i][s] for i, s in pick)]
