# SPDX-License-Identifier: Apache-2.0
"""Clocks: CUDA graphs over rotated buffers, host cost, and interleaved rounds on the CPU.

All times are microseconds per call. A *call* is a function without arguments that runs one op on
one set of buffers; a provider hands in one call per set, so that walking over its calls walks over
memory. Providers of one row are timed in turn, round after round, so that a drifting clock touches
all of them alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

Call = Callable[[], object]

#: A replay (GPU) or a sample (CPU) lasts at least this long: event and clock resolution, and the
#: few microseconds between two graph launches, then stay under 1 %.
MIN_REPLAY_US = 600.0
MIN_SAMPLE_US = 5_000.0
#: A GPU works at least this long before its first sample: for some 10 ms after a pause an H200
#: moves memory a tenth slower (B=8, T=4096, D=3072: 328 us instead of 298).
WARM_US = 50_000.0
#: Eager calls between two synchronisations when the host cost is taken: under the 1,024 launches
#: that a stream queues before the host has to wait for the device.
HOST_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Median and quartiles in us per call, over `samples` samples of `calls` calls each."""

    us: float
    us_q1: float
    us_q3: float
    samples: int
    calls: int

    @staticmethod
    def of(samples: Sequence[float], calls: int) -> Timing:
        if len(samples) == 1:
            return Timing(samples[0], samples[0], samples[0], 1, calls)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(median, q1, q3, len(samples), calls)

    def to_json(self) -> dict[str, float]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


class _Graph:
    """A CUDA graph of a whole number of walks over the calls of one provider."""

    def __init__(self, calls: Sequence[Call], min_replay_us: float):
        self._calls = calls
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for call in calls:  # one eager walk: lazy set-up and caches stay out of the capture
                call()
        torch.cuda.synchronize()
        self._capture(walks=1)
        once_us = self.replay(2)[-1] * self.calls
        if once_us < min_replay_us:
            self._capture(walks=math.ceil(min_replay_us / max(once_us, 1.0)))
        self._replay_us = self.replay(1)[0] * self.calls

    def warm_up(self, us: float) -> None:
        """Keeps the GPU busy for about that long."""
        self.replay(math.ceil(us / self._replay_us))

    def _capture(self, walks: int) -> None:
        self.calls = walks * len(self._calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(walks):
                for call in self._calls:
                    call()

    def replay(self, times: int) -> list[float]:
        """us per call of each of `times` replays, queued back to back so the GPU never waits."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        self._graph.replay()  # the GPU is busy while the host queues the timed replays
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [
            1e3 * begin.elapsed_time(end) / self.calls for begin, end in itertools.pairwise(events)
        ]

    def release(self) -> None:
        self._graph.reset()


def time_graphs(
    calls: Mapping[str, Sequence[Call]],
    replays: int = 9,
    min_replay_us: float = MIN_REPLAY_US,
    failed: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Times providers by replayed CUDA graphs; `replays` samples each, in rounds of three.

    A provider that cannot be captured raises, or is noted in `failed` and left out."""
    graphs: dict[str, _Graph] = {}
    stream = torch.cuda.current_stream()
    for name, walk in calls.items():
        try:
            graphs[name] = _Graph(walk, min_replay_us)
        except Exception as error:
            if failed is None:
                raise
            failed[name] = error
            torch.cuda.set_stream(stream)  # a capture that breaks off leaves its own one current
    for graph in graphs.values():
        graph.warm_up(WARM_US / len(graphs))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(math.ceil(replays / 3)):
        for name, graph in graphs.items():
            samples[name] += graph.replay(3)
    result = {name: Timing.of(samples[name], graph.calls) for name, graph in graphs.items()}
    for graph in graphs.values():
        graph.release()
    return result


def time_synchronised(calls: Mapping[str, Sequence[Call]], samples: int = 9) -> dict[str, Timing]:
    """Wall time of a call and the wait for its result: for what no graph can capture."""
    result = {}
    for name, walk in calls.items():
        walk[0]()
        taken = []
        for call in itertools.islice(itertools.cycle(walk), samples):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            taken.append(1e6 * (time.perf_counter() - begin))
        result[name] = Timing.of(taken, 1)
    return result


def time_host(calls: Mapping[str, Sequence[Call]], samples: int) -> dict[str, Timing]:
    """Host cost of an eager call: a burst of calls that a stream's queue can hold, then a wait
    outside the clock. Use a size at which the device keeps up with the host."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for walk in calls.values():
        for call in walk:
            call()
    for _ in range(samples):
        for name, walk in calls.items():
            burst = list(itertools.islice(itertools.cycle(walk), HOST_CALLS))
            synchronize()
            begin = time.perf_counter()
            for call in burst:
                call()
            taken[name].append(1e6 * (time.perf_counter() - begin) / HOST_CALLS)
            synchronize()
    return {name: Timing.of(samples_, HOST_CALLS) for name, samples_ in taken.items()}


def time_cpu(
    calls: Mapping[str, Sequence[Call]], rounds: int = 9, min_sample_us: float = MIN_SAMPLE_US
) -> dict[str, Timing]:
    """Times providers on the CPU in interleaved rounds; one sample per provider and round."""
    counts, walks = {}, {}
    for name, walk in calls.items():
        walk[0]()
        begin = time.perf_counter()
        walk[-1]()
        once_us = 1e6 * (time.perf_counter() - begin)
        counts[name] = max(1, math.ceil(min_sample_us / max(once_us, 0.1)))
        walks[name] = itertools.cycle(walk)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, count in counts.items():
            todo = list(itertools.islice(walks[name], count))
            begin = time.perf_counter()
            for call in todo:
                call()
            samples[name].append(1e6 * (time.perf_counter() - begin) / count)
    return {name: Timing.of(samples[name], counts[name]) for name in calls}


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
