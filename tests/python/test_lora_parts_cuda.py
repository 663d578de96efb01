# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/numerics.md for products of parts: split-bf16 on tensor cores.

With rank 1, float32 h and float32 y the op writes every product h[m] b[n] on its own, so that what
the parts drop is seen beside one rounding, 2^-24.
"""

import pytest
import torch

from mortar import lora

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def products(h: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, N]: h [M], float32, times b [N], in parts."""
    h, b = h.cuda(), b.cuda()
    y = torch.full((len(h), len(b)), torch.nan, device="cuda")
    weights = lora.Weights.stacked([b.new_zeros(1, 1, 8)], [b.view(1, -1, 1)])
    ids = torch.zeros(len(h), dtype=torch.int32, device="cuda")
    return lora.expand(y, h.view(1, -1, 1), weights, lora.plan(ids, 1), add_inputs=False).cpu()


def random(count: int, dtype=FP32) -> torch.Tensor:
    """Of both signs, over eleven octaves, evenly on a logarithmic scale."""
    mantissa = torch.exp2(torch.rand(count, dtype=torch.float64)).to(dtype)
    return mantissa * torch.ldexp(torch.randn(count).sign(), torch.randint(-5, 5, (count,))).to(
        dtype
    )


@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize(
    "dtype, most, mean", [(BF16, 0.0, 0.0), (FP16, 2**-22, 2**-25.75), (FP32, 2**-21, 2**-24.5)],
    ids=str,
)  # fmt: skip
def test_what_parts_drop(tokens, dtype, most, mean):
    """At most `most` of a product, `mean` on average, always towards zero."""
    columns = 1024
    h, b = random(tokens), random(columns, dtype)
    want = h.double()[:, None] * b.double()
    dropped = (want - products(h, b).double()) / want
    rounding = 2**-24 * (1 + 2**-20)
    assert dropped.max() <= most + rounding
    assert dropped.min() >= -rounding
    # The rounding has no side. What a row or column adds to the mean is spread evenly from zero to
    # twice that: its standard deviation is 0.58 of it. The mean has four of these, and ten of that
    # of the rounding.
    spread = 4 * 0.58 * (tokens**-0.5 + columns**-0.5)
    assert abs(dropped.mean() - mean) <= 8 * 2**-24 / (tokens * columns) ** 0.5 + spread * mean


def test_where_parts_end():
    """Down to 2^-110 parts hold all bits; below, what lies under 2^-133 is lost, towards zero."""
    one = torch.ones(8)
    whole = random(256) * 2.0**-104  # at least 2^-109
    assert torch.equal(products(whole, one), whole[:, None].expand(-1, 8))
    small = (1 + torch.rand(256)) * 2.0**-115
    lost = small.double()[:, None] - products(small, one).double()
    assert (lost >= 0).all() and (0 < lost.max() <= 2.0**-133)


def test_equal_tokens_have_equal_results():
    """Of as many CTAs as share the tensor cores of an SM, and steps that follow each other: one x
    for all tokens. (One of some thousand rows was another where fragments of x were overwritten
    while products still read them.)"""
    tokens, hidden, width, rank = 12000, 18944, 512, 32
    x = torch.randn(1, hidden, device="cuda").to(BF16).expand(tokens, hidden).contiguous()
    a = torch.randn(2, rank, hidden, device="cuda") * hidden**-0.5
    b = torch.randn(2, width, rank, device="cuda")
    ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    y = torch.zeros(tokens, width, dtype=BF16, device="cuda")
    plan, weights = lora.plan(ids, 2), lora.Weights.stacked([a], [b])
    for _ in range(5):
        lora.apply(y, x, weights, plan, add_inputs=False)
        assert torch.equal(y, y[:1].expand_as(y))
