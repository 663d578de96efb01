# SPDX-License-Identifier: Apache-2.0
"""`./run demo conv`: the dynamic convolution in a small language model, trained and served.

1. Trains two copies of one byte-level hybrid model on local text: one sees each step's sequences,
   of different lengths, packed into one row, the other sees them one by one. Their losses must
   agree at every step; a control run whose convolutions ignore the boundaries must not.
2. Prefills packed prompts and decodes token by token, and compares the logits with one full pass.
3. Lets the model write, and leaves a report and a plot in build/demo_conv/.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from corpus import Corpus
from demo_main import Spoken, demo
from hybrid_model import ConvMixer, HybridConfig, HybridModel

#: Largest differences that float32 arithmetic in another order explains: every step differs by
#: rounding (2^-24), and training amplifies it step by step.
MAX_LOSS_DIFFERENCE = 1e-4
MAX_GRADIENT_DIFFERENCE = 1e-5
MAX_LOGIT_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Recipe:
    """One training; the defaults take about a minute on two cores."""

    steps: int = 240
    sequences: int = 10
    shortest: int = 16
    longest: int = 160
    lr: float = 4e-3
    warmup: int = 20
    seed: int = 5
    model: HybridConfig = HybridConfig()


@dataclass
class Batch:
    """One step's sequences of bytes, each with one more byte than it has inputs."""

    texts: list[Tensor]

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """inputs [1, T], targets [T], cu_seqlens [N + 1]."""
        inputs = torch.cat([t[:-1] for t in self.texts]).unsqueeze(0)
        lengths = [0, *(len(t) - 1 for t in self.texts)]
        bounds = torch.tensor(list(itertools.accumulate(lengths)))
        return inputs, torch.cat([t[1:] for t in self.texts]), bounds


def batches(text: bytes, recipe: Recipe) -> list[Batch]:
    """Random places and lengths; some sequences are shorter than the kernel is wide."""
    generator = torch.Generator().manual_seed(recipe.seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def one(length: int) -> Tensor:
        start = int(torch.randint(len(data) - length - 1, (1,), generator=generator))
        return data[start : start + length + 1]

    made = []
    for _ in range(recipe.steps):
        lengths = torch.randint(recipe.shortest, recipe.longest + 1, (recipe.sequences - 2,),
                                generator=generator).tolist()  # fmt: skip
        made.append(Batch([one(length) for length in (1, 2, *lengths)]))
    return made


# ---- training ------------------------------------------------------------------------------------


def packed_loss(model: HybridModel, batch: Batch) -> Tensor:
    inputs, targets, cu_seqlens = batch.packed()
    return F.cross_entropy(model(inputs, cu_seqlens)[0], targets)


def separate_loss(model: HybridModel, batch: Batch) -> Tensor:
    """The same mean over all tokens, one sequence at a time."""
    total = sum(
        F.cross_entropy(model(text[:-1].unsqueeze(0))[0], text[1:], reduction="sum")
        for text in batch.texts
    )
    return total / sum(len(text) - 1 for text in batch.texts)


def leaking_loss(model: HybridModel, batch: Batch) -> Tensor:
    """Packed, with convolutions that ignore the boundaries: what the comparison must notice."""
    hooks = [
        m.conv.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"cu_seqlens": None}), with_kwargs=True
        )
        for m in model.modules()
        if isinstance(m, ConvMixer)
    ]
    try:
        return packed_loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()


def gradients(model: HybridModel, loss: Tensor) -> Tensor:
    """All gradients as one vector."""
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([p.flatten() for p in parts])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


class Trainer:
    """One copy of the model, trained by `loss` of each batch."""

    def __init__(self, recipe: Recipe, loss):
        torch.manual_seed(recipe.seed)
        self.model, self.loss = HybridModel(recipe.model), loss
        self.losses: list[float] = []
        self.seconds = 0.0
        # eps bounds how much Adam magnifies the rounding of gradients that are nearly zero.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, eps=1e-5)

        def rate(step: int) -> float:
            progress = min(step / max(recipe.steps, 1), 1.0)
            return min((step + 1) / recipe.warmup, 0.5 + 0.5 * math.cos(math.pi * progress))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def step(self, batch: Batch) -> None:
        begin = time.perf_counter()
        loss = self.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.seconds += time.perf_counter() - begin
        self.losses.append(loss.item())


def train(recipe: Recipe, text: bytes, progress: Progress) -> tuple[Trainer, Trainer]:
    """Both copies, step by step on the same batches."""
    packed, separate = Trainer(recipe, packed_loss), Trainer(recipe, separate_loss)
    task = progress.add_task("training twice", total=recipe.steps)
    speak = Spoken(progress.console)
    for step, batch in enumerate(batches(text, recipe), 1):
        packed.step(batch)
        separate.step(batch)
        progress.update(
            task, advance=1, description=f"training twice, loss {packed.losses[-1]:.2f}"
        )
        speak(f"step {step} of {recipe.steps}, loss {packed.losses[-1]:.2f}")
    return packed, separate


def compare_gradients(model: HybridModel, batch: Batch) -> dict[str, float]:
    """Gradients of one batch: packed against separate, and the control that leaks."""
    separate = gradients(model, separate_loss(model, batch))
    return {
        "gradient_difference": relative(gradients(model, packed_loss(model, batch)), separate),
        "gradient_difference_if_leaking": relative(
            gradients(model, leaking_loss(model, batch)), separate
        ),
    }


# ---- serving -------------------------------------------------------------------------------------


@torch.no_grad()
def decode_difference(model: HybridModel, texts: Sequence[Tensor], prompts: Sequence[int]) -> float:
    """Prefills texts[n][: prompts[n]] packed, feeds the rest token by token, and returns the
    largest relative difference of any token's logits from a full pass over its text."""
    room = max(len(t) for t in texts)
    cache = model.new_cache(len(texts), room)
    bounds = torch.tensor([0, *itertools.accumulate(prompts)])
    packed = torch.cat([t[:p] for t, p in zip(texts, prompts, strict=True)]).unsqueeze(0)
    logits = model(packed, bounds, cache)[0]
    got = [list(part) for part in logits.split(list(prompts))]
    steps = min(len(t) - p for t, p in zip(texts, prompts, strict=True))
    for i in range(steps):
        tokens = torch.stack([t[p + i] for t, p in zip(texts, prompts, strict=True)])
        for row, step_logits in zip(
            got, model(tokens.unsqueeze(1), cache=cache)[:, 0], strict=True
        ):
            row.append(step_logits)
    worst = 0.0
    for text, row in zip(texts, got, strict=True):
        full = model(text[: len(row)].unsqueeze(0))[0]
        difference = (torch.stack(row) - full).norm(dim=-1) / full.norm(dim=-1)
        worst = max(worst, difference.max().item())
    return worst


@torch.no_grad()
def write(model: HybridModel, prompts: Sequence[bytes], length: int, seed: int = 1) -> list[bytes]:
    """Continues each prompt by `length` sampled bytes, all in one batch."""
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + length)
    tokens = torch.tensor(list(b"".join(prompts))).unsqueeze(0)
    bounds = torch.tensor([0, *itertools.accumulate(map(len, prompts))])
    logits = model(tokens, bounds, cache)[0, bounds[1:] - 1]
    written = [bytearray() for _ in prompts]
    for _ in range(length):
        chosen = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        for text, token in zip(written, chosen[:, 0].tolist(), strict=True):
            text.append(token)
        logits = model(chosen, cache=cache)[:, 0]
    return [bytes(text) for text in written]


@torch.no_grad()
def bits_per_byte(model: HybridModel, text: bytes, length: int, rows: int = 32) -> float:
    data = torch.frombuffer(bytearray(text[: rows * length + 1]), dtype=torch.uint8).long()
    rows = (len(data) - 1) // length
    inputs, targets = data[: rows * length], data[1 : rows * length + 1]
    logits = model(inputs.view(rows, length)).flatten(0, 1)
    return F.cross_entropy(logits, targets).item() / math.log(2)


# ---- report --------------------------------------------------------------------------------------


def plot(packed: Sequence[float], separate: Sequence[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    top.plot(separate, color="tab:orange", linewidth=4, alpha=0.5, label="one by one")
    top.plot(packed, color="tab:blue", linewidth=1.2, label="packed")
    top.set_ylabel("loss (nats per byte)")
    top.set_title("Packed training is unpacked training")
    top.legend()
    top.grid(alpha=0.3)
    differences = [abs(a - b) / b for a, b in zip(packed, separate, strict=True)]
    bottom.plot(differences, ".", color="tab:red", markersize=3)
    bottom.axhline(2**-23, color="gray", linewidth=0.8, linestyle="--", label="float32 epsilon")
    bottom.legend(fontsize=8, loc="upper left")
    bottom.set_ylim(bottom=0, top=max(1.5 * 2**-22, *differences))
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(recipe: Recipe, corpus: Corpus, out: Path, console: Console) -> dict[str, object]:
    """The whole demo; returns the report."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        packed, separate = train(recipe, corpus.train, progress)
    model = packed.model
    held_out = batches(corpus.test, Recipe(**{**vars(recipe), "steps": 1, "seed": recipe.seed + 1}))
    longest = sorted(held_out[0].texts, key=len)[-3:]
    prompts = [max(len(text) // (2 + 3 * i), 1) for i, text in enumerate(longest)]
    losses = zip(packed.losses, separate.losses, strict=True)
    report = {
        "corpus": corpus.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe),
        "first_loss": packed.losses[0],
        "last_loss": packed.losses[-1],
        "bits_per_byte_held_out": bits_per_byte(model, corpus.test, recipe.longest),
        "max_loss_difference": max(abs(a - b) / b for a, b in losses),
        **compare_gradients(model, held_out[0]),
        "decode_logit_difference": decode_difference(model, longest, prompts),
        "packed_seconds": packed.seconds,
        "one_by_one_seconds": separate.seconds,
    }
    out.mkdir(parents=True, exist_ok=True)
    plot(packed.losses, separate.losses, out / "loss.png")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(_table(report))
    starts = [corpus.prompt.encode(), corpus.test[:40]]
    for start, text in zip(starts, write(model, starts, 160), strict=True):
        shown = Text(start.decode("ascii", "replace"), style="bold")
        console.print(Panel(shown.append(text.decode("ascii", "replace"), style="not bold"),
                            title="it writes on", width=80))  # fmt: skip
    return report


def checks(report: dict[str, object]) -> dict[str, bool]:
    """What the demo claims."""
    return {
        "packed training = one by one, loss at every step":
            report["max_loss_difference"] < MAX_LOSS_DIFFERENCE,
        "packed gradients = one by one": report["gradient_difference"] < MAX_GRADIENT_DIFFERENCE,
        "ignoring the boundaries would show":
            report["gradient_difference_if_leaking"] > 1000 * MAX_GRADIENT_DIFFERENCE,
        "prefill + decoding = one full pass":
            report["decode_logit_difference"] < MAX_LOGIT_DIFFERENCE,
        "it has learnt": report["last_loss"] < report["first_loss"],
    }  # fmt: skip


def _table(report: dict[str, object]) -> Table:
    table = Table(title=f"{report['parameters']:,} parameters on {report['corpus']}",
                  show_header=False)  # fmt: skip
    rows = {
        "loss, first and last step": f"{report['first_loss']:.2f}, {report['last_loss']:.2f}",
        "held-out text": f"{report['bits_per_byte_held_out']:.2f} bits per byte",
        "loss, packed against one by one": f"{report['max_loss_difference']:.1e} at most",
        "gradient, packed against one by one": f"{report['gradient_difference']:.1e}",
        "... with boundaries ignored": f"{report['gradient_difference_if_leaking']:.1e}",
        "logits, decoding against one pass": f"{report['decode_logit_difference']:.1e} at most",
        "seconds, packed and one by one":
            f"{report['packed_seconds']:.1f}, {report['one_by_one_seconds']:.1f}",
    }  # fmt: skip
    for name, value in rows.items():
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    title = "Dynamic convolution: train, prefill, decode"
    sys.exit(demo("conv", title, __doc__, Recipe, run, checks))
