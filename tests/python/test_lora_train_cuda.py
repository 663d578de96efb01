# SPDX-License-Identifier: Apache-2.0
"""LoRA training on a GPU: what a PEFT layer costs the host."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import mortar.compat.peft
from test_lora_cuda import host_costs


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_layer_costs_the_host_less_than_pefts(dropout):
    """Forward and backward at 512 tokens, whose kernels the device runs as fast as they come."""
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    config = LoraConfig(r=16, lora_dropout=dropout, target_modules=["0"])
    theirs = get_peft_model(torch.nn.Sequential(linear), config).train()
    ours = mortar.compat.peft.accelerate(copy.deepcopy(theirs))
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(model):
        return lambda: model(x).backward(x.detach())

    cost, limit = host_costs(step(ours), step(theirs), bursts=50, calls=20)
    print(f"host cost of a layer: {cost:.1f} us, at most {limit:.1f}")
    assert cost <= limit
