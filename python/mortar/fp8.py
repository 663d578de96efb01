# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that ends in FP8: `mortar.fp8_rmsnorm`, its backward, and the quantisation alone.

    z = x * x_scale (+ residual)      rstd = 1 / sqrt(mean(z^2) + eps)
    y = z * rstd * (weight + weight_offset)      y ~ q * scale

RMSNorm is Zhang and Sennrich's (arXiv:1910.07467); activations in FP8 with a scale per group are
COAT's (arXiv:2410.19313), scales of 1 x 128 blocks DeepSeek-V3's (arXiv:2412.19437). Results are
bitwise repeatable, the gradient of the weight included. Below lie the operators
`torch.ops.mortar.fp8_rmsnorm_out`, `fp8_rmsnorm_backward_out` and `fp8_quantize_out`, which write
into given tensors.

With gradients: `mortar.nn.Fp8RMSNorm` and `mortar.nn.Fp8RMSNormLinear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._ffi import lib
from ._fp8_ops import (
    NUMERICS,
    SCALINGS,
    backward_into,
    quantize_into,
    refuse_gradient,
    require_tensors,
    rmsnorm_into,
)

__all__ = ["Fp8Output", "fp8_quantize", "fp8_rmsnorm", "fp8_rmsnorm_backward", "traffic"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALING_INDEX = {name: i for i, name in enumerate(SCALINGS)}
_NUMERICS_INDEX = {name: i for i, name in enumerate(NUMERICS)}
_empty, _is_grad_enabled = torch.empty, torch.is_grad_enabled


class Fp8Output(NamedTuple):
    """What `fp8_rmsnorm` and `fp8_quantize` return; what was not asked for is None.

    M = all rows of y, N = its last dimension, G = group.
    """

    q: Tensor | None  #: y in FP8, in the shape of x
    scale: Tensor | None  #: float32: [] for "tensor", [M] for "row", [M, ceil(N / G)] for "group"
    q_t: Tensor | None  #: y^T in FP8, [N, M]
    scale_t: Tensor | None  #: float32: scale for "tensor", [N] for "row", [N, ceil(M / G)]
    rstd: Tensor | None  #: float32 [M]
    amax: Tensor | None  #: float32 []: max|y|, for "tensor"
    residual: Tensor | None  #: the residual that was given, updated
    normed: Tensor | None  #: y in bfloat16, in the shape of x


class _Format(NamedTuple):
    """How y becomes FP8, checked, as the operators take it."""

    scaling: int
    group: int
    pow2_scale: bool
    given_scale: bool
    numerics: int


def _choice(function: str, name: str, value: object, choices: dict) -> int:
    index = choices.get(value) if isinstance(value, str) else None
    if index is None:
        allowed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{function}: {name} must be one of {allowed}, got {value!r}")
    return index


def _check_format(
    function: str, dtype, scaling, group, scale, pow2_scale, scale_layout, transpose, numerics
) -> _Format:
    if dtype not in _FP8:
        raise TypeError(
            f"{function}: fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
        )
    index = _choice(function, "scaling", scaling, _SCALING_INDEX)
    if type(group) is not int:
        raise TypeError(f"{function}: group must be an int, got {type(group).__name__}")
    if scale_layout != "row" and (scale_layout != "col" or index != 2):
        raise ValueError(
            f"{function}: scale_layout must be 'row', or 'col' with scaling='group', "
            f"got {scale_layout!r} with scaling={scaling!r}"
        )
    if transpose not in (False, True, "only"):
        raise ValueError(f"{function}: transpose must be False, True or 'only', got {transpose!r}")
    return _Format(
        index, group, bool(pow2_scale), scale is not None,
        _choice(function, "numerics", numerics, _NUMERICS_INDEX),
    )  # fmt: skip


def _given_scales(function: str, scale, index: int, transpose) -> tuple[Tensor | None, ...]:
    """scale and scale_t as the operators take them: a pair where q and q_t have scales of their
    own."""
    both = transpose and index != 0
    if both and transpose != "only":
        if not (isinstance(scale, tuple | list) and len(scale) == 2):
            got = type(scale).__name__
            raise TypeError(
                f"{function}: scale must be the pair (scale, scale_t) with transpose=True and "
                f"scaling={SCALINGS[index]!r}, got {got}"
            )
        pair = tuple(scale)
    else:
        pair = (None, scale) if both else (scale, None)
    require_tensors(function, ("scale", "scale"), pair, optional=True)
    return pair


def _new_scale(rows: int, length: int, index: int, group: int, col: bool, device) -> Tensor:
    if index == 0:
        return _empty((), dtype=torch.float32, device=device)
    if index == 1:
        return _empty(rows, dtype=torch.float32, device=device)
    groups = -(-length // max(group, 1))
    if not col:
        return _empty(rows, groups, dtype=torch.float32, device=device)
    return _empty(groups, -(-rows // 4) * 4, dtype=torch.float32, device=device).t()[:rows]


def _new_outputs(
    function: str, y: Tensor, dtype, form: _Format, scale, scale_layout: str, transpose
) -> tuple[Tensor | None, ...]:
    """q, scale, q_t, scale_t and amax for y [..., N]: unfilled, but for given scales."""
    shape, device = y.shape, y.device
    if len(shape) < 2:
        raise ValueError(
            f"{function}: {'y' if function == 'fp8_quantize' else 'x'} must have at least 2 "
            f"dimensions, got {tuple(shape)}"
        )
    hidden = shape[-1]
    rows = shape[0] if len(shape) == 2 else shape[:-1].numel()
    index, group, col = form.scaling, form.group, scale_layout == "col"
    q = scales = q_t = scales_t = amax = None
    if form.given_scale:
        scales, scales_t = _given_scales(function, scale, index, transpose)
    if transpose != "only":
        q = _empty(shape, dtype=dtype, device=device)
    if transpose:
        q_t = _empty(hidden, rows, dtype=dtype, device=device)
        if index != 0 and scales_t is None:
            scales_t = _new_scale(hidden, rows, index, group, col, device)
    if scales is None and (q is not None or index == 0):
        scales = _new_scale(rows, hidden, index, group, col, device)
    if index == 0:
        amax = _empty((), dtype=torch.float32, device=device)
    return q, scales, q_t, scales_t, amax


def _draw(stochastic: bool, device: torch.device) -> Tensor | None:
    """Seed and offset of a call's random numbers, from PyTorch's generator of that device."""
    if not stochastic:
        return None
    return torch.randint(2**62, (2,), dtype=torch.int64, device=device)


def fp8_rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    x_scale: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    fp8_dtype: torch.dtype | None = None,
    scaling: str = "tensor",
    group: int = 128,
    scale: Tensor | tuple[Tensor, Tensor] | None = None,
    pow2_scale: bool = False,
    scale_layout: str = "row",
    transpose: bool | str = False,
    normed: bool = False,
    stochastic: bool = False,
    numerics: str = "fast",
) -> Fp8Output:
    """Normalises rows and quantises them to FP8, and their transpose on request.

    Args:
        x: [M, N] or [B, T, N] with M = B T: bfloat16, float16 or float32, or float8_e4m3fn or
            float8_e5m2 with x_scale. Rows are dense and equally far apart; N is at most 65,536.
        weight: [N], float32, float16 or bfloat16.
        x_scale: [..., N / G], float32 or bfloat16, G = 16, 32, 64 or 128: x stands for x * x_scale.
        eps: added to the mean square.
        residual: as x, float32, float16 or bfloat16. x * x_scale + residual is rounded once to its
            dtype, written back into it, and that value is normalised.
        weight_offset: 1.0 for weights that are stored as w - 1, such as Gemma's.
        fp8_dtype: of q and q_t; that of an FP8 x by default, else float8_e4m3fn.
        scaling: what shares a scale: "tensor", "row", or "group" elements of a row (the last group
            may be short).
        group: 16, 32, 64 or 128.
        scale: scales known beforehand (delayed or static scaling), float32 in the shape of
            Fp8Output.scale, positive: one pass over x. The pair (scale, scale_t) with
            transpose=True and "row" or "group".
        pow2_scale: scales are rounded up to a power of two.
        scale_layout: "col", for "group": scales have strides (1, M rounded up to 4).
        transpose: True for q_t beside q, "only" for q_t alone. q_t is y^T quantised by the same
            scheme along its own rows; for "tensor" these are exactly the bytes of q.
        normed: also return y in bfloat16.
        stochastic: round up or down at random, on average right. The random numbers depend on two
            drawn from PyTorch's generator of x's device; q and q_t share them.
        numerics: "fast": float32 throughout and one rounding. "compat": COAT's chain of roundings,
            for scaling="tensor".

    Returns:
        An Fp8Output. Scales are max(amax, 1e-10) / 448 (57344 for float8_e5m2).

    Conversions saturate. A NaN is not quantised away: with one scale for all it reaches the scale
    and every value, else it stays in its row or group.

    Raises:
        ValueError: a shape, stride or option is wrong; nothing has been written then.
        TypeError: a dtype, device or Python type is wrong.
        RuntimeError: an argument requires a gradient and gradients are enabled.
    """
    require_tensors("fp8_rmsnorm", ("x", "weight"), (x, weight))
    if fp8_dtype is None:
        fp8_dtype = x.dtype if x.dtype in _FP8 else _FP8[0]
    if _is_grad_enabled():
        refuse_gradient("fp8_rmsnorm", x, x_scale, weight, residual)
    form = _check_format("fp8_rmsnorm", fp8_dtype, scaling, group, scale, pow2_scale, scale_layout,
                         transpose, numerics)  # fmt: skip
    outputs = _new_outputs("fp8_rmsnorm", x, fp8_dtype, form, scale, scale_layout, transpose)
    q, scales, q_t, scales_t, amax = outputs
    rstd = _empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
    y = _empty(x.shape, dtype=torch.bfloat16, device=x.device) if normed else None
    rng = _draw(stochastic, x.device)
    tensors = (x, x_scale, weight, residual, rng, q, scales, q_t, scales_t, amax, rstd, y, None)
    rmsnorm_into(tensors, eps, weight_offset, *form)
    if form.scaling == 0 and q_t is not None:
        scales_t = scales
    return Fp8Output(q, scales, q_t, scales_t, rstd, amax, residual, y)


def fp8_rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_offset: float = 0.0,
    residual_grad: Tensor | None = None,
    dx: Tensor | None = None,
    dw: Tensor | None = None,
    accumulate_dw: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of `fp8_rmsnorm`, of y as if it had not been quantised; one pass over x and dy.

    Args:
        dy: [M, N] or [B, T, N]: bfloat16, float16 or float32, rows dense.
        x, x_scale, weight, weight_offset: those of the forward; with a residual, x is the residual
            as the forward left it, and x_scale is None.
        rstd: float32 [M], of the forward.
        residual_grad: as dy: the gradient that reached the updated residual otherwise. It is added
            into dx before that is rounded; dx is then the gradient of x * x_scale and of the
            residual alike.
        dx: where to write, as dy; dy or residual_grad themselves are allowed. New by default.
        dw: where to write, [N], any of these dtypes. By default new, in the dtype of weight.
        accumulate_dw: add to dw, which must be given, instead of overwriting it.

    Returns:
        dx in the shape and dtype of dy, and dw [N]: partial sums are float32, added in a fixed
        order, rounded once.

    Raises:
        ValueError, TypeError, RuntimeError: as `fp8_rmsnorm`.
    """
    names = ("dy", "x", "weight", "rstd")
    require_tensors("fp8_rmsnorm_backward", names, (dy, x, weight, rstd))
    if accumulate_dw and dw is None:
        raise ValueError("fp8_rmsnorm_backward: dw must be given with accumulate_dw, got None")
    if _is_grad_enabled():
        refuse_gradient("fp8_rmsnorm_backward", dy, x, x_scale, weight, residual_grad)
    if dx is None:
        dx = _empty(dy.shape, dtype=dy.dtype, device=dy.device)
    if dw is None:
        dw = _empty(weight.shape, dtype=weight.dtype, device=weight.device)
    tensors = (dy, x, x_scale, weight, rstd, residual_grad, dx, dw, None)
    backward_into(tensors, weight_offset, accumulate_dw)
    return dx, dw


def fp8_quantize(
    y: Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    group: int = 128,
    scale: Tensor | tuple[Tensor, Tensor] | None = None,
    pow2_scale: bool = False,
    scale_layout: str = "row",
    transpose: bool | str = False,
    stochastic: bool = False,
    numerics: str = "fast",
) -> Fp8Output:
    """Quantises y [M, N] or [B, T, N], of float32, float16 or bfloat16, to FP8.

    Arguments, result and errors are those of `fp8_rmsnorm`; rstd, residual and normed are None.
    """
    require_tensors("fp8_quantize", ("y",), (y,))
    if _is_grad_enabled():
        refuse_gradient("fp8_quantize", y)
    form = _check_format("fp8_quantize", fp8_dtype, scaling, group, scale, pow2_scale, scale_layout,
                         transpose, numerics)  # fmt: skip
    outputs = _new_outputs("fp8_quantize", y, fp8_dtype, form, scale, scale_layout, transpose)
    q, scales, q_t, scales_t, amax = outputs
    quantize_into((y, _draw(stochastic, y.device), *outputs, None), *form)
    if form.scaling == 0 and q_t is not None:
        scales_t = scales
    return Fp8Output(q, scales, q_t, scales_t, None, amax, None, None)


class Traffic(NamedTuple):
    """Fewest bytes that each op can move."""

    forward: int
    backward: int


def traffic(
    rows: int, hidden: int, x_bytes: int, group: int, scale_bytes: int, outputs: int, dy_bytes: int
) -> Traffic:
    """Bytes of a forward and a backward over [rows, hidden]: x_bytes, scale_bytes and dy_bytes are
    those of one element, `group` of 0 stands for no x_scale, `outputs` counts q and q_t."""
    sizes = (rows, hidden, x_bytes, group, scale_bytes, outputs, dy_bytes)
    return Traffic(*lib.fp8_rmsnorm_traffic(*sizes))
