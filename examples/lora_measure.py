# SPDX-License-Identifier: Apache-2.0
"""What the LoRA demo reports: exactness, losses and times of one mixed batch."""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress

from corpus import Corpus
from lora_report import stage
from lora_subject import Subject
from mortar.compat.peft import accelerate, restore

PREFILL_TOKENS = 128


@torch.inference_mode()
def check(subject: Subject, corpora: Sequence[Corpus], progress: Progress) -> dict[str, Any]:
    """Logits of one mixed batch, through Mortar and through PEFT, against a float64 copy."""
    task = stage(progress, "comparing with float64", 4)
    ids = subject.rows(corpora, len(subject.batch_names()), PREFILL_TOKENS)
    wanted = {"input_ids": ids, "adapter_names": subject.batch_names()}
    kinds = ("max", "rms")
    if not _fits_in_float64(subject.peft):
        progress.console.print("no room for a float64 copy of the model: exactness not checked")
        return {f"{who}{k}_rel_error_vs_fp64": None for who in ("", "peft_") for k in kinds}
    exact = copy.deepcopy(subject.peft).double()(**wanted).logits
    progress.advance(task)
    theirs = subject.peft(**wanted).logits
    progress.advance(task)
    ours = subject.mortar(**wanted).logits
    progress.advance(task)
    accelerated = accelerate(subject.peft)(**wanted).logits
    restore(subject.peft)
    progress.advance(task)
    if not torch.equal(accelerated, ours):
        raise RuntimeError(
            "demo: accelerate and attach must agree to the last bit, got a difference"
        )
    found = {}
    for who, logits in (("", ours), ("peft_", theirs)):
        error = logits.double() - exact
        found[f"{who}max_rel_error_vs_fp64"] = float(error.abs().max() / exact.abs().max())
        found[f"{who}rms_rel_error_vs_fp64"] = float(error.square().mean().sqrt() / exact.std())
    return found


def _fits_in_float64(model: torch.nn.Module) -> bool:
    needed = 8 * sum(p.numel() for p in model.parameters())
    if next(model.parameters()).is_cuda:
        free, _ = torch.cuda.mem_get_info()
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return needed < 0.8 * free


@torch.inference_mode()
def losses(
    subject: Subject, corpora: Sequence[Corpus], progress: Progress
) -> dict[str, dict[str, float]]:
    """losses[adapter][corpus] in nats per token, all adapters on the same text in one batch."""
    names = [*subject.store.names(), "__base__"]
    rows_each = 16
    task = stage(progress, "loss of every adapter on every corpus", len(corpora))
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for corpus in corpora:
        rows = subject.rows([corpus], rows_each, PREFILL_TOKENS)
        batch = rows.repeat(len(names), 1)
        row_names = [name for name in names for _ in range(rows_each)]
        logits = subject.mortar(input_ids=batch, adapter_names=row_names).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
        )
        means = each.view(len(names), -1).mean(1)
        for name, loss in zip(names, means.tolist(), strict=True):
            found[name][corpus.name] = loss
        progress.advance(task)
    return {"(base)" if name == "__base__" else name: row for name, row in found.items()}


@torch.inference_mode()
def measure(
    subject: Subject, corpora: Sequence[Corpus], rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    """Medians of a prefill and of a decode step, the three ways in turn in one loop.

    Every round prefills a cache for each way and then decodes step by step, all ways at the same
    length; the order of the ways changes with every step, so that none always follows the same.
    """
    ids = subject.rows(corpora, len(subject.batch_names()), PREFILL_TOKENS)
    named = {"adapter_names": subject.batch_names()}
    ways = [
        ("base", subject.base, {}),
        ("peft", subject.peft, named),
        ("mortar", subject.mortar, named),
    ]
    times: dict[tuple[str, str], list[float]] = {
        (phase, way): [] for phase in ("decode", "prefill") for way, _, _ in ways
    }
    order = itertools.cycle(itertools.permutations(ways))
    task = stage(progress, "timing, interleaved", (rounds + 1) * (steps + 1))
    for round_ in range(rounds + 1):
        caches = {}
        for step in range(steps + 1):
            phase = "decode" if step else "prefill"
            tokens = ids[:, :1] if step else ids
            for way, model, adapters in next(order):
                _synchronise(subject.device)
                start = time.perf_counter()
                out = model(
                    input_ids=tokens, past_key_values=caches.get(way), use_cache=True, **adapters
                )
                _synchronise(subject.device)
                elapsed = time.perf_counter() - start
                caches[way] = out.past_key_values
                if round_:  # the first round warms up
                    times[phase, way].append(1e3 * elapsed)
            progress.advance(task)

    found: dict[str, Any] = {}
    for phase in ("decode", "prefill"):
        base, theirs, ours = (statistics.median(times[phase, way]) for way, _, _ in ways)
        found[f"{phase}_base_ms"] = base
        found[f"{phase}_peft_ms"] = theirs
        found[f"{phase}_mortar_ms"] = ours
        found[f"{phase}_speedup_vs_peft"] = theirs / ours
        found[f"{phase}_added_vs_peft"] = (ours - base) / (theirs - base)
        found[f"{phase}_repeats"] = len(times[phase, "mortar"])
    return found


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
