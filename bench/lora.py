# SPDX-License-Identifier: Apache-2.0
"""`./run bench lora`: multi-LoRA against its floor, cuBLAS, vLLM's Triton ops, PEFT and PyTorch.

On a GPU: every row is a CUDA graph of calls over rotated buffers (cold caches), then the planner
and the host cost of a call. On the CPU: interleaved rounds with PEFT's loop and PyTorch.
docs/measuring.md says how, bench/README.md what the peers need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

import peers
from harness import Case, Options, View, main
from lora_grid import GRID_VIEW, grid_cases
from lora_problem import DOWN, GATE_UP, QKV, TINY, LoraProblem
from lora_rows import ApplyCase, CpuCase, HostCase, PlanCase

#: tokens, adapters, rank: the rows at which the peers were measured as well.
ROWS = [
    (1, 1, 16), (8, 8, 16), (32, 1, 16), (32, 32, 16), (128, 32, 16), (256, 64, 16),
    (1024, 8, 16), (8192, 1, 16), (8192, 16, 16),
    (1, 1, 64), (32, 32, 64), (256, 64, 64), (8192, 1, 64), (8192, 16, 64),
]  # fmt: skip
#: Sizes between those, where kernels change, and batches of many adapters.
SIZES = [
    (QKV, 64, 1, 32), (QKV, 200, 1, 128), (QKV, 300, 32, 16), (QKV, 512, 64, 32),
    (QKV, 1024, 8, 64), (QKV, 2048, 8, 32), (QKV, 2048, 128, 16), (QKV, 2048, 4, 128),
    (QKV, 4096, 1, 256),
    (GATE_UP, 512, 256, 16), (GATE_UP, 1024, 64, 32),
    (DOWN, 300, 32, 32), (DOWN, 1024, 8, 64), (DOWN, 2048, 8, 64), (DOWN, 4096, 8, 64),
]  # fmt: skip
#: A batch as a server sees it: adapters trained at different ranks.
RAGGED = [8, 16, 16, 64] * 8

VIEWS = [
    View("Multi-LoRA: y += delta, bf16, cold caches", "apply", "mortar",
         ("two calls", "cublas", "vllm")),
    View("Other sizes, bf16, cold caches", "sizes", "mortar", ("two calls", "cublas", "vllm")),
    View("Variants: ragged ranks, base tokens, other dtypes", "variants", "mortar",
         ("two calls", "vllm")),
    View("compat.vllm: lora_shrink + lora_expand against the native shrink + expand", "apply",
         "compat", ("two calls", "vllm")),
    View("compat.vllm: lora_linear, what vLLM's linear layers call, against lora_apply", "apply",
         "compat linear", ("mortar", "vllm")),
    View("Planner", "plan", "mortar", ("torch.sort", "vllm")),
    View("Host cost of an eager call", "host", "mortar", ("vllm", "torch.mul"), floors=False),
    View("Multi-LoRA on the CPU: y += delta", "cpu", "mortar", ("peft", "torch")),
]  # fmt: skip


def _target(tokens: int) -> str:
    return "lora_decode" if tokens <= 256 else "lora_prefill"


def _gpu_cases() -> Iterator[Case]:
    for layer in (QKV, GATE_UP, DOWN):
        for tokens, adapters, rank in ROWS:
            yield ApplyCase(LoraProblem(layer, tokens, adapters, rank), _target(tokens))
    for layer, tokens, adapters, rank in SIZES:
        yield ApplyCase(LoraProblem(layer, tokens, adapters, rank), _target(tokens), "sizes")
    yield from _variants()
    for adapters in (1, 16, 64, 4096):
        for tokens in (32, 1024, 8192, 65536, 1_000_000):
            yield PlanCase(tokens, adapters)
    for op in HostCase.OPS:
        yield HostCase(op)


def _variants() -> Iterator[Case]:
    half, full = torch.float16, torch.float32
    variants = [
        ("ragged ranks", 32, 32, RAGGED, {}),
        ("ragged ranks", 1024, 32, RAGGED, {}),
        ("half of the tokens have none", 256, 64, 16, {"base_share": 0.5}),
        ("fp16", 32, 32, 16, {"dtype": half}),
        ("fp32 adapters", 32, 32, 16, {"weight_dtype": full}),
        ("fp32 adapters", 1024, 8, 16, {"weight_dtype": full}),
        ("fp32", 32, 32, 16, {"dtype": full}),
    ]
    for what, tokens, adapters, ranks, other in variants:
        problem = LoraProblem(QKV, tokens, adapters, ranks, **other)
        case = ApplyCase(problem, _target(tokens), "variants")
        case.key = {"variant": what} | case.key
        yield case


def _cpu_cases() -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        yield CpuCase(256, 256, 8, 1, 8, 16, dtype)  # the size of the demo's model
        for sequences, adapters, rank in [(8, 8, 16), (8, 8, 64), (32, 8, 16), (32, 32, 16)]:
            yield CpuCase(4096, 4096, sequences, 1, adapters, rank, dtype)
        yield CpuCase(256, 256, 8, 128, 8, 16, dtype)
        for sequences, length, rank in [(8, 128, 16), (8, 128, 64), (16, 64, 16)]:
            yield CpuCase(4096, 4096, sequences, length, sequences, rank, dtype)
        for rank in (16, 64):
            yield CpuCase(4096, 4096, 1, 1024, 1, rank, dtype)
    for op in HostCase.OPS:
        yield HostCase(op, TINY)


def cases(options: Options) -> Iterator[Case]:
    if options.device.type == "cpu":
        return _cpu_cases()
    if options.wants("vllm"):
        peers.VllmTriton.shared()  # says at once what is missing
    return _gpu_cases()


def run(argv: list[str]) -> int:
    """The table's rows, or with --grid SEED random ones."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--grid", type=int, metavar="SEED")
    own_args, rest = own.parse_known_args(argv)
    seed = own_args.grid
    if seed is None:
        return main("lora", cases, VIEWS, peers=("cublas", "vllm", "torch", "peft"),
                    default_peers=("cublas", "torch", "peft"), argv=rest,
                    epilog="--grid SEED: 200 random problems in place of the rows.")  # fmt: skip

    def random_cases(options: Options) -> Iterator[Case]:
        if options.wants("vllm"):
            peers.VllmTriton.shared()
        return grid_cases(seed)

    return main("lora-grid", random_cases, [GRID_VIEW], peers=("cublas", "vllm"),
                default_peers=("cublas",), argv=rest, command=f"lora --grid {seed}")  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():  # as a server runs
        sys.exit(run(sys.argv[1:]))
