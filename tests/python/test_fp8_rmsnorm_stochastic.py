# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: unbiased, the same for q and q_t, drawn from PyTorch's generators."""

import pytest
import torch

import mortar
from fp8_rmsnorm_cases import (
    E4M3,
    FP8,
    SCALINGS,
    assert_matches_oracle,
    assert_same_bytes,
    assert_same_output,
    random_case,
    run,
)
from mortar.reference import fp8_rmsnorm as reference

DRAWS = 1 << 20


def rounded(values: torch.Tensor, dtype: torch.dtype, **options) -> torch.Tensor:
    """Values rounded at random by a scale of 1."""
    one = torch.ones((), device=values.device)
    return mortar.fp8_quantize(values, dtype, scale=one, stochastic=True, **options).q.float()


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("fraction", [1 / 16, 1 / 3, 1 / 2, 15 / 16])
@pytest.mark.parametrize("place", ["normal", "subnormal", "least", "negative", "large"])
def test_unbiased(device, dtype, fraction, place):
    """Over 2^20 draws of one value between two neighbours: only these two come out, the upper one
    as often as it should within six standard deviations."""
    smallest = 2.0 ** (reference.LEAST_EXPONENT[dtype] - reference.MANTISSA_BITS[dtype])
    low = {"normal": 1.25, "subnormal": smallest, "least": 0.0, "negative": -1.5,
           "large": reference.LARGEST[dtype] / 2}[place]  # fmt: skip
    sign = -1 if low < 0 else 1
    units = reference.step(torch.tensor(low), dtype).item()
    value = torch.tensor(low + sign * fraction * units).item()
    exact = abs(torch.tensor(value).double().item() - low) / units
    out = rounded(torch.full((1024, DRAWS // 1024), value, device=device), dtype)
    up = out == low + sign * units
    assert (up | (out == low)).all()
    deviation = (exact * (1 - exact) / DRAWS) ** 0.5
    # 2^-18: what a comparison with 20 or more random bits may be off by.
    assert abs(up.double().mean().item() - exact) <= 6 * deviation + 2**-18


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_representable_values_stay(device, dtype):
    values = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()
    values = values[values.isfinite()].view(2, -1)
    for _ in range(20):
        assert torch.equal(rounded(values, dtype), values)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_saturates(device, dtype):
    largest = reference.LARGEST[dtype]
    values = torch.tensor([[largest * 1.01, -largest * 3, 3e38, largest]], device=device)
    want = torch.tensor([[largest, -largest, largest, largest]], device=device)
    for _ in range(20):
        assert torch.equal(rounded(values, dtype), want)
    assert rounded(torch.full((1, 4), torch.nan, device=device), dtype).isnan().all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_norm(device, scaling):
    case = random_case(device, (33, 144), E4M3, scaling=scaling, transpose=True, stochastic=True)
    assert_matches_oracle(case)
    if scaling == "tensor":
        out = run(case)
        assert_same_bytes(out.q.t(), out.q_t, "shared draws")


def test_shared_draws_without_q(device):
    """q_t alone has the bytes that it has beside q."""
    case = random_case(device, (33, 144), stochastic=True, transpose=True)
    outputs = []
    for case.options["transpose"] in (True, "only", False):
        torch.manual_seed(3)
        outputs.append(run(case))
    assert_same_bytes(outputs[0].q_t, outputs[1].q_t)
    assert_same_bytes(outputs[0].q, outputs[2].q)


def test_noise_is_new_each_call_and_follows_the_seed(device):
    case = random_case(device, (64, 128), stochastic=True)
    torch.manual_seed(7)
    first, second = run(case), run(case)
    assert (first.q.view(torch.uint8) != second.q.view(torch.uint8)).any()
    torch.manual_seed(7)
    assert_same_output(run(case), first)
    assert_same_output(run(case), second)
    torch.manual_seed(7)
    with torch.random.fork_rng():
        run(case)
    assert_same_output(run(case), first)


def test_elements_draw_independently(device):
    """Rows, columns and their neighbours: no two of 64 x 64 fair draws agree too often."""
    bits = torch.stack([rounded(torch.full((64, 64), 1.0625, device=device), E4M3) > 1
                        for _ in range(256)])  # fmt: skip
    signs = bits.flatten(1).double() * 2 - 1
    correlation = (signs.t() @ signs / 256).fill_diagonal_(0).abs().max()
    assert correlation < 0.5  # 8 standard deviations


def test_nothing_is_drawn_without_need(device):
    case = random_case(device)
    get_state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    before = get_state()
    run(case)
    assert torch.equal(get_state(), before)
    case.options["stochastic"] = True
    run(case)
    assert not torch.equal(get_state(), before)
