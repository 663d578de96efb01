# SPDX-License-Identifier: Apache-2.0
"""accelerate and restore: Mortar in the place of PEFT's own mixed batch."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from mortar import lora
from mortar.compat.peft import accelerate, restore
from peft_models import (
    ADAPTERS,
    ALL_LINEAR,
    NAMES,
    adapted,
    assert_no_less_exact,
    assert_same_up_to_rounding,
    gpt2,
    llama,
    logits,
    tokens,
)


@pytest.fixture
def model(device):
    return adapted(llama(device=device))


def mortar_and_peft(model, ids, names=NAMES):
    """Logits of both and of an fp64 copy, on a model that is handed back as it was."""
    peft = logits(model, ids, names)
    exact = logits(copy.deepcopy(model).double(), ids, names)
    got = logits(accelerate(model), ids, names)
    restore(model)
    return got, peft, exact


@pytest.mark.parametrize("length", [1, 2, 17])
def test_matches_peft_and_fp64(model, device, length):
    got, peft, exact = mortar_and_peft(model, tokens(len(NAMES), length, device))
    assert_no_less_exact(got, peft, exact)


@pytest.mark.parametrize("names", [["small"] * 3, ["__base__"] * 2, ["odd"], [*ADAPTERS] * 5])
def test_other_batches(model, device, names):
    got, peft, exact = mortar_and_peft(model, tokens(len(names), 5, device), names)
    assert_no_less_exact(got, peft, exact)


def test_adapters_change_the_logits(model, device):
    """The parity above would hold for adapters that do nothing."""
    ids = tokens(1, 9, device).expand(len(NAMES), -1)
    got = logits(accelerate(model), ids, NAMES)
    base = NAMES.index("__base__")
    for row, name in enumerate(NAMES):
        distance = (got[row] - got[base]).abs().max()
        assert distance == 0 if name == "__base__" else distance > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_model_with_float32_adapters(device, dtype):
    model = adapted(llama(dtype, device))
    assert model.base_model.model.lm_head.weight.dtype == dtype
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["small"].weight.dtype == torch.float32
    got, peft, exact = mortar_and_peft(model, tokens(len(NAMES), 9, device))
    assert got.dtype == dtype
    assert_no_less_exact(got, peft, exact, dtype)


def test_half_adapters(device):
    model = adapted(llama(torch.bfloat16, device)).to(torch.bfloat16)
    got, peft, exact = mortar_and_peft(model, tokens(len(NAMES), 9, device))
    assert_no_less_exact(got, peft, exact, torch.bfloat16)


def test_conv1d_with_fan_in_fan_out(device):
    targets = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    model = adapted(gpt2(device), {"one": {"r": 3, **targets}, "two": {"r": 8, **targets}})
    got, peft, exact = mortar_and_peft(model, tokens(3, 7, device), ["two", "__base__", "one"])
    assert_no_less_exact(got, peft, exact)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_generate(model, device, settings):
    ids = tokens(len(NAMES), 6, device)
    wanted = {"input_ids": ids, "adapter_names": NAMES, "do_sample": False, "max_new_tokens": 8}
    peft = model.generate(**wanted, **settings)
    got = accelerate(model).generate(**wanted, **settings)
    assert torch.equal(got, peft)


def test_encoder_decoder_with_beams(device):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, initializer_factor=3.0,
    )  # fmt: skip
    base = T5ForConditionalGeneration(config).to(device).eval()
    model = adapted(
        base, {n: {"r": r, "target_modules": ["q", "v"]} for n, r in (("one", 2), ("two", 5))}
    )
    ids = tokens(3, 5, device)
    for beams in (1, 2):
        wanted = {
            "adapter_names": ["two", "one", "__base__"],
            "num_beams": beams,
            "max_new_tokens": 6,
        }
        peft = model.generate(input_ids=ids, **wanted)
        got = accelerate(model).generate(input_ids=ids, **wanted)
        restore(model)
        assert torch.equal(got, peft)


def test_none_is_the_base_model(model, device):
    ids = tokens(2, 4, device)
    accelerate(model)
    assert torch.equal(logits(model, ids, ["odd", None]), logits(model, ids, ["odd", "__base__"]))


def test_one_plan_for_all_layers_and_steps(model, device, monkeypatch):
    made = []
    plan = lora.plan
    monkeypatch.setattr(lora, "plan", lambda *args: made.append(len(args[0])) or plan(*args))
    accelerate(model)
    ids = tokens(len(NAMES), 5, device)
    model.generate(input_ids=ids, adapter_names=NAMES, max_new_tokens=4, do_sample=False)
    assert made == [5 * len(NAMES), len(NAMES)]  # the prompt, then one plan for every step
    logits(model, ids, NAMES[::-1])
    assert len(made) == 3


def test_restore_gives_back_the_same_bits(model, device):
    ids = tokens(len(NAMES), 7, device)
    keys, before = list(model.state_dict()), logits(model, ids, NAMES)
    accelerate(model)
    assert list(model.state_dict()) == keys
    logits(model, ids, NAMES)
    restore(model)
    assert torch.equal(logits(model, ids, NAMES), before)
    assert not any("forward" in vars(module) for module in model.modules())
    accelerate(model)  # and again


def test_without_names_nothing_changes(model, device):
    ids = tokens(2, 7, device)
    model.set_adapter("small")
    model.requires_grad_(False)
    with torch.inference_mode():
        active = model(input_ids=ids).logits
        with model.disable_adapter():
            disabled = model(input_ids=ids).logits
        accelerate(model)
        assert torch.equal(model(input_ids=ids).logits, active)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, disabled)
            assert torch.equal(logits(model, ids, ["odd", "small"]), disabled)


ERRORS = {
    "fewer names than samples": lambda m, ids: m(input_ids=ids, adapter_names=["odd"]),
    "more names than samples": lambda m, ids: m(input_ids=ids, adapter_names=["odd"] * 5),
    "unknown adapter": lambda m, ids: m(input_ids=ids, adapter_names=["odd", "nobody", "what"]),
    "training": lambda m, ids: m.train()(input_ids=ids, adapter_names=["odd"] * 3),
    "merged": lambda m, ids: (
        m.merge_adapter(["odd"]),
        m(input_ids=ids, adapter_names=["odd"] * 3),
    ),
    "generate": lambda m, ids: m.generate(input_ids=ids, adapter_names=["odd"], num_beams=2),
}


@pytest.mark.parametrize("wrong", ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_those_of_peft(wrong, device):
    said = []
    for prepare in (lambda m: m, accelerate):
        with torch.no_grad(), pytest.raises(ValueError) as error:
            wrong(prepare(adapted(llama(device=device))), tokens(3, 4, device))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_serves_on_after_an_error(model, device):
    ids = tokens(len(NAMES), 4, device)
    before = logits(accelerate(model), ids, NAMES)
    with pytest.raises(ValueError, match="Length of `adapter_names`"):
        logits(model, ids, NAMES[:2])
    assert torch.equal(logits(model, ids, NAMES), before)


CHANGES = {
    "in place": lambda m: q_proj(m).lora_B["odd"].weight.data.mul_(3),
    "scaled": lambda m: q_proj(m).set_scale("odd", 7.0),
    "moved": lambda m: m.to(torch.bfloat16).float(),
    "replaced": lambda m: q_proj(m).update_layer("odd", 7, 7, LoraConfig(init_lora_weights=False)),
    "deleted": lambda m: m.delete_adapter("small"),
    "added": lambda m: m.add_adapter(
        "odder", LoraConfig(r=6, target_modules=[*ALL_LINEAR, "lm_head"], init_lora_weights=False)
    ),
    "float64": lambda m: m.double(),
}


def q_proj(model):
    return model.base_model.model.model.layers[1].self_attn.q_proj


@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_in_service(model, device, change):
    names = ["odd", "odder" if change == "added" else "pattern", "__base__"]
    ids = tokens(3, 5, device)
    before = logits(accelerate(model), ids, ["odd", "pattern", "__base__"])
    CHANGES[change](model)
    model.requires_grad_(False).eval()
    got = logits(model, ids, names)
    peft = logits(restore(model), ids, names)
    assert_same_up_to_rounding(got, peft)
    assert torch.equal(got, before) == (change == "deleted")  # of an adapter not asked for


LEFT_TO_PEFT = {
    "2 x DoraLinearVariant": {"r": 4, "target_modules": ["up_proj"], "use_dora": True},
    "1 x Embedding layers": {"r": 4, "target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("reason", LEFT_TO_PEFT)
def test_layers_left_to_peft(device, reason):
    adapters = {**ADAPTERS, "small": {"r": 4, "target_modules": ["q_proj"]}}
    model = adapted(llama(device=device), {**adapters, "special": LEFT_TO_PEFT[reason]})
    # DoRA is refused in a batch by PEFT, but other adapters of its layers are not.
    names = [n if n != "odd" or "Dora" in reason else "special" for n in NAMES]
    ids = tokens(len(names), 5, device)
    peft = logits(model, ids, names)
    with pytest.warns(UserWarning, match=reason):
        accelerate(model)
    assert_same_up_to_rounding(logits(model, ids, names), peft)
    if "Dora" in reason:
        with pytest.raises(ValueError, match="when DoRA is enabled"):
            logits(model, ids, ["special"] * len(names))


def test_lora_bias_and_saved_modules(device):
    adapters = {
        "bias": {"r": 4, "target_modules": ["c_proj"], "lora_bias": True},
        "head": {"r": 4, "target_modules": ["c_fc"]},
    }
    model = adapted(gpt2(device), adapters, fan_in_fan_out=True, modules_to_save=["lm_head"])
    names = ["bias", "head", "__base__"]
    ids = tokens(3, 5, device)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["head"].weight.mul_(2)
    peft = logits(model, ids, names)
    with pytest.warns(UserWarning, match="4 x LoRA biases"):
        accelerate(model)
    assert_same_up_to_rounding(logits(model, ids, names), peft)


def test_gradients_are_those_of_peft(model, device):
    embeddings = model.get_input_embeddings()(tokens(3, 5, device))
    names = ["odd", "__base__", "small"]

    def gradients():
        inputs = embeddings.detach().clone().requires_grad_()
        model(inputs_embeds=inputs, adapter_names=names).logits.square().sum().backward()
        weight = q_proj(model).lora_A["odd"].weight
        return [g for g in (inputs.grad, weight.grad) if g is not None]

    for trainable in (False, True):
        q_proj(model).lora_A["odd"].weight.requires_grad_(trainable).grad = None
        peft = gradients()
        q_proj(model).lora_A["odd"].weight.grad = None
        accelerate(model)
        got = gradients()
        restore(model)
        assert len(got) == len(peft) == 1 + trainable
        for mine, theirs in zip(got, peft, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_refuses_what_it_cannot_serve(device):
    base = llama(device=device)
    with pytest.raises(TypeError, match="must be a PeftModel with LoRA adapters.*LlamaForCausalLM"):
        accelerate(base)
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(TypeError, match="must be a PeftModel with LoRA adapters"):
        accelerate(get_peft_model(copy.deepcopy(base), ia3))
    dora = adapted(base, {"d": {"r": 4, "target_modules": ["q_proj"], "use_dora": True}})
    before = logits(dora, tokens(1, 3, device), ["__base__"])
    with pytest.raises(ValueError, match="plain LoRA, got 2 x DoraLinearVariant"):
        accelerate(dora)
    assert not any("forward" in vars(module) for module in dora.modules())
    assert before.shape == (1, 3, 61)


def test_refuses_twice(model):
    with pytest.raises(ValueError, match="restore: model must be in service"):
        restore(model)
    accelerate(model)
    with pytest.raises(ValueError, match="accelerate: model must not be in service already"):
        accelerate(model)
    restore(model)
