# SPDX-License-Identifier: Apache-2.0
"""Unfilled tensors of eager calls are like those of torch.empty."""

import pytest
import torch

from mortar._new_tensors import allocator_like, dense_strides, part

SHAPES = [(), (3,), (0,), (2, 3), (0, 64), (3, 0), (1, 1), (2, 3, 4), (3, 0, 5), (2, 0, 0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_like_torch_empty(device, shape, eager, dtype):
    like = torch.empty(shape, dtype=dtype, device=device)
    assert dense_strides(shape) == like.stride()
    made = allocator_like(like, eager)(shape, dense_strides(shape), dtype)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), dtype)
    assert made.device == like.device and not made.requires_grad and not made._is_view()


def test_inference_tensors(device):
    like = torch.empty(2, device=device)
    with torch.inference_mode():
        made = allocator_like(like, True)((2, 2), (2, 1), torch.float32)
    assert made.is_inference()


def test_sizes_of_a_tracer_are_not_asked(device):
    """A compiled call of one size serves others."""
    torch._dynamo.reset()

    def make(x):
        shape = (x.shape[0], x.shape[1])
        return allocator_like(x, False)(shape, dense_strides(shape), x.dtype)

    compiled = torch.compile(make, fullgraph=True, dynamic=True, backend="eager")
    for shape in ((2, 3), (4, 5)):
        made = compiled(torch.empty(shape, device=device))
        assert made.shape == shape and made.is_contiguous()


def test_parts(device):
    values = torch.arange(4.0, device=device)
    assert part(values, 2).shape == () and part(values, 2) == 2
