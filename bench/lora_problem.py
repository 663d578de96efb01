# SPDX-License-Identifier: Apache-2.0
"""One multi-LoRA problem of the benchmark: its sizes, buffers, traffic and float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import mortar.lora
import peers
from harness import Traffic
from mortar._ffi import lib

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Largest ||out - ref|| / ||ref|| of a row. The delta is rounded to h (16-bit) and to y: each adds
#: at most half an ulp, and drop-ins that round once more still pass. fp32: K products in fp32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Layer:
    """A linear layer, or several that share x: hidden size in and the widths of the slices."""

    name: str
    hidden: int
    widths: tuple[int, ...]


QKV = Layer("qkv", 4096, (4096, 1024, 1024))
GATE_UP = Layer("gate_up", 4096, (14336, 14336))
DOWN = Layer("down", 14336, (4096,))
#: Of three slices and next to no work, for the host cost on a CPU.
TINY = Layer("tiny", 64, (64, 64, 64))


@dataclass
class LoraBuffers:
    x: torch.Tensor  #: (M, K)
    y: torch.Tensor  #: (M, sum N_s)
    a: list[torch.Tensor]  #: S of (L, R, K)
    b: list[torch.Tensor]  #: S of (L, N_s, R)


@dataclass
class Batch:
    """What a step shares between its layers: the token map and what is made from it."""

    token_adapter: torch.Tensor
    ranks: torch.Tensor | None
    plan: mortar.lora.Plan
    tables: peers.VllmTables
    h: torch.Tensor  #: (S, M, R) fp32: the buffer between shrink and expand
    workspace: torch.Tensor


def balanced_map(
    tokens: int, adapters: int, base_share: float = 0.0, seed: int = 1
) -> torch.Tensor:
    """Every adapter equally often, in random order; a share of the tokens has none (-1)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(tokens, dtype=torch.int32) % adapters
    ids[: int(base_share * tokens)] = -1
    return ids[torch.randperm(tokens, generator=generator)]


@dataclass
class LoraProblem:
    """Sizes of one call. `ranks` is one rank, or one per adapter (ragged: the stacked tensors are
    padded to the largest, and the padding is zero)."""

    layer: Layer
    tokens: int
    adapters: int
    ranks: int | Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    token_adapter: torch.Tensor | None = None
    base_share: float = 0.0
    max_rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight_dtype = self.weight_dtype or self.dtype
        self.max_rank = self.ranks if isinstance(self.ranks, int) else max(self.ranks)
        if self.token_adapter is None:
            self.token_adapter = balanced_map(self.tokens, self.adapters, self.base_share)

    def rank(self, adapter: int) -> int:
        return self.ranks if isinstance(self.ranks, int) else self.ranks[adapter]

    def traffic(self) -> Traffic:
        ids, counts = self.token_adapter[self.token_adapter >= 0].unique(return_counts=True)
        ranks = [self.rank(int(i)) for i in ids for _ in self.layer.widths]
        weight_bytes, x_bytes, y_bytes, flops = lib.lora_traffic(
            self.layer.hidden, self.layer.widths, ranks, counts.tolist(), self.dtype,
            self.weight_dtype, True,
        )  # fmt: skip
        return Traffic(weight_bytes + x_bytes + y_bytes, flops)

    def make_buffers(self, device: torch.device, seed: int) -> LoraBuffers:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
            out = torch.empty(shape, dtype=dtype, device=device)
            return out.normal_(std=scale, generator=generator)

        m, k, r = self.tokens, self.layer.hidden, self.max_rank
        # h and the delta have variance 1 for any size, and y starts small: an error of the delta
        # cannot hide in y.
        x = random(m, k, scale=1.0, dtype=self.dtype)
        y = random(m, sum(self.layer.widths), scale=0.1, dtype=self.dtype)
        a = [random(self.adapters, r, k, scale=k**-0.5, dtype=self.weight_dtype)
             for _ in self.layer.widths]  # fmt: skip
        b = [random(self.adapters, n, r, scale=r**-0.5, dtype=self.weight_dtype)
             for n in self.layer.widths]  # fmt: skip
        if not isinstance(self.ranks, int):
            for adapter, rank in enumerate(self.ranks):
                for wa, wb in zip(a, b, strict=True):
                    wa[adapter, rank:] = 0
                    wb[adapter, :, rank:] = 0
        return LoraBuffers(x, y, a, b)

    def make_batch(self, buffers: LoraBuffers) -> Batch:
        device = buffers.x.device
        token_adapter = self.token_adapter.to(device)
        ranks = None
        if not isinstance(self.ranks, int):
            ranks = torch.tensor(self.ranks, dtype=torch.int32, device=device)
        plan = mortar.lora.plan(token_adapter, self.adapters)
        weights = mortar.lora.Weights.stacked(buffers.a, buffers.b, ranks=ranks)
        size = (len(self.layer.widths), self.tokens, self.max_rank)
        return Batch(
            token_adapter,
            ranks,
            plan,
            peers.VllmTables.make(token_adapter, self.adapters),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.empty(weights.workspace_size(buffers.x), dtype=torch.uint8, device=device),
        )

    def reference(self, buffers: LoraBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, y) in float64 from buffers not yet touched; h rows of base tokens are zero."""
        token_adapter = self.token_adapter.to(buffers.x.device)
        y = buffers.y.to(torch.float64)
        x = buffers.x.to(torch.float64)
        h = x.new_zeros(len(buffers.a), self.tokens, self.max_rank)
        outs = peers.columns(y, buffers.b)
        for adapter in token_adapter.unique().tolist():
            if adapter < 0:
                continue
            where = (token_adapter == adapter).nonzero().flatten()
            part = x[where]
            for s, (wa, wb) in enumerate(zip(buffers.a, buffers.b, strict=True)):
                h[s, where] = part @ wa[adapter].to(torch.float64).T
                outs[s][where] += h[s, where] @ wb[adapter].to(torch.float64).T
        return h, y
