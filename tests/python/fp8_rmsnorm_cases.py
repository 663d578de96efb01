# SPDX-License-Identifier: Apache-2.0
"""Inputs of the FP8 RMSNorm, the float64 oracle and its tolerances, shared by its tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import mortar
from mortar.fp8 import Fp8Output
from mortar.reference import fp8_rmsnorm as reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCALINGS = ("tensor", "row", "group")


@dataclass
class Case:
    """One call of `mortar.fp8_rmsnorm`; `options` are its further keywords."""

    x: Tensor
    weight: Tensor
    x_scale: Tensor | None = None
    residual: Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def fp8_dtype(self) -> torch.dtype:
        return self.options.get("fp8_dtype") or (self.x.dtype if self.x.dtype in FP8 else E4M3)


def random_case(
    device: torch.device,
    shape: tuple[int, ...] = (6, 64),
    dtype: torch.dtype = torch.bfloat16,
    x_group: int = 16,
    scale_dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32,
    residual: torch.dtype | None = None,
    **options,
) -> Case:
    """Normal inputs; rows and groups of very different sizes. 8-bit x gets a scale per x_group."""
    *rows, hidden = shape
    weight = (torch.randn(hidden, device=device) * 0.5 + 1).to(weight_dtype)
    spread = torch.randn(*rows, 1, device=device).exp()
    x_scale = None
    if dtype in FP8:
        x = (torch.randn(shape, device=device) * 30).to(dtype)
        x_scale = torch.rand(*rows, hidden // x_group, device=device) * spread / 8 + 2**-9
        x_scale = x_scale.to(scale_dtype)
    else:
        x = (torch.randn(shape, device=device) * spread).to(dtype)
    added = None if residual is None else torch.randn(shape, device=device).to(residual)
    return Case(x, weight, x_scale, added, options)


def run(case: Case) -> Fp8Output:
    """Mortar's result; the case's residual is left as it was."""
    residual = None if case.residual is None else case.residual.clone()
    return mortar.fp8_rmsnorm(
        case.x, case.weight, x_scale=case.x_scale, residual=residual, **case.options
    )


def oracle(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [M, N] and rstd [M] in float64, and the updated residual."""
    numbers = {k: v for k, v in case.options.items() if k in ("eps", "weight_offset")}
    residual = None if case.residual is None else case.residual.cpu()
    scale = None if case.x_scale is None else case.x_scale.cpu()
    y, rstd, updated = reference.rmsnorm(
        case.x.cpu(), case.weight.cpu(), x_scale=scale, residual=residual, **numbers
    )
    return y.flatten(0, -2), rstd, updated


def y_error(hidden: int) -> float:
    """Relative error of float32 y: a sum of N squares in some order, a root and four products."""
    return (hidden**0.5 + 8) * 2**-24


def assert_matches_oracle(case: Case, out: Fp8Output | None = None) -> None:
    out = run(case) if out is None else out
    y, rstd, updated = oracle(case)
    relative = y_error(y.shape[-1])
    if updated is not None:
        near = torch.finfo(updated.dtype).eps / 2 * updated.double().abs() * (1 + 2**-8)
        assert ((out.residual.cpu().double() - updated.double()).abs() <= 2 * near).all()
        # The rest is exact in what was written back.
        case = Case(out.residual.cpu(), case.weight.cpu(), None, None, case.options)
        y, rstd, _ = oracle(case)
    assert out.rstd.dtype == torch.float32 and out.rstd.shape == rstd.shape
    assert ((out.rstd.cpu().double() - rstd).abs() <= relative * rstd).all()
    if case.options.get("normed"):
        assert out.normed.dtype == torch.bfloat16 and out.normed.shape == case.x.shape
        error = (out.normed.cpu().double().flatten(0, -2) - y).abs()
        assert (error <= (2**-8 * (1 + 2**-8) + relative) * y.abs() + 2**-130).all()
    else:
        assert out.normed is None
    if out.q is not None:
        assert out.q.shape == case.x.shape
    assert_quantised(y, out, case.fp8_dtype, relative, case.options)


def assert_quantised(
    y: Tensor, out: Fp8Output, dtype: torch.dtype, relative: float, options: dict
) -> None:
    """q, q_t and their scales against y [M, N] in float64, itself known to `relative`."""
    scaling, transpose = options.get("scaling", "tensor"), options.get("transpose", False)
    group, pow2 = options.get("group", 128), options.get("pow2_scale", False)
    stochastic, given = options.get("stochastic", False), options.get("scale") is not None
    if scaling == "tensor":
        amax = reference.amax_of(y)
        assert out.amax.shape == () and out.amax.dtype == torch.float32
        assert (out.amax.cpu().double() - amax).abs() <= relative * amax
    else:
        assert out.amax is None
    assert (out.q is None) == (transpose == "only")
    assert (out.q_t is None) == (transpose is False)
    if scaling == "tensor" and transpose is True:
        assert_same_bytes(out.q.flatten(0, -2).t(), out.q_t, "q_t")
    sides = []
    if out.q is not None:
        sides.append((y, out.q.flatten(0, -2), out.scale))
    if out.q_t is not None:
        sides.append((y.t(), out.q_t, out.scale_t))
    for values, q, scale in sides:
        assert q.dtype == dtype and q.shape == values.shape
        assert scale.dtype == torch.float32
        expected = reference.scale_of(reference.amax_of(values, scaling, group), dtype)
        assert scale.shape == expected.shape
        got = scale.cpu().double()
        if not given:
            assert_scale(got, expected, relative, pow2)
        v = (values / reference.spread(got, values.shape, group)).nan_to_num(0)
        v = v.clamp(-reference.LARGEST[dtype], reference.LARGEST[dtype])
        units = reference.step(v, dtype)
        # Half a step (any of the two neighbours, if stochastic) and 2^-8 of one.
        allowed = units * ((1.0 if stochastic else 0.5) + 2**-8) + relative * v.abs()
        error = (q.cpu().double() - v).abs()
        worst = (error / allowed).max().item() if error.numel() else 0.0
        assert (error <= allowed).all(), f"error is {worst:.4g} times the tolerance"


def assert_scale(got: Tensor, expected: Tensor, relative: float, pow2: bool) -> None:
    allowed = (relative + 2**-22) * expected
    if not pow2:
        assert ((got - expected).abs() <= allowed).all()
        return
    assert (torch.frexp(got).mantissa == 0.5).all()
    assert (got >= expected - allowed).all() and (got / 2 < expected + allowed).all()


def assert_same_bytes(a: Tensor, b: Tensor, what: str = "") -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, what
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = kinds[a.element_size()]
    same = torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    assert same, f"{what}: not the same bytes"


def assert_same_output(a: Fp8Output, b: Fp8Output) -> None:
    for name in Fp8Output._fields:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert_same_bytes(left, right, name)


# ---- backward ----------------------------------------------------------------------------------


def assert_gradients_match(
    dx: Tensor, dw: Tensor, dy: Tensor, case: Case, rstd: Tensor,
    residual_grad: Tensor | None = None, before: Tensor | None = None,
) -> None:  # fmt: skip
    """dx and dw within one rounding and the float32 sums' own error; `before`: what dw held and is
    added to."""
    to = lambda t: None if t is None else t.cpu()  # noqa: E731
    offset = case.options.get("weight_offset", 0.0)
    args = [to(t) for t in (dy, case.x, case.weight, rstd)]
    more = {"x_scale": to(case.x_scale), "weight_offset": offset}
    want_dx, want_dw = reference.backward(*args, **more, residual_grad=to(residual_grad))
    z = reference.dequantize(args[1], more["x_scale"])
    r = args[3].double().view(*z.shape[:-1], 1)
    g = (args[0].double() * (args[2].double() + offset)).abs()
    sums = r * (g + z.abs() * r.square() * (g * z.abs()).mean(-1, keepdim=True))
    if residual_grad is not None:
        sums = sums + args[0].new_tensor(0).double() + residual_grad.cpu().double().abs()
    parts = (args[0].double() * z * r).abs().flatten(0, -2).sum(0)
    if before is not None:
        want_dw = want_dw + before.cpu().double()
        parts = parts + before.cpu().double().abs()
    hidden, rows = z.shape[-1], rstd.numel()
    for name, got, want, size, terms in (
        ("dx", dx, want_dx, sums, hidden), ("dw", dw, want_dw, parts, rows)
    ):  # fmt: skip
        info = torch.finfo(got.dtype)
        allowed = (
            info.eps / 2 * want.abs() * (1 + 2**-8)
            + (terms**0.5 + 8) * 2**-24 * size
            + info.smallest_normal * info.eps
        )
        error = (got.cpu().double() - want).abs()
        assert got.shape == want.shape, name
        worst = (error / allowed).max().item() if error.numel() else 0.0
        assert (error <= allowed).all(), f"{name}: error is {worst:.4g} times the tolerance"
