# SPDX-License-Identifier: Apache-2.0
"""Copies and pickles of a model in service are the plain model."""

import copy
import io
import json

import pytest
import torch
from peft import LoraConfig, PeftModel

import mortar
from mortar.compat.peft import accelerate, attach, restore
from peft_models import NAMES, adapted, assert_same_up_to_rounding, llama, logits, tokens


@pytest.fixture
def model(device):
    return adapted(llama(device=device))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "torch.save": saved_whole}


def assert_plain(model):
    for module in model.modules():
        for name in ("forward", "generate", "__reduce_ex__", "_mortar_session"):
            assert name not in vars(module), f"{type(module).__name__}.{name}"
        assert "_enable_peft_forward_hooks" not in vars(module)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_an_accelerated_model_is_plain(model, device, way):
    ids = tokens(len(NAMES), 7, device)
    peft = logits(model, ids, NAMES)
    served = logits(accelerate(model), ids, NAMES)
    made = WAYS[way](model)
    assert_plain(made)
    assert isinstance(made, PeftModel) and made.base_model is not model.base_model
    assert torch.equal(logits(made, ids, NAMES), peft)  # to the last bit: PEFT's own code
    assert torch.equal(logits(model, ids, NAMES), served)  # the original is still in service
    assert_same_up_to_rounding(logits(accelerate(made), ids, NAMES), peft)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_same_up_to_rounding(logits(made, ids, NAMES), peft)
    restore(made)
    restore(model)
    assert torch.equal(logits(made, ids, NAMES), peft)


@pytest.mark.parametrize(
    "part", ["base_model", "base_model.model", "base_model.model.model.layers.0"]
)
def test_copies_of_parts(model, part):
    accelerate(model)
    assert_plain(copy.deepcopy(model.get_submodule(part)))
    assert len([m for m in model.modules() if "forward" in vars(m)])


def replicated(network):
    """What torch.nn.parallel.replicate makes for another device: weights that are no parameters.
    Here they are twice those of the network."""
    replicas = {m: m._replicate_for_data_parallel() for m in network.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, child if child is None else replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, parameter if parameter is None else parameter * 2)
    return replicas[network]


def test_replicas_use_their_own_weights(model, device):
    """Of nn.DataParallel, where the layers of a model in service know those of another device."""
    model.base_model.set_adapter("small")
    ids = tokens(2, 5, device)
    replica = replicated(model.train())
    with torch.no_grad():
        want = replica(input_ids=ids).logits
    accelerate(model)
    with pytest.warns(UserWarning, match="replicas of nn.DataParallel run without Mortar"):
        replica = replicated(model)
    assert_plain(replica)
    with torch.no_grad():
        assert torch.equal(replica(input_ids=ids).logits, want)
    assert len([m for m in model.modules() if "forward" in vars(m)])
    assert "_replicate_for_data_parallel" not in vars(restore(model).base_model)


def test_copies_after_the_tables_were_made_again(model, device):
    accelerate(model)
    model.add_adapter("new", LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    model.requires_grad_(False).eval()
    names = ["new", "__base__", "odd"]
    ids = tokens(3, 4, device)
    got = logits(model, ids, names)
    made = copy.deepcopy(model)
    assert_plain(made)
    restore(model)
    assert_plain(model)
    peft = logits(model, ids, names)
    assert torch.equal(logits(made, ids, names), peft)
    assert_same_up_to_rounding(got, peft)


def test_save_pretrained_is_as_before(model, tmp_path):
    model.save_pretrained(tmp_path / "before")
    accelerate(model).save_pretrained(tmp_path / "in service")
    copy.deepcopy(model).save_pretrained(tmp_path / "copied")
    files = sorted(f.relative_to(tmp_path / "before") for f in (tmp_path / "before").rglob("*.*"))
    assert any(f.suffix == ".safetensors" for f in files)
    for folder in ("in service", "copied"):
        for file in files:
            want, got = (tmp_path / f / file for f in ("before", folder))
            if file.suffix == ".json":  # whose lists were sets, without an order
                assert content(got) == content(want), file
            elif file.suffix == ".safetensors":
                assert got.read_bytes() == want.read_bytes(), file


def content(file):
    """A config, its lists sorted."""
    config = json.loads(file.read_text())
    return {k: sorted(v, key=str) if isinstance(v, list) else v for k, v in config.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_an_attached_model_is_plain(device, tmp_path, way):
    base = llama(device=device)
    model = adapted(copy.deepcopy(base))
    model.save_pretrained(tmp_path)
    store = mortar.AdapterStore()
    for name in model.peft_config:
        store.open(name, tmp_path / name)
    ids = tokens(len(NAMES), 5, device)
    with torch.inference_mode():
        before = base(input_ids=ids).logits
    served = logits(attach(base, store), ids, NAMES)
    made = WAYS[way](base)
    assert_plain(made)
    with torch.inference_mode():
        assert torch.equal(made(input_ids=ids).logits, before)
    assert torch.equal(logits(attach(made, store), ids, NAMES), served)
    assert torch.equal(logits(base, ids, NAMES), served)
