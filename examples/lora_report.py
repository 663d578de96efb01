# SPDX-License-Identifier: Apache-2.0
"""How the LoRA demo shows its results: tables on the terminal, one picture, one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

WAYS = {"base": "Base model alone", "peft": "PEFT mixed batch", "mortar": "Mortar mixed batch"}
COLOURS = {"base": "#8a9199", "peft": "#d9822b", "mortar": "#14786f"}
INK, FAINT = "#20262c", "#6b737b"


def stage(progress: Progress, title: str, total: int | None) -> TaskID:
    """A new line of the progress display; where there is no terminal to draw on, plain text."""
    if not progress.console.is_terminal:
        progress.console.print(f"{title} ...")
    return progress.add_task(title, total=total, note="")


def samples_table(samples: list[tuple[str, str, str]]) -> Table:
    """(adapter, prompt, text that followed), all from one batch."""
    table = Table(
        title="One batch, every row its own adapter", show_lines=True, title_justify="left"
    )
    table.add_column("adapter", style="bold cyan", no_wrap=True)
    table.add_column("[bold]prompt[/] and what followed", overflow="fold")
    for name, prompt, text in samples:
        table.add_row(name, f"[bold]{escape(_visible(prompt))}[/]{escape(_visible(text))}")
    return table


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))


def accuracy_table(report: dict[str, Any]) -> Table:
    num = report["exactness_batches"]
    batches = f"{num} batches" if num > 1 else "one batch"
    title = f"Logits of {batches} against an fp64 copy of the model"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("max error / max |logit|", justify="right")
    table.add_column("rms error / rms logit", justify="right")
    for way, prefix in (("peft", "peft_"), ("mortar", "")):
        worst, mean = (report[f"{prefix}{kind}_rel_error_vs_fp64"] for kind in ("max", "rms"))
        table.add_row(WAYS[way], f"{worst:.2e}", f"{mean:.2e}")
    return table


def loss_table(losses: dict[str, dict[str, float]], homes: dict[str, str]) -> Table:
    """losses[adapter][corpus]; homes[adapter] is the corpus that it was trained on."""
    table = Table(
        title="Loss of every adapter on every corpus (nats per token)", title_justify="left"
    )
    table.add_column("adapter", style="bold cyan")
    corpora = list(next(iter(losses.values())))
    for corpus in corpora:
        table.add_column(corpus, justify="right")
    best = {c: min(losses, key=lambda name: losses[name][c]) for c in corpora}
    for name, row in losses.items():
        cells = []
        for corpus in corpora:
            text = f"{row[corpus]:.3f}"
            if best[corpus] == name:
                text = f"[bold green]{text}[/]"
            elif homes.get(name) == corpus:
                text = f"[bold red]{text}[/]"
            cells.append(text)
        table.add_row(name, *cells)
    return table


def timing_table(report: dict[str, Any]) -> Table:
    table = Table(title="Whole model, median ms (interleaved)", title_justify="left")
    table.add_column("")
    for way in WAYS.values():
        table.add_column(way, justify="right")
    table.add_column("Mortar vs PEFT", justify="right")
    table.add_column("added time, Mortar / PEFT", justify="right")
    for phase in ("decode", "prefill"):
        table.add_row(
            phase,
            *(f"{report[f'{phase}_{way}_ms']:.2f}" for way in WAYS),
            f"[bold green]{report[f'{phase}_speedup_vs_peft']:.2f}x[/]",
            f"{report[f'{phase}_added_vs_peft']:.3f}",
        )
    return table


def print_results(console: Console, report: dict[str, Any]) -> None:
    console.print(loss_table(report["losses"], report["homes"]))
    if report["max_rel_error_vs_fp64"] is not None:
        console.print(accuracy_table(report))
    console.print(timing_table(report))


def write(folder: Path, report: dict[str, Any]) -> tuple[Path, Path]:
    """Writes report.json and report.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, picture = folder / "report.json", folder / "report.png"
    numbers.write_text(json.dumps(report, indent=2) + "\n")
    _draw(picture, report)
    return numbers, picture


def _draw(path: Path, report: dict[str, Any]) -> None:
    matplotlib.rcParams.update({"font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=(1.35, 1, 1))
    _draw_losses(figure.add_subplot(grid[0]), report["losses"], report["homes"])
    for column, phase in ((1, "decode"), (2, "prefill")):
        _draw_times(figure.add_subplot(grid[column]), report, phase)
    ranks = ", ".join(str(a["rank"]) for a in report["adapters"].values())
    figure.suptitle(
        f"{len(report['adapters'])} LoRA adapters (ranks {ranks}) and the base model in one batch "
        f"of {report['batch']}",
        fontsize=13, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    figure.supxlabel(
        f"{report['device']}, {report['threads']} threads, PyTorch {report['torch']}, "
        f"PEFT {report['peft']}; {report['dtype']}, medians of {report['decode_repeats']} decode "
        f"steps and {report['prefill_repeats']} prefills, interleaved",
        fontsize=8.5, color=FAINT, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path, dpi=160)


def _draw_losses(axes: Axes, losses: dict[str, dict[str, float]], homes: dict[str, str]) -> None:
    """Colour: how far from the best of its column. The number: the loss itself."""
    names, corpora = list(losses), list(next(iter(losses.values())))
    best = {c: min(row[c] for row in losses.values()) for c in corpora}
    gaps = [[losses[name][c] - best[c] for c in corpora] for name in names]
    axes.imshow(gaps, cmap="BuGn_r", aspect="auto", vmin=-0.15 * max(map(max, gaps)))
    limit = 0.3 * max(map(max, gaps))
    for row, name in enumerate(names):
        for column, corpus in enumerate(corpora):
            axes.text(
                column, row, f"{losses[name][corpus]:.2f}", ha="center", va="center",
                color="white" if gaps[row][column] < limit else INK,
                fontweight="bold" if gaps[row][column] == 0 else "normal",
            )  # fmt: skip
    axes.set_xticks(range(len(corpora)), corpora)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.set_xlabel("text")
    axes.set_ylabel("adapter")
    axes.spines[:].set_visible(False)
    at_home = homes and all(losses[name][home] == best[home] for name, home in homes.items())
    title = "Loss: every adapter is best at home" if at_home else "Loss (nats per token)"
    axes.set_title(title, loc="left", fontsize=11)


def _draw_times(axes: Axes, report: dict[str, Any], phase: str) -> None:
    times = [report[f"{phase}_{way}_ms"] for way in WAYS]
    labels = [title.replace(" ", "\n", 1) for title in WAYS.values()]
    bars = axes.bar(labels, times, color=[COLOURS[way] for way in WAYS], width=0.68)
    axes.bar_label(bars, [f"{t:.2f} ms" for t in times], padding=2)
    axes.set_ylim(0, max(times) * 1.14)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    what = {
        "decode": "One decode step",
        "prefill": f"Prefill of {report['prefill_tokens']} tokens each",
    }[phase]
    speedup = report[f"{phase}_speedup_vs_peft"]
    axes.set_title(f"{what}: {speedup:.1f}x PEFT", loc="left", fontsize=11)
