# SPDX-License-Identifier: Apache-2.0
"""accelerate on adapters whose modules are no plain linear layers: PEFT's own code trains them."""

import copy
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from peft.utils import hotswap
from torch import nn
from torch.nn.utils import parametrizations, prune

from mortar.compat.peft import accelerate
from peft_models import ADAPTERS, adapted, llama, tokens
from test_compat_peft_training import train_step, trainable


def with_bias(linear):
    linear.bias = nn.Parameter(torch.ones_like(linear.weight[:, 0]))


def with_another_forward(module):
    original = module.forward
    module.forward = lambda *args, **kwargs: 2 * original(*args, **kwargs)


MORE_THAN_A_WEIGHT = {
    "adapters of ParametrizedLinear": parametrizations.weight_norm,
    "(adapters whose weight is no parameter|hooks or another forward on .*)":
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "LoRA biases": with_bias,
    "hooks or another forward on the modules of an adapter": with_another_forward,
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


def hooked(layer):
    layer.lora_A["small"].register_forward_hook(lambda module, inputs, output: 2 * output)


def scaled_by_a_tensor(layer):
    """As PEFT's hot-swapping does, which then fills it."""
    layer.scaling["small"] = torch.tensor(layer.scaling["small"])


SERVED_BY_PEFT = {
    "hooks or another forward on the modules of an adapter": (
        hooked,
        lambda layer: with_another_forward(layer.lora_B["small"]),
    ),
    "scales that are tensors": (scaled_by_a_tensor,),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("reason", "change"), [(r, c) for r, changes in SERVED_BY_PEFT.items() for c in changes]
)
def test_mixed_batches_of_what_only_peft_can_serve(device, reason, change, before):
    model = adapted(llama(device=device), {"small": ADAPTERS["small"]}).eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    other = copy.deepcopy(model)
    options = {"input_ids": tokens(2, 5, device), "adapter_names": ["small", "__base__"]}
    with torch.no_grad():
        if not before:
            accelerate(model)
            model(**options)
        change(layer)
        change(other.base_model.model.model.layers[0].self_attn.q_proj)
        with pytest.warns(UserWarning, match=f"left to PEFT: 1 x {reason}$"):
            if before:
                accelerate(model)
            got = model(**options).logits
        torch.testing.assert_close(got, other(**options).logits, rtol=1e-3, atol=1e-4)


def test_hot_swapping_changes_scales_in_place(device, tmp_path):
    settings = {"small": {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj"]}}
    adapted(llama(device=device), settings).save_pretrained(tmp_path)
    settings["small"] |= {"r": 2, "lora_alpha": 2}
    model = trainable(adapted(llama(device=device), settings), "small")
    other, ids = copy.deepcopy(model), tokens(2, 5, device)
    accelerate(other)
    got = []
    for each in (model, other):
        train_step(each, ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hotswap.prepare_model_for_compiled_hotswap(each, target_rank=8)
            train_step(each, ids)
            hotswap.hotswap_adapter(each, tmp_path / "small", "small", torch_device=device.type)
            got.append(train_step(each, ids)[0])
    torch.testing.assert_close(got[1], got[0], rtol=1e-3, atol=1e-4)


class Doubled(Linear):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


@pytest.mark.parametrize("of_the_class", [True, False])
def test_layers_with_another_forward_keep_it(device, of_the_class):
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    if of_the_class:
        config._register_custom_module({nn.Linear: Doubled})
    model = get_peft_model(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)).to(device), config)
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["1"]))
    if not of_the_class:
        with_another_forward(model.base_model.model[0])
    x = torch.randn(3, 16, device=device)
    names = ["default", "plain", "__base__"]
    with torch.no_grad():
        want = model(x), model.eval()(x, adapter_names=names)
        with pytest.warns(UserWarning, match="1 x (Doubled layers|layers with another forward)"):
            accelerate(model)
        got = model.train()(x), model.eval()(x, adapter_names=names)
    torch.testing.assert_close(got, want)


def test_transforms_of_torch_func_run_through_peft(device):
    model = trainable(adapted(llama(device=device), {"small": ADAPTERS["small"]}), "small")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, layer.in_features, device=device)

    def results():
        with forward_ad.dual_level():
            dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(dual).tangent
        gradient = torch.func.vmap(torch.func.grad(lambda row: layer(row).square().sum()))(x)
        return tangent.detach(), gradient

    want = results()
    accelerate(model)
    with pytest.warns(UserWarning, match="left to PEFT: transforms of torch.func"):
        got = results()
    torch.testing.assert_close(got, want)


def test_calls_of_a_layer_without_rows_and_with_absent_offsets(device):
    """PEFT hands alora_offsets=None to its layers, of which their base layers know nothing."""
    model = trainable(adapted(llama(device=device), {"small": ADAPTERS["small"]}), "small")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 3, layer.in_features, device=device)
    want = layer(x)
    accelerate(model, train_mixed=True)
    torch.testing.assert_close(layer(x, alora_offsets=None), want, rtol=1e-3, atol=1e-4)
    with model.base_model._enable_peft_forward_hooks(adapter_names=["small", "__base__"]):
        assert layer(x[:, :0]).shape == (2, 0, layer.out_features)
