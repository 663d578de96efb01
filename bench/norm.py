# SPDX-License-Identifier: Apache-2.0
"""`./run bench norm`: the FP8 RMSNorm against its floor, COAT, PyTorch and other libraries' norms.

On a GPU: every row is a CUDA graph of calls over rotated buffers (cold caches), then the host cost
of a call. On the CPU: interleaved rounds with PyTorch's expressions. docs/measuring.md says how,
bench/norm_peers.py what the peers need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import norm_peers as peers
from harness import Case, Options, View, main
from norm_cases import BackwardCase, CompatCase, ForwardCase, HostCase, Problem, QuantiseCase

#: M, N: the rows at which COAT was measured as well.
SIZES = [(2048, 4096), (8192, 4096), (16384, 4096), (8192, 8192), (32768, 2048)]
#: Widths of other models, M of 1,000 and odd, very wide and very narrow rows.
OTHER_SIZES = [
    (4096, 1536), (4096, 2304), (8192, 2560), (8192, 3584), (4096, 5120), (4096, 12288),
    (1000, 4096), (4097, 4096), (512, 65536), (131072, 256),
]  # fmt: skip
_PEERS = ("coat", "vila", "torch", "library")

VIEWS = [
    View("FP8 RMSNorm, forward: cold caches", "forward", "mortar", _PEERS),
    View("FP8 RMSNorm, backward (dx and dw)", "backward", "mortar", _PEERS[:-1]),
    View("Other sizes, forward", "other forward", "mortar", _PEERS),
    View("Other sizes, backward", "other backward", "mortar", _PEERS[:-1]),
    View("Other inputs and scales, forward", "variants", "mortar", ("torch", "library")),
    View("COAT's chain of roundings", "compat", "mortar", ("fast", "drop-in", "coat", "vila")),
    View("The quantisation alone", "quantise", "mortar", ("coat", "vila", "torch")),
    View("Host cost of an eager call", "host", "mortar", ("torch.mul",), floors=False),
]


def variants(rows: int, hidden: int) -> Iterator[Problem]:
    """Inputs and scales other than those of the first table."""
    base = Problem(rows, hidden, x="bf16")
    yield base
    yield replace(base, residual=True)
    yield replace(base, given=True)
    yield replace(base, given=True, transpose=False)
    for x in ("bf16", "e4m3"):
        for scaling in ("row", "group"):
            for transpose in (False, True):
                yield replace(base, x=x, scaling=scaling, transpose=transpose)
    yield Problem(rows, hidden, given=True)


def _gpu_cases() -> Iterator[Case]:
    for sizes, name in ((SIZES, ""), (OTHER_SIZES, "other ")):
        for case in (ForwardCase, BackwardCase):
            for size in sizes:
                yield case(Problem(*size), table=name + case.table)
    for size in ((2048, 4096), (8192, 4096)):
        for problem in variants(*size):
            yield ForwardCase(problem, table="variants")
        yield BackwardCase(Problem(*size, x="bf16"))
    for size in SIZES:
        yield CompatCase(Problem(*size))
    for size in SIZES[:3]:
        yield QuantiseCase(Problem(*size))
    for op in HostCase.OPS:
        yield HostCase(op)


def _cpu_cases() -> Iterator[Case]:
    for size in ((512, 4096), (1000, 1536), (256, 8192)):
        for x in ("e4m3", "bf16", "fp32"):
            yield ForwardCase(Problem(*size, x=x), "cpu_norm")
            yield BackwardCase(Problem(*size, x=x), "cpu_norm")
    for problem in variants(512, 4096):
        yield ForwardCase(problem, "cpu_norm", "variants")
    yield QuantiseCase(Problem(512, 4096), "cpu_norm")
    for op in HostCase.OPS:
        yield HostCase(op)


def cases(options: Options) -> Iterator[Case]:
    if options.device.type == "cpu":
        return _cpu_cases()
    if options.wants("coat"):
        for copy in peers.COAT_COPIES:
            peers.Coat.shared(copy)  # says at once what is missing
    return _gpu_cases()


if __name__ == "__main__":
    sys.exit(main("norm", cases, VIEWS, peers=("torch", "coat", "libraries"),
                  default_peers=("torch", "libraries")))  # fmt: skip
