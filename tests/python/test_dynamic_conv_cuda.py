# SPDX-License-Identifier: Apache-2.0
"""What eager calls of the dynamic convolution cost the host of a GPU."""

import pytest
import torch

from mortar.compat import jet
from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step
from test_lora_cuda import host_cost_and_limit, host_costs

BF16 = torch.bfloat16


class Nothing(torch.autograd.Function):
    """What PyTorch itself takes to record a gradient."""

    @staticmethod
    def forward(ctx, x, kernels, y):
        ctx.save_for_backward(x, kernels)
        return y

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError


@pytest.mark.alone
@pytest.mark.parametrize(
    "op", ["dynamic_conv", "gradients wanted", "dynamic_conv_step", "jet training", "jet step"]
)
def test_host_cost(op):
    x = torch.randn(1, 4, 256, dtype=BF16, device="cuda")
    kernels = torch.randn(1, 4, 256, 4, dtype=BF16, device="cuda")
    state = torch.zeros(4, 256, 4, dtype=BF16, device="cuda")
    row, row_kernels = x[0], kernels[0]
    token = row.unsqueeze(1)
    leaves = [t.clone().requires_grad_() for t in (x, kernels)]
    calls = {
        "dynamic_conv": lambda: dynamic_conv(x, kernels),
        "gradients wanted": lambda: dynamic_conv(*leaves),
        "dynamic_conv_step": lambda: dynamic_conv_step(row, row_kernels, state),
        "jet training": lambda: jet.dynamic_conv_triton_autograd(x, kernels),
        "jet step": lambda: jet.causal_conv_step_triton(token, state, row_kernels),
    }
    with torch.set_grad_enabled("step" not in op):  # decoding has no gradients
        cost, limit = host_cost_and_limit(calls[op])
    if op == "gradients wanted":
        y = torch.empty_like(x)
        limit += host_costs(lambda: Nothing.apply(*leaves, y))[0]
    print(f"host cost of {op}: {cost:.1f} us, at most {limit:.1f}")
    assert cost <= limit
