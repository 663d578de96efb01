# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with several LoRA adapters, for the tests of ``mortar.compat.peft``."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB = 61
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Ranks that differ and are no multiples of 8, rslora, patterns, and a missing half of the modules.
ADAPTERS = {
    "small": {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR},
    "odd": {"r": 5, "lora_alpha": 3, "target_modules": ALL_LINEAR, "use_rslora": True},
    "partial": {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "pattern": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 3},
        "alpha_pattern": {"o_proj": 20},
    },
}
NAMES = ["odd", "__base__", "partial", "small", "odd", "pattern"]


def llama(dtype=torch.float32, device="cpu") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device, dtype).eval()


def gpt2(device="cpu") -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=36,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).to(device).eval()


def adapted(base, adapters=None, **shared):
    """A PEFT model over a copy of base, frozen and in eval mode; no adapter is a no-op."""
    model = None
    for name, settings in (ADAPTERS if adapters is None else adapters).items():
        config = LoraConfig(**{"init_lora_weights": False, **shared, **settings})
        if model is None:
            model = get_peft_model(copy.deepcopy(base), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    return model.requires_grad_(False).eval()


def tokens(batch: int, length: int, device="cpu") -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), device=device)


@torch.inference_mode()
def logits(model, ids, names) -> torch.Tensor:
    return model(input_ids=ids, adapter_names=names).logits


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def assert_no_less_exact(got, peft, exact, dtype=torch.float32) -> None:
    """Both round what the other computes exactly, in other places: the worst of many roundings of
    the same size may differ by a factor of two, hardly by more; eps covers a lucky PEFT."""
    eps = torch.finfo(dtype).eps
    assert torch.isfinite(got).all()
    assert relative_error(got, exact) <= 2 * relative_error(peft, exact) + 2 * eps


def assert_same_up_to_rounding(got, peft) -> None:
    """For where an fp64 copy is out of reach. Against one, both err by some 10 eps of the largest
    logit in these models (two layers, sums of up to 72 products): 64 leaves a factor of three."""
    eps = torch.finfo(torch.float32).eps
    assert torch.isfinite(got).all()
    assert relative_error(got, peft.double()) <= 64 * eps
