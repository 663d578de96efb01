# SPDX-License-Identifier: Apache-2.0
"""Trains what the LoRA demo serves: a small byte-level Llama and one PEFT adapter per corpus.

Everything is saved in the formats that users have (`save_pretrained` of transformers and PEFT) in
a cache folder whose name is a fingerprint of the recipe and the text: a second run reads it back.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from corpus import Corpus

VOCAB = 256  # one token per byte
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# step, number of steps, training loss
OnStep = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of one training; the defaults take two to three minutes on two cores."""

    hidden: int = 256
    intermediate: int = 688
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 128
    batch: int = 8
    base_steps: int = 320
    base_lr: float = 3e-3
    adapter_steps: int = 96
    adapter_lr: float = 4e-3
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    seed: int = 17

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=1024,
            # 1 / sqrt(hidden): a model this narrow hardly starts to learn from the default 0.02.
            initializer_range=self.hidden**-0.5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


QUICK = Recipe(
    hidden=64, intermediate=160, layers=2, heads=4, kv_heads=2, context=64, batch=8,
    base_steps=60, base_lr=5e-3, adapter_steps=60, adapter_lr=1e-2,
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Where the base model and the adapters lie; `cached` if nothing had to be trained."""

    base: Path
    adapters: dict[str, Path]
    cached: bool


def fingerprint(recipe: Recipe, corpora: Sequence[Corpus]) -> str:
    described = {"recipe": asdict(recipe), "text": {c.name: c.digest() for c in corpora}}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def prepare(
    cache: Path,
    recipe: Recipe,
    corpora: Sequence[Corpus],
    device: str,
    on_stage: Callable[[str, int], OnStep],
) -> Trained:
    """Trains the base model and one adapter per corpus, or finds them in the cache.

    on_stage(title, steps) is called before each training and returns its progress callback.
    """
    folder = cache / fingerprint(recipe, corpora)
    trained = Trained(folder / "base", {c.name: folder / c.name for c in corpora}, True)
    if (folder / "complete").exists():
        return trained

    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config()).to(device)
    texts = [_tokens(c.train, device) for c in corpora]
    report = on_stage("base model on all corpora", recipe.base_steps)
    _train(model, texts, recipe, recipe.base_steps, recipe.base_lr, report)
    model.save_pretrained(trained.base)

    for corpus, text, rank in zip(corpora, texts, _cycle(recipe.ranks), strict=False):
        torch.manual_seed(recipe.seed + rank)
        # alpha = 2 r: the adapter's output is scaled by 2 whatever its rank.
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(copy.deepcopy(model), config, adapter_name=corpus.name)
        report = on_stage(f"adapter {corpus.name} (rank {rank})", recipe.adapter_steps)
        _train(adapted, [text], recipe, recipe.adapter_steps, recipe.adapter_lr, report)
        # PEFT puts an adapter that is not called "default" in a folder of its own name.
        adapted.save_pretrained(folder)
    (folder / "complete").touch()
    return Trained(trained.base, trained.adapters, False)


def _cycle(ranks: Sequence[int]):
    while True:
        yield from ranks


def _tokens(text: bytes, device: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()


def _train(
    model: torch.nn.Module,
    texts: Sequence[torch.Tensor],
    recipe: Recipe,
    steps: int,
    peak_lr: float,
    report: OnStep,
) -> None:
    """AdamW with a linear warm-up and a cosine to zero; rows of a batch take the texts in turn."""
    model.train()
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, steps // 20)
    random = torch.Generator().manual_seed(recipe.seed)
    for step in range(steps):
        ramp = min(1.0, (step + 1) / warm_up)
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * ramp * decay
        rows = []
        for row in range(recipe.batch):
            text = texts[row % len(texts)]
            start = int(torch.randint(len(text) - recipe.context, (), generator=random))
            rows.append(text[start : start + recipe.context])
        batch = torch.stack(rows)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step + 1, steps, loss.detach().item())
    model.eval()


@torch.inference_mode()
def loss_on(
    model: torch.nn.Module, rows: torch.Tensor, names: Sequence[str | None] | None = None
) -> float:
    """Mean next-token loss (nats) of `rows` (B, T); names gives each row its adapter."""
    chosen = {} if names is None else {"adapter_names": list(names)}
    logits = model(input_ids=rows, **chosen).logits[:, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
