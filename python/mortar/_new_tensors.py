# SPDX-License-Identifier: Apache-2.0
"""Unfilled tensors for eager calls, at half of what torch.empty costs the host: what Inductor's
compiled code takes its buffers from. They are made on the current device, in tuples of sizes and
strides."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_guards = getattr(torch._C._dynamo, "guards", None)
_on_cpu = getattr(_guards, "_empty_strided_cpu", None)
_on_cuda = getattr(_guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_reinterpret = getattr(_guards, "_reinterpret_tensor", None)

#: (shape, strides, dtype) -> tensor; the strides are those of a dense one.
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


@functools.cache
def _only_one_gpu() -> bool:
    """It is the current one then; to ask which one is takes 0.2 us."""
    return torch.cuda.device_count() == 1


def allocator_like(x: Tensor, eager: bool) -> Allocator:
    """What makes tensors on x's device. `eager`: nothing traces or intercepts this call."""
    if eager:
        if x.is_cpu:
            if _on_cpu is not None:
                return _on_cpu
        elif x.is_cuda and _on_cuda is not None:
            on_current = _only_one_gpu() or x.get_device() == _current_device()
            if on_current:
                return _on_cuda
    device = x.device

    def empty(shape, strides, dtype):
        return torch.empty(shape, dtype=dtype, device=device)

    return empty


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides as torch.empty has them: row-major, sizes of 0 counting as 1. A size that is a symbol
    of a tracer is not asked whether it is 0."""
    if len(shape) == 2 and type(shape[1]) is int:  # the usual case, in a third of the time
        return shape[1] or 1, 1
    strides, step = (1,), 1
    for size in shape[:0:-1]:
        if type(size) is not int or size > 1:
            step *= size
        strides = (step, *strides)
    return strides if shape else ()


def part(values: Tensor, index: int) -> Tensor:
    """values[index] of a vector."""
    if _reinterpret is None:
        return values.select(0, index)
    return _reinterpret(values, (), (), index)


def as_vector(one: Tensor) -> Tensor:
    """The one element of `one`, a tensor without dimensions, as a vector."""
    return one.view(1) if _reinterpret is None else _reinterpret(one, (1,), (1,), 0)
