# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.mortar.fp8_*``: thin shells that pass flat arguments to the library.

Every op writes into its arguments and returns nothing; an optional output that is None is not made.
The library takes its workspace from PyTorch's allocator on the current stream. Matrices may have
two dimensions or more, [..., N]: the leading ones are rows.

    fp8_rmsnorm_out           q, scale, q_t, scale_t, amax, rstd, normed; updates residual
    fp8_rmsnorm_backward_out  dx and dw
    fp8_quantize_out          q, scale, q_t, scale_t, amax

``scaling`` is an index of SCALINGS, ``numerics`` of NUMERICS. With given_scale, scale and scale_t
are read. ``rng``, int64 [2], makes rounding stochastic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from ._ffi import lib, torch_function
from ._library import (
    any_negation,
    define,
    in_words,
    increment_version,
    negation,
    note_writes,
    refuse_nested,
    refuse_tangents,
    refuse_transforms,
)

SCALINGS = ("tensor", "row", "group")
NUMERICS = ("fast", "compat")

_forward, _backward = lib.fp8_rmsnorm_forward, lib.fp8_rmsnorm_backward
_quantize = lib.fp8_quantize
_is_grad_enabled = torch.is_grad_enabled


_INSTEAD = {
    "fp8_rmsnorm": "mortar.nn.Fp8RMSNorm",
    "fp8_rmsnorm_backward": "it inside a torch.autograd.Function",
    "fp8_quantize": "it inside a torch.autograd.Function",
}


def refuse_gradient(function: str, *tensors: torch.Tensor | None) -> None:
    """Raises where a gradient would be lost."""
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{function}: has no gradient of its own, but an argument requires one; use "
                    f"{_INSTEAD[function]} or call it under torch.no_grad()"
                )
    except AttributeError:
        pass  # of what is no tensor at all: require_tensors names it later


def _rmsnorm_impl(
    x, x_scale, weight, residual, rng, q, scale, q_t, scale_t, amax, rstd, normed,
    eps, weight_offset, scaling, group, pow2_scale, given_scale, numerics,
):  # fmt: skip
    if _is_grad_enabled():
        written = (q, scale, q_t, scale_t, amax, rstd, normed)
        refuse_gradient("fp8_rmsnorm", x, x_scale, weight, residual, *written)
    try:
        _forward(
            x, x_scale, weight, eps, weight_offset, residual, scaling, group, pow2_scale,
            given_scale, numerics, rng, q, scale, q_t, scale_t, amax, rstd, normed, None,
        )  # fmt: skip
    except (TypeError, ValueError) as error:  # compiled code shows it as it is
        raise _renamed(NORM, (), error) from None
    scales = () if given_scale else (scale, scale_t)
    note_writes((residual, q, q_t, amax, rstd, normed, *scales))


def _backward_impl(
    dy, x, x_scale, weight, rstd, residual_grad, dx, dw, weight_offset, accumulate_dw
):
    if _is_grad_enabled():
        refuse_gradient("fp8_rmsnorm_backward", dy, x, x_scale, weight, rstd, residual_grad, dx, dw)
    _backward(
        dy, x, x_scale, weight, weight_offset, rstd, residual_grad, dx, dw, accumulate_dw, None
    )
    note_writes((dx, dw))


def _quantize_impl(
    y, rng, q, scale, q_t, scale_t, amax, scaling, group, pow2_scale, given_scale, numerics
):
    if _is_grad_enabled():
        refuse_gradient("fp8_quantize", y, q, scale, q_t, scale_t, amax)
    _quantize(
        y, scaling, group, pow2_scale, given_scale, numerics, rng, q, scale, q_t, scale_t, amax,
        None,
    )  # fmt: skip
    note_writes((q, q_t, amax, *(() if given_scale else (scale, scale_t))))


_rmsnorm_op = define(
    "fp8_rmsnorm_out(Tensor x, Tensor? x_scale, Tensor weight, Tensor(a!)? residual, Tensor? rng, "
    "Tensor(b!)? q, Tensor(c!)? scale, Tensor(d!)? q_t, Tensor(e!)? scale_t, Tensor(f!)? amax, "
    "Tensor(g!)? rstd, Tensor(h!)? normed, float eps, float weight_offset, int scaling, int group, "
    "bool pow2_scale, bool given_scale, int numerics) -> ()",
    _rmsnorm_impl,
)
_backward_op = define(
    "fp8_rmsnorm_backward_out(Tensor dy, Tensor x, Tensor? x_scale, Tensor weight, Tensor rstd, "
    "Tensor? residual_grad, Tensor(a!)? dx, Tensor(b!)? dw, float weight_offset, "
    "bool accumulate_dw) -> ()",
    _backward_impl,
)
_quantize_op = define(
    "fp8_quantize_out(Tensor y, Tensor? rng, Tensor(a!)? q, Tensor(b!)? scale, Tensor(c!)? q_t, "
    "Tensor(d!)? scale_t, Tensor(e!)? amax, int scaling, int group, bool pow2_scale, "
    "bool given_scale, int numerics) -> ()",
    _quantize_impl,
)


# ---- eager calls -------------------------------------------------------------------------------
# An eager call skips the dispatcher. Errors name the function and not what lies below. Whoever
# calls has seen to gradients.

# Operands of each function as they lie in its tuple: their names, and whether they may be None.
_OUTPUTS = tuple((name, True) for name in ("q", "scale", "q_t", "scale_t", "amax"))
_NORM_OPERANDS = (
    ("x", False), ("x_scale", True), ("weight", False), ("residual", True), ("rng", True),
    *_OUTPUTS, ("rstd", True), ("normed", True),
)  # fmt: skip
_BACKWARD_OPERANDS = (
    ("dy", False), ("x", False), ("x_scale", True), ("weight", False), ("rstd", False),
    ("residual_grad", True), ("dx", True), ("dw", True),
)  # fmt: skip
_QUANTIZE_OPERANDS = (("y", False), ("rng", True), *_OUTPUTS)


class _Function(NamedTuple):
    name: str
    library: str
    """What the library calls it."""
    operands: tuple[tuple[str, bool], ...]
    op: Callable
    """What a call goes through where it cannot go straight to the library."""
    now: Callable[..., int]
    """The library's torch_function, which costs the host less."""


NORM = _Function("fp8_rmsnorm", "fp8_rmsnorm_forward", _NORM_OPERANDS, _rmsnorm_op,
                 torch_function("torch_fp8_rmsnorm_forward"))  # fmt: skip
BACKWARD = _Function(*["fp8_rmsnorm_backward"] * 2, _BACKWARD_OPERANDS, _backward_op,
                     torch_function("torch_fp8_rmsnorm_backward"))  # fmt: skip
QUANTIZE = _Function(*["fp8_quantize"] * 2, _QUANTIZE_OPERANDS, _quantize_op,
                     torch_function("torch_fp8_quantize"))  # fmt: skip


def run_into(
    function: _Function, eager: bool, tensors: tuple, given, written: list, values: tuple
) -> None:
    """Runs a function by its shortest way.

    Args:
        eager: _library.is_eager of the first tensor.
        tensors: those of the op, None for the workspace last.
        given: what the caller brought, but for the first tensor, of which `eager` has told.
        written: the tensors of these that are written: autograd must know.
        values: the other arguments of the op.
    """
    try:
        if not (eager and not any_negation(given) and function.now(id(tensors), *values)):
            return _run_op(function, tensors, values)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        require_tensors(function.name, function.operands, tensors)
        raise _renamed(function, tensors, error) from None
    if written:
        increment_version(written)


def _run_op(function: _Function, tensors: tuple, values: tuple) -> None:
    """By way of the dispatcher but below autograd, for tensors that may require a gradient."""
    require_tensors(function.name, function.operands, tensors)
    _require_one_device(function, tensors)
    _refuse_negations(function, tensors)
    refuse_transforms(function.name)
    if not is_compiling():
        refuse_tangents(function.name, tensors)
    with torch.no_grad():
        function.op(*tensors[:-1], *values)


def _require_one_device(function: _Function, tensors: tuple) -> None:
    """The dispatcher takes a call with one meta tensor for a traced one, and writes nothing."""
    device = tensors[0].device
    for (name, _), tensor in zip(function.operands, tensors, strict=False):
        if tensor is not None and tensor.device != device:
            raise TypeError(f"{function.name}: {name} must be on {device}, got {tensor.device}")


def _refuse_negations(function: _Function, tensors: tuple) -> None:
    """Among what is written, which the dispatcher does not resolve beside a None."""
    if is_compiling():
        return
    for argument, tensor in zip(function.op._schema.arguments, tensors, strict=False):
        if tensor is not None and argument.is_write and tensor.is_neg():
            raise negation(function.name, argument.name)


def _renamed(function: _Function, tensors: tuple, error: Exception) -> Exception:
    """The error of a call with the function's own name."""
    if isinstance(error, RuntimeError):
        names = (name for name, _ in function.operands)
        given = [(n, t) for n, t in zip(names, tensors, strict=False) if t is not None]
        return in_words(function.name, given, error)
    inner, colon, sentence = str(error).partition(": ")
    library = function.library
    if not colon or inner not in (library, f"{library}_workspace", f"{function.name}_out"):
        return error
    return type(error)(f"{function.name}: {sentence}")


def require_tensors(function: str, operands: tuple[tuple[str, bool], ...], values: tuple) -> None:
    """One sentence for an argument that is no tensor at all."""
    for (name, optional), value in zip(operands, values, strict=False):
        if not (isinstance(value, torch.Tensor) or (optional and value is None)):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(value).__name__}")
        refuse_nested(function, **{name: value})
