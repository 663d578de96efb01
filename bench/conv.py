# SPDX-License-Identifier: Apache-2.0
"""`./run bench conv`: the dynamic convolution against its floor, Jet-Nemotron and PyTorch.

On a GPU: every row is a CUDA graph of calls over rotated buffers (cold caches), then the host cost
of a call. On the CPU: interleaved rounds with PyTorch's compiled expressions. docs/measuring.md
says how, bench/conv_peers.py what the peers need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import conv_peers as peers
from conv_cases import BackwardCase, ForwardCase, HostCase, Problem, StepCase
from harness import Case, Options, View, main

#: B, T, D: the rows at which the peers were measured as well.
SHAPES = [(1, 4096, 3072), (8, 4096, 3072), (4, 16384, 2048), (32, 512, 3072)]
#: Few tokens, and sizes that are no power of two: where a chip is not filled, or unevenly.
OTHER_SHAPES = [(1, 33, 3072), (1, 200, 3072), (1, 1000, 1536), (3, 77, 1000), (16, 9, 4096)]
OTHER_WIDTHS = (2, 3, 8)
STEP_ROWS = (1, 32, 128, 1024)

VIEWS = [
    View("Dynamic convolution, forward: cold caches", "forward", "mortar",
         ("jet", "unfold", "shifts")),
    View("Dynamic convolution, backward (dx and dk)", "backward", "mortar", ("jet", "unfold")),
    View("Packed sequences, forward: against dense of the same size", "packed forward", "mortar",
         ("dense", "jet")),
    View("Packed sequences, backward: against dense of the same size", "packed backward", "mortar",
         ("dense",)),
    View("Decode step", "step", "mortar", ("jet", "cat")),
    View("Host cost of an eager call", "host", "mortar", ("jet", "torch.mul"), floors=False),
]  # fmt: skip


def _gpu_cases() -> Iterator[Case]:
    for case, name in ((ForwardCase, "conv_forward"), (BackwardCase, "conv_backward")):
        for shape in SHAPES + OTHER_SHAPES:
            yield case(Problem(*shape), name)
        for width in OTHER_WIDTHS:
            yield case(Problem(8, 4096, 3072, width), "conv_width")
        yield case(Problem(8, 4096, 3072, silu=True), name)
        for dtype in ("fp16", "fp32"):
            yield case(Problem(1, 4096, 3072, dtype=dtype), name)
        for time, channels in ((32768, 3072), (65536, 2048)):
            yield case(Problem(1, time, channels, sequences=1000), "conv_packed")
    for channels in (3072, 2048):
        for rows in STEP_ROWS:
            yield StepCase(rows, channels, 4, "bf16", False, "conv_step")
            yield StepCase(rows, channels, 4, "bf16", True, "conv_step")
    for width in OTHER_WIDTHS:
        yield StepCase(128, 3072, width, "bf16", False, "conv_step")
    for op in HostCase.OPS:
        yield HostCase(op)


def _cpu_cases() -> Iterator[Case]:
    for case in (ForwardCase, BackwardCase):
        for dtype in ("fp32", "bf16"):
            for shape in ((1, 1024, 3072), (8, 256, 1024)):
                yield case(Problem(*shape, dtype=dtype), "cpu_conv")
            for width in OTHER_WIDTHS:
                yield case(Problem(1, 1024, 3072, width, dtype), "cpu_conv")
            yield case(Problem(1, 1024, 3072, dtype=dtype, silu=True), "cpu_conv")
            packed = Problem(1, 16384, 1024, dtype=dtype, sequences=1000)
            yield case(packed, "conv_packed")
    for dtype in ("fp32", "bf16"):
        for rows in STEP_ROWS:
            yield StepCase(rows, 3072, 4, dtype, False, "cpu_conv")
    for op in HostCase.OPS:
        yield HostCase(op)


def cases(options: Options) -> Iterator[Case]:
    if options.device.type == "cpu":
        return _cpu_cases()
    if options.wants("jet"):
        peers.Jet.shared()  # says at once what is missing
    return _gpu_cases()


if __name__ == "__main__":
    sys.exit(main("conv", cases, VIEWS, peers=("torch", "jet"), default_peers=("torch",)))
