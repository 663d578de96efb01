# SPDX-License-Identifier: Apache-2.0
"""The command line that every benchmark shares."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from . import machine
from .cases import Case, Options, run_case
from .foreign import ForeignProcess
from .results import SCHEMA, View, save
from .tables import Table, roofs_text, table_of

RESULTS = machine.ROOT / "bench" / "results"


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def parser(
    command: str, peers: Sequence[str], default_peers: Sequence[str], epilog: str = ""
) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=f"./run bench {command}", description=f"Times the {command} ops.", epilog=epilog
    )
    p.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="auto: CUDA where there is a GPU",
    )
    p.add_argument(
        "--rows", metavar="REGEX", type=_regex, default="", help="only rows whose label matches"
    )
    p.add_argument("--list", action="store_true", help="print the row labels and stop")
    p.add_argument(
        "--peers",
        metavar="NAME,...",
        default=",".join(default_peers),
        help=f"'all', 'none' or some of {', '.join(peers)} (default: %(default)s)",
    )
    p.add_argument(
        "--peer-budget",
        type=float,
        default=60,
        metavar="SECONDS",
        help="warm-up that all peers together may use up (default: %(default)s)",
    )
    p.add_argument("--replays", type=int, default=9, help="samples a row (default: %(default)s)")
    p.add_argument("--warm", action="store_true", help="one set of buffers: caches stay warm")
    p.add_argument("--quick", action="store_true", help="few samples, less memory for the roof")
    p.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="results folder (default: bench/results; none with --rows, --quick, --warm)",
    )
    return p  # fmt: skip


def print_table(console: Console, table: Table) -> None:
    rich = RichTable(title=table.title, caption=table.summary, title_justify="left",
                     caption_justify="left")  # fmt: skip
    for header in table.headers:
        rich.add_column(header, justify="right", no_wrap=True)
    styles = {True: "green", False: "bold red", None: None}
    for row in table.rows:
        rich.add_row(*(f"[{s}]{c.text}[/]" if (s := styles[c.good]) else c.text for c in row))
    console.print(rich)


def _command(command: str, args: argparse.Namespace) -> str:
    """The command that repeats this run; where its files go is no part of that."""
    words = ["./run", "bench", *command.split(), "--device", args.device]
    words += ["--peers", args.peers or "none"]
    words += ["--rows", args.rows] if args.rows else []
    words += ["--replays", str(args.replays), "--peer-budget", f"{args.peer_budget:g}"]
    words += [f"--{name}" for name in ("warm", "quick") if getattr(args, name)]
    return shlex.join(words)


def _exit_status(rows: Sequence[dict[str, Any]]) -> int:
    """1 if a judged provider failed its check or could not run: its time would mean nothing."""
    return int(any(name in row["failed"] for row in rows for name in row["targets"]))


def main(
    family: str,
    cases: Callable[[Options], Iterable[Case]],
    views: Sequence[View],
    peers: Sequence[str] = (),
    default_peers: Sequence[str] | None = None,
    argv: Sequence[str] | None = None,
    command: str = "",
    epilog: str = "",
) -> int:
    """Runs the rows of a family, prints their tables and writes the result file after every row.

    `cases` is called with the options and yields rows; `default_peers` are the peers that need no
    request (all, when not given); `command` is what follows `./run bench`, where that is not the
    family alone. Returns the exit status."""
    command = command or family
    default_peers = peers if default_peers is None else default_peers
    args = parser(command, peers, default_peers, epilog).parse_args(argv)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        print("bench: --device cuda needs a GPU that PyTorch can use, got none", file=sys.stderr)
        return 2
    wanted = {name for name in args.peers.split(",") if name and name != "none"}
    if unknown := wanted - {*peers, "all"}:
        print(
            f"bench: --peers must be of {', '.join(peers)}, got {sorted(unknown)}", file=sys.stderr
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    options = Options(device, frozenset(wanted), args.quick, args.warm, args.replays,
                      args.peer_budget)  # fmt: skip
    try:
        todo = [case for case in cases(options) if re.search(args.rows, case.label)]
    except (FileNotFoundError, ImportError) as missing:
        print(missing, file=sys.stderr)
        return 2
    if args.list or not todo:
        with contextlib.suppress(BrokenPipeError):  # of a reader such as `head`
            print("\n".join(case.label for case in todo) or f"bench: no row matches {args.rows!r}",
                  flush=True)  # fmt: skip
        return 0 if todo else 2

    if not cuda:
        machine.keep_freed_memory()
    console = Console(width=None if sys.stdout.isatty() else 320)
    info = machine.describe(device) | {"command": _command(command, args)}
    if info.get("load_average", 0) > 1:
        console.print(f"the load average is {info['load_average']}: other programs are running, "
                      "and these timings will show them")  # fmt: skip
    roofs = machine.memory_roofs(device, args.quick)
    roof = max(roofs.values())
    ceiling = machine.ceiling(info, roof)
    partial = bool(args.rows or args.quick or args.warm)
    out = args.out or (None if partial else RESULTS)
    path = out / machine.slug(info) / f"{family}.json" if out else None
    result: dict[str, Any] = {
        "schema": SCHEMA, "family": family, "machine": info, "roofs": roofs,
        "roof_bytes_per_s": roof,
        "floor_bytes_per_s": ceiling.bandwidth, "warm": args.warm, "quick": args.quick,
        "views": [dataclasses.asdict(view) | {"peers": list(view.peers)} for view in views],
        "rows": [],
    }  # fmt: skip
    foreign = ForeignProcess(cases, options)
    with contextlib.closing(foreign), \
         Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                  TimeElapsedColumn(), console=console, transient=True) as progress:  # fmt: skip
        task = progress.add_task(family, total=len(todo))
        for case in todo:
            progress.update(task, description=case.label)
            row = run_case(case, options, ceiling, foreign)
            result["rows"].append(row)
            for name, why in row["failed"].items():
                progress.console.print(f"{case.label}: {name} failed: {why}", markup=False)
            if path:
                save(result, path)
            progress.advance(task)
            if not console.is_terminal:
                console.print(f"{len(result['rows'])}/{len(todo)}: {case.label}", markup=False)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    for view in views:
        if table := table_of(view, result):
            print_table(console, table)
    console.print(f"{info['name']}, torch {info['torch']}, commit {info['commit']}; "
                  f"{roofs_text(result)}, floors at {ceiling.bandwidth / 1e9:,.0f} GB/s; us per "
                  "call; (x): the peer's time over Mortar's")  # fmt: skip
    if path:
        console.print(f"written: {path}", markup=False)
    return _exit_status(result["rows"])
