# SPDX-License-Identifier: Apache-2.0
"""Gradients of the FP8 RMSNorm against float64."""

import math

import pytest
import torch

import mortar
from fp8_rmsnorm_cases import (
    E4M3,
    FLOATS,
    FP8,
    Case,
    assert_gradients_match,
    assert_same_bytes,
    random_case,
)
from mortar.reference import fp8_rmsnorm as reference

SHAPES = [
    (1, 1), (1, 16), (3, 33), (17, 128), (2, 5, 144), (65, 272), (129, 31), (257, 64), (3, 4097),
    (1, 65536), (1030, 48),
]  # fmt: skip


def rstd_of(case: Case) -> torch.Tensor:
    return mortar.fp8_rmsnorm(case.x, case.weight, x_scale=case.x_scale).rstd


def gradient(case: Case, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(case.x.shape, device=case.x.device).to(dtype)


def backward(dy, case: Case, rstd, **options):
    options = {"weight_offset": case.options.get("weight_offset", 0.0)} | options
    return mortar.fp8_rmsnorm_backward(dy, case.x, case.weight, rstd, x_scale=case.x_scale,
                                       **options)  # fmt: skip


def test_the_formula_is_the_derivative():
    """The reference's own gradients, by autograd in float64."""
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 32), (32,)))
    dy, residual_grad = torch.randn(5, 32).double(), torch.randn(5, 32).double()
    y, rstd, _ = reference.rmsnorm(x, weight, weight_offset=1.0)
    want = torch.autograd.grad((y * dy).sum() + (x * residual_grad).sum(), (x, weight))
    got = reference.backward(dy, x.detach(), weight.detach(), rstd.detach(), weight_offset=1.0,
                             residual_grad=residual_grad)  # fmt: skip
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dy_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shapes(device, shape, dy_dtype):
    case = random_case(device, shape)
    rstd, dy = rstd_of(case), gradient(case, dy_dtype)
    assert_gradients_match(*backward(dy, case, rstd), dy, case, rstd)


@pytest.mark.parametrize("x_dtype", [*FLOATS, *FP8], ids=str)
@pytest.mark.parametrize("dy_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_dtypes(device, x_dtype, dy_dtype, weight_dtype):
    case = random_case(device, (9, 80), x_dtype, weight_dtype=weight_dtype, weight_offset=1.0)
    rstd, dy = rstd_of(case), gradient(case, dy_dtype)
    dx, dw = backward(dy, case, rstd)
    assert dx.dtype == dy_dtype and dx.shape == dy.shape and dw.dtype == weight_dtype
    assert_gradients_match(dx, dw, dy, case, rstd)


@pytest.mark.parametrize("x_group", [16, 32, 64, 128])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups(device, x_group, scale_dtype):
    case = random_case(device, (35, 384), E4M3, x_group, scale_dtype)
    rstd, dy = rstd_of(case), gradient(case, torch.bfloat16)
    assert_gradients_match(*backward(dy, case, rstd), dy, case, rstd)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_residual_gradient(device, dtype):
    case = random_case(device, (2, 9, 96), dtype)
    rstd, dy, added = rstd_of(case), gradient(case, dtype), gradient(case, dtype)
    dx, dw = backward(dy, case, rstd, residual_grad=added)
    assert_gradients_match(dx, dw, dy, case, rstd, residual_grad=added)
    for into in ("dy", "residual_grad"):
        tensors = {"dy": dy.clone(), "residual_grad": added.clone()}
        mine, _ = mortar.fp8_rmsnorm_backward(
            tensors["dy"], case.x, case.weight, rstd, residual_grad=tensors["residual_grad"],
            dx=tensors[into],
        )  # fmt: skip
        assert mine is tensors[into]
        assert_same_bytes(mine, dx, into)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dw_is_added_to_a_gradient(device, dtype):
    case = random_case(device, (70, 96))
    rstd, dy = rstd_of(case), gradient(case, torch.bfloat16)
    dw = torch.randn(96, device=device).to(dtype)
    before = dw.clone()
    dx, same = backward(dy, case, rstd, dw=dw, accumulate_dw=True)
    assert same is dw
    assert_gradients_match(dx, dw, dy, case, rstd, before=before)
    dx, same = backward(dy, case, rstd, dw=dw)
    assert_gradients_match(dx, dw, dy, case, rstd)


def test_views(device):
    case = random_case(device, (9, 96), E4M3)
    rstd = rstd_of(case)
    room = torch.randn(11, 140, device=device).bfloat16()
    for dy in (room[1:10, 7:103], room[:1, 5:101].expand(9, 96)):
        dx, dw = backward(dy, case, rstd)
        assert_gradients_match(dx, dw, dy, case, rstd)
        again, _ = backward(dy.contiguous(), case, rstd)
        assert_same_bytes(dx, again)
    into = torch.full((11, 140), 7.0, device=device).bfloat16()
    dy = room[1:10, 7:103]
    dx, _ = backward(dy, case, rstd, dx=into[2:11, 3:99])
    assert_same_bytes(dx.contiguous(), backward(dy, case, rstd)[0])
    outside = torch.ones_like(into, dtype=torch.bool)
    outside[2:11, 3:99] = False
    assert (into[outside] == 7).all()


def test_no_rows(device):
    case = random_case(device, (0, 32))
    dy = gradient(case, torch.bfloat16)
    dx, dw = backward(dy, case, torch.empty(0, device=device))
    assert dx.shape == (0, 32) and (dw == 0).all()
    dw = torch.full((32,), 2.0, device=device)
    backward(dy, case, torch.empty(0, device=device), dw=dw, accumulate_dw=True)
    assert (dw == 2).all()


def test_a_nan_stays_in_its_row_of_dx(device):
    case = random_case(device, (9, 64))
    rstd, dy = rstd_of(case), gradient(case, torch.bfloat16)
    clean, _ = backward(dy, case, rstd)
    dy[4, 2] = math.nan
    dx, dw = backward(dy, case, rstd)
    others = torch.arange(9, device=device) != 4
    assert_same_bytes(dx[others], clean[others])
    assert dx[4].isnan().all() and dw[2].isnan() and not dw[3].isnan()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_bitwise(device, weight_dtype):
    case = random_case(device, (1030, 272), E4M3, weight_dtype=weight_dtype)
    rstd, dy = rstd_of(case), gradient(case, torch.bfloat16)
    first = backward(dy, case, rstd)
    for _ in range(10):
        for a, b in zip(backward(dy, case, rstd), first, strict=True):
            assert_same_bytes(a, b)
