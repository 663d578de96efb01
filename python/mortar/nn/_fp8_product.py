# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 matrices with a scale each: torch._scaled_mm where it is fast, else float32."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._fp8_outputs import Fp8Output
from .._library import in_words
from .._limits import FP8_RMSNORM_MAX_HIDDEN
from ..fp8 import fp8_quantize

_E5M2 = torch.float8_e5m2
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def _device_multiplies_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm is the fast way there."""
    return _has_fp8_product(device)


@functools.cache
def _has_fp8_product(device: torch.device) -> bool:
    # Most CPUs have it as oneDNN's reference code alone: 300 x 512 by 512 x 128 takes 600 ms on one
    # core, and 1.1 ms in float32.
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def multiply(
    a: Tensor, a_scale: Tensor, b_t: Tensor, b_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """(a a_scale) (b b_scale) of FP8 matrices a [M, K] and b [K, N], which comes as b_t [N, K].

    Through torch._scaled_mm on a GPU that has it, for what it takes (K and N are multiples of 16
    and not both dtypes float8_e5m2); else in float32. Never with fast accumulation, which keeps a
    sum of all K products in the few bits that tensor cores add FP8 with.
    """
    if not a.is_meta and torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _multiply(a, a_scale, b_t, b_scale, out_dtype)
    return _multiply(a, a_scale, b_t, b_scale, out_dtype)


def _multiply(a, a_scale, b_t, b_scale, out_dtype) -> Tensor:
    # Sizes last: to a tracer each question is a condition on those that it leaves open.
    both_e5m2 = a.dtype == b_t.dtype == _E5M2
    if not both_e5m2 and _device_multiplies_fp8(a.device) and _are_aligned(a, b_t):
        return torch._scaled_mm(a, b_t.t(), a_scale, b_scale, out_dtype=out_dtype,
                                use_fast_accum=False)  # fmt: skip
    return (a.float() @ b_t.float().t() * (a_scale * b_scale)).to(out_dtype)


def _are_aligned(a: Tensor, b_t: Tensor) -> bool:
    aligned = b_t.shape[0] % 16 == 0 and b_t.shape[1] % 16 == 0
    return aligned and a.numel() > 0 and b_t.numel() > 0


def quantize_gradient(
    gradient: Tensor, dtype: torch.dtype, transpose: bool | str, stochastic: bool
) -> Fp8Output:
    """`fp8_quantize` of a dense gradient [M, O], of any O: where it has more columns than that
    takes, as that of a large vocabulary has, each row is read as several short ones. With one scale
    q has the same bytes, and q_t is put in order by a copy."""
    rows, columns = gradient.shape
    if columns <= FP8_RMSNORM_MAX_HIDDEN:
        return fp8_quantize(gradient, dtype, transpose=transpose, stochastic=stochastic)
    parts = 2
    while columns % parts or columns // parts > FP8_RMSNORM_MAX_HIDDEN:
        parts += 1
    gradient = gradient.view(rows * parts, columns // parts)
    g = fp8_quantize(gradient, dtype, transpose=transpose, stochastic=stochastic)
    q = None if g.q is None else g.q.view(rows, columns)
    q_t = g.q_t
    if q_t is not None:
        q_t = q_t.view(-1, rows, parts).permute(2, 0, 1).reshape(columns, rows)
    return g._replace(q=q, q_t=q_t)


def rows_dense(weight: Tensor) -> Tensor:
    """A weight as the library reads it: copied where its rows are not dense, as in a transposed
    one."""
    return weight if weight.stride(-1) == 1 or weight.shape[-1] == 1 else weight.contiguous()


def check_product(activation, weight) -> None:
    for name, value, kind in (("activation", activation, Fp8Output), ("weight", weight, Tensor)):
        if not isinstance(value, kind):
            got = type(value).__name__
            raise TypeError(f"fp8_linear: {name} must be of type {kind.__name__}, got {got}")
    q = activation.q
    if weight.is_nested or weight.layout is not torch.strided or weight.is_quantized:
        raise in_words("fp8_linear", [("weight", weight)], RuntimeError())
    if q is not None and weight.device != q.device:
        raise TypeError(f"fp8_linear: weight must be on {q.device}, got {weight.device}")
    if weight.ndim != 2 or (q is not None and weight.shape[1] != q.shape[-1]):
        wanted = "[O, N]" if q is None else f"[O, {q.shape[-1]}]"
        raise ValueError(f"fp8_linear: weight must have shape {wanted}, got {tuple(weight.shape)}")
    if weight.dtype not in _FLOATS:
        raise TypeError(
            "fp8_linear: weight must have dtype float32, float16 or bfloat16, got "
            f"{str(weight.dtype).removeprefix('torch.')}"
        )


def check_parts(q: Tensor, q_t: Tensor | None, carrier: Tensor | None) -> None:
    """Of a record whose q somebody has cut to size, say, but not what lies beside it."""
    shape = tuple(q.shape)
    rows = math.prod(shape[:-1])  # torch.Size.numel() makes a number of a size that is a symbol
    for name, part, wanted in (("q_t", q_t, (shape[-1], rows)), ("normed", carrier, shape)):
        if part is not None and part.shape != wanted:
            raise ValueError(
                f"fp8_linear: activation must have a {name} of shape {wanted} beside q of shape "
                f"{shape}, got {tuple(part.shape)}"
            )
