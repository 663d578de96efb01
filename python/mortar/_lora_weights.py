# SPDX-License-Identifier: Apache-2.0
"""``mortar.lora.Weights``: the adapters of one layer, in the form that the ops take."""

import struct
from collections.abc import Sequence

import torch
import tvm_ffi

from . import _lora_ops as ops
from ._ffi import lib

Pair = tuple[torch.Tensor, torch.Tensor]
Adapter = Pair | Sequence[Pair | None] | None

_ALIGNMENT = 16  # bytes; what a vector load of the kernels needs
_ENTRY = struct.Struct("<QQifQ")  # LoraTableEntry: a, b, rank, scale, unused


class Weights:
    """The adapters of one layer: L adapters with S slices each.

    Made by ``from_adapters`` (one pair of tensors per adapter and slice, ranks as they come) or by
    ``stacked`` (all adapters of a slice in one tensor). Keeps the tensors alive and reads their
    addresses once: values written in place are seen, other memory (``t.data = ...``) is not.
    """

    num_adapters: int
    """L."""
    max_rank: int
    """Largest rank of any (adapter, slice)."""
    hidden: int
    """K."""
    widths: list[int]
    """N_s."""
    dtype: torch.dtype
    requires_grad: bool
    """True if one of the tensors requires gradients, which the ops do not give."""
    watched: Sequence[torch.Tensor]
    """What an eager call looks at for gradients."""
    handle: tvm_ffi.Object
    """What an eager call passes."""

    def __init__(self, flat: tuple, dtype: torch.dtype) -> None:
        self._flat = flat
        self._take_handle()
        described = lib.lora_weights_describe(self.handle)
        self.max_rank, self.num_adapters, self.hidden, *self.widths = map(int, described)
        self.dtype = dtype
        self._sizes = (self.num_adapters, len(self.widths), self.max_rank, dtype)

    @classmethod
    def stacked(
        cls,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        ranks: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> "Weights":
        """Weights from stacked tensors, one pair per slice.

        Args:
            a: S tensors [L, R_s, K] (or [L, 1, R_s, K]), last dimension dense.
            b: S tensors [L, N_s, R_s] (or [L, 1, N_s, R_s]), last dimension dense.
            ranks: int32 [L], each adapter's own rank: what lies past it is never read. None: R_s.
            scales: float32 [L], multiplies each adapter's delta. None: 1.

        Raises:
            ValueError, TypeError: shapes, dtypes or devices do not agree.
        """
        a, b = list(a), list(b)
        first = (a or b or [torch.empty(0)])[0]
        self = cls((None, ranks, scales, len(a), *a, *b), first.dtype)
        self._tensors = self.watched = [*a, *b]
        self.requires_grad = any(t.requires_grad for t in self._tensors)
        self.call_apply, self.apply_args = ops.call_apply, (a, b, ranks, scales)
        self.call_shrink, self.shrink_args = ops.call_shrink, (a, ranks, scales)
        self.call_expand, self.expand_args = ops.call_expand, (b, ranks)
        return self

    @classmethod
    def from_adapters(
        cls,
        adapters: Sequence[Adapter],
        scales: Sequence[float | Sequence[float]] | None = None,
        *,
        widths: Sequence[int] | None = None,
        max_rank: int | None = None,
        capacity: int | None = None,
    ) -> "Weights":
        """Weights from one pair of tensors per adapter and slice; a device table, built once.

        Args:
            adapters: one entry per adapter: a list with one (A, B) or None per slice (None: the
                adapter leaves this slice alone); with one slice the bare (A, B) will do; None for
                an empty slot. A is [rank, K], B is [N_s, rank], contiguous, 16-byte aligned, all of
                one dtype and on one device. They are used in place, not copied.
            scales: one number per adapter, or one per slice. None: 1.
            widths: N_s of every slice; needed only where no adapter has a pair for a slice.
            max_rank: largest rank that ``update`` will bring. None: the largest there is now.
            capacity: L, to leave empty slots for ``update``. None: as many as adapters.

        Raises:
            ValueError, TypeError: shapes, dtypes, devices, strides or alignments are wrong.
        """
        rows = [_slices(adapter) for adapter in adapters]
        num_slices = max([len(row) for row in rows if row is not None], default=0)
        present = [pair for row in rows if row for pair in row if pair is not None]
        if not present:
            raise ValueError("lora_weights: adapters must hold at least one (A, B), got none")
        if scales is not None and len(scales) != len(rows):
            raise ValueError(
                f"lora_weights: scales must have one entry per adapter = {len(rows)}, "
                f"got {len(scales)}"
            )
        first, _ = present[0]
        if widths is not None:
            num_slices = len(widths)
        else:
            widths = [_width(rows, s) for s in range(num_slices)]
        if max_rank is None:
            max_rank = max(a.shape[0] if a.ndim else 0 for a, _ in present)
        length = len(rows) if capacity is None else capacity
        if length < len(rows):
            raise ValueError(
                f"lora_weights: capacity must be at least the number of adapters = {len(rows)}, "
                f"got {length}"
            )
        table = torch.zeros(length, num_slices, 4, dtype=torch.int64, device=first.device)
        hidden = first.shape[-1] if first.ndim else 0
        flat = (table, first.dtype, max_rank, hidden)
        self = cls((*flat, *widths), first.dtype)
        self._table = table
        self._slots = [None] * length
        self.call_apply = ops.call_apply_table
        self.call_shrink = ops.call_shrink_table
        self.call_expand = ops.call_expand_table
        self.apply_args = self.shrink_args = self.expand_args = (*flat, list(widths))
        packed = [
            self._checked_row(slot, row, 1.0 if scales is None else scales[slot])
            for slot, row in enumerate(rows)
        ]
        table[: len(rows)].copy_(_as_tensor(b"".join(packed)).view(len(rows), num_slices, 4))
        self._slots[: len(rows)] = rows
        self._note_gradients()
        return self

    def update(self, slot: int, adapter: Adapter, scale: float | Sequence[float] = 1.0) -> None:
        """Puts another adapter into a slot of weights made by ``from_adapters``; None empties it.

        The table is changed in place, in the order of the current stream: captured CUDA graphs see
        the new adapter, and work that was queued before on this stream still uses the old one,
        whose memory PyTorch may reuse only after that work. Ranks may differ, up to ``max_rank``.
        """
        if not hasattr(self, "_table"):
            raise TypeError("lora_weights: update needs weights made by from_adapters, got stacked")
        if not 0 <= slot < self.num_adapters:
            raise ValueError(f"lora_weights: slot must be in [0, {self.num_adapters}), got {slot}")
        row = _slices(adapter)
        packed = _as_tensor(self._checked_row(slot, row, scale))
        self._table[slot].copy_(packed.view(self.num_slices, 4))
        self._slots[slot] = row
        self._note_gradients()

    @property
    def num_slices(self) -> int:
        """S."""
        return len(self.widths)

    def tensors(self) -> list[torch.Tensor]:
        """Every A and B in use."""
        if not hasattr(self, "_table"):
            return self._tensors
        return [t for row in self._slots if row for pair in row if pair for t in pair]

    def workspace_size(self, x: torch.Tensor) -> int:
        """Bytes of workspace that ``apply`` and ``shrink`` need for x [M, K]."""
        sizes = (x.is_cuda, *x.shape, x.dtype, *self._sizes)
        return max(ops.apply_bytes(*sizes), ops.shrink_bytes(*sizes))

    def _checked_row(self, slot: int, row, scale) -> bytes:
        """The table's row for one adapter, or an error that names what is wrong."""
        if row is None:
            return bytes(_ENTRY.size * self.num_slices)
        if len(row) != self.num_slices:
            raise ValueError(
                f"lora_weights: adapter {slot} must have {self.num_slices} slices, got {len(row)}"
            )
        per_slice = [scale] * len(row) if isinstance(scale, int | float) else list(scale)
        if len(per_slice) != len(row):
            raise ValueError(
                f"lora_weights: scales of adapter {slot} must be one number or one per slice = "
                f"{len(row)}, got {len(per_slice)}"
            )
        entries = []
        for s, (pair, factor) in enumerate(zip(row, per_slice, strict=True)):
            if pair is None:
                entries.append(bytes(_ENTRY.size))
                continue
            self._check_pair(f"lora_weights: {{}} of adapter {slot}, slice {s}", s, *pair)
            a, b = pair
            entries.append(_ENTRY.pack(a.data_ptr(), b.data_ptr(), a.shape[0], factor, 0))
        return b"".join(entries)

    def _check_pair(self, where: str, s: int, a: torch.Tensor, b: torch.Tensor) -> None:
        rank = a.shape[0] if a.ndim else 0
        for name, t, shape in (("A", a, (rank, self.hidden)), ("B", b, (self.widths[s], rank))):
            what = where.format(name)
            if tuple(t.shape) != shape:
                raise ValueError(f"{what} must have shape {shape}, got {tuple(t.shape)}")
            if t.dtype != self.dtype:
                raise TypeError(f"{what} must have dtype {self.dtype}, got {t.dtype}")
            if t.device != self._table.device:
                raise TypeError(f"{what} must be on {self._table.device}, got {t.device}")
            if not t.is_contiguous():
                raise ValueError(f"{what} must be contiguous, got strides {t.stride()}")
            if t.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"{what} must be aligned to {_ALIGNMENT} bytes (clone() it), "
                    f"got address {t.data_ptr():#x}"
                )
        if not 1 <= rank <= self.max_rank:
            raise ValueError(
                f"{where.format('A')} must have a rank of 1 to {self.max_rank}, got {rank}"
            )

    def _note_gradients(self) -> None:
        tensors = self.tensors()
        self.requires_grad = any(t.requires_grad for t in tensors)
        self.watched = tensors if self.requires_grad else ()

    def _take_handle(self) -> None:
        """Weights as eager calls pass them: read and checked once. The aliases hold the memory that
        the handle points to, even where a tensor is given other memory."""
        self.handle = lib.lora_weights(*self._flat)
        self._memory = [t.detach() for t in self._flat if isinstance(t, torch.Tensor)]

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "handle"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._take_handle()


def _slices(adapter: Adapter) -> list[Pair | None] | None:
    """One entry per slice; a bare (A, B) is an adapter of one slice."""
    if adapter is None:
        return None
    entries = list(adapter)
    if len(entries) == 2 and all(isinstance(t, torch.Tensor) for t in entries):
        entries = [(entries[0], entries[1])]
    for entry in entries:
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        if entry is not None and not (is_pair and all(isinstance(t, torch.Tensor) for t in entry)):
            raise TypeError(
                "lora_weights: a slice must be a pair of tensors (A, B) or None, got "
                f"{type(entry).__name__} {'of another kind' if is_pair else ''}".rstrip()
            )
    return entries


def _width(rows, s: int) -> int:
    for row in rows:
        if row is not None and s < len(row) and row[s] is not None:
            b = row[s][1]
            return b.shape[0] if b.ndim else 0
    raise ValueError(
        f"lora_weights: widths must be given, as no adapter has a pair for slice {s}, got None"
    )


def _as_tensor(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)
