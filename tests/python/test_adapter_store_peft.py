# SPDX-License-Identifier: Apache-2.0
"""AdapterStore against PEFT itself: everything here is saved by PEFT's own save_pretrained."""

import re

import numpy as np
import peft
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mortar
from adapter_store_cases import raw_bytes, write_adapter


def llama(dtype=torch.float32) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype)


def gpt2(dtype=torch.float32) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ).to(dtype)


def adapted(model: torch.nn.Module, autocast: bool = False, **config) -> peft.PeftModel:
    """A model with an adapter whose A and B are both random, not B = 0 as at the start."""
    wanted = {"init_lora_weights": False} | config
    model = peft.get_peft_model(
        model, peft.LoraConfig(**wanted), autocast_adapter_dtype=autocast
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


ATTENTION = ["q_proj", "v_proj"]
CONFIGS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    "odd rank": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]},
    "rank 1": {"r": 1, "lora_alpha": 1, "target_modules": ["o_proj"]},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION},
    "all linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1},
    "regex target": {"r": 4, "target_modules": r".*\.1\..*(q|down)_proj"},
    "one layer": {"r": 4, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "rank by suffix": {
        "r": 4,
        "rank_pattern": {"v_proj": 7},
        "alpha_pattern": {"q_proj": 3},
        "target_modules": ATTENTION,
    },
    "rank by full name": {
        "r": 4,
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 9, "layers.0.self_attn.v_proj": 2},
        "target_modules": ATTENTION,
    },
    "rank by regex": {
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {r"^model\.layers\.[1-9]\..*q_proj": 5, r".*\.0\..*": 2, "q_proj": 11},
        "alpha_pattern": {r"(q|v)_proj": 12, r"x": 1},
        "target_modules": ATTENTION,
    },
    "gaussian": {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
    "mica": {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "mica"},
    "velora": {
        "r": 4,
        "target_modules": ATTENTION,
        "velora_config": peft.tuners.lora.config.VeloraConfig(),
    },
    "monteclora": {
        "r": 4,
        "target_modules": ATTENTION,
        "monteclora_config": peft.tuners.lora.config.MontecloraConfig(),
    },
}


def check_against_peft(model: peft.PeftModel, adapter: mortar.adapter_store.Adapter) -> None:
    """Names, ranks, scales and bits of every module are those of the live PEFT model."""
    state = peft.get_peft_model_state_dict(model)
    names = {re.sub(r"\.lora_[AB]\.weight$", "", key) for key in state if "lora_velora" not in key}
    names = {n.removeprefix("base_model.model.") for n in names if "monteclora" not in n}
    assert [m.name for m in adapter.modules] == sorted(names) and names
    layers = dict(model.base_model.model.named_modules())
    for module in adapter.modules:
        layer = layers[module.name]
        assert module.rank == layer.r["default"]
        assert module.scale == np.float32(layer.scaling["default"])
        for factor, tensor in (("A", module.a), ("B", module.b)):
            wanted = state[f"base_model.model.{module.name}.lora_{factor}.weight"]
            assert tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
            assert raw_bytes(tensor) == raw_bytes(wanted)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_adapters_are_as_peft_has_them(tmp_path, config):
    model = adapted(llama(), **config)
    model.save_pretrained(tmp_path)
    store = mortar.AdapterStore()
    store.open("x", tmp_path)
    check_against_peft(model, store.get("x"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["same dtype", "float32 adapter"])
def test_dtypes(tmp_path, dtype, autocast):
    model = adapted(llama(dtype), autocast, r=8, target_modules=ATTENTION)
    model.save_pretrained(tmp_path)
    store = mortar.AdapterStore()
    store.open("x", tmp_path)
    check_against_peft(model, store.get("x"))
    wanted = torch.float32 if autocast else dtype
    assert all(m.a.dtype == m.b.dtype == wanted for m in store.get("x").modules)


def test_fan_in_fan_out(tmp_path):
    """GPT-2 keeps its weights as [K, N]; A stays [rank, K] and B [N, rank], and scale * (x A^T) B^T
    is what PEFT adds to the output of the layer."""
    model = adapted(
        gpt2(), r=5, lora_alpha=3, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"]
    )
    model.save_pretrained(tmp_path)
    store = mortar.AdapterStore()
    store.open("x", tmp_path)
    adapter = store.get("x")
    assert adapter.fan_in_fan_out is True
    check_against_peft(model, adapter)
    layer = model.base_model.model.transformer.h[1].mlp.c_proj
    module = adapter.find("transformer.h.1.mlp.c_proj")
    assert module.a.shape == (5, 128) and module.b.shape == (32, 5)
    x = torch.randn(7, 128)
    delta = module.scale * (x.double() @ module.a.double().T) @ module.b.double().T
    with torch.no_grad():
        wanted = layer(x) - layer.base_layer(x)
    assert torch.allclose(delta.float(), wanted, rtol=1e-4, atol=1e-4)  # PEFT sums in float32


def test_folders_of_a_model_with_several_adapters(tmp_path):
    model = adapted(llama(), r=8, target_modules=ATTENTION)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["o_proj"]))
    model.save_pretrained(tmp_path)
    store = mortar.AdapterStore()
    store.open("first", tmp_path)
    store.open("second", tmp_path / "second")
    assert {m.rank for m in store.get("first").modules} == {8}
    assert [m.name for m in store.get("second").modules] == [
        f"model.layers.{i}.self_attn.o_proj" for i in range(2)
    ]


REFUSED = {
    "dora": ({"use_dora": True}, "use_dora must be empty or off, got true"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save must be empty or off"),
    "bias all": ({"bias": "all"}, "bias must be 'none', got 'all'"),
    "bias lora_only": ({"bias": "lora_only"}, "bias must be 'none', got 'lora_only'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias must be empty or off, got true"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "a LoRA on an embedding layer"),
    "token indices": ({"trainable_token_indices": [1, 2]}, "replaces rows of the embedding"),
    "layer replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication must be"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "aLoRA acts only on the tokens after"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights must leave the base model"),
    "pissa fast": (
        {"init_lora_weights": "pissa_niter_2"},
        "init_lora_weights must leave the base",
    ),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights must leave the base model"),
    "kasa": ({"kasa_config": peft.tuners.lora.config.KasaConfig()}, "KaSA puts a diagonal"),
    "block diagonal": (
        {
            "use_bdlora": peft.tuners.lora.config.BdLoraConfig(
                target_modules_bd_a=ATTENTION, nblocks=2
            )
        },
        "BD-LoRA stores A or B as blocks",
    ),
    "parameters": (
        {"target_modules": [], "target_parameters": ["q_proj.weight"]},
        "the adapter changes bare parameters",
    ),
}


def expect_refused(folder, message: str) -> None:
    store = mortar.AdapterStore()
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        store.open("x", folder)
    assert str(raised.value).startswith(f"AdapterStore.open: {folder}/adapter_")
    assert len(store) == 0


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refuses_what_mortar_cannot_serve(tmp_path, config, message):
    model = adapted(llama(), **{"r": 4, "target_modules": ATTENTION} | config)
    model.save_pretrained(tmp_path)
    expect_refused(tmp_path, message)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(target_modules=ATTENTION),
        peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[]),
        peft.VeraConfig(target_modules=["o_proj"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.AdaLoraConfig(target_modules=ATTENTION, total_step=9, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: config.peft_type.value,
)
@pytest.mark.filterwarnings("ignore")
def test_refuses_other_peft_types(tmp_path, config):
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path)
    expect_refused(tmp_path, f"peft_type must be 'LORA', got '{config.peft_type.value}'")


@pytest.mark.filterwarnings("ignore")
def test_refuses_saved_base_weights_and_pickles(tmp_path):
    model = adapted(llama(), r=4, target_modules=ATTENTION)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    expect_refused(tmp_path, "a weight of the base model is written with save_embedding_layers")
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    expect_refused(tmp_path / "pickled", "adapter_model.safetensors: must exist")


PIECES = [
    *["model", "layers", "mlp", "q_proj", "k_proj", "proj", "0", "1", "x", "_", "-", "é"],
    *[".", "\\.", ".*", ".+", "\\d", "\\w+", "[0-9]", "[^.]", "[a-z_]+", "(q|k)", "(?:0|1)"],
    *["^", "$", "?", "x*", "{2}", "{1,2}", "|", "(", ")", "(?=", "(?!", "(?P<n>", "\\2"],
]
MODULES = [
    "model.layers.0.mlp.q_proj",
    "model.layers.11.mlp.k_proj",
    "model.layers_0.q_proj",
    "modelé.x",
    "q_proj",
]


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join),
        min_size=1,
        max_size=3,
        unique=True,
    )
)
@example(keys=["proj", ".proj", "mlp.q_proj"])
@example(keys=["model.", "modelé"])
@example(keys=["q_proj|x", "(q|k)_proj$", "\\2"])
@example(keys=["[", "q_proj"])
def test_patterns_match_as_in_peft(tmp_path_factory, keys):
    """The first key that PEFT matches gives alpha. Out of scope: what Python's `re` refuses, and
    what takes it, too, longer than a name is worth (the store gives up after a number of steps).
    """
    alphas = {key: float(i + 2) for i, key in enumerate(keys)}
    try:
        for key in keys:
            get_pattern_key([key], "")
    except re.error:
        assume(False)
    wanted = {name: alphas.get(get_pattern_key(alphas, name), 1.0) for name in MODULES}
    tensors = {}
    for name in MODULES:
        for factor in "AB":
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = torch.ones(1, 1)
    folder = write_adapter(
        tmp_path_factory.mktemp("patterns"), tensors, r=1, lora_alpha=1, alpha_pattern=alphas
    )
    store = mortar.AdapterStore()
    try:
        store.open("x", folder)
    except ValueError as error:
        assume("must match all modules within 32000000 steps" not in str(error))
        raise
    assert {m.name: m.scale for m in store.get("x").modules} == wanted
