# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that ends in FP8: `mortar.fp8_rmsnorm`, its backward, and the quantisation alone.

    z = x * x_scale (+ residual)      rstd = 1 / sqrt(mean(z^2) + eps)
    y = z * rstd * (weight + weight_offset)      y ~ q * scale

RMSNorm is Zhang and Sennrich's (arXiv:1910.07467); activations in FP8 with a scale per group are
COAT's (arXiv:2410.19313), scales of 1 x 128 blocks DeepSeek-V3's (arXiv:2412.19437). Results are
bitwise repeatable, the gradient of the weight included. Inputs may be negative-bit views, outputs
not (ValueError). Below lie the operators
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
    BACKWARD,
    NORM,
    QUANTIZE,
    refuse_gradient,
    require_tensors,
    run_into,
)
from ._fp8_outputs import (
    Fp8Output,
    Settings,
    draw,
    outputs,
    record,
    settings,
)
from ._library import is_eager
from ._new_tensors import allocator_like, dense_strides

__all__ = ["Fp8Output", "fp8_quantize", "fp8_rmsnorm", "fp8_rmsnorm_backward", "traffic"]

_F32, _BF16 = torch.float32, torch.bfloat16
_is_grad_enabled = torch.is_grad_enabled


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
    out: Fp8Output | None = None,
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
        fp8_dtype: of q and q_t; by default that of `out`, of an FP8 x, else float8_e4m3fn.
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
        out: where to write: the record of an earlier call with these options, or one like it. Its
            rstd and amax may be None and are then not made; its residual, and its scales where
            `scale` is given, are not used.

    Returns:
        An Fp8Output, of the tensors of `out` if that is given. Scales are max(amax, 1e-10) / 448
        (57344 for float8_e5m2).

    Conversions saturate. A NaN is not quantised away: with one scale for all it reaches the scale
    and every value, else it stays in its row or group.

    Raises:
        ValueError: a shape, stride or option is wrong; nothing has been written then.
        TypeError: a dtype, device or Python type is wrong.
        RuntimeError: an argument, `scale` and the tensors of `out` among them, requires a gradient
            and gradients are enabled.
    """
    if _is_grad_enabled():
        refuse_gradient("fp8_rmsnorm", x, x_scale, weight, residual)
    chosen = settings("fp8_rmsnorm", fp8_dtype, scaling, group, scale is not None, pow2_scale,
                      scale_layout, transpose, normed, stochastic, numerics, eps,
                      weight_offset)  # fmt: skip
    eager = is_eager(x)
    if not eager:
        require_tensors("fp8_rmsnorm", (("x", False),), (x,))
    return record(normalise(x, x_scale, weight, residual, chosen, eager, scale, out))


def normalise(
    x, x_scale, weight, residual, chosen: Settings, eager: bool, scale=None, out=None,
    with_amax=True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The fields of `fp8_rmsnorm`'s record, of tensors that may require gradients. `eager`:
    is_eager(x)."""
    _, values, _, _, _, stochastic = chosen
    q, scales, q_t, scales_t, amax, rstd, y, written = outputs(
        "fp8_rmsnorm", "x", x, chosen, scale, out, eager, True, with_amax
    )
    if residual is not None:
        written = [*written, residual]
    rng = draw(x.device) if stochastic else None
    tensors = (x, x_scale, weight, residual, rng, q, scales, q_t, scales_t, amax, rstd, y, None)
    given = tensors if scale is not None else [x_scale, weight, *written]
    run_into(NORM, eager, tensors, given, written, values)
    if q_t is not None and values[2] == 0:
        scales_t = scales
    return q, scales, q_t, scales_t, rstd, amax, residual, y


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
    if accumulate_dw and dw is None:
        raise ValueError("fp8_rmsnorm_backward: dw must be given with accumulate_dw, got None")
    if _is_grad_enabled():
        refuse_gradient("fp8_rmsnorm_backward", dy, x, x_scale, weight, rstd, residual_grad, dx, dw)
    return differentiate(
        dy, x, x_scale, weight, rstd, weight_offset, residual_grad, dx, dw, accumulate_dw
    )


def differentiate(
    dy, x, x_scale, weight, rstd, weight_offset=0.0, residual_grad=None, dx=None, dw=None,
    accumulate_dw=False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fp8_rmsnorm_backward` of tensors that may require gradients."""
    eager = is_eager(dy)
    written = [t for t in (dx, dw) if t is not None]
    given = [x, x_scale, weight, rstd, residual_grad, *written]
    if len(written) < 2:
        both = isinstance(dy, Tensor) and isinstance(weight, Tensor)
        if not both or dy.is_nested or weight.is_nested:  # before their sizes are read
            require_tensors(
                "fp8_rmsnorm_backward", (("dy", False), ("weight", False)), (dy, weight)
            )
        empty = allocator_like(dy, eager)
        if dx is None:
            shape = tuple(dy.shape)
            dx = empty(shape, dense_strides(shape), dy.dtype)
        if dw is None:
            shape = tuple(weight.shape)
            dw = empty(shape, dense_strides(shape), weight.dtype)
    tensors = (dy, x, x_scale, weight, rstd, residual_grad, dx, dw, None)
    run_into(BACKWARD, eager, tensors, given, written, (weight_offset, accumulate_dw))
    return dx, dw


def fp8_quantize(
    y: Tensor,
    fp8_dtype: torch.dtype | None = None,
    *,
    scaling: str = "tensor",
    group: int = 128,
    scale: Tensor | tuple[Tensor, Tensor] | None = None,
    pow2_scale: bool = False,
    scale_layout: str = "row",
    transpose: bool | str = False,
    stochastic: bool = False,
    numerics: str = "fast",
    out: Fp8Output | None = None,
) -> Fp8Output:
    """Quantises y [M, N] or [B, T, N], of float32, float16 or bfloat16, to FP8.

    Arguments, result and errors are those of `fp8_rmsnorm`; rstd, residual and normed are None.
    """
    if _is_grad_enabled():
        refuse_gradient("fp8_quantize", y)
    chosen = settings("fp8_quantize", fp8_dtype, scaling, group, scale is not None, pow2_scale,
                      scale_layout, transpose, False, stochastic, numerics, 0.0, 0.0)  # fmt: skip
    _, values, _, _, _, _ = chosen
    eager = is_eager(y)
    if not eager:
        require_tensors("fp8_quantize", (("y", False),), (y,))
    q, scales, q_t, scales_t, amax, _, _, written = outputs(
        "fp8_quantize", "y", y, chosen, scale, out, eager, False, True
    )
    rng = draw(y.device) if stochastic else None
    tensors = (y, rng, q, scales, q_t, scales_t, amax, None)
    given = tensors if scale is not None else written
    run_into(QUANTIZE, eager, tensors, given, written, values[2:])
    if q_t is not None and values[2] == 0:
        scales_t = scales
    return record((q, scales, q_t, scales_t, None, amax, None, None))


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
