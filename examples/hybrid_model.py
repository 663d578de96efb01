# SPDX-License-Identifier: Apache-2.0
"""A tiny byte-level language model that mixes dynamic convolutions with attention.

It runs in three ways: packed (sequences of different lengths in one row), dense, and decoding
with a cache. Attention needs no positions of its own: the convolutions below it see the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mortar.nn import DynamicShortConvolution

VOCAB = 256  # one token per byte


@dataclass(frozen=True)
class HybridConfig:
    """Sizes; `layers` is one letter a block: c for convolution, a for attention."""

    hidden: int = 128
    layers: str = "ccac"
    heads: int = 4
    taps: int = 4
    generator_reduction: int = 8


@dataclass
class Cache:
    """What decoding remembers of N sequences.

    `length` [N]: tokens seen. `conv`: per convolution a state [N, D, W]. `keys` and `values`: per
    attention [N, heads, room, head size], filled up to `length`.
    """

    length: Tensor
    room: int
    conv: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


def same_sequence_and_past(cu_seqlens: Tensor, length: int) -> Tensor:
    """bool [T, T]: key j is visible to query i if it is of i's sequence and not after it."""
    token = torch.arange(length, device=cu_seqlens.device)
    sequence = torch.bucketize(token, cu_seqlens[1:].contiguous(), right=True)
    return (sequence[:, None] == sequence) & (token[:, None] >= token)


class ConvMixer(nn.Module):
    """Values through a dynamic convolution, a gate, and back."""

    def __init__(self, config: HybridConfig, index: int):
        super().__init__()
        self.index = index
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.gate = nn.Linear(config.hidden, config.hidden, bias=False)
        self.conv = DynamicShortConvolution(
            config.hidden,
            config.taps,
            generator_reduction=config.generator_reduction,
            static_conv_init=lambda bias: nn.init.normal_(bias, std=0.5),
        )
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None,
                cache: Cache | None) -> Tensor:  # fmt: skip
        y, state = self.conv(
            self.value(x),
            cache=None if cache is None else cache.conv.get(self.index),
            output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
            generator_input=x,
        )
        if cache is not None:
            cache.conv[self.index] = state
        return self.out(y * F.silu(self.gate(x)))


class Attention(nn.Module):
    """Multi-head attention without position embeddings."""

    def __init__(self, config: HybridConfig, index: int):
        super().__init__()
        self.index, self.heads = index, config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None,
                cache: Cache | None) -> Tensor:  # fmt: skip
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        elif cu_seqlens is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            self._remember_prompts(cache, k, v, cu_seqlens)
        else:
            y = self._attend_to_the_past(cache, q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def _remember_prompts(self, cache: Cache, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
        """Moves packed keys and values [1, heads, T, size] to a row per sequence."""
        token = torch.arange(k.shape[2], device=k.device)
        sequence = torch.bucketize(token, cu_seqlens[1:].contiguous(), right=True)
        place = token - cu_seqlens[sequence]
        for store, packed in ((cache.keys, k), (cache.values, v)):
            rows = packed.new_zeros(len(cache.length), self.heads, cache.room, packed.shape[-1])
            rows[sequence, :, place] = packed[0].transpose(0, 1)
            store[self.index] = rows

    def _attend_to_the_past(self, cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token per sequence."""
        row = torch.arange(len(cache.length), device=q.device)
        keys, values = cache.keys[self.index], cache.values[self.index]
        keys[row, :, cache.length] = k[:, :, 0]
        values[row, :, cache.length] = v[:, :, 0]
        seen = torch.arange(cache.room, device=q.device) <= cache.length[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None])


class Block(nn.Module):
    def __init__(self, config: HybridConfig, kind: str, index: int):
        super().__init__()
        self.mixer = {"c": ConvMixer, "a": Attention}[kind](config, index)
        self.mixer_norm = nn.RMSNorm(config.hidden)
        self.mlp_norm = nn.RMSNorm(config.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden, 3 * config.hidden, bias=False),
            nn.GELU(),
            nn.Linear(3 * config.hidden, config.hidden, bias=False),
        )

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), *context)
        return x + self.mlp(self.mlp_norm(x))


class HybridModel(nn.Module):
    """Logits [B, T, 256] of bytes [B, T]."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, config.hidden)
        nn.init.normal_(self.embedding.weight, std=config.hidden**-0.5)
        self.blocks = nn.ModuleList(Block(config, k, i) for i, k in enumerate(config.layers))
        self.norm = nn.RMSNorm(config.hidden)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None,
                cache: Cache | None = None) -> Tensor:  # fmt: skip
        """Packed with cu_seqlens (B = 1), else every row is a sequence.

        With a cache: a packed call fills it (prefill), a call with one token a row uses and extends
        it (decoding).
        """
        mask = None
        if cu_seqlens is not None:
            mask = same_sequence_and_past(cu_seqlens, tokens.shape[1])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, mask, cache)
        if cache is not None:
            cache.length += 1 if cu_seqlens is None else cu_seqlens.diff()
        return self.norm(x) @ self.embedding.weight.T

    def new_cache(self, sequences: int, room: int) -> Cache:
        device = self.embedding.weight.device
        return Cache(torch.zeros(sequences, dtype=torch.int64, device=device), room)
