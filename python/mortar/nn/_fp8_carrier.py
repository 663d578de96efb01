# SPDX-License-Identifier: Apache-2.0
"""Carriers, which stand for FP8 tensors in autograd's graph (fp8_rmsnorm.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._library import refuse_nested

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
@torch.inference_mode(False)
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _spread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _nan(dtype, device).expand(shape).detach()


def carrier_of(x: Tensor, dtype: torch.dtype, eager: bool) -> Tensor:
    """A tensor of the shape of x with one element of memory, NaN. `eager`: is_eager(x)."""
    if not eager:
        # What a mode makes, a fake tensor for one, must not be kept for the calls after it.
        return torch.full((), torch.nan, dtype=dtype, device=x.device).expand(x.shape)
    return _spread(x.shape, dtype, x.device).detach()


def check_carrier(carrier, x: Tensor) -> None:
    if not (isinstance(carrier, Tensor) and carrier.dtype in _FLOATS):
        got = getattr(carrier, "dtype", type(carrier).__name__)
        raise TypeError(
            "Fp8RMSNorm: carrier must be a tensor of dtype float32, float16 or bfloat16, got "
            f"{str(got).removeprefix('torch.')}"
        )
    refuse_nested("Fp8RMSNorm", carrier=carrier)
    if carrier.shape != x.shape:
        shapes = f"{tuple(x.shape)}, got {tuple(carrier.shape)}"
        raise ValueError(f"Fp8RMSNorm: carrier must have the shape of x {shapes}")
