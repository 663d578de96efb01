# SPDX-License-Identifier: Apache-2.0
"""accelerate on adapters whose modules are no plain linear layers: PEFT's own code trains them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from mortar.compat.peft import accelerate
from peft_models import ADAPTERS, adapted, llama, tokens
from test_compat_peft_training import train_step, trainable


def with_bias(linear):
    linear.bias = nn.Parameter(torch.ones_like(linear.weight[:, 0]))


MORE_THAN_A_WEIGHT = {
    "adapters of ParametrizedLinear": parametrizations.weight_norm,
    "(adapters whose weight is no parameter|hooks on the modules of an adapter)":
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "LoRA biases": with_bias,
}  # fmt: skip


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("reason", MORE_THAN_A_WEIGHT)
def test_modules_of_an_adapter_that_are_more_than_a_weight(device, reason, before):
    """Whether they were so before accelerate or have been changed since."""
    model = trainable(adapted(llama(device=device), {"small": ADAPTERS["small"]}), "small")
    other, ids = copy.deepcopy(model), tokens(2, 5, device)
    for changed in (model, other):
        if changed is other and not before:
            accelerate(other)
        layer = changed.base_model.model.model.layers[0].self_attn.q_proj
        MORE_THAN_A_WEIGHT[reason](layer.lora_B["small"])
    with pytest.warns(UserWarning, match=f"left to PEFT: (1 x )?{reason}$"):
        if before:
            accelerate(other)
        got = train_step(other, ids)
    want = train_step(model, ids)
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
    assert got[1].keys() == want[1].keys()


def test_hooks_are_respected_in_a_mixed_batch(device):
    model = adapted(llama(device=device), {"small": ADAPTERS["small"]}).eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["small"].register_forward_hook(lambda module, inputs, output: 2 * output)
    options = {"input_ids": tokens(2, 5, device), "adapter_names": ["small", "__base__"]}
    with torch.no_grad():
        want = model(**options).logits
        with pytest.warns(UserWarning, match="left to PEFT: 1 x hooks on the modules"):
            accelerate(model)
        torch.testing.assert_close(model(**options).logits, want, rtol=1e-3, atol=1e-4)
