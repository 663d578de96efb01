# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small model with PEFT, and again with Mortar under PEFT, from one seed.

    ./run demo train                 at most four minutes on two cores
    ./run demo train --device cuda   the same, with a GPU's own table
    ./run demo train --quick         a tiny model, in seconds

First one adapter: steps per second, peak memory of training beyond what was in use before it, what
a step keeps for its backward, both losses and their largest difference. Then four adapters of ranks
4, 8, 16 and 64, each on its own text, in one batch (`accelerate(model, train_mixed=True)`), beside
four separate runs. Text and base model are made on this machine (corpus.py, lora_training.py).

Exit status: 1 if a loss of Mortar's is further from its counterpart than rounding explains.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import lora_training
from corpus import Corpus, load_corpora
from demo_main import Spoken, make_folder, positive
from mortar._ffi import lib
from mortar.compat.peft import accelerate

RANKS = (4, 8, 16, 64)
SEED = 17
#: Rounding differs from the first step on, and training carries it further; after some tens of
#: steps the losses of two correct runs differ by less than this.
MARGIN = 0.02
COLOURS = ("#14786f", "#d9822b", "#4a6fa5", "#a23b72")


@dataclass
class Run:
    """What one training left."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    steps_per_second: float = 0.0
    peak_mb: float = 0.0
    kept_mb: float = 0.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run demo train", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--steps", type=positive, help="of every training")
    parser.add_argument("--dropout", type=float, default=0.0, help="losses then differ by masks")
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="results and cache")
    args = parser.parse_args(argv)
    has_cuda = torch.cuda.is_available() and lib.has_cuda()
    if args.device == "cuda" and not has_cuda:
        parser.error("--device cuda: PyTorch sees no GPU, or this build is for the CPU only")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be 0 to 1, got {args.dropout}")
    args.device = ("cuda" if has_cuda else "cpu") if args.device == "auto" else args.device
    args.steps = args.steps or (12 if args.quick else 60)
    return args


# ---- measuring -----------------------------------------------------------------------------------


def _resident_mb(what: str) -> float:
    """VmRSS, the process's resident size, or VmHWM, the highest since it was last forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _reset_peak(device: str) -> float:
    """MB in use as a training begins. What the last one freed is given back first, as it would
    count for this one."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size
    return _resident_mb("VmRSS")


def _peak_mb(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else _resident_mb("VmHWM")


def _kept_mb(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> float:
    """What autograd keeps of one forward, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss()
    return sum(kept.values()) / 1e6


# ---- training ------------------------------------------------------------------------------------


def adapted(base: torch.nn.Module, ranks: dict[str, int], dropout: float) -> torch.nn.Module:
    """A PEFT model over a copy of base, with an adapter for every name; all from one seed."""
    model = None
    for name, rank in ranks.items():
        torch.manual_seed(SEED + rank)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout,
                            target_modules=lora_training.TARGETS)  # fmt: skip
        if model is None:
            model = get_peft_model(copy.deepcopy(base), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model.base_model.set_adapter(list(ranks))
    return model.train()


def batches(texts: Sequence[torch.Tensor], rows: int, length: int, steps: int):
    """Token ids [len(texts) * rows, length] of every step: `rows` of each text, in its own order,
    whoever else is in the batch."""
    randoms = [torch.Generator().manual_seed(SEED + len(text)) for text in texts]
    for _ in range(steps):
        picked = []
        for text, random in zip(texts, randoms, strict=True):
            starts = torch.randint(len(text) - length, (rows,), generator=random)
            picked += [text[s : s + length] for s in starts.tolist()]
        yield torch.stack(picked)


def train(model: torch.nn.Module, names: Sequence[str], texts, rows: int, length: int, steps: int,
          mixed: bool = False) -> Run:  # fmt: skip
    """AdamW on the sum of the adapters' mean losses, so that each adapter's gradient is its own."""
    run = Run(losses={name: [] for name in names})
    device = next(model.parameters()).device.type
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=2e-3, weight_decay=0.0)
    options = {"adapter_names": [n for n in names for _ in range(rows)]} if mixed else {}

    def losses(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, **options).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return each.view(len(names), -1).mean(1)

    run.kept_mb = _kept_mb(model, lambda: losses(next(batches(texts, rows, length, 1))))
    before = _reset_peak(device)
    torch.manual_seed(SEED)
    seconds = 0.0
    for step, ids in enumerate(batches(texts, rows, length, steps)):
        begin = time.perf_counter()
        found = losses(ids)
        found.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, loss in zip(names, found.tolist(), strict=True):
            run.losses[name].append(loss)
        seconds += (time.perf_counter() - begin) if step else 0.0  # the first step warms up
    run.steps_per_second = max(steps - 1, 1) / max(seconds, 1e-9)
    run.peak_mb = _peak_mb(device) - before
    return run


def largest_difference(one: Run, other: Run) -> float:
    pairs = ((a, b) for name in one.losses
             for a, b in zip(one.losses[name], other.losses[name], strict=True))  # fmt: skip
    return max(abs(a - b) for a, b in pairs)


def base_model(args: argparse.Namespace, corpora: Sequence[Corpus], console: Console):
    """(model, recipe): the demo's model, trained briefly on all corpora or found in the cache."""
    whole = lora_training.QUICK if args.quick else lora_training.Recipe()
    recipe = replace(whole, base_steps=whole.base_steps // 3, adapter_steps=0)

    def on_stage(title: str, steps: int) -> lora_training.OnStep:
        if steps:
            console.print(f"training {title} ...")
        speak = Spoken(console)
        return lambda step, steps, loss: speak(f"step {step} of {steps}, loss {loss:.2f}")

    trained = lora_training.prepare(args.out / "cache", recipe, corpora, args.device, on_stage)
    return AutoModelForCausalLM.from_pretrained(trained.base).to(args.device), recipe


# ---- the account ---------------------------------------------------------------------------------


def one_adapter(args, base, recipe, texts, console) -> tuple[dict[str, Run], float]:
    runs = {}
    for way in ("PEFT", "Mortar"):
        console.print(f"fine-tuning one adapter of rank 16 through {way} ...")
        model = adapted(base, {"one": 16}, args.dropout)
        if way == "Mortar":
            accelerate(model)
        runs[way] = train(model, ["one"], texts[:1], recipe.batch, recipe.context, args.steps)
    return runs, largest_difference(*runs.values())


def four_adapters(args, base, recipe, corpora, texts, console) -> tuple[dict[str, Run], float]:
    names = [corpus.name for corpus in corpora]
    ranks = dict(zip(names, RANKS, strict=True))
    rows = max(recipe.batch // len(names), 1)
    console.print("four adapters in one batch ...")
    model = accelerate(adapted(base, ranks, args.dropout), train_mixed=True)
    together = train(model, names, texts, rows, recipe.context, args.steps, mixed=True)
    apart = Run()
    seconds = 0.0
    for i, name in enumerate(names):
        console.print(f"{name} (rank {ranks[name]}) alone, through PEFT ...")
        model = adapted(base, {name: ranks[name]}, args.dropout)
        run = train(model, [name], texts[i : i + 1], rows, recipe.context, args.steps)
        apart.losses |= run.losses
        apart.peak_mb = max(apart.peak_mb, run.peak_mb)
        apart.kept_mb = max(apart.kept_mb, run.kept_mb)
        seconds += 1 / run.steps_per_second
    apart.steps_per_second = 1 / seconds  # of all four
    runs = {"together": together, "apart": apart}
    return runs, largest_difference(together, apart)


def results_table(title: str, runs: dict[str, Run], difference: float) -> Table:
    table = Table(title=title, title_justify="left",
                  caption=f"largest difference of a loss: {difference:.2e}",
                  caption_justify="left")  # fmt: skip
    for header in ("", "steps/s", "peak MB above start", "kept for backward, MB", "last loss"):
        table.add_column(header, justify="right" if header else "left")
    for name, run in runs.items():
        last = sum(curve[-1] for curve in run.losses.values()) / len(run.losses)
        table.add_row(name, f"{run.steps_per_second:.2f}", f"{run.peak_mb:.0f}",
                      f"{run.kept_mb:.1f}", f"{last:.4f}")  # fmt: skip
    return table


def draw(path: Path, one: dict[str, Run], four: dict[str, Run]) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (way, run), style, colour in zip(one.items(), ("-", "--"), COLOURS, strict=False):
        left.plot(run.losses["one"], style, color=colour, label=way)
    left.set_title("One adapter, one seed")
    for (name, curve), colour in zip(four["together"].losses.items(), COLOURS, strict=True):
        right.plot(curve, color=colour, label=f"{name}, together")
        right.plot(four["apart"].losses[name], "--", color=colour, label="alone")
    right.set_title("Four adapters in one batch, and alone")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    make_folder(args.out)
    console = Console()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        corpora = load_corpora()[: len(RANKS)]
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"demo: {error}") from None
    base, recipe = base_model(args, corpora, console)
    texts = [torch.frombuffer(bytearray(c.train), dtype=torch.uint8).to(args.device).long()
             for c in corpora]  # fmt: skip
    one, first = one_adapter(args, base, recipe, texts, console)
    four, second = four_adapters(args, base, recipe, corpora, texts, console)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    console.print(results_table(f"One adapter, {name}", one, first))
    console.print(results_table(f"Four adapters of ranks {RANKS}, {name}", four, second))
    args.out.mkdir(parents=True, exist_ok=True)
    picture, numbers = args.out / "train.png", args.out / "train.json"
    draw(picture, one, four)
    report = {"device": name, "difference_one": first, "difference_four": second,
              "runs": {k: vars(v) for k, v in (one | four).items()}}  # fmt: skip
    numbers.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"wrote {picture} and {numbers}")
    if args.dropout == 0 and max(first, second) > MARGIN:
        console.print(f"[bold red]failed:[/] losses differ by more than {MARGIN}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
