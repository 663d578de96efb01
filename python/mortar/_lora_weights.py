# SPDX-License-Identifier: Apache-2.0
"""``mortar.lora.Weights``: the adapters of one layer, in the form that the ops take."""

import copy
import threading
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import tvm_ffi

from . import _lora_ops as ops
from ._ffi import lib
from ._library import in_words, named, negation
from ._limits import LORA_MAX_ADAPTERS as MAX_ADAPTERS
from ._lora_table import (
    Adapter,
    Layer,
    Row,
    common_layer,
    integer,
    is_sequence,
    latest,
    make_row,
    mark_static,
    packed,
    slices_of,
)


@tvm_ffi.register_object("mortar.LoraWeights")
class Handle(tvm_ffi.Object):
    """Weights that the library has read and checked. A call holds on to the handle that it was
    given, and the handle to all memory that it points to: what an update drops lives as long as
    calls that began before."""

    __slots__ = ("memory",)


class Weights:
    """The adapters of one layer: L adapters with S slices each.

    Made by ``from_adapters`` (one pair of tensors per adapter and slice, ranks as they come) or by
    ``stacked`` (all adapters of a slice in one tensor). Reads the addresses of the tensors once and
    keeps that memory alive: values written in place are seen; other memory (``t.data = ...``, as
    ``module.to`` does) is not. Only what takes the memory of the storage itself must not be done to
    weights in use: ``t.untyped_storage().resize_(0)``, and ``t.share_memory_()``, which is also
    what torch.multiprocessing does to a tensor that it sends to another process. (Weights that are
    sent themselves send copies.)

    Copies (``copy.deepcopy``) and pickles hold tensors of their own and a table made from them.
    Under ``torch.compile`` every A and B is an input of the compiled code, so writes to them before
    a call are seen; an ``update`` that changes ranks or fills a slot makes it compile again.
    A program that ``torch.export`` has saved uses the tensors that it brings; as its table is read
    back for that, calls wait for the device, and a CUDA graph cannot hold them (stacked weights do
    neither).
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
    watched: Sequence[torch.Tensor]
    """What an eager call looks at while gradients are enabled: every A and B."""
    handle: Handle
    """What an eager call passes."""

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
        for name, given in (("a", a), ("b", b)):
            _check_tensors(name, given)
        for name, given in (("ranks", ranks), ("scales", scales)):
            if given is not None and not isinstance(given, torch.Tensor):
                got = type(given).__name__
                raise TypeError(f"Weights.stacked: {name} must be a tensor or None, got {got}")
        a, b = list(a), list(b)
        self = cls()
        try:
            self.handle = lib.lora_weights(None, ranks, scales, len(a), *a, *b)
        except (TypeError, ValueError) as error:
            said = str(error).replace("lora_weights: ", "Weights.stacked: ", 1)
            raise type(error)(said) from None
        except RuntimeError as error:
            given = {"a": a, "b": b, "ranks": ranks, "scales": scales}
            tensors = [pair for item in given.items() for pair in named(*item)]
            raise in_words("Weights.stacked", tensors, error) from None
        self._tensors = self.watched = [*a, *b]
        self.handle.memory = [t if t is None else t.detach() for t in (*a, *b, ranks, scales)]
        self._describe((a or b)[0].dtype)
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
                one dtype and on one device. They are used in place, not copied: no call may write
                over them, which calls do not check, as a table holds but addresses.
            scales: one number per adapter, or one per slice. None: 1.
            widths: N_s of every slice; needed only where no adapter has a pair for a slice.
            max_rank: largest rank that ``update`` will bring. None: the largest there is now.
            capacity: L, to leave empty slots for ``update``. None: as many as adapters.

        Raises:
            ValueError, TypeError: shapes, dtypes, devices, strides or alignments are wrong.
        """
        op = "Weights.from_adapters"
        for name, given in (("adapters", adapters), ("scales", scales)):
            if not is_sequence(given) and (name == "adapters" or given is not None):
                got = type(given).__name__
                raise TypeError(f"{op}: {name} must be a list of one per adapter, got {got}")
        pairs = [slices_of(op, slot, adapter) for slot, adapter in enumerate(adapters)]
        if scales is None:
            scales = [1.0] * len(pairs)
        if len(scales) != len(pairs):
            raise ValueError(
                f"{op}: scales must have one entry per adapter = {len(pairs)}, got {len(scales)}"
            )
        length = len(pairs) if capacity is None else integer(op, "capacity", capacity)
        if length < len(pairs):
            raise ValueError(
                f"{op}: capacity must be at least the number of adapters = {len(pairs)}, "
                f"got {length}"
            )
        if length > MAX_ADAPTERS:
            name = "adapters must be" if capacity is None else "capacity must be"
            raise ValueError(f"{op}: {name} at most {MAX_ADAPTERS}, got {length}")
        layer = common_layer(op, pairs, widths, max_rank)
        return cls._of_rows(op, pairs, scales, layer, length)

    @classmethod
    def _of_rows(
        cls, op: str, pairs: Sequence, scales: Sequence, layer: Layer, length: int
    ) -> "Weights":
        rows: list[Row | None] = [None] * length
        for slot, (row, scale) in enumerate(zip(pairs, scales, strict=True)):
            if row is not None:
                rows[slot] = make_row(op, slot, row, scale, layer)
        self = cls()
        self._lock = threading.Lock()
        self._layer = layer
        self.call_apply = ops.call_apply_table
        self.call_shrink = ops.call_shrink_table
        self.call_expand = ops.call_expand_table
        with torch.inference_mode(False):  # an update may come outside of it
            table = packed(rows, len(layer.widths)).to(layer.device)
        self._install(rows, table)
        self._describe(layer.dtype)
        return self

    def update(self, slot: int, adapter: Adapter, scale: float | Sequence[float] = 1.0) -> None:
        """Puts another adapter into a slot of weights made by ``from_adapters``; None empties it.

        Ranks may differ, up to ``max_rank``. A failed update changes nothing.

        On the CPU a call that runs in another thread meanwhile uses the old adapter or the new one,
        whole; the old one's memory lives until the last such call is done.

        On CUDA the table keeps its address and its row is written by one copy in the order of the
        current stream, which the call waits for. Work queued on this stream before has used the old
        adapter, whose memory may then be reused; what is queued later uses the new one, captured
        graphs included. Weights in use on another stream as well need what every write in place
        needs: that stream waits for this one, and this one for that, around the update
        (``torch.cuda.Stream.wait_stream``).
        """
        op = "Weights.update"
        if not hasattr(self, "_layer"):
            raise TypeError(f"{op}: weights must be made by from_adapters, got stacked ones")
        slot = integer(op, "slot", slot)
        if not 0 <= slot < self.num_adapters:
            raise ValueError(f"{op}: slot must be in [0, {self.num_adapters}), got {slot}")
        pairs = slices_of(op, slot, adapter)
        row = None if pairs is None else make_row(op, slot, pairs, scale, self._layer)
        new = packed([row], self.num_slices)[0]
        with self._lock:
            rows, table = [*self._rows], self._table
            rows[slot] = row
            if table.is_cuda:
                table[slot].copy_(new)  # from pageable memory: waits for the stream
            else:
                table = table.clone()
                table[slot] = new
            self._install(rows, table)

    @property
    def requires_grad(self) -> bool:
        """True if one of the tensors requires gradients, which the ops do not give."""
        return any(t.requires_grad for t in self.watched)

    @property
    def num_slices(self) -> int:
        """S."""
        return len(self.widths)

    def tensors(self) -> list[torch.Tensor]:
        """Every A and B in use."""
        if not hasattr(self, "_layer"):
            return self._tensors
        return [t for row in self._rows if row for t in row.tensors()]

    def workspace_size(self, x: torch.Tensor) -> int:
        """Bytes of workspace that ``apply`` and ``shrink`` need for x [M, K]."""
        op = "Weights.workspace_size"
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: x must be a tensor, got {type(x).__name__}")
        if x.ndim != 2:
            raise ValueError(f"{op}: x must have shape [M, K], got {tuple(x.shape)}")
        sizes = (self.num_adapters, self.num_slices, self.max_rank, self.dtype)
        return lib.lora_apply_workspace(x.is_cuda, *x.shape, x.dtype, *sizes)

    def _install(self, rows: list[Row | None], table: torch.Tensor) -> None:
        """Makes these rows the ones that calls use from now on. A call reads one of the attributes
        that are set here, once."""
        dtype, _, hidden, widths, max_rank = self._layer
        known = ops.KnownTable(mark_static(table), rows)
        handle = lib.lora_weights(table, dtype, max_rank, hidden, *widths)
        handle.memory = known
        flat = (table, dtype, max_rank, hidden, list(widths))
        self._rows, self._table = rows, table
        self.watched = self.tensors()
        self.handle = handle
        self.apply_args = (*flat, known.factors(0, 1))
        self.shrink_args, self.expand_args = (*flat, known.factors(0)), (*flat, known.factors(1))

    def _describe(self, dtype: torch.dtype) -> None:
        described = lib.lora_weights_describe(self.handle)
        self.max_rank, self.num_adapters, self.hidden, *self.widths = map(int, described)
        self.dtype = dtype

    def __reduce__(self) -> tuple:
        """Of copies and pickles: the tensors, from which weights are made again."""
        if not hasattr(self, "_layer"):
            a, b, ranks, scales = self.apply_args
            given = [*a, *b, ranks, scales]
            kept = [
                t if t is None else latest(t, alias)
                for t, alias in zip(given, self.handle.memory, strict=True)
            ]
            return Weights.stacked, (kept[: len(a)], kept[len(a) : -2], *kept[-2:])
        scales = [row and row.scales for row in self._rows]
        pairs = [row and row.latest() for row in self._rows]
        return _made_again, (pairs, scales, self._layer)


def _reduce_for_another_process(weights: Weights) -> tuple:
    """torch.multiprocessing moves what it sends into shared memory: not what these weights use."""
    return copy.deepcopy(weights).__reduce__()


ForkingPickler.register(Weights, _reduce_for_another_process)


def _made_again(pairs: list, scales: list, layer: Layer) -> Weights:
    tensors = [t for row in pairs if row for pair in row if pair for t in pair]
    if tensors:  # a pickle may have been loaded to another device
        layer = layer._replace(device=tensors[0].device)
    return Weights._of_rows("Weights", pairs, scales, layer, len(pairs))


def _check_tensors(name: str, given: Any) -> None:
    """One tensor per slice, in a list."""
    if not is_sequence(given):
        got = type(given).__name__
        raise TypeError(f"Weights.stacked: {name} must be a list of tensors, got {got}")
    for s, t in enumerate(given):
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"Weights.stacked: {name}[{s}] must be a tensor, got {type(t).__name__}"
            )
        if t.is_neg():
            raise negation("Weights.stacked", f"{name}[{s}]")
