# SPDX-License-Identifier: Apache-2.0
"""Carriers, which stand for FP8 tensors in autograd's graph (fp8_rmsnorm.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._library import num_dispatch_modes
from .._new_tensors import spread


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


def carrier_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape with one element of memory, NaN."""
    if torch.compiler.is_compiling() or num_dispatch_modes():
        # What a mode makes, a fake tensor for one, must not be kept for the calls after it.
        return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    return spread(_nan(dtype, device), shape)


def check_carrier(carrier, x: Tensor) -> None:
    if not (isinstance(carrier, Tensor) and carrier.is_floating_point()):
        got = getattr(carrier, "dtype", type(carrier).__name__)
        raise TypeError(f"Fp8RMSNorm: carrier must be a tensor of a floating dtype, got {got}")
    if carrier.shape != x.shape:
        shapes = f"{tuple(x.shape)}, got {tuple(carrier.shape)}"
        raise ValueError(f"Fp8RMSNorm: carrier must have the shape of x {shapes}")
