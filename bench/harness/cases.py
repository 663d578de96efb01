# SPDX-License-Identifier: Apache-2.0
"""A benchmark row: what it moves, who can compute it, whether they are right, how long they take.

A family writes subclasses of `Case`; `run_case` does the rest: it makes enough sets of buffers to
exceed the cache three times, compares every provider with float64 once, and only then times them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .machine import Ceiling, cache_bytes
from .targets import PEER_GROUPS
from .timing import Call, Timing, synchronize, time_cpu, time_graphs, time_host, time_synchronised

if TYPE_CHECKING:
    from .foreign import ForeignProcess

#: Buffers of one row together exceed the last-level cache by this factor.
CACHE_FACTOR = 3
MAX_SETS = 512
#: A peer that is neither compiled nor tuned for a row, such as a product of cuBLAS.
CHEAP_WARM_UP_S = 0.5


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes and the floating-point operations of one call: the op's own count, the same
    for every provider, so that their GB/s compare."""

    bytes: int
    flops: int = 0

    def floor_us(self, ceiling: Ceiling) -> float:
        return 1e6 * max(self.bytes / ceiling.bandwidth, self.flops / ceiling.flops)


@dataclass(frozen=True)
class Provider:
    """One way to compute a row. `bind` takes a set of buffers and returns a call that runs the op
    on them: what belongs to loading a model, not to a step, happens in `bind`. `group` is the name
    that targets know it by."""

    name: str
    bind: Callable[[Any], Call]
    group: str = ""
    #: Needs the host in the middle of the call: timed with synchronisation, not in a graph.
    synchronises: bool = False
    #: False: another op, there for scale, whose result is nobody's reference.
    compared: bool = True
    #: Kernels of another project: run in a process of their own (foreign.py), host cost aside.
    foreign: bool = False

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.name)


@dataclass
class Options:
    """What the command line asks for."""

    device: torch.device
    peers: frozenset[str] = frozenset()
    quick: bool = False
    warm: bool = False
    replays: int = 9
    peer_budget_s: float = 60.0
    #: What peers took to compile and warm up: by table and name, a number for every row.
    warm_ups: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def affords(self, table: str, peer: str) -> bool:
        """Whether a peer takes part in one more row of a table: its first one always, others if
        what its last row took is next to nothing or left of the budget."""
        took = self.warm_ups.get((table, peer))
        if not took or took[-1] <= CHEAP_WARM_UP_S:
            return True
        return sum(map(sum, self.warm_ups.values())) + took[-1] <= self.peer_budget_s

    def spend(self, table: str, peer: str, seconds: float) -> None:
        self.warm_ups.setdefault((table, peer), []).append(seconds)

    def wants(self, peer: str) -> bool:
        return peer in self.peers or "all" in self.peers


class Case(ABC):
    """One row. `key` names it (table columns in this order); `targets` maps the providers that are
    judged to names in targets.TARGETS; `host` rows are timed by their host cost, those of
    inference (not `grad`) under `torch.no_grad()`; of `memory` rows the peak of a call is kept."""

    table: str
    key: Mapping[str, object]
    traffic: Traffic
    targets: Mapping[str, str]
    tolerance: float
    host: bool = False
    grad: bool = True
    memory: bool = False

    @abstractmethod
    def make_buffers(self, device: torch.device, seed: int) -> Any:
        """One set of buffers (a dataclass or a mapping of tensors), random by `seed`."""

    @abstractmethod
    def outputs(self, buffers: Any) -> Sequence[torch.Tensor]:
        """Everything a call writes to; restored before the next provider is checked."""

    @abstractmethod
    def reference(self, buffers: Any) -> Sequence[torch.Tensor]:
        """What `outputs` must hold after one call, in float64, from buffers not yet touched."""

    @abstractmethod
    def providers(self, options: Options) -> Iterable[Provider]:
        """Who takes part; the first is the row's subject."""

    def error(self, buffers: Any, reference: Sequence[torch.Tensor], provider: Provider) -> float:
        """Distance of one call's outputs from the reference, to be at most `tolerance`."""
        pairs = zip(self.outputs(buffers), reference, strict=True)
        return max(relative_error(out, ref) for out, ref in pairs)

    @property
    def label(self) -> str:
        return " ".join([self.table, *(f"{name}={value}" for name, value in self.key.items())])


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest ||out - ref|| / ||ref|| of any row (last dimension); infinite if not finite."""
    if out.numel() == 0:
        return 0.0
    out64 = out.detach().to(torch.float64)
    rows = (out64 - ref).norm(dim=-1) / ref.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    worst = float(rows.max())
    return worst if math.isfinite(worst) else math.inf


def tensors_of(buffers: Any) -> Iterator[torch.Tensor]:
    """All tensors in a set of buffers, however nested."""
    if isinstance(buffers, torch.Tensor):
        yield buffers
    elif dataclasses.is_dataclass(buffers):
        for entry in dataclasses.fields(buffers):
            yield from tensors_of(getattr(buffers, entry.name))
    elif isinstance(buffers, Mapping):
        yield from tensors_of(list(buffers.values()))
    elif isinstance(buffers, list | tuple):
        for item in buffers:
            yield from tensors_of(item)


def num_sets(one: Any, options: Options, host: bool) -> int:
    """How many sets of buffers to walk over."""
    if host:
        return 4
    if options.warm or (options.quick and options.device.type == "cpu"):
        return 1
    size = sum(t.numel() * t.element_size() for t in tensors_of(one))
    wanted = math.ceil(CACHE_FACTOR * cache_bytes(options.device) / max(size, 1))
    return min(max(wanted, 2), MAX_SETS)


def _torch_mul(options: Options) -> Provider:
    """What PyTorch itself takes for a call that writes into a given tensor: hosts differ."""
    x = torch.ones(8, 1024, device=options.device)
    y = torch.empty_like(x)
    return Provider("torch.mul", lambda _: lambda: torch.mul(x, x, out=y), compared=False)


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class _Checked:
    calls: dict[str, list[Call]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def _check(
    case: Case, providers: Sequence[Provider], sets: Sequence[Any], options: Options
) -> _Checked:
    """Runs every provider once against float64 and binds those that are right to all sets."""
    first = sets[0]
    reference = [ref.to(torch.float64) for ref in case.reference(first)]
    before = [out.clone() for out in case.outputs(first)]
    result = _Checked()
    for provider in providers:
        peer = provider.foreign or provider.group in PEER_GROUPS
        peer = peer and provider.name not in case.targets
        if peer and not options.affords(case.table, provider.name):
            result.skipped[provider.name] = f"{options.peer_budget_s:.0f} s of warm-up are spent"
            continue
        try:
            begin = time.perf_counter()
            call = provider.bind(first)
            call()
            synchronize()
            if peer:
                options.spend(case.table, provider.name, time.perf_counter() - begin)
            error = case.error(first, reference, provider) if provider.compared else 0.0
            if not error <= case.tolerance:
                raise ArithmeticError(
                    f"error {error:.3g} against float64, allowed {case.tolerance:g}"
                )
            result.errors[provider.name] = error
            result.calls[provider.name] = [call, *(provider.bind(s) for s in sets[1:])]
        except Exception as error:  # a provider that cannot run must not end the table
            result.failed[provider.name] = _sentence(error)
        for out, saved in zip(case.outputs(first), before, strict=True):
            out.copy_(saved)
    return result


def _time(
    case: Case, providers: Sequence[Provider], checked: _Checked, options: Options
) -> dict[str, Timing]:
    if case.host:
        return time_host(checked.calls, 5 if options.quick else 101)
    if options.device.type == "cpu":
        rounds, sample_us = (3, 200.0) if options.quick else (options.replays, 5_000.0)
        return time_cpu(checked.calls, rounds, sample_us)
    waiting = {p.name for p in providers if p.synchronises}
    graphs = {n: calls for n, calls in checked.calls.items() if n not in waiting}
    eager = {n: calls for n, calls in checked.calls.items() if n in waiting}
    refused: dict[str, Exception] = {}
    timings = time_graphs(graphs, 3 if options.quick else options.replays, failed=refused)
    checked.failed.update({name: _sentence(error) for name, error in refused.items()})
    return timings | time_synchronised(eager)


def _peak_bytes(call: Call) -> int:
    """The most device memory at a time during a call, beside what was there before."""
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def provider_results(case: Case, providers: Sequence[Provider], options: Options) -> dict[str, Any]:
    """Checks and times some providers of a row: what they took, why some failed or were skipped."""
    one = case.make_buffers(options.device, 0)
    count = num_sets(one, options, case.host)
    sets = [one, *(case.make_buffers(options.device, seed) for seed in range(1, count))]
    checked = _check(case, providers, sets, options)
    with torch.set_grad_enabled(case.grad and torch.is_grad_enabled()):
        timings = _time(case, providers, checked, options) if checked.calls else {}
    by_name = {p.name: p for p in providers}
    found = {
        name: {
            "group": by_name[name].group,
            "synchronises": by_name[name].synchronises and not case.host,
            "rel_error": float(f"{checked.errors[name]:.3g}"),
            **timing.to_json(),
        }
        for name, timing in timings.items()
    }
    if case.memory and options.device.type == "cuda":
        for name, entry in found.items():
            entry["peak_bytes"] = _peak_bytes(checked.calls[name][0])
    return {"sets": count, "providers": found, "failed": checked.failed, "skipped": checked.skipped}


def run_case(
    case: Case, options: Options, ceiling: Ceiling, foreign: ForeignProcess | None = None
) -> dict[str, Any]:
    """Checks and times one row; the result is a row of a result file (results.py). `foreign` runs
    the providers that want a process of their own, after the others."""
    providers = list(case.providers(options))
    apart = [p.name for p in providers if p.foreign and foreign is not None and not case.host]
    here = [p for p in providers if p.name not in apart]
    if case.host:
        here.append(_torch_mul(options))
    row = {
        "table": case.table,
        "case": dict(case.key),
        "bytes": case.traffic.bytes,
        "flops": case.traffic.flops,
        "floor_us": round(case.traffic.floor_us(ceiling), 4),
        "targets": dict(case.targets),
        **provider_results(case, here, options),
    }
    for name in apart:
        found = foreign.results(case.label, name)
        for part in ("providers", "failed", "skipped"):
            row[part] |= found[part]
    return row
