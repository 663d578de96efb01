# SPDX-License-Identifier: Apache-2.0
"""The command line of the demos that train one small model on local text."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from corpus import Corpus, load_corpora

ROOT = Path(__file__).resolve().parents[1]


class Spoken:
    """Says how far a demo is where there is no terminal to draw a bar on: a line every 15 s."""

    def __init__(self, console: Console):
        self._console, self._said = console, time.monotonic()

    def __call__(self, line: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._said > 15:
            self._said = time.monotonic()
            self._console.print(f"  {line}")


def make_folder(path: Path) -> None:
    """Ends the demo before its work where there will be no place for what it writes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SystemExit(f"demo: --out: cannot write into {path}: {error.strerror}") from None


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def demo(
    name: str,
    title: str,
    description: str,
    recipe: type,
    run: Callable[[Any, Corpus, Path, Console], dict[str, object]],
    checks: Callable[[dict[str, object]], dict[str, bool]],
) -> int:
    """`./run demo <name>`: runs the recipe, says what holds of its claims. Returns the exit status.

    `run` takes the recipe, the text, the folder of its report and the console."""
    parser = argparse.ArgumentParser(
        prog=f"./run demo {name}", description=description.splitlines()[0]
    )
    parser.add_argument(
        "--steps", type=positive, default=recipe.steps, help="(default: %(default)s)"
    )
    folder = ROOT / "build" / f"demo_{name}"
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR")
    arguments = parser.parse_args()
    make_folder(arguments.out)
    console = Console()
    console.print(f"[bold]{title}[/]")
    corpus = load_corpora(limit=1_000_000)[0]
    report = run(recipe(steps=arguments.steps), corpus, arguments.out, console)
    results = checks(report)
    for claim, holds in results.items():
        console.print(f"[green]✓[/] {claim}" if holds else f"[bold red]✗[/] {claim}")
    console.print(f"report and plot: {arguments.out}")
    return 0 if all(results.values()) else 1
