# SPDX-License-Identifier: Apache-2.0
"""`./run bench lora --grid SEED`: random multi-LoRA problems, of sizes that no table names.

Tokens and adapters are drawn log-uniformly, tokens are shared out evenly or by Zipf's law, ranks
are one of eight or ragged, and layers are those of real models, whole or a quarter of one (tensor
parallelism over four GPUs).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from harness import Options, Provider, View
from lora_problem import Layer, LoraProblem
from lora_rows import ApplyCase

GRID_SIZE = 200
RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
MOST_TOKENS, MOST_ADAPTERS = 16384, 512
#: Adapters are halved until their weights fit: two sets of buffers and the peers stay in memory.
MOST_WEIGHT_BYTES = 4 << 30
DTYPES = ("bf16", "bf16", "fp16", "fp32 adapters")

GRID_VIEW = View("Random problems, cold caches", "grid", "mortar", ("cublas", "vllm"),
                 plot="floor")  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The sizes that a decoder's linear layers follow from."""

    name: str
    hidden: int
    query: int
    key: int
    inner: int

    def layers(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        yield "qkv", self.hidden, (self.query, self.key, self.key)
        yield "o", self.query, (self.hidden,)
        yield "gate_up", self.hidden, (self.inner, self.inner)
        yield "down", self.inner, (self.hidden,)


MODELS = (
    Model("Qwen3-0.6B", 1024, 2048, 1024, 3072),
    Model("Llama-3.2-1B", 2048, 2048, 512, 8192),
    Model("Qwen2.5-7B", 3584, 3584, 512, 18944),
    Model("Llama-3.1-8B", 4096, 4096, 1024, 14336),
    Model("Llama-2-13B", 5120, 5120, 5120, 13824),
    Model("Llama-3.1-70B", 8192, 8192, 1024, 28672),
    Model("Llama-3.1-405B", 16384, 16384, 1024, 53248),
)


def _log_uniform(draw: random.Random, most: int) -> int:
    return min(most, int(math.exp(draw.uniform(0.0, math.log(most + 1)))))


def _layer(draw: random.Random) -> Layer:
    model = draw.choice(MODELS)
    name, hidden, widths = draw.choice(list(model.layers()))
    if draw.random() < 0.3:  # columns are cut where the next layer reduces over them
        if name in ("o", "down"):
            hidden //= 4
        else:
            widths = tuple(width // 4 for width in widths)
        name += "/4"
    return Layer(f"{model.name} {name}", hidden, widths)


def _shared_out(draw: random.Random, tokens: int, adapters: int, zipf: bool) -> torch.Tensor:
    """The adapter of each token, in random order: evenly, or the i-th as often as 1 / i."""
    ids = [token % adapters for token in range(tokens)]
    if zipf:
        weights = [1 / (i + 1) for i in range(adapters)]
        ids = draw.choices(range(adapters), weights, k=tokens)
    draw.shuffle(ids)
    return torch.tensor(ids, dtype=torch.int32)


def draw_problem(draw: random.Random) -> tuple[LoraProblem, dict[str, object]]:
    """A problem and its row's key."""
    layer = _layer(draw)
    tokens, adapters = _log_uniform(draw, MOST_TOKENS), _log_uniform(draw, MOST_ADAPTERS)
    ragged = draw.random() < 0.15
    rank, dtype = draw.choice(RANKS), draw.choice(DTYPES)
    zipf, base = draw.random() < 0.5, draw.choice((0.0, 0.0, 0.25))
    size = 4 if dtype == "fp32 adapters" else 2
    most_rank = 64 if ragged else rank
    one = most_rank * size * sum(layer.hidden + width for width in layer.widths)
    while adapters > 1 and adapters * one > MOST_WEIGHT_BYTES:
        adapters //= 2
    ranks: int | list[int] = rank
    if ragged and adapters > 1:
        ranks = [draw.choice((8, 16, 32, 64)) for _ in range(adapters)]
    ids = _shared_out(draw, tokens, adapters, zipf)
    if adapters > 1:
        ids[torch.tensor([draw.random() < base for _ in range(tokens)])] = -1
    if bool((ids < 0).all()):
        ids[0] = 0  # there is something to do
    problem = LoraProblem(
        layer, tokens, adapters, ranks,
        dtype=torch.float16 if dtype == "fp16" else torch.bfloat16,
        weight_dtype=torch.float32 if dtype == "fp32 adapters" else None,
        token_adapter=ids,
    )  # fmt: skip
    key = {
        "layer": layer.name, "tokens": tokens, "adapters": adapters,
        "rank": ranks if isinstance(ranks, int) else f"{min(ranks)}-{max(ranks)}",
        "shares": "Zipf" if zipf and adapters > 1 else "even",
        "base": int((ids < 0).sum()), "dtype": dtype,
    }  # fmt: skip
    return problem, key


def target_of(problem: LoraProblem) -> str:
    """The name of a problem's limits in harness/targets.py."""
    name = "lora_grid_decode" if problem.tokens <= 256 else "lora_grid_prefill"
    if problem.max_rank > 64:
        name = "lora_grid_wide"
    if problem.weight_dtype != problem.dtype:
        name += "_mixed"
    return name


class GridCase(ApplyCase):
    """One call of `mortar.lora.apply` on a random problem, and the two peers of its limits."""

    def __init__(self, problem: LoraProblem, key: dict[str, object]):
        super().__init__(problem, target_of(problem), "grid", key)
        self.targets = {"mortar": self.targets["mortar"]}

    def providers(self, options: Options) -> Iterator[Provider]:
        for provider in super().providers(options):
            if provider.name in ("mortar", "cublas", "vllm"):
                yield provider


def grid_cases(seed: int, size: int = GRID_SIZE) -> Iterator[GridCase]:
    draw = random.Random(seed)
    for number in range(size):
        problem, key = draw_problem(draw)
        yield GridCase(problem, {"number": number} | key)
