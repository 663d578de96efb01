# SPDX-License-Identifier: Apache-2.0
"""Values of the FP8 RMSNorm and of the quantisation alone, against float64."""

import itertools
import math

import pytest
import torch

import mortar
from fp8_rmsnorm_cases import (
    E4M3,
    E5M2,
    FLOATS,
    FP8,
    SCALINGS,
    Case,
    assert_matches_oracle,
    assert_quantised,
    assert_same_bytes,
    assert_same_output,
    random_case,
    run,
)
from mortar.fp8 import Fp8Output
from mortar.reference import fp8_rmsnorm as reference

# One element, groups, vectors and tiles and one to either side, odd, wide; dimensions of x.
SHAPES = [
    (1, 1), (1, 7), (3, 16), (2, 33), (17, 31), (33, 64), (5, 127), (64, 128), (31, 129),
    (65, 257), (2, 3, 80), (1, 1000), (130, 65), (3, 4097), (1, 65536),
]  # fmt: skip
FP8_SHAPES = [(1, 16), (3, 48), (17, 128), (2, 5, 144), (65, 272), (2, 65536)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_shapes(device, shape, scaling):
    for transpose in (False, True, "only"):
        assert_matches_oracle(random_case(device, shape, scaling=scaling, transpose=transpose))


@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_8_bit_inputs(device, shape, scaling, dtype):
    assert_matches_oracle(random_case(device, shape, dtype, scaling=scaling, transpose=True))


@pytest.mark.parametrize("x_dtype", [*FLOATS, *FP8], ids=str)
@pytest.mark.parametrize("fp8_dtype", FP8, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_dtypes(device, x_dtype, fp8_dtype, weight_dtype):
    case = random_case(device, (9, 80), x_dtype, weight_dtype=weight_dtype, fp8_dtype=fp8_dtype,
                       transpose=True, weight_offset=1.0, normed=True, eps=1e-3)  # fmt: skip
    assert_matches_oracle(case)


def test_the_default_dtype_is_that_of_x(device):
    for dtype, want in ((E5M2, E5M2), (E4M3, E4M3), (torch.bfloat16, E4M3)):
        assert run(random_case(device, dtype=dtype)).q.dtype == want


@pytest.mark.parametrize("x_group", [16, 32, 64, 128])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_x(device, x_group, scale_dtype):
    assert_matches_oracle(random_case(device, (7, 384), E4M3, x_group, scale_dtype))


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 15), (16, 16), (33, 129), (127, 200)], ids=str)
def test_groups_of_y(device, group, shape):
    for pow2_scale, layout in itertools.product((False, True), ("row", "col")):
        case = random_case(device, shape, scaling="group", group=group, transpose=True,
                           pow2_scale=pow2_scale, scale_layout=layout)  # fmt: skip
        out = run(case)
        assert_matches_oracle(case, out)
        if layout == "col":
            for scale, rows in ((out.scale, shape[0]), (out.scale_t, shape[1])):
                assert scale.stride() == (1, math.ceil(rows / 4) * 4)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_powers_of_two(device, scaling):
    assert_matches_oracle(random_case(device, (9, 130), scaling=scaling, pow2_scale=True,
                                      transpose=True))  # fmt: skip
    y = torch.full((4, 32), 448.0 * 4, device=device)  # a scale that is a power of two stays
    scale = mortar.fp8_quantize(y, E4M3, scaling=scaling, pow2_scale=True).scale
    assert (scale == 4).all()


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
@pytest.mark.parametrize("residual", FLOATS, ids=str)
def test_residual(device, x_dtype, residual):
    case = random_case(device, (2, 5, 96), x_dtype, residual=residual, normed=True, transpose=True)
    assert_matches_oracle(case)
    before = case.residual.data_ptr()
    out = mortar.fp8_rmsnorm(case.x, case.weight, x_scale=case.x_scale, residual=case.residual)
    assert out.residual is case.residual and out.residual.data_ptr() == before


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("transpose", [False, True, "only"])
def test_given_scales(device, scaling, transpose):
    """One pass; values beyond the scale saturate, amax comes back for the history."""
    case = random_case(device, (9, 130), scaling=scaling, transpose=transpose)
    first = run(case)
    scale, scale_t = ((s if s is None else s * 0.75) for s in (first.scale, first.scale_t))
    given = scale
    if scaling != "tensor" and transpose:
        given = scale_t if transpose == "only" else (scale, scale_t)
    case.options["scale"] = given
    out = run(case)
    assert_matches_oracle(case, out)
    if transpose != "only":
        assert out.scale is scale
        assert (out.q.float().abs() == 448).any()


def test_static_scale_of_a_row_view(device):
    """Scales of any strides are read in place."""
    case = random_case(device, (5, 256), scaling="group", group=64)
    scales = torch.rand(4, 9, device=device) + 0.5
    case.options["scale"] = scales.t()[2:7]
    assert_matches_oracle(case)


# ---- the quantisation alone ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("numerics", ["fast", "compat"])
def test_every_rounding_of_float16(device, dtype, numerics):
    """All finite float16 values by a scale of 1: nearest even, subnormals, signs of zero,
    saturation. bfloat16 of them for the other chain."""
    y = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    y = y[y.isfinite()].to(torch.bfloat16 if numerics == "compat" else torch.float16)
    y = y.view(32, -1)
    one = torch.ones((), device=device)
    out = mortar.fp8_quantize(y.to(device), dtype, scale=one, transpose=True, numerics=numerics)
    assert_same_bytes(out.q.cpu(), reference.round_to(y, dtype), "q")
    assert_same_bytes(out.q_t.cpu(), reference.round_to(y, dtype).t(), "q_t")
    assert out.amax == y.abs().max()


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_comes_back(device, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    values = codes.float()
    kept = values.isfinite()
    out = mortar.fp8_quantize(values[kept].view(2, -1), dtype, scale=torch.ones((), device=device))
    assert_same_bytes(out.q.flatten(), codes[kept], "q")


@pytest.mark.parametrize("y_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 17, 33), (64, 256)], ids=str)
def test_quantize(device, y_dtype, scaling, shape):
    y = torch.randn(shape, device=device).to(y_dtype)
    for dtype, transpose in itertools.product(FP8, (False, True, "only")):
        options = {"scaling": scaling, "transpose": transpose, "group": 16}
        out = mortar.fp8_quantize(y, dtype, **options)
        assert_quantised(y.cpu().double().flatten(0, -2), out, dtype, 2**-22, options)
        assert out.rstd is None and out.residual is None and out.normed is None


# ---- layouts -----------------------------------------------------------------------------------


def test_views(device):
    """Rows that lie apart, begin at odd offsets, or repeat are read in place."""
    case = random_case(device, (9, 96), residual=torch.float32, normed=True, transpose=True)
    room = torch.randn(12, 131, device=device)
    for x in (
        room.bfloat16()[2:11, 3:99], room[:9, 35:], room.half()[:1, 1:97].expand(9, 96),
        room.bfloat16().view(2, 6, 131)[..., 1:97],
    ):  # fmt: skip
        view = Case(x, case.weight, None, None, case.options)
        assert_matches_oracle(view)
        assert_same_output(run(view), run(Case(x.contiguous(), case.weight, None, None,
                                               case.options)))  # fmt: skip
    codes = (torch.randn(9, 123, device=device) * 9).to(E4M3)[:, 5:101]
    scales = torch.rand(11, 13, device=device)[1:10, 2:8]
    assert_matches_oracle(Case(codes, case.weight, scales, None, {"transpose": True}))
    residual = torch.randn(9, 200, device=device)
    expected = case.x.float() + residual[:, 7:103]
    out = mortar.fp8_rmsnorm(case.x, case.weight, residual=residual[:, 7:103])
    torch.testing.assert_close(out.residual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hidden, dtype", [
    (16400, torch.float32), (32772, torch.float32), (65536, torch.float32),
    (32776, torch.bfloat16), (65528, torch.float16),
])  # fmt: skip
def test_wide_rows_have_the_same_bits_wherever_they_lie(device, hidden, dtype):
    """On a GPU rows that are not aligned are summed by another kernel, wide ones in spans."""
    case = random_case(device, (3, hidden), dtype, transpose=True)
    room = torch.empty(3, hidden + 3, dtype=dtype, device=device)
    room[:, 1:-2] = case.x
    assert_same_output(run(case), run(Case(room[:, 1:-2], case.weight, options=case.options)))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_empties(device, scaling):
    for shape in ((0, 32), (2, 0, 32), (0, 3, 16)):
        case = random_case(device, shape, scaling=scaling, transpose=True, normed=True)
        out = run(case)
        assert out.q.shape == shape and out.q_t.shape == (shape[-1], 0)
        assert out.rstd.shape == (0,)
    if scaling == "tensor":
        assert out.amax == 0 and out.scale > 0


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_columns_of_no_rows_have_the_scale_of_zeros(device, dtype):
    scale_t = torch.full((33,), math.nan, device=device)
    out = Fp8Output(q_t=torch.empty(33, 0, device=device).to(dtype), scale_t=scale_t)
    mortar.fp8_quantize(torch.empty(0, 33, device=device), scaling="row", transpose="only", out=out)
    torch.testing.assert_close(scale_t.cpu(), torch.full((33,), 1e-10 / reference.LARGEST[dtype]))


# ---- what is not finite --------------------------------------------------------------------------


def nans(t: torch.Tensor) -> torch.Tensor:
    return t.float().isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_nan_stays_in_its_row(device, value, dtype):
    case = random_case(device, (9, 64), fp8_dtype=dtype, scaling="row", normed=True)
    clean = run(case)
    case.x[3, 5] = value
    out = run(case)
    others = torch.arange(9, device=device) != 3
    assert_same_bytes(out.q[others], clean.q[others], "other rows")
    assert_same_bytes(out.scale[others], clean.scale[others], "other scales")
    # Inf gives rstd = 0 and NaN where Inf meets it; the row says that something was wrong.
    assert nans(out.scale[3]) and nans(out.q[3]).all() and nans(out.normed[3]).any()


def test_a_nan_reaches_everything_by_one_scale(device):
    case = random_case(device, (9, 64), transpose=True)
    case.x[3, 5] = math.nan
    out = run(case)
    assert nans(out.scale) and nans(out.amax)
    assert nans(out.q).all() and nans(out.q_t).all()
    case.options["scale"] = torch.ones((), device=device)
    out = run(case)
    assert nans(out.q[3]).all() and not nans(out.q[[0, 1, 2, 4, 5, 6, 7, 8]]).any()
    assert nans(out.amax)


def test_a_nan_stays_in_its_group(device):
    y = torch.randn(40, 64, device=device)
    options = {"scaling": "group", "group": 16, "transpose": True}
    clean = mortar.fp8_quantize(y, **options)
    y[17, 20] = math.nan
    out = mortar.fp8_quantize(y, **options)
    hit = torch.zeros(40, 64, dtype=torch.bool, device=device)
    hit[17, 16:32] = True
    assert nans(out.q[hit]).all()
    assert_same_bytes(out.q[~hit], clean.q[~hit], "other groups")
    hit_t = torch.zeros(64, 40, dtype=torch.bool, device=device)
    hit_t[20, 16:32] = True
    assert nans(out.q_t[hit_t]).all()
    assert_same_bytes(out.q_t[~hit_t], clean.q_t[~hit_t], "other groups of q_t")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("numerics", ["fast", "compat"])
def test_zeros(device, scaling, numerics):
    if numerics == "compat" and scaling != "tensor":
        return
    x = torch.zeros(5, 32, device=device)
    x[:, ::2] *= -1
    out = mortar.fp8_rmsnorm(x, torch.ones(32, device=device), scaling=scaling, transpose=True,
                             numerics=numerics)  # fmt: skip
    assert (out.q.float() == 0).all() and (out.scale > 0).all() and out.scale.isfinite().all()
    assert torch.equal(out.q.float().signbit(), x.signbit())


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_repeats_bitwise(device, scaling):
    case = random_case(device, (130, 272), E4M3, scaling=scaling, transpose=True, normed=True)
    first = run(case)
    for _ in range(10):
        assert_same_output(run(case), first)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(127, 257), (129, 255)], ids=str)
def test_threads_change_no_bit(shape, scaling):
    """On the CPU, to both sides of the size from which there is more than one thread."""
    case = random_case(torch.device("cpu"), shape, scaling=scaling, transpose=True)
    dy = torch.randn(shape)
    usual, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = run(case)
            results.append((out, mortar.fp8_rmsnorm_backward(dy, case.x, case.weight, out.rstd)))
    finally:
        torch.set_num_threads(usual)
    for out, gradients in results[1:]:
        assert_same_output(out, results[0][0])
        for a, b in zip(gradients, results[0][1], strict=True):
            assert_same_bytes(a, b)


def test_rows_do_not_depend_on_their_neighbours(device):
    case = random_case(device, (70, 200), scaling="row", normed=True)
    whole = run(case)
    for rows in (slice(0, 1), slice(3, 36), slice(69, 70)):
        part = run(Case(case.x[rows], case.weight, None, None, case.options))
        for name in ("q", "scale", "rstd", "normed"):
            assert_same_bytes(getattr(part, name), getattr(whole, name)[rows], name)


# ---- COAT's chain ------------------------------------------------------------------------------


def assert_compat(case: Case) -> None:
    """Byte for byte from the rstd that came out, but next to a tie, where a division that is good
    to a float32 step may take either neighbour unless the quotient is exact."""
    out = run(case)
    cpu = [None if t is None else t.cpu() for t in (case.x, case.x_scale, case.weight, out.rstd)]
    q, scale, quotients = reference.compat(*cpu, case.fp8_dtype,
                                           case.options.get("weight_offset", 0.0))  # fmt: skip
    assert out.scale.cpu() == scale.float()
    got = out.q.flatten(0, -2).cpu()
    different = got.view(torch.uint8) != q.view(torch.uint8)
    if torch.frexp(scale.float()).mantissa == 0.5:
        assert not different.any()
    v = quotients.double()
    units = reference.step(v, case.fp8_dtype)
    from_tie = ((v / units - (v / units).floor()) - 0.5).abs() * units
    near = from_tie <= 2**-22 * v.abs()
    assert not (different & ~near).any()
    assert ((got.double() - v).abs() <= units * (0.5 + 2**-8)).logical_or(v.abs() > 448).all()
    if out.q_t is not None:
        assert_same_bytes(out.q_t.cpu(), got.t(), "q_t")


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_compat(device, dtype, weight_dtype, shape):
    assert_compat(random_case(device, shape, dtype, weight_dtype=weight_dtype, transpose=True,
                              numerics="compat"))  # fmt: skip


def test_compat_of_16_bit_inputs(device):
    assert_compat(random_case(device, (9, 80), numerics="compat", weight_offset=1.0))


def test_compat_with_a_power_of_two(device):
    """Exact all the way: rstd is 2, the scale is a power of two, and every byte is decided."""
    x = torch.tensor([0.5, -0.5], device=device).repeat(7, 64)
    weight = torch.linspace(-448, 448, 128, device=device).bfloat16().float()
    out = mortar.fp8_rmsnorm(x, weight, eps=1e-30, numerics="compat", transpose=True)
    assert (out.rstd == 2).all() and out.scale == 1
    y = torch.tensor([1.0, -1.0]).repeat(7, 64) * weight.cpu()
    assert_same_bytes(out.q.cpu(), reference.round_to(y, E4M3), "q")
