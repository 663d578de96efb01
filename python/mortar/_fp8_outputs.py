# SPDX-License-Identifier: Apache-2.0
"""The record that fp8.py's functions return, their options, and the tensors that they write."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._fp8_ops import NUMERICS, SCALINGS, refuse_gradient, require_tensors
from ._library import refuse_nested
from ._new_tensors import allocator_like, dense_strides

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALING_INDEX = {name: i for i, name in enumerate(SCALINGS)}
_NUMERICS_INDEX = {name: i for i, name in enumerate(NUMERICS)}
_TRANSPOSES = (False, True, "only")
_GIVEN_SCALE, _GIVEN_SCALES = (("scale", False),), (("scale", False), ("scale_t", False))
_F32 = torch.float32
_is_grad_enabled = torch.is_grad_enabled


class Fp8Output(NamedTuple):
    """What `fp8_rmsnorm` and `fp8_quantize` return; what was not asked for is None.

    M = all rows of y, N = its last dimension, G = group.
    """

    #: y in FP8, in the shape of x
    q: Tensor | None = None
    #: float32: [] for "tensor", [M] for "row", [M, ceil(N / G)] for "group"
    scale: Tensor | None = None
    #: y^T in FP8, [N, M]
    q_t: Tensor | None = None
    #: float32: scale for "tensor", [N] for "row", [N, ceil(M / G)] for "group"
    scale_t: Tensor | None = None
    #: float32 [M]
    rstd: Tensor | None = None
    #: float32 []: max|y|, for "tensor"
    amax: Tensor | None = None
    #: the residual that was given, updated
    residual: Tensor | None = None
    #: y in bfloat16, in the shape of x
    normed: Tensor | None = None


#: Fp8Output(*fields) of a tuple of all fields, in a third of the time.
record = functools.partial(tuple.__new__, Fp8Output)


#: All of a call but its tensors, checked: fp8_dtype, values, whether scales lie column by column,
#: transpose, normed, stochastic. The values are those that `fp8_rmsnorm_out` takes: eps,
#: weight_offset, scaling, group, pow2_scale, given_scale, numerics.
Settings = tuple[torch.dtype | None, tuple[float, float, int, int, bool, bool, int], bool,
                 bool | str, bool, bool]  # fmt: skip

#: q, scale, q_t, scale_t, amax, rstd and normed as the operators take them, and what of these the
#: caller brought and is written.
Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
                Tensor | None, Tensor | None, list[Tensor]]  # fmt: skip


def _unknown(function: str, name: str, value: object, choices: dict) -> ValueError:
    allowed = ", ".join(repr(c) for c in choices)
    return ValueError(f"{function}: {name} must be one of {allowed}, got {value!r}")


def require_fp8(function: str, name: str, dtype: object) -> None:
    if dtype not in _FP8:
        raise TypeError(
            f"{function}: {name} must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
        )


def settings(
    function: str, fp8_dtype, scaling, group, given_scale, pow2_scale, scale_layout, transpose,
    normed, stochastic, numerics, eps, weight_offset,
) -> Settings:  # fmt: skip
    """Options of `fp8_rmsnorm`, in any types, checked as far as the library does not do that."""
    if fp8_dtype is not None:
        require_fp8(function, "fp8_dtype", fp8_dtype)
    index = _SCALING_INDEX.get(scaling) if isinstance(scaling, str) else None
    if index is None:
        raise _unknown(function, "scaling", scaling, _SCALING_INDEX)
    chain = _NUMERICS_INDEX.get(numerics) if isinstance(numerics, str) else None
    if chain is None:
        raise _unknown(function, "numerics", numerics, _NUMERICS_INDEX)
    if type(group) is not int:
        raise TypeError(f"{function}: group must be an int, got {type(group).__name__}")
    col = scale_layout == "col"
    if scale_layout != "row" and not (col and index == 2):
        raise ValueError(
            f"{function}: scale_layout must be 'row', or 'col' with scaling='group', "
            f"got {scale_layout!r} with scaling={scaling!r}"
        )
    if transpose is not False and transpose not in _TRANSPOSES:
        raise ValueError(f"{function}: transpose must be False, True or 'only', got {transpose!r}")
    values = (eps, weight_offset, index, group, bool(pow2_scale), given_scale, chain)
    return fp8_dtype, values, col, transpose, bool(normed), stochastic


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
        require_tensors(function, _GIVEN_SCALES, pair)
        if _is_grad_enabled():
            refuse_gradient(function, *pair)
        return pair
    require_tensors(function, _GIVEN_SCALE, (scale,))
    if _is_grad_enabled():
        refuse_gradient(function, scale)
    return (None, scale) if both else (scale, None)


def _new_scale(rows: int, length: int, index: int, group: int, col: bool, empty) -> Tensor:
    if index == 1:
        return empty((rows,), (1,), _F32)
    groups = -(-length // max(group, 1))
    if not col:
        return empty((rows, groups), dense_strides((rows, groups)), _F32)
    padded = -(-rows // 4) * 4
    return empty((groups, padded), dense_strides((groups, padded)), _F32).t()[:rows]


def outputs(
    function: str, name: str, y: Tensor, chosen: Settings, scale, out: Fp8Output | None,
    eager: bool, with_rstd: bool, with_amax: bool,
) -> Outputs:  # fmt: skip
    """What a call for y [..., N] writes, and given scales: unfilled tensors, or those of `out`.
    `eager`: is_eager(y)."""
    if out is not None:
        return _given_outputs(function, out, chosen, scale)
    dtype, (_, _, index, group, _, given_scale, _), col, transpose, normed, _ = chosen
    if y.ndim != 2:  # before its sizes are read
        refuse_nested(function, **{name: y})
    shape = tuple(y.shape)
    if len(shape) < 2:
        raise ValueError(f"{function}: {name} must have at least 2 dimensions, got {shape}")
    rows, hidden = shape if len(shape) == 2 else (math.prod(shape[:-1]), shape[-1])
    if eager and len(shape) == 2:  # the usual case, in half the time
        strides, strides_t = (hidden or 1, 1), (rows or 1, 1)
    else:
        strides, strides_t = dense_strides(shape), dense_strides((hidden, rows))
    if dtype is None:
        dtype = y.dtype
        if dtype not in _FP8:
            dtype = _FP8[0]
    empty = allocator_like(y, eager)
    q = scales = q_t = scales_t = amax = rstd = normed_y = None
    if given_scale:
        scales, scales_t = _given_scales(function, scale, index, transpose)
    if transpose != "only":
        q = empty(shape, strides, dtype)
    if transpose:
        q_t = empty((hidden, rows), strides_t, dtype)
    if index == 0:
        if scales is None:
            scales = empty((), (), _F32)
        if with_amax:
            amax = empty((), (), _F32)
    else:
        if scales is None and q is not None:
            scales = _new_scale(rows, hidden, index, group, col, empty)
        if scales_t is None and q_t is not None:
            scales_t = _new_scale(hidden, rows, index, group, col, empty)
    if with_rstd:
        rstd = empty((rows,), (1,), _F32)
    if normed:
        normed_y = empty(shape, strides, torch.bfloat16)
    return q, scales, q_t, scales_t, amax, rstd, normed_y, []


def _given_outputs(function: str, out: Fp8Output, chosen: Settings, scale) -> Outputs:
    # A starred name would be a list, which takes as long as all other names together.
    dtype, (_, _, index, _, _, given_scale, _), _, transpose, normed, _ = chosen
    if type(out) is not Fp8Output:
        raise TypeError(f"{function}: out must be an Fp8Output, got {type(out).__name__}")
    q, scales, q_t, scales_t, rstd, amax, _, y = out
    if (
        (q is None) != (transpose == "only")
        or (q_t is None) == bool(transpose)
        or (y is None) == normed
        or dtype is not None
    ):
        _check_given(function, out, dtype, transpose, normed)
    if given_scale:
        scales, scales_t = _given_scales(function, scale, index, transpose)
        written = (q, q_t, amax, rstd, y)
    else:
        if index == 0 and scales_t is not None:
            if scales_t is not scales:
                raise ValueError(
                    f"{function}: out must have one tensor as scale and scale_t with "
                    "scaling='tensor', got two"
                )
            scales_t = None
        written = (q, scales, q_t, scales_t, amax, rstd, y)
    if _is_grad_enabled():
        refuse_gradient(function, *written)
    return q, scales, q_t, scales_t, amax, rstd, y, [t for t in written if t is not None]


def _check_given(function: str, out: Fp8Output, dtype, transpose, normed) -> None:
    q, q_t = out.q, out.q_t
    if (q is None) != (transpose == "only") or (q_t is None) == bool(transpose):
        raise ValueError(
            f"{function}: out must have what transpose={transpose!r} makes, got "
            f"{'no q' if q is None else 'q'} and {'no q_t' if q_t is None else 'q_t'}"
        )
    if (out.normed is None) == normed:
        raise ValueError(
            f"{function}: out must have what normed={normed} makes, got "
            f"{'no normed' if out.normed is None else 'normed'}"
        )
    held = getattr(q_t if q is None else q, "dtype", None)
    if dtype is not None and held != dtype:
        raise TypeError(f"{function}: out must have q and q_t of fp8_dtype={dtype}, got {held}")


def draw(device: torch.device) -> Tensor:
    """Seed and offset of a call's random numbers, from PyTorch's generator of that device."""
    return torch.randint(2**62, (2,), dtype=torch.int64, device=device)
