# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that ends in FP8, in plain PyTorch: the meaning of `mortar.fp8_rmsnorm`.

    z = x * x_scale (+ residual)      rstd = 1 / sqrt(mean(z^2) + eps)
    y = z * rstd * (weight + weight_offset)      y ~ q * scale

Everything is float64 but what is rounded by definition: the updated residual and q itself. Inputs
may have any leading dimensions; rows are flattened where a result is per row. `compat` is COAT's
chain of float32 and bfloat16 roundings (Xi et al., 2024) instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}  # of normal numbers
LEAST_AMAX = 1e-10


def dequantize(x: Tensor, x_scale: Tensor | None = None) -> Tensor:
    """z = x * x_scale in float64: x [..., N], x_scale [..., N / G] or None."""
    wide = x.double()
    if x_scale is None:
        return wide
    group = x.shape[-1] // x_scale.shape[-1]
    return wide * x_scale.double().repeat_interleave(group, -1)


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    x_scale: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [..., N] and rstd [M], float64, and the updated residual in its own dtype."""
    z = dequantize(x, x_scale)
    if residual is not None:
        residual = (z + residual.double()).to(residual.dtype)
        z = residual.double()
    rstd = (z.square().mean(-1) + eps).rsqrt()
    y = z * rstd.unsqueeze(-1) * (weight.double() + weight_offset)
    return y, rstd.flatten(), residual


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_offset: float = 0.0,
    residual_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dx as dy and dw [N], float64. x is what was normalised: the updated residual, if there was
    one."""
    z, dy = dequantize(x, x_scale), dy.double()
    rstd = rstd.double().view(*x.shape[:-1], 1)
    g = dy * (weight.double() + weight_offset)
    dx = rstd * (g - z * rstd.square() * (g * z).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + residual_grad.double()
    dw = (dy * z * rstd).flatten(0, -2).sum(0)
    return dx, dw


# ---- FP8 ---------------------------------------------------------------------------------------


def step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between the neighbours of an FP8 format around `value`, float64."""
    least = LEAST_EXPONENT[dtype]
    exponent = (torch.frexp(value.double()).exponent - 1).clamp_min(least)
    exponent = torch.where(value == 0, least, exponent) - MANTISSA_BITS[dtype]
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent)


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to FP8: nearest, ties to even, saturating; NaN stays."""
    units = step(value, dtype)
    rounded = torch.round(value.double() / units) * units
    return rounded.clamp(-LARGEST[dtype], LARGEST[dtype]).float().to(dtype)


def amax_of(y: Tensor, scaling: str = "tensor", group: int = 128) -> Tensor:
    """max|y| of whatever shares a scale: [] for "tensor", [M] for "row", [M, ceil(N / G)]. A NaN
    is the largest."""
    rows = y.abs().flatten(0, -2)
    if rows.numel() == 0:
        shape = {
            "tensor": (),
            "row": (len(rows),),
            "group": (len(rows), -(-rows.shape[1] // group)),
        }
        return rows.new_zeros(shape[scaling])
    if scaling == "tensor":
        return rows.amax()
    if scaling == "row":
        return rows.amax(-1)
    padding = -rows.shape[-1] % group
    return torch.nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, group)).amax(-1)


def scale_of(amax: Tensor, dtype: torch.dtype, pow2_scale: bool = False) -> Tensor:
    """max(amax, 1e-10) / largest value, the next power of two above it on request."""
    scale = amax.double().clamp_min(LEAST_AMAX) / LARGEST[dtype]
    if not pow2_scale:
        return scale
    mantissa, exponent = torch.frexp(scale)  # in [1/2, 1): 1/2 is a power of two itself
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(scale.isfinite(), power, scale)


def spread(scale: Tensor, shape: tuple[int, int], group: int = 128) -> Tensor:
    """A scale of any scaling as [M, N], float64."""
    scale = scale.double()
    if scale.ndim == 1:
        scale = scale.unsqueeze(-1)
    elif scale.ndim == 2:
        scale = scale.repeat_interleave(group, -1)[:, : shape[1]]
    return scale.expand(shape)


# ---- COAT's chain ------------------------------------------------------------------------------


def compat(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, rstd: Tensor, dtype: torch.dtype,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [M, N], its scale [] (bfloat16) and the quotients y / scale in float32, of numerics
    "compat" from a given rstd [M]: y is float32, (max|y| + 1e-10) / largest of every row is rounded
    to bfloat16, the largest of them is the scale, and bfloat16 y is divided by it."""
    z = x.float().flatten(0, -2)
    if x_scale is not None:
        group = x.shape[-1] // x_scale.shape[-1]
        z = z * x_scale.float().flatten(0, -2).repeat_interleave(group, -1)
    y = z * rstd.float().unsqueeze(-1) * (weight.float() + weight_offset)
    row_scales = (y.abs().amax(-1) + LEAST_AMAX) / LARGEST[dtype]
    scale = row_scales.bfloat16().amax()
    quotients = y.bfloat16().float() / scale.float()
    return round_to(quotients, dtype), scale, quotients
