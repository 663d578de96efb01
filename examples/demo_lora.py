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
import copy
import itertools
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

import lora_report
import lora_training
import mortar
from corpus import Corpus, load_corpora
from mortar._ffi import lib
from mortar.compat.peft import accelerate, attach, restore

BATCH = 8
PREFILL_TOKENS = 128
SEED = 17

# Both ways round the same sums in other orders. Over thousands of logits the rms of the errors is
# steady to a few percent; the largest one is the tail of a distribution and is not.
RMS_MARGIN = 1.1
MAX_MARGIN = 2.0


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
        """The adapters in turn, the base model ("__base__") after the last of them."""
        return list(itertools.islice(itertools.cycle([*self.store.names(), "__base__"]), BATCH))

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
    parser.add_argument("--new-tokens", type=int, default=160, help="length of the sample texts")
    parser.add_argument("--rounds", type=int, default=12, help="timing: prefills of each kind")
    parser.add_argument(
        "--steps", type=int, default=20, help="timing: decode steps after each prefill"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="results and cache")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.adapters):
        parser.error("--model and --adapters go together")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    if args.device == "cuda" and not lib.has_cuda():
        parser.error("--device cuda: this build of Mortar is for the CPU only")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() and lib.has_cuda() else "cpu"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
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
        report.update(check(subject, corpora, progress))
        report["losses"] = losses(subject, corpora, progress)
        report.update(measure(subject, corpora, args, progress))
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
        task = progress.add_task(f"training {title}", total=steps, note="")

        def report(step: int, steps: int, loss: float) -> None:
            progress.update(task, completed=step, note=f"loss {loss:.2f}")

        return report

    recipe = lora_training.QUICK if args.quick else lora_training.Recipe()
    trained = lora_training.prepare(args.out / "cache", recipe, corpora, args.device, on_stage)
    if trained.cached:
        progress.console.print(f"model and adapters from the cache, {trained.base.parent}")
    return assemble(
        trained.base,
        trained.adapters,
        args,
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
        args,
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        homes={},
        prompts=dict.fromkeys(folders, prompt),
    )


def assemble(base: Any, adapters: dict[str, Path], args: argparse.Namespace, **text) -> Subject:
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(args.device).eval()
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
        task = progress.add_task(f"mixed batch through {way}", total=None, note="")
        torch.manual_seed(SEED)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask.to(subject.device),
            adapter_names=names,
            max_new_tokens=args.new_tokens,
            do_sample=True,
            temperature=0.6,
            pad_token_id=0,
        )
        texts.append(out[:, longest:].tolist())
        progress.update(task, total=1, completed=1)
    same = statistics.fmean(mine == theirs for mine, theirs in zip(*texts, strict=True))
    labels = [*subject.store.names(), "(base)"]
    found = zip(labels, prompts, map(subject.decode, texts[0]), strict=True)
    return list(found), same


# ------------------------------------------------------------------ 3. is it right


@torch.inference_mode()
def check(subject: Subject, corpora: Sequence[Corpus], progress: Progress) -> dict[str, Any]:
    """Logits of one mixed batch, through Mortar and through PEFT, against a float64 copy."""
    task = progress.add_task("comparing with float64", total=4, note="")
    ids = subject.rows(corpora, BATCH, PREFILL_TOKENS)
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
    task = progress.add_task("loss of every adapter on every corpus", total=len(corpora), note="")
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


# ------------------------------------------------------------------ 4. is it fast


@torch.inference_mode()
def measure(
    subject: Subject, corpora: Sequence[Corpus], args: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Medians of a prefill and of a decode step, the three ways in turn in one loop.

    Every round prefills a cache for each way and then decodes step by step, all ways at the same
    length; the order of the ways changes with every step, so that none always follows the same.
    """
    ids = subject.rows(corpora, BATCH, PREFILL_TOKENS)
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
    task = progress.add_task(
        "timing, interleaved", total=(args.rounds + 1) * (args.steps + 1), note=""
    )
    for round_ in range(args.rounds + 1):
        caches = {}
        for step in range(args.steps + 1):
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


# ------------------------------------------------------------------ the account


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
        "batch": BATCH,
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
        if ours is not None and not ours <= margin * theirs:
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
