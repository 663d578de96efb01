# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.mortar.lora_*``: thin shells that pass flat arguments to the library.

Every op writes into its arguments and returns nothing. ``workspace=None`` takes what the op needs
from PyTorch's allocator on the current stream, for the time of the call; nothing else is ever
allocated. A plan is its tensor here. ``lora_plan`` notes on the tensor object what it was made for,
and a call of other sizes is refused, as with ``mortar.lora.Plan``.
"""

import weakref

import torch
import torch.autograd.forward_ad as forward_ad

from ._ffi import lib
from ._library import define, increment_version, refuse_tangents, shortcut
from ._limits import MEMORY_ALIGNMENT as ALIGNMENT

# Bound once: an attribute look-up per call would cost as much as an argument.
_plan, _shrink, _expand, _apply = lib.lora_plan, lib.lora_shrink, lib.lora_expand, lib.lora_apply
_is_grad_enabled = torch.is_grad_enabled


def remember_sizes(plan: torch.Tensor, num_tokens: int, num_adapters: int) -> None:
    """Notes on a plan's tensor what it is made for, so that ops that are given the tensor alone
    need not read it back from the device. And tells autograd that it was written."""
    increment_version((plan,))
    plan._mortar_sizes = (num_tokens, num_adapters), _version(plan)


def _version(tensor: torch.Tensor) -> int | None:
    """Changes when PyTorch writes the tensor; tensors of inference mode do not tell."""
    return None if tensor.is_inference() else tensor._version


def sizes_of(plan, x, first) -> tuple[int, int]:
    """(M, L) that a plan's tensor was made for; where that is not known, as of a copy, those of the
    call, whose tensor of all adapters is ``first``. 0 where an argument has no dimensions: the op
    will say why."""
    noted = getattr(plan, "_mortar_sizes", None)
    if noted is not None and noted[1] == _version(plan):
        return noted[0]
    return x.shape[0] if x.ndim else 0, first.shape[0] if first is not None and first.ndim else 0


def _is_watched() -> bool:
    """Whether derivatives of a call might be wanted; forward mode works under no_grad as well."""
    return _is_grad_enabled() or forward_ad._current_level >= 0


def wants_gradient(tensors) -> bool:
    for t in tensors:  # noqa: SIM110  a third faster than any()
        if t.requires_grad:
            return True
    return False


def guard_autograd(op: str, tensors) -> None:
    """With gradients enabled: refuses tensors that want one."""
    if forward_ad._current_level >= 0:
        refuse_tangents(op, tensors)
    if wants_gradient(tensors):
        raise RuntimeError(
            f"{op}: arguments must not require gradients (call it under torch.no_grad() or "
            "detach them), got a tensor with requires_grad=True"
        )


class KnownTable:
    """A device table of ours, and on the host what it points to."""

    def __init__(self, table: torch.Tensor, rows: list) -> None:
        """rows: per adapter None or a Row. Keeps the table and the memory of the rows alive."""
        num_slices = table.shape[1]
        self._table = table
        self.entries, self._given, self._memory, self._addresses = [], [], [], []
        for slot, row in enumerate(rows):
            for s, pair in enumerate(row.memory if row else ()):
                if pair is not None:
                    self.entries.append(slot * num_slices + s)
                    self._given.append(row.given[s])
                    self._memory.append(pair)
                    self._addresses.append(tuple(t.data_ptr() for t in pair))
        _known_tables[table.data_ptr()] = self

    def factors(self, *columns: int) -> list[torch.Tensor]:
        """What an op reads through the table: A is column 0 and B column 1 of an entry."""
        return [pair[column] for pair in self._given for column in columns]

    def moved(self, factors: list[torch.Tensor], columns: tuple) -> list[tuple[int, int, int]]:
        """Entry, column and address of what lies elsewhere than in the table. A given tensor that
        got other memory since (``t.data = ...``) does not count: the table keeps the memory."""
        places = [(i, column) for i in range(len(self.entries)) for column in columns]
        if len(factors) != len(places):
            return []
        out = []
        for (i, column), factor in zip(places, factors, strict=True):
            address = factor.data_ptr()
            if address not in (self._addresses[i][column], self._given[i][column].data_ptr()):
                out.append((self.entries[i], column, address))
        return out


class _ReadTable:
    """A table that is not known here, read back, for which the call waits."""

    def __init__(self, table: torch.Tensor) -> None:
        words = table.cpu().reshape(-1, 4)
        self._ranks = words.view(torch.int32)[:, 4].tolist()
        self._addresses = words[:, :2].tolist()

    def moved(self, factors: list[torch.Tensor], columns: tuple) -> list[tuple[int, int, int]]:
        """As that of a KnownTable. The factors are of the entries that have a rank, in order; where
        they cannot be, the table is used as it is."""
        entries = [entry for entry, rank in enumerate(self._ranks) if rank > 0]
        places = [(entry, column) for entry in entries for column in columns]
        if len(factors) != len(places):
            return []
        out = []
        for (entry, column), factor in zip(places, factors, strict=True):
            if factor.ndim != 2 or factor.shape[column] != self._ranks[entry]:
                return []
            if factor.numel() and factor.data_ptr() != self._addresses[entry][column]:
                out.append((entry, column, factor.data_ptr()))
        return out


def _can_be_read(table: torch.Tensor) -> bool:
    """Of any other form the library says what is wrong."""
    if table.dtype is not torch.int64 or table.ndim != 3 or table.shape[2] != 4:
        return False
    return not (table.is_cuda and torch.cuda.is_current_stream_capturing())


# By the address of the table.
_known_tables: weakref.WeakValueDictionary[int, KnownTable] = weakref.WeakValueDictionary()


def _pointing_to(factors, table, *columns):
    """The table, or a copy of it that points to these tensors.

    Compiled code turns writes in place into new tensors and writes them back at its end, so what an
    op is given may lie elsewhere than what the table points to; and a program that torch.export has
    saved comes with a table of another process. A table whose tensors the caller does not name is
    used as it is.
    """
    known = _known_tables.get(table.data_ptr())
    moved = ()
    if factors:
        if known is None and _can_be_read(table):
            known = _ReadTable(table)
        moved = known.moved(factors, columns) if known else ()
    if not moved:
        return table
    copy = table.clone()
    entries = copy.view(-1, 4)
    for entry, column, address in moved:  # by value, which a CUDA graph may capture
        if address % ALIGNMENT:  # else the slice would be left alone
            raise ValueError(
                f"lora: tensors of a table must be aligned to {ALIGNMENT} bytes, got address "
                f"{address:#x}"
            )
        entries[entry, column].fill_(address)
    if copy.is_cuda:  # the ops ask for another kernel between them and what writes their table
        copy.new_empty(1).fill_(0)
    return copy


def _plan_impl(token_adapter, num_adapters, plan):
    _plan(token_adapter, num_adapters, plan)
    remember_sizes(plan, token_adapter.shape[0], num_adapters)


def _shrink_impl(x, plan, a, ranks, scales, h, scale=1.0, zero_rows=None, workspace=None):
    if _is_watched():
        guard_autograd("lora_shrink", (x, h, *a))
    sizes = sizes_of(plan, x, a[0] if a else None)
    _shrink(x, h, workspace, scale, zero_rows, plan, *sizes, None, ranks, scales, len(a), *a)
    increment_version((h,))


def _shrink_table_impl(
    x,
    plan,
    table,
    dtype,
    max_rank,
    hidden,
    widths,
    a,
    h,
    scale=1.0,
    zero_rows=None,
    workspace=None,
):
    if _is_watched():
        guard_autograd("lora_shrink", (x, h, *a))
    table = _pointing_to(a, table, 0)
    plan_and_table = (plan, *sizes_of(plan, x, table), table, dtype, max_rank, hidden, *widths)
    _shrink(x, h, workspace, scale, zero_rows, *plan_and_table)
    increment_version((h,))


def _expand_impl(h, plan, b, ranks, y, offset=0, add_inputs=True):
    if _is_watched():
        guard_autograd("lora_expand", (h, y, *b))
    sizes = sizes_of(plan, y, b[0] if b else None)
    _expand(h, y, offset, add_inputs, plan, *sizes, None, ranks, None, 0, *b)
    increment_version((y,))


def _expand_table_impl(
    h, plan, table, dtype, max_rank, hidden, widths, b, y, offset=0, add_inputs=True
):
    if _is_watched():
        guard_autograd("lora_expand", (h, y, *b))
    table = _pointing_to(b, table, 1)
    plan_and_table = (plan, *sizes_of(plan, y, table), table, dtype, max_rank, hidden, *widths)
    _expand(h, y, offset, add_inputs, *plan_and_table)
    increment_version((y,))


def _apply_impl(
    x, plan, a, b, ranks, scales, y, offset=0, scale=1.0, add_inputs=True, workspace=None
):
    if _is_watched():
        guard_autograd("lora_apply", (x, y, *a, *b))
    stacked = (None, ranks, scales, len(a), *a, *b)
    sizes = sizes_of(plan, x, a[0] if a else None)
    _apply(x, y, workspace, offset, scale, add_inputs, plan, *sizes, *stacked)
    increment_version((y,))


def _apply_table_impl(
    x,
    plan,
    table,
    dtype,
    max_rank,
    hidden,
    widths,
    ab,
    y,
    offset=0,
    scale=1.0,
    add_inputs=True,
    workspace=None,
):
    if _is_watched():
        guard_autograd("lora_apply", (x, y, *ab))
    table = _pointing_to(ab, table, 0, 1)
    plan_and_table = (plan, *sizes_of(plan, x, table), table, dtype, max_rank, hidden, *widths)
    _apply(x, y, workspace, offset, scale, add_inputs, *plan_and_table)
    increment_version((y,))


def _fake(op: str):
    """Infers nothing, but refuses gradients as the op does: tracing must not hide the error."""

    def fake(*args, **kwargs):
        if _is_grad_enabled():
            leaves = [a for arg in args for a in (arg if isinstance(arg, list) else [arg])]
            guard_autograd(op, [t for t in leaves if isinstance(t, torch.Tensor)])

    return fake


# A table goes with the tensors that it points to, so that tracers see what the op reads: of all its
# pairs in order, A and B for apply, A for shrink, B for expand. An empty list names nothing.
_TABLE = "Tensor table, ScalarType dtype, int max_rank, int hidden, int[] widths"

lora_plan = define(
    "lora_plan(Tensor token_adapter, int num_adapters, Tensor(a!) plan) -> ()", _plan_impl
)
lora_shrink = define(
    "lora_shrink(Tensor x, Tensor plan, Tensor[] a, Tensor? ranks, Tensor? scales, Tensor(a!) h, "
    "float scale=1.0, Tensor? zero_rows=None, Tensor(b!)? workspace=None) -> ()",
    _shrink_impl,
    _fake("lora_shrink"),
)
lora_shrink_table = define(
    f"lora_shrink.table(Tensor x, Tensor plan, {_TABLE}, Tensor[] a, Tensor(a!) h, "
    "float scale=1.0, Tensor? zero_rows=None, Tensor(b!)? workspace=None) -> ()",
    _shrink_table_impl,
    _fake("lora_shrink"),
)
lora_expand = define(
    "lora_expand(Tensor h, Tensor plan, Tensor[] b, Tensor? ranks, Tensor(a!) y, "
    "int offset=0, bool add_inputs=True) -> ()",
    _expand_impl,
    _fake("lora_expand"),
)
lora_expand_table = define(
    f"lora_expand.table(Tensor h, Tensor plan, {_TABLE}, Tensor[] b, Tensor(a!) y, "
    "int offset=0, bool add_inputs=True) -> ()",
    _expand_table_impl,
    _fake("lora_expand"),
)
lora_apply = define(
    "lora_apply(Tensor x, Tensor plan, Tensor[] a, Tensor[] b, Tensor? ranks, Tensor? scales, "
    "Tensor(a!) y, int offset=0, float scale=1.0, bool add_inputs=True, "
    "Tensor(b!)? workspace=None) -> ()",
    _apply_impl,
    _fake("lora_apply"),
)
lora_apply_table = define(
    f"lora_apply.table(Tensor x, Tensor plan, {_TABLE}, Tensor[] ab, Tensor(a!) y, "
    "int offset=0, float scale=1.0, bool add_inputs=True, Tensor(b!)? workspace=None) -> ()",
    _apply_table_impl,
    _fake("lora_apply"),
)

# What the friendly layer calls: the same arguments, without the dispatcher where that is safe.
call_plan = shortcut(lora_plan, _plan_impl)
call_shrink = shortcut(lora_shrink, _shrink_impl)
call_shrink_table = shortcut(lora_shrink_table, _shrink_table_impl)
call_expand = shortcut(lora_expand, _expand_impl)
call_expand_table = shortcut(lora_expand_table, _expand_table_impl)
call_apply = shortcut(lora_apply, _apply_impl)
call_apply_table = shortcut(lora_apply_table, _apply_table_impl)
