# SPDX-License-Identifier: Apache-2.0
"""What the LoRA demo serves: one model, as it is, under PEFT and under Mortar."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import mortar
from corpus import Corpus
from mortar.compat.peft import attach

MIN_BATCH = 8


@dataclass
class Subject:
    """What is served: a model three times over the same parameters, and how to make text of it."""

    base: torch.nn.Module
    peft: PeftModel
    mortar: torch.nn.Module
    store: mortar.AdapterStore
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    homes: dict[str, str]  # adapter -> the corpus that it was trained on
    prompts: dict[str, str]  # adapter -> a prompt that suits it

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    def batch_names(self) -> list[str]:
        """The adapters in turn, the base model ("__base__") after the last of them; 8 or more."""
        names = [*self.store.names(), "__base__"]
        return list(itertools.islice(itertools.cycle(names), max(MIN_BATCH, len(names))))

    def rows(self, corpora: Sequence[Corpus], count: int, length: int) -> torch.Tensor:
        """Token ids [count, length] of text that was not trained on, the corpora in turn."""
        span = 16 * length  # bytes: indented code may have many to a token
        picked = []
        for row in range(count):
            corpus = corpora[row % len(corpora)]
            start = (len(corpus.test) - span) * row // count
            text = corpus.test[start : start + span].decode("latin-1")
            picked.append(self.encode(text)[:length])
        return torch.tensor(picked, device=self.device)


def assemble(
    base: str | Path, adapters: dict[str, Path], device: str, dtype: str, **text: Any
) -> Subject:
    """Loads a base model and adapter folders; `text` is the rest of a Subject."""
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=kind).to(device).eval()
    store = mortar.AdapterStore()
    for name, folder in adapters.items():
        store.open(name, folder)
    theirs = None
    for name, folder in adapters.items():
        if theirs is None:
            theirs = PeftModel.from_pretrained(_sharing_copy(model), folder, adapter_name=name)
        else:
            theirs.load_adapter(folder, adapter_name=name)
    served = attach(_sharing_copy(model), store)
    return Subject(model, theirs.eval(), served, store, **text)


def _sharing_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Another module tree over the same parameters."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors})
