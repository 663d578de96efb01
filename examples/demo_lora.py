# SPDX-License-Identifier: Apache-2.0
"""Serves LoRA adapters of different ranks in one mixed batch, and compares with PEFT.

    ./run demo                                       a small model and four adapters, made here
    ./run demo --model PATH_OR_ID --adapters DIR...  your own
    ./run demo --device cuda

Text, base model and adapters are made on this machine, without a network, from what every Debian
or Ubuntu has (corpus.py, lora_training.py). Then the saved adapter folders are opened by
mortar.AdapterStore, put on the plain base model by mortar.compat.peft.attach, and every answer is
compared with PEFT's own mixed batch and with the same model in float64.

Exit status: 0 if Mortar is as exact as PEFT and every adapter is best on the text it was trained
on, 1 if not.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoTokenizer

import lora_report
import lora_training
import mortar
from corpus import Corpus, load_corpora
from demo_main import Spoken, make_folder, positive
from lora_measure import PREFILL_TOKENS, check, losses, measure
from lora_report import stage
from lora_subject import Subject, assemble
from mortar._ffi import lib

SEED = 17

# Both ways round the same sums in other orders, and most of them in the base model's layers. In one
# batch the rms errors of the two differ by 1.4 %, now this way, now that, and by up to 4 %; over
# several by less, as the root of their number. The largest error is the tail of a distribution, and
# in one batch either may have the larger by a factor of two. Both margins shrink with that root.
RMS_MARGIN = 0.1
MAX_MARGIN = 3.0
# Batches of the demo's own model: 0.5 s each on two cores.
EXACTNESS_BATCHES = 24


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run demo",
        description="Serves LoRA adapters of different ranks in one mixed batch, next to PEFT.",
    )
    parser.add_argument("--model", help="your own base model: a folder, or an id of the Hub")
    parser.add_argument(
        "--adapters", nargs="+", type=Path, metavar="DIR", help="its PEFT LoRA adapter folders"
    )
    parser.add_argument("--prompt", help="one prompt for every adapter, instead of one each")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )
    parser.add_argument(
        "--new-tokens", type=positive, default=160, help="length of the sample texts"
    )
    parser.add_argument("--rounds", type=positive, default=12, help="timing: prefills of each kind")
    parser.add_argument(
        "--steps", type=positive, default=20, help="timing: decode steps after each prefill"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="results and cache")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.adapters):
        parser.error("--model and --adapters go together")
    if args.model and args.model.startswith(("/", ".", "~")) and not Path(args.model).is_dir():
        parser.error(f"--model: there is no folder {args.model}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    if args.device == "cuda" and not lib.has_cuda():
        parser.error("--device cuda: this build of Mortar is for the CPU only")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() and lib.has_cuda() else "cpu"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    make_folder(args.out)
    console = Console()
    _quieten()
    with _progress(console) as progress:
        try:
            corpora = load_corpora()
            subject = own_subject(args) if args.model else trained_subject(args, corpora, progress)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            if args.traceback:
                raise
            raise SystemExit(f"demo: {error}") from None
        samples, same_text = generate(subject, args, progress)
        report = describe(subject, args)
        report["same_text_as_peft"] = same_text
        batches = 1 if args.model else EXACTNESS_BATCHES  # a large model takes long in float64
        report.update(check(subject, corpora, batches, progress))
        report["losses"] = losses(subject, corpora, progress)
        report.update(measure(subject, corpora, args.rounds, args.steps, progress))
    console.print(lora_report.samples_table(samples))
    console.print(f"PEFT's own mixed batch wrote the same text in {same_text:.0%} of these rows.\n")
    lora_report.print_results(console, report)
    for path in lora_report.write(args.out, report):
        console.print(f"wrote {path}")
    failures = verdict(report)
    for failure in failures:
        console.print(f"[bold red]failed:[/] {failure}")
    return 1 if failures else 0


# ------------------------------------------------------------------ 1. what is served


def trained_subject(
    args: argparse.Namespace, corpora: Sequence[Corpus], progress: Progress
) -> Subject:
    """The demo's own model and adapters, trained now or found in the cache."""

    def on_stage(title: str, steps: int) -> lora_training.OnStep:
        task = stage(progress, f"training {title}", steps)
        speak = Spoken(progress.console)

        def report(step: int, steps: int, loss: float) -> None:
            progress.update(task, completed=step, note=f"loss {loss:.2f}")
            speak(f"step {step} of {steps}, loss {loss:.2f}")

        return report

    recipe = lora_training.QUICK if args.quick else lora_training.Recipe()
    trained = lora_training.prepare(args.out / "cache", recipe, corpora, args.device, on_stage)
    if trained.cached:
        progress.console.print(f"model and adapters from the cache, {trained.base.parent}")
    return assemble(
        trained.base,
        trained.adapters,
        args.device,
        args.dtype,
        encode=lambda text: list(text.encode("latin-1", "replace")),
        decode=lambda ids: bytes(ids).decode("utf-8", "replace"),
        homes={c.name: c.name for c in corpora},
        prompts={c.name: args.prompt or c.prompt for c in corpora},
    )


def own_subject(args: argparse.Namespace) -> Subject:
    """The user's model and adapters; an adapter is called as its folder is."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    folders: dict[str, Path] = {}
    for folder in args.adapters:
        name = folder.resolve().name
        folders[name if name not in folders else f"{name}-{len(folders)}"] = folder
    prompt = args.prompt or "The most important thing to know is"
    return assemble(
        args.model,
        folders,
        args.device,
        args.dtype,
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        homes={},
        prompts=dict.fromkeys(folders, prompt),
    )


# ------------------------------------------------------------------ 2. text from a mixed batch


@torch.inference_mode()
def generate(
    subject: Subject, args: argparse.Namespace, progress: Progress
) -> tuple[list[tuple[str, str, str]], float]:
    """One mixed batch: every adapter on its prompt, and the base model on the first of them.

    Returns:
        (adapter, prompt, text) of every row, and the share of rows that are PEFT's to the token.
    """
    names: list[str] = [*subject.store.names(), "__base__"]
    prompts = [*subject.prompts.values(), next(iter(subject.prompts.values()))]
    encoded = [subject.encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded))
    ids = torch.tensor([[0] * (longest - len(e)) + e for e in encoded], device=subject.device)
    mask = torch.tensor([[0] * (longest - len(e)) + [1] * len(e) for e in encoded])

    texts = []
    for way, model in (("Mortar", subject.mortar), ("PEFT", subject.peft)):
        task = stage(progress, f"mixed batch through {way}", None)
        torch.manual_seed(SEED)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask.to(subject.device),
            adapter_names=names,
            max_new_tokens=args.new_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=0,
        )
        texts.append(out[:, longest:].tolist())
        progress.update(task, total=1, completed=1)
    same = statistics.fmean(mine == theirs for mine, theirs in zip(*texts, strict=True))
    labels = [*subject.store.names(), "(base)"]
    found = zip(labels, prompts, map(subject.decode, texts[0]), strict=True)
    return list(found), same


# ------------------------------------------------------------------ 3. the account


def describe(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    adapters = {}
    for name in subject.store.names():
        modules = subject.store.get(name).modules
        adapters[name] = {"rank": max(m.rank for m in modules), "modules": len(modules)}
    cuda = subject.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "model": args.model or "byte-level Llama",
        "parameters": sum(p.numel() for p in subject.base.parameters()),
        "dtype": str(subject.base.dtype).removeprefix("torch."),
        "batch": len(subject.batch_names()),
        "prefill_tokens": PREFILL_TOKENS,
        "adapters": adapters,
        "homes": subject.homes,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "mortar": mortar.__version__,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def verdict(report: dict[str, Any]) -> list[str]:
    """What went wrong, one sentence each."""
    failures = []
    for kind, margin in (("rms", RMS_MARGIN), ("max", MAX_MARGIN)):
        ours, theirs = (report[f"{who}{kind}_rel_error_vs_fp64"] for who in ("", "peft_"))
        if ours is None:
            continue
        if not ours <= (1 + margin / math.sqrt(report["exactness_batches"])) * theirs:
            failures.append(f"{kind} error of Mortar is {ours:.2e}, that of PEFT {theirs:.2e}")
    for name, home in report["homes"].items():
        best = min(report["losses"], key=lambda other: report["losses"][other][home])
        if best != name:
            failures.append(f"adapter {name} is not the best on its own corpus, {best} is")
    return failures


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _quieten() -> None:
    """The libraries' own bars and notices would break the progress display."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


if __name__ == "__main__":
    sys.exit(main())
