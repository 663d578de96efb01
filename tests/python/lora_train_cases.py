# SPDX-License-Identifier: Apache-2.0
"""Random LoRA training problems, the float64 oracle, and how far results may lie from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_cases import BF16, FP16, FP32, ROUNDOFF, SMALLEST
from mortar import lora
from mortar.reference import lora_train as reference

DTYPES = (FP32, FP16, BF16)
# Every dtype alone, and mixtures as PEFT and autocast make them.
MIXTURES = [*((d, d, d) for d in DTYPES), (BF16, FP32, BF16), (FP32, BF16, BF16),
            (FP16, FP32, FP32), (BF16, FP16, FP32)]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """``ranks[l][s]`` (or one number for all slices), 0 for no pair; ``rows[l]`` of every adapter,
    which lie in segments, or anywhere if a plan says so (then ``base_rows`` belong to nobody)."""

    rows: tuple[int, ...] = (19,)
    hidden: int = 40
    widths: tuple[int, ...] = (24,)
    ranks: tuple = (6,)
    dtypes: tuple = (FP32, FP32, FP32)  # x, weights, y
    p: tuple[float, ...] | None = None
    drops_delta: bool = False
    with_base: bool = True
    form: str = "one"  # one, segments or plan
    base_rows: int = 0
    seed: int = 0


class Case:
    """Tensors of a problem, drawn on the CPU so that every device sees the same."""

    def __init__(self, problem: Problem, device):
        p, g = problem, torch.Generator().manual_seed(problem.seed)
        self.problem, self.device = p, torch.device(device)

        def normal(*shape, dtype):
            return torch.randn(*shape, generator=g).to(dtype).to(device)

        x_dtype, w_dtype, y_dtype = p.dtypes
        num_rows = sum(p.rows) + p.base_rows
        self.adapters = []
        for own in p.ranks:
            ranks = [own] * len(p.widths) if isinstance(own, int) else own
            self.adapters.append([
                (normal(r, p.hidden, dtype=w_dtype), normal(n, r, dtype=w_dtype)) if r else None
                for r, n in zip(ranks, p.widths, strict=True)
            ])  # fmt: skip
        self.scales = [0.5 * (i + 1) for i in range(len(p.ranks))]
        self.p = p.p or (0.0,) * len(p.ranks)
        self.x = normal(num_rows, p.hidden, dtype=x_dtype)
        self.base = [normal(num_rows, n, dtype=y_dtype) for n in p.widths] if p.with_base else None
        self.dy = [normal(num_rows, n, dtype=y_dtype) for n in p.widths]
        ids = torch.arange(len(p.rows)).repeat_interleave(torch.tensor(p.rows))
        ids = torch.cat([ids, torch.full((p.base_rows,), -1)])
        if p.form == "plan":
            ids = ids[torch.randperm(num_rows, generator=g)]
        self.row_adapter = ids.to(torch.int32).to(device)

    def leaves(self) -> list[Tensor]:
        """x, then every A and B that is there, then the bases; all require gradients."""
        pairs = [w for row in self.adapters for pair in row if pair is not None for w in pair]
        found = [self.x, *pairs, *(self.base or [])]
        return [t.requires_grad_() for t in found]

    def rows(self):
        if self.problem.form == "plan":
            return lora.plan(self.row_adapter, len(self.adapters))
        offsets = [0, *itertools.accumulate(self.problem.rows)]
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    def forward(self, **options) -> tuple[Tensor, ...]:
        options = {"dtype": self.problem.dtypes[2], **options}
        options.setdefault("base", self.base)
        options["dropout_on"] = "delta" if self.problem.drops_delta else "input"
        if self.problem.form == "one":
            a, b = ([pair[i] for pair in self.adapters[0]] for i in (0, 1))
            return lora.linear(self.x, a, b, self.scales[0], dropout=self.p[0], **options)
        return lora.mixed_linear(
            self.x, self.adapters, self.rows(), self.scales, dropout=self.p,
            widths=self.problem.widths, **options,
        )  # fmt: skip

    def oracle(self, rng: Tensor | None = None, magnitude: bool = False) -> reference.Problem:
        adapters = self.adapters
        if magnitude:
            adapters = [[q and (q[0].abs(), q[1].abs()) for q in row] for row in adapters]
        scales = [[s] * len(self.problem.widths) for s in self.scales]
        return reference.Problem(adapters, scales, self.row_adapter, self.problem.widths, self.p,
                                 self.problem.drops_delta, rng)  # fmt: skip


def drawn(seed: int, device) -> Tensor:
    """Seed and offset of the next call after ``torch.manual_seed(seed)``."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def _bound(size, want, terms: int, inner_dtype, factor, out_dtype) -> Tensor:
    """``terms`` float32 additions over products whose absolute values sum to ``size``, one rounding
    between the two products, one of the result. ``factor`` is the absolute sum of what an element
    between them is multiplied by, where that is subnormal."""
    return (
        size * ((terms + 16) * ROUNDOFF[FP32] + ROUNDOFF[inner_dtype])
        + factor * SMALLEST[inner_dtype]
        + 1.01 * ROUNDOFF[out_dtype] * want.abs()
        + SMALLEST[out_dtype]
    )


def _top_rank(case: Case) -> int:
    return max(q[0].shape[0] for row in case.adapters for q in row if q is not None)


def check_forward(case: Case, y, rng: Tensor | None = None) -> None:
    want = reference.forward(case.oracle(rng), case.x, case.base)
    sizes = reference.forward(
        case.oracle(rng, True), case.x.abs(), None if case.base is None else
        [t.abs() for t in case.base])  # fmt: skip
    p, top = case.problem, _top_rank(case)
    largest = _largest(case, 1)
    for got, w, size in zip(y, want, sizes, strict=True):
        bound = _bound(size, w, p.hidden + top, p.dtypes[1], top * largest, got.dtype)
        assert_within(got, w, bound)


def _largest(case: Case, which: int) -> float:
    return max(q[which].abs().max().item() if q[which].numel() else 0.0
               for row in case.adapters for q in row if q is not None)  # fmt: skip


def check_gradients(case: Case, dx, da, db, rng: Tensor | None = None) -> None:
    """da and db: [L][S]; None for what was not asked for."""
    p, top, rows = case.problem, _top_rank(case), case.x.shape[0]
    want = reference.backward(case.oracle(rng), case.x, case.dy)
    size = reference.backward(case.oracle(rng, True), case.x.abs(), [t.abs() for t in case.dy])
    total, weight = sum(p.widths), p.dtypes[1]
    if dx is not None:
        factor = len(p.widths) * top * _largest(case, 0)
        bound = _bound(size.dx, want.dx, total + top * len(p.widths), weight, factor, dx.dtype)
        assert_within(dx, want.dx, bound)
    most_x = rows * case.x.abs().max().item() if case.x.numel() else 0.0
    most_dy = rows * max((t.abs().max().item() for t in case.dy if t.numel()), default=0.0)
    for i, s in itertools.product(range(len(case.adapters)), range(len(p.widths))):
        for got, g, m, terms, factor in (
            (da, want.da, size.da, total + rows, most_x),
            (db, want.db, size.db, p.hidden + rows, most_dy),
        ):
            if g[i][s] is None or got is None or got[i][s] is None:
                continue
            bound = _bound(m[i][s], g[i][s], terms, weight, factor, got[i][s].dtype)
            assert_within(got[i][s], g[i][s], bound)


def weight_gradients(case: Case, of=lambda t: t.grad) -> tuple[list, list]:
    return tuple([[q and of(q[i]) for q in row] for row in case.adapters] for i in (0, 1))


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    excess = ((got.double() - want).abs() - bound).flatten()
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max().item():.3g}"


def assert_bitwise(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))
