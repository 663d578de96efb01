# SPDX-License-Identifier: Apache-2.0
"""Random multi-LoRA problems, and how far a correct result may lie from the float64 reference."""

from dataclasses import dataclass

import torch

from mortar import lora, reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Unit roundoff: the largest relative error of rounding to nearest.
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
SMALLEST = {BF16: 2.0**-133, FP16: 2.0**-24, FP32: 2.0**-149}


@dataclass(frozen=True)
class Problem:
    """Sizes and dtypes; ``ranks[a][s]`` (or one number for all slices), 0 for no pair."""

    tokens: int = 33
    hidden: int = 64
    widths: tuple[int, ...] = (48,)
    ranks: tuple = (8, 16, 4)
    x_dtype: torch.dtype = BF16
    w_dtype: torch.dtype = BF16
    y_dtype: torch.dtype = BF16
    map: str = "random"  # random, base, one, or blocks
    seed: int = 0


@dataclass
class Tensors:
    problem: Problem
    x: torch.Tensor
    y: torch.Tensor
    token_adapter: torch.Tensor
    adapters: list
    scales: list[float]
    widths: list[int]

    @property
    def num_adapters(self) -> int:
        return len(self.adapters)

    def plan(self) -> lora.Plan:
        return lora.plan(self.token_adapter, self.num_adapters)

    def table(self) -> lora.Weights:
        return lora.Weights.from_adapters(self.adapters, self.scales, widths=self.widths)

    def stacked(self, poison: float = float("nan")) -> lora.Weights:
        """The same weights, padded to one rank per slice; what lies past the largest rank of an
        adapter must never be read and is poison."""
        own = [max([q[0].shape[0] for q in row if q], default=0) for row in self.adapters]
        top = max(1, *own) if own else 1
        a, b = [], []
        for s, width in enumerate(self.widths):
            a_s = self.x.new_full(
                (self.num_adapters, top, self.problem.hidden), poison, dtype=self.problem.w_dtype
            )
            b_s = a_s.new_full((self.num_adapters, width, top), poison)
            for i, row in enumerate(self.adapters):
                a_s[i, : own[i]], b_s[i, :, : own[i]] = 0, 0
                if row[s] is not None:
                    rank = row[s][0].shape[0]
                    a_s[i, :rank], b_s[i, :, :rank] = row[s]
            a.append(a_s)
            b.append(b_s)
        ranks = torch.tensor(own, dtype=torch.int32, device=self.x.device)
        scales = torch.tensor(self.scales, dtype=torch.float32, device=self.x.device)
        return lora.Weights.stacked(a, b, ranks, scales)

    def weights(self, form: str) -> lora.Weights:
        return self.table() if form == "table" else self.stacked()


def make_map(kind: str, tokens: int, num_adapters: int, generator) -> torch.Tensor:
    if kind == "base":
        ids = torch.full((tokens,), -1)
    elif kind == "one":
        ids = torch.full((tokens,), num_adapters - 1)
    elif kind == "blocks":
        ids = torch.arange(tokens) * (num_adapters + 1) // max(tokens, 1) - 1
    else:
        ids = torch.randint(-1, num_adapters, (tokens,), generator=generator)
    return ids.to(torch.int32)


def make(problem: Problem, device) -> Tensors:
    """Standard normal tensors, drawn on the CPU so that every device sees the same."""
    p, g = problem, torch.Generator().manual_seed(problem.seed)

    def normal(*shape, dtype):
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    adapters = []
    for own in p.ranks:
        per_slice = [own] * len(p.widths) if isinstance(own, int) else own
        adapters.append(
            [
                (normal(r, p.hidden, dtype=p.w_dtype), normal(n, r, dtype=p.w_dtype)) if r else None
                for r, n in zip(per_slice, p.widths, strict=True)
            ]
        )
    return Tensors(
        problem=p,
        x=normal(p.tokens, p.hidden, dtype=p.x_dtype),
        y=normal(p.tokens, sum(p.widths), dtype=p.y_dtype),
        token_adapter=make_map(p.map, p.tokens, len(adapters), g).to(device),
        adapters=adapters,
        scales=[0.25 * (i + 1) for i in range(len(adapters))],
        widths=list(p.widths),
    )


def magnitudes(adapters):
    """Adapters with every element's absolute value."""
    return [[p and (p[0].abs(), p[1].abs()) for p in row] for row in adapters]


def shrink_bound(t: Tensors, scale: float, h_dtype) -> torch.Tensor:
    """|error| of h: K products summed in float32 in any order, the scale, one rounding."""
    p = t.problem
    size = reference.lora.shrink(
        t.x.abs(), magnitudes(t.adapters), t.token_adapter, t.scales, abs(scale)
    )
    return size * ((p.hidden + 4) * ROUNDOFF[FP32] + ROUNDOFF[h_dtype]) + SMALLEST[h_dtype]


def apply_bound(t: Tensors, want, scale: float = 1.0, offset: int = 0) -> torch.Tensor:
    """|error| of y: both sums in float32, h rounded to the dtype of B where y has that dtype too,
    y rounded once."""
    p = t.problem
    zero = torch.zeros_like(want)
    size = reference.lora.apply(
        zero,
        t.x.abs(),
        magnitudes(t.adapters),
        t.token_adapter,
        t.widths,
        t.scales,
        abs(scale),
        offset=offset,
    )
    top = max((q[0].shape[0] for row in t.adapters for q in row if q), default=0)
    relative = (p.hidden + top + 8) * ROUNDOFF[FP32]
    absolute = SMALLEST[p.y_dtype]
    if p.w_dtype is not FP32 and p.y_dtype is p.w_dtype:
        relative += ROUNDOFF[p.w_dtype]
        # Where the 16-bit type is subnormal, every element of h may be off by its smallest number.
        h = torch.full_like(zero[:, :1], SMALLEST[p.w_dtype]).expand(len(p.widths), -1, top)
        absolute = absolute + reference.lora.expand(
            zero, h, magnitudes(t.adapters), t.token_adapter, t.widths, offset=offset
        )
    return size * relative + 1.01 * ROUNDOFF[p.y_dtype] * want.abs() + absolute


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    error = (got.double() - want).abs()
    worst = (error - bound).flatten()
    assert torch.isfinite(got).all()
    assert (worst <= 0).all(), f"error exceeds its bound by {worst.max().item():.3g}"
