# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for COAT's FP8 RMSNorm and division (`coat.activation.real_quantization`).

The three functions have the signatures, results, dtypes and layouts of the originals, with
numerics="compat". They are right where the originals are not: any M and any N that the group
divides, gradients of any strides, a gradient of the weight that is summed in float32 in a fixed
order, stochastic rounding that is unbiased and draws from PyTorch's generator; and they work on the
CPU. Like the originals they are made to be called inside a torch.autograd.Function and have no
gradient.

`install()` puts them into every imported copy of COAT: the original package, or those inside VILA
and Audio Flamingo (`llava.model.coat`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from .._fp8_outputs import settings
from .._library import is_eager
from .._new_tensors import as_vector, part
from ..fp8 import differentiate, normalise
from ..fp8 import fp8_quantize as _quantize
from ._arguments import check_dimensions, in_words_of
from ._install import Replacements, found

__all__ = [
    "fp8_division_transpose",
    "fp8_rmsnorm_backward",
    "fp8_rmsnorm_forward",
    "install",
    "uninstall",
]

_LEAST_SCALE, _LEAST_FLOAT16 = 1e-10, 2.0**-24
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_BY_NAME = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_SCALE_DTYPES = (torch.bfloat16, torch.float32)
_UPPER_HALF = 1 if sys.byteorder == "little" else 0
# Of settings() but for eps, which comes first among the values.
_DTYPE, (_, *_VALUES), *_FLAGS = settings("fp8_rmsnorm", None, "tensor", 128, False, False, "row",
                                          True, False, False, "compat", 1e-5, 0.0)  # fmt: skip
_NUM_WARPS = 8  # what the originals hand from the forward to the backward; nothing here reads it


def _rows(t: Tensor) -> Tensor:
    """[B, T, N] as [B T, N], [M, N] as it is; copied only where the strides leave no other way."""
    return t.detach().reshape(-1, t.shape[-1]) if t.ndim == 3 else t


def _scales(s_x: Tensor) -> Tensor:
    """The scales of x as the library reads them: those of other types in float32, rows dense."""
    rows = _dense(_rows(s_x))
    wide = rows.dtype in _SCALE_DTYPES or not rows.is_floating_point()
    return rows if wide else rows.float()


def _dense(t: Tensor) -> Tensor:
    """The rows of t dense, as the originals read them whatever the strides are."""
    # is_contiguous takes the host a third of what stride does.
    if t.is_contiguous() or t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    return t.detach().contiguous()


def _check_group(function: str, x: Tensor, s_x: Tensor, QB: int) -> None:
    try:
        fits = x.shape[-1] == s_x.shape[-1] * QB
    except (AttributeError, IndexError, TypeError):
        fits = False
    if not fits:
        check_dimensions(function, x=(x, 2, 3), s_x=(s_x, 2, 3))
        if not isinstance(QB, int):
            raise TypeError(f"{function}: QB must be an integer, got {type(QB).__name__}")
        if QB <= 0:
            raise ValueError(f"{function}: QB must be positive, got {QB}")
        raise ValueError(
            f"{function}: s_x must have x's last dimension divided by QB = {QB}, "
            f"{x.shape[-1] / QB:g}, as its own, got {s_x.shape[-1]}"
        )


def fp8_rmsnorm_forward(
    x: Tensor, s_x: Tensor, w: Tensor, QB: int, eps: float, transpose_output_2d: bool = False
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, int]]:
    """RMSNorm of group-scaled FP8 x, quantised with one scale.

    x: [M, N] or [B, T, N], float8_e4m3fn or float8_e5m2; s_x: [..., N / QB], any float; w: [N].
    Returns qy in x's shape and dtype; s_y, bfloat16 and 0-dim; qy_t [N, M], or for 3-D x without
    transpose_output_2d that buffer reshaped to [B, -1, N]; and (w, rstd [M], a number) for
    `fp8_rmsnorm_backward`.
    """
    try:
        _check_group("fp8_rmsnorm_forward", x, s_x, QB)
        rows, scales = _dense(_rows(x)), _scales(s_x)
    except RuntimeError as error:
        raise in_words_of("fp8_rmsnorm_forward", error, x=x, s_x=s_x) from None
    eager = is_eager(rows)
    chosen = (_DTYPE, (eps, *_VALUES), *_FLAGS)
    made = normalise(rows, scales, w, None, chosen, eager, with_amax=False)
    qy, scale, qy_t, _, rstd, _, _, _ = made
    # The scale is a bfloat16 value in float32: its upper half is that bfloat16. Tracers and modes
    # would not see it being taken.
    if eager:
        s_y = part(as_vector(scale).view(torch.bfloat16), _UPPER_HALF)
    else:
        s_y = scale.to(torch.bfloat16)
    if x.ndim == 3:
        qy = qy.view(x.shape)
        if not transpose_output_2d:
            qy_t = qy_t.view(x.shape)
    return qy, s_y, qy_t, (w, rstd, _NUM_WARPS)


def fp8_rmsnorm_backward(
    x: Tensor, s_x: Tensor, g: Tensor, w: Tensor, v: Tensor, QB: int, num_warps: int
) -> tuple[Tensor, Tensor]:
    """The gradients of `fp8_rmsnorm_forward`: dx in bfloat16 and x's shape, dw in w's dtype.

    g: as x or its rows [M, N], bfloat16, float16 or float32, of any strides; v: rstd [M]; num_warps
    is not read.
    """
    try:
        _check_group("fp8_rmsnorm_backward", x, s_x, QB)
        check_dimensions("fp8_rmsnorm_backward", g=(g, 2, 3))
        dy, rows, scales = _dense(_rows(g)), _dense(_rows(x)), _scales(s_x)
    except RuntimeError as error:
        raise in_words_of("fp8_rmsnorm_backward", error, x=x, s_x=s_x, g=g) from None
    dx, dw = differentiate(dy, rows, scales, w, v)
    dx = dx if dx.dtype == torch.bfloat16 else dx.to(torch.bfloat16)
    return dx.view(x.shape) if x.ndim == 3 else dx, dw


@torch.no_grad()
def fp8_division_transpose(
    x: Tensor,
    QB: int,
    fp8type: torch.dtype | str,
    s_y: Tensor | float | None = None,
    stochastic: bool = False,
    only_transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor]:
    """x / s_y in FP8, and its transpose.

    x: [M, N] or [B, T, N], bfloat16, float16 or float32; fp8type: a dtype, "E4M3" or "E5M2";
    s_y: one number, computed from max|x| in x's dtype if not given.
    Returns (y in x's shape, s_y, y_t [N, M]), or (y_t, s_y) if only_transposed.
    """
    dtype = _BY_NAME.get(fp8type) if isinstance(fp8type, str) else fp8type
    if dtype not in _LARGEST:
        raise TypeError(
            "fp8_division_transpose: fp8type must be 'E4M3', 'E5M2', torch.float8_e4m3fn or "
            f"torch.float8_e5m2, got {fp8type!r}"
        )
    check_dimensions("fp8_division_transpose", x=(x, 2, 3))
    try:
        return _divide(x, dtype, s_y, stochastic, only_transposed)
    except RuntimeError as error:
        raise in_words_of("fp8_division_transpose", error, x=x, s_y=s_y) from None


def _divide(x: Tensor, dtype: torch.dtype, s_y, stochastic: bool, only_transposed: bool):
    rows = _dense(_rows(x))
    if s_y is None:
        s_y = _scale_of(x, dtype)
        if x.is_cpu and not torch.compiler.is_compiling() and not s_y.isfinite():
            # What is given to fp8_quantize must be finite there.
            y = (rows / s_y).to(dtype)
            y_t = y.t().contiguous()
            return (y_t, s_y) if only_transposed else (y.view(x.shape), s_y, y_t)
    scale = _as_scale(s_y, x.device)
    out = _quantize(rows, dtype, scale=scale, transpose="only" if only_transposed else True,
                    stochastic=stochastic, numerics="compat")  # fmt: skip
    if only_transposed:
        return out.q_t, s_y
    return out.q.view(x.shape), s_y, out.q_t


def _as_scale(s_y: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(s_y, Tensor) and s_y.numel() == 1:
        return s_y.reshape(()).float()
    if isinstance(s_y, float | int):
        return torch.tensor(float(s_y), dtype=torch.float32, device=device)
    got = f"shape {tuple(s_y.shape)}" if isinstance(s_y, Tensor) else type(s_y).__name__
    raise TypeError(f"fp8_division_transpose: s_y must be one number, got {got}")


def _scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In x's dtype, of which float16 would make 0 of the scale of small values."""
    amax = x.abs().max() if x.numel() > 0 else x.new_zeros(())
    scale = (amax + _LEAST_SCALE) / _LARGEST[dtype]
    return scale.clamp_min(_LEAST_FLOAT16) if x.dtype == torch.float16 else scale


# ---- install -------------------------------------------------------------------------------------

_HOMES = {
    "func_rmsnorm": (fp8_rmsnorm_forward, fp8_rmsnorm_backward),
    "_division_transpose": (fp8_division_transpose,),
}

_replacements = Replacements()


def _homes() -> Iterator[tuple[str, str]]:
    """(package, module) for each of COAT's two modules in every copy that has been imported, such
    as ("coat.activation.real_quantization", "func_rmsnorm")."""
    for name in list(sys.modules):
        package, _, stem = name.rpartition(".")
        if stem in _HOMES and package.endswith("activation.real_quantization"):
            yield package, stem


def install() -> list[str]:
    """Puts the three functions into every imported copy of COAT, in whichever module has taken hold
    of them, those of models included. Calling it again finds what has been imported since.
    `uninstall` takes it back.

    Returns:
        The packages that were found, such as ["coat.activation.real_quantization"].

    Raises:
        RuntimeError: no copy of COAT has been imported.
    """
    homes = found(
        list(_homes()),
        "mortar.compat.coat.install",
        "import coat.activation.real_quantization (or load the model)",
    )
    for package, stem in homes:
        for ours in _HOMES[stem]:
            original = vars(sys.modules[f"{package}.{stem}"]).get(ours.__name__, ours)
            _replacements.replace_everywhere(original, ours)
    return sorted({package for package, _ in homes})


def uninstall() -> None:
    """Restores all that install() replaced; nothing if it has not run."""
    _replacements.undo()
