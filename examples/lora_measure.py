# SPDX-License-Identifier: Apache-2.0
"""What the LoRA demo reports: exactness, losses and times of one mixed batch."""

from __future__ import annotations

import copy
import itertools
import math
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


class Errors:
    """Of logits against exact ones, batch by batch."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = self.squares = 0.0  # of the errors
        self.largest_exact = self.sum_exact = self.squares_exact = 0.0

    def add(self, logits: torch.Tensor, exact: torch.Tensor) -> None:
        error = logits.double() - exact
        self.count += exact.numel()
        self.largest = max(self.largest, float(error.abs().max()))
        self.squares += float(error.square().sum())
        self.largest_exact = max(self.largest_exact, float(exact.abs().max()))
        self.sum_exact += float(exact.sum())
        self.squares_exact += float(exact.square().sum())

    def max_rel(self) -> float:
        """The largest error over the largest logit."""
        return self.largest / self.largest_exact

    def rms_rel(self) -> float:
        """The rms error over the standard deviation of the logits."""
        variance = self.squares_exact / self.count - (self.sum_exact / self.count) ** 2
        return math.sqrt(self.squares / self.count / variance)


@torch.inference_mode()
def check(
    subject: Subject, corpora: Sequence[Corpus], batches: int, progress: Progress
) -> dict[str, Any]:
    """Logits of mixed batches, through Mortar and through PEFT, against a float64 copy."""
    kinds = ("max", "rms")
    if not _fits_in_float64(subject.peft):
        progress.console.print("no room for a float64 copy of the model: exactness not checked")
        return {f"{who}{k}_rel_error_vs_fp64": None for who in ("", "peft_") for k in kinds}
    task = stage(progress, "comparing with float64", batches)
    names = subject.batch_names()
    rows = subject.rows(corpora, batches * len(names), PREFILL_TOKENS)
    exact_model = copy.deepcopy(subject.peft).double()
    ways = {"": subject.mortar, "peft_": subject.peft}
    errors = {who: Errors() for who in ways}
    for ids in rows.split(len(names)):
        wanted = {"input_ids": ids, "adapter_names": names}
        exact = exact_model(**wanted).logits
        logits = {who: model(**wanted).logits for who, model in ways.items()}
        for who, found in logits.items():
            errors[who].add(found, exact)
        progress.advance(task)
    accelerated = accelerate(subject.peft)(**wanted).logits
    restore(subject.peft)
    if not torch.equal(accelerated, logits[""]):
        raise RuntimeError(
            "demo: accelerate and attach must agree to the last bit, got a difference"
        )
    report: dict[str, Any] = {"exactness_batches": batches}
    for who, error in errors.items():
        report[f"{who}max_rel_error_vs_fp64"] = error.max_rel()
        report[f"{who}rms_rel_error_vs_fp64"] = error.rms_rel()
    return report


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
