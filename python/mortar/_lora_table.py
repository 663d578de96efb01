# SPDX-License-Identifier: Apache-2.0
"""What ``Weights.from_adapters`` and ``update`` take, checked and packed as rows of a table.

Every error names the function and the argument as the caller wrote them.
"""

import operator
import struct
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ._limits import LORA_MAX_RANK as MAX_RANK
from ._limits import LORA_MAX_SLICES as MAX_SLICES
from ._limits import MEMORY_ALIGNMENT as ALIGNMENT

Pair = tuple[torch.Tensor, torch.Tensor]
Adapter = Pair | Sequence[Pair | None] | None

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT32 = struct.Struct("<f")
_ENTRY = struct.Struct("<QQifQ")  # LoraTableEntry: a, b, rank, scale, unused


class Layer(NamedTuple):
    """What all rows of one table have in common."""

    dtype: torch.dtype
    device: torch.device
    hidden: int
    widths: list[int]
    max_rank: int


class Row:
    """One adapter: the tensors as given, and aliases that own the memory the table points to, even
    after a given tensor got other memory (``t.data = ...``)."""

    def __init__(self, pairs: list[Pair | None], scales: list[float]) -> None:
        self.given = pairs
        self.scales = scales
        self.memory = [pair and tuple(t.detach() for t in pair) for pair in pairs]
        for t in self.tensors():
            if not isinstance(t, torch.nn.Parameter):  # which are static already
                mark_static(t)

    def tensors(self) -> list[torch.Tensor]:
        return [t for pair in self.given if pair for t in pair]

    def latest(self) -> list[Pair | None]:
        """The given tensors where they still have the memory of the table, else the aliases."""
        return [
            pair and tuple(map(latest, pair, aliases))
            for pair, aliases in zip(self.given, self.memory, strict=True)
        ]

    def packed(self) -> bytes:
        entries = []
        for pair, scale in zip(self.memory, self.scales, strict=True):
            if pair is None:
                entries.append(bytes(_ENTRY.size))
            else:
                # An A without columns and a B without rows have no address, which would leave the
                # slice alone: any other one does, as nothing is read there.
                a, b = (t.data_ptr() for t in pair)
                entries.append(_ENTRY.pack(a or b, b or a, pair[0].shape[0], scale, 0))
        return b"".join(entries)


def mark_static(tensor: torch.Tensor) -> torch.Tensor:
    """What torch._dynamo.mark_static_address does, without its import of a second: the graphs of
    torch.compile(mode="reduce-overhead") use the tensor in place instead of copying it."""
    tensor._dynamo_static_input_type = "unguarded"
    return tensor


def latest(given: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    return given if given.data_ptr() == alias.data_ptr() else alias


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def integer(op: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}") from None


def slices_of(op: str, slot: int, adapter: Adapter) -> list[Pair | None] | None:
    """One entry per slice; a bare (A, B) is an adapter of one slice."""
    if adapter is None:
        return None
    if not is_sequence(adapter):
        raise TypeError(
            f"{op}: adapter {slot} must be a pair of tensors (A, B), a list with such a pair or "
            f"None per slice, or None, got {type(adapter).__name__}"
        )
    entries = list(adapter)
    if len(entries) == 2 and all(isinstance(t, torch.Tensor) for t in entries):
        entries = [tuple(entries)]
    for s, entry in enumerate(entries):
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        if entry is not None and not (is_pair and all(isinstance(t, torch.Tensor) for t in entry)):
            got = type(entry).__name__
            if isinstance(entry, list | tuple):
                got += f" of ({', '.join(type(t).__name__ for t in entry[:4])})"
            raise TypeError(
                f"{op}: adapter {slot}, slice {s} must be a pair of tensors (A, B) or None, "
                f"got {got}"
            )
        if entry is not None and any(t.is_nested for t in entry):
            raise TypeError(
                f"{op}: adapter {slot}, slice {s} must be dense tensors in memory, got a nested one"
            )
    return entries


def make_row(op: str, slot: int, pairs: list[Pair | None], scale: Any, layer: Layer) -> Row:
    """The checked row of one adapter."""
    if len(pairs) != len(layer.widths):
        raise ValueError(
            f"{op}: adapter {slot} must have {len(layer.widths)} slices, got {len(pairs)}"
        )
    scales = _scales(op, slot, scale, len(pairs))
    for s, pair in enumerate(pairs):
        if pair is not None:
            _check_pair(f"{op}: {{}} of adapter {slot}, slice {s}", *pair, layer.widths[s], layer)
    return Row(pairs, scales)


def _scales(op: str, slot: int, scale: Any, num_slices: int) -> list[float]:
    scales = [scale] * num_slices if isinstance(scale, Real) else scale
    if not is_sequence(scales) or not all(isinstance(value, Real) for value in scales):
        got = type(scale).__name__
        if is_sequence(scales):
            got += f" with {next(type(v).__name__ for v in scales if not isinstance(v, Real))}"
        raise TypeError(
            f"{op}: scale of adapter {slot} must be a number or a list of one per slice, got {got}"
        )
    if len(scales) != num_slices:
        raise ValueError(
            f"{op}: scale of adapter {slot} must be one number or one per slice = {num_slices}, "
            f"got {len(scales)}"
        )
    for value in scales:
        try:
            _FLOAT32.pack(value)
        except (OverflowError, struct.error):
            raise ValueError(
                f"{op}: scale of adapter {slot} must fit float32, got {value}"
            ) from None
    return [float(value) for value in scales]


def _check_pair(where: str, a: torch.Tensor, b: torch.Tensor, width: int, layer: Layer) -> None:
    what = where.format("A")
    if a.ndim != 2 or not 1 <= a.shape[0] <= MAX_RANK:
        raise ValueError(
            f"{what} must be [rank, K] with a rank of 1 to {MAX_RANK}, got shape {tuple(a.shape)}"
        )
    if a.shape[0] > layer.max_rank:
        raise ValueError(
            f"{what} must have a rank of at most max_rank = {layer.max_rank}, got {a.shape[0]}"
        )
    for name, t, wanted in (("A", a, (a.shape[0], layer.hidden)), ("B", b, (width, a.shape[0]))):
        what = where.format(name)
        if tuple(t.shape) != wanted:
            beside = f" (A has {tuple(a.shape)})" if t is b else ""
            raise ValueError(f"{what} must have shape {wanted}, got {tuple(t.shape)}{beside}")
        if t.dtype != layer.dtype:
            raise TypeError(f"{what} must have dtype {layer.dtype}, got {t.dtype}")
        if t.device != layer.device:
            raise TypeError(f"{what} must be on {layer.device}, got {t.device}")
        if t.layout != torch.strided or not t.is_contiguous():
            got = f"strides {t.stride()}" if t.layout == torch.strided else f"{t.layout}"
            raise ValueError(f"{what} must be contiguous, got {got}")
        if t.is_neg():
            raise ValueError(f"{what} must hold its own values (resolve_neg() it), got a negation")
        if t.numel() and not t.data_ptr():
            raise ValueError(f"{what} must hold memory, got a {type(t).__name__} without any")
        if t.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{what} must be aligned to {ALIGNMENT} bytes (clone() it), "
                f"got address {t.data_ptr():#x}"
            )


def common_layer(op: str, rows: list, widths: Sequence[int] | None, max_rank: int | None) -> Layer:
    """What the rows of a new table must agree with: taken from the first pair where not given."""
    present = [pair for row in rows if row for pair in row if pair is not None]
    if not present:
        raise ValueError(f"{op}: adapters must hold at least one (A, B), got none")
    first = present[0][0]
    if first.dtype not in DTYPES:
        raise TypeError(
            f"{op}: adapters must have dtype float32, float16 or bfloat16, got {first.dtype}"
        )
    if widths is None:
        num_slices = max(len(row) for row in rows if row is not None)
        widths = [_width(op, rows, s) for s in range(num_slices)]
    elif is_sequence(widths):
        widths = [integer(op, "widths", width) for width in widths]
    else:
        raise TypeError(f"{op}: widths must be a list of integers, got {type(widths).__name__}")
    if not 1 <= len(widths) <= MAX_SLICES:
        raise ValueError(f"{op}: adapters must have 1 to {MAX_SLICES} slices, got {len(widths)}")
    if max_rank is None:
        max_rank = max(a.shape[0] if a.ndim else 0 for a, _ in present)
        max_rank = min(max(max_rank, 1), MAX_RANK)  # the row's own check says what is wrong
    max_rank = integer(op, "max_rank", max_rank)
    if not 1 <= max_rank <= MAX_RANK:
        raise ValueError(f"{op}: max_rank must be 1 to {MAX_RANK}, got {max_rank}")
    hidden = first.shape[-1] if first.ndim else 0
    return Layer(first.dtype, first.device, hidden, widths, max_rank)


def _width(op: str, rows: list, s: int) -> int:
    for row in rows:
        if row is not None and s < len(row) and row[s] is not None:
            b = row[s][1]
            return b.shape[0] if b.ndim else 0
    raise ValueError(
        f"{op}: widths must be given, as no adapter has a pair for slice {s}, got None"
    )


def packed(rows: Sequence[Row | None], num_slices: int) -> torch.Tensor:
    """The rows of a table, on the CPU."""
    empty = bytes(_ENTRY.size * num_slices)
    entries = bytearray(b"".join(row.packed() if row else empty for row in rows))
    return torch.frombuffer(entries, dtype=torch.int64).view(len(rows), num_slices, 4)
