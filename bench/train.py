# SPDX-License-Identifier: Apache-2.0
"""`./run bench train`: LoRA training against its floor, cuBLAS, PyTorch, PEFT and NeMo Automodel.

On a GPU: every row is a CUDA graph of calls over rotated buffers (cold caches), then steps of PEFT
models and the host cost of a layer. On the CPU: interleaved rounds with PyTorch's expressions.
docs/measuring.md says how, bench/train_peers.py what the peers need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import train_peers as peers
from harness import Case, Options, View, main
from train_cases import BackwardCase, ForwardCase, LayerCase, Problem

#: M, K, N, r: the rows at which the peers were measured as well.
SHAPES = [
    (4096, 4096, 4096, 16), (4096, 4096, 4096, 64), (8192, 4096, 14336, 16),
    (8192, 4096, 14336, 64), (8192, 14336, 4096, 16), (8192, 14336, 4096, 64),
    (16384, 2048, 2048, 16),
]  # fmt: skip
#: Widths of other models, odd M, few tokens, other ranks, one wide and one narrow projection.
OTHER_SHAPES = [
    (512, 4096, 4096, 16), (512, 4096, 14336, 8), (4095, 4096, 4096, 16), (6001, 3584, 18944, 24),
    (2048, 5120, 13824, 32), (8192, 3072, 8192, 8), (4096, 8192, 1024, 32),
    (4096, 1024, 28672, 16), (12345, 2560, 2560, 24), (1024, 7168, 2048, 64),
]  # fmt: skip
#: Float32 adapters beside a bfloat16 model, as PEFT keeps them; the first also with dropout.
MIXED_SHAPES = [
    SHAPES[0], (512, 4096, 4096, 16), SHAPES[2], (2048, 5120, 13824, 32), SHAPES[1],
]  # fmt: skip
FLOAT_SHAPES = [SHAPES[0], (512, 4096, 4096, 16), (2048, 5120, 13824, 32)]  # all of it float32
HIGH_RANKS = (128, 256, 512)
#: With dropout above 32 ranks.
DROPPED_SHAPES = [
    *((2048, 4096, 4096, r) for r in (48, 64, 128, 256)),
    *((1024, 4096, 14336, r) for r in (64, 256)),
    *((4096, 14336, 4096, r) for r in (64, 128, 256)),
]  # fmt: skip
QKV = (4096, 1024, 1024)
RAGGED, TWO = (4, 8, 8, 16, 16, 24, 32, 20), (64, 48)

_CUBLAS = ("products", "addmm", "eager", "compiled", "nemo")
VIEWS = [
    View("LoRA training, forward: cold caches", "forward", "mortar", _CUBLAS),
    View("LoRA training, backward (dx, dA and dB)", "backward", "mortar", _CUBLAS),
    View("q/k/v in one call: against a call for each", "q/k/v forward", "mortar", ("apart",)),
    View("q/k/v in one call, backward", "q/k/v backward", "mortar", ("apart",)),
    View("Several adapters: against one of the mean rank", "ragged forward", "mortar",
         ("one",)),
    View("Several adapters, backward", "ragged backward", "mortar", ("one",)),
    View("Dropout: against none", "dropout forward", "mortar", ("plain",)),
    View("Dropout, backward", "dropout backward", "mortar", ("plain",)),
    View("Step of PEFT layers", "step", "mortar", ("peft", "peft compiled"), floors=False,
         memory=True),
    View("Host cost of a PEFT layer, forward and backward", "host", "mortar",
         ("peft", "torch.mul"), floors=False),
]  # fmt: skip


def _problem(m: int, k: int, n: int, r: int, **options) -> Problem:
    return Problem(m, k, (n,), (r,), **options)


def _gpu_cases() -> Iterator[Case]:
    for case, name in ((ForwardCase, "train_forward"), (BackwardCase, "train_backward")):
        for shape in (*SHAPES, *OTHER_SHAPES):
            yield case(_problem(*shape), name)
        for rank in HIGH_RANKS:
            yield case(_problem(8192, 4096, 4096, rank), name.replace("train", "train_wide"))
        for shape in MIXED_SHAPES:
            yield case(_problem(*shape, weights="fp32"), name)
        yield case(_problem(*MIXED_SHAPES[0], p=0.05, weights="fp32"), "train_dropout", "plain")
        for shape in FLOAT_SHAPES:
            yield case(_problem(*shape, dtype="fp32"), name)
        for shape in (SHAPES[0], SHAPES[2], *DROPPED_SHAPES):
            yield case(_problem(*shape, p=0.1), "train_dropout", "plain")
        for rank in (32, 64):
            yield case(Problem(4096, 4096, QKV, (rank,), p=0.05), "train_dropout", "plain")
        yield case(Problem(2048, 4096, (4096,), TWO, p=0.05), "train_dropout", "plain")
        together = "train_slices" if case is ForwardCase else "train_slices_backward"
        yield case(Problem(4096, 4096, QKV, (16,)), together, "apart")
        for rows, ranks in ((4096, RAGGED), (2048, TWO), (2048, (128, 128))):
            yield case(Problem(rows, 4096, (4096,), ranks), "train_adapters", "one")
    for shape in (SHAPES[0], SHAPES[2]):
        yield ForwardCase(_problem(*shape, base=True), "train_forward")
    for p in (0.0, 0.05):
        yield LayerCase(8192, 4096, 32, p, "bf16", "train_step")
        yield LayerCase(512, 4096, 1, p, "bf16", "train_host", host=True)


def _cpu_cases() -> Iterator[Case]:
    for case in (ForwardCase, BackwardCase):
        for dtype, name in (("fp32", "cpu_train"), ("bf16", "cpu_train_bf16")):
            for shape in ((512, 1024, 4096, 16), (512, 4096, 1024, 64), (1000, 1024, 1024, 8)):
                yield case(_problem(*shape, dtype=dtype), name)
        yield case(_problem(512, 1024, 4096, 16, p=0.1, dtype="fp32"), "train_dropout", "plain")
        yield case(_problem(512, 1024, 4096, 16, p=0.1, dtype="fp32"), "cpu_train_dropout")
        together = "train_slices" if case is ForwardCase else "train_slices_backward"
        yield case(Problem(512, 1024, (1024, 256, 256), (16,)), together, "apart")
        yield case(Problem(512, 1024, (1024,), RAGGED), "train_adapters", "one")
    yield ForwardCase(_problem(512, 1024, 4096, 16, dtype="fp32", base=True), "cpu_train")
    for dtype in ("fp32", "bf16"):
        for p in (0.0, 0.05):
            yield LayerCase(512, 1024, 4, p, dtype, "cpu_train_step")
    yield LayerCase(8, 64, 1, 0.0, "fp32", "train_host", rank=8, host=True)


def cases(options: Options) -> Iterator[Case]:
    if options.device.type == "cpu":
        return _cpu_cases()
    if options.wants("nemo"):
        peers.nemo()  # says at once what is missing
    return _gpu_cases()


if __name__ == "__main__":
    sys.exit(main("train", cases, VIEWS, peers=("torch", "nemo"), default_peers=("torch",)))
