# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of a test run, shows their output as it comes, counts and times them."""

import dataclasses
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


@dataclasses.dataclass
class Counts:
    """Outcomes of the tests or checks of one stage."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __iadd__(self, other: "Counts") -> "Counts":
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self

    @classmethod
    def of(cls, ok: bool) -> "Counts":
        return cls(passed=int(ok), failed=int(not ok))


class Suite:
    """Stages run one after another; a failed stage does not stop the next."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, Counts, float]] = []

    def stage(self, name: str, action: Callable[[], Counts]) -> Counts:
        """Runs `action` under a heading; an exception counts as one failure."""
        console.rule(f"[bold]{name}", align="left")
        start = time.monotonic()
        try:
            counts = action()
        except Exception as error:
            console.print(f"[red]{type(error).__name__}: {error}", markup=True)
            counts = Counts(failed=1)
        seconds = time.monotonic() - start
        console.print(f"{name}: {counts.passed} passed, {counts.failed} failed in {seconds:.1f} s")
        self._rows.append((name, counts, seconds))
        return counts

    def check(self, name: str, find_problems: Callable[[], Iterable[str]]) -> Counts:
        """A stage that is one check: it passes if `find_problems` yields nothing."""

        def action() -> Counts:
            problems = list(find_problems())
            for problem in problems:
                console.print(problem, markup=False)
            return Counts.of(not problems)

        return self.stage(name, action)

    def finish(self) -> int:
        """Prints the table and, as the last line, `N passed, N failed`. Returns the exit status.

        A skipped test counts as a failed one: every test runs where it was collected.
        """
        table = Table(title="Summary", title_justify="left")
        table.add_column("stage")
        for column in ("passed", "failed", "skipped", "seconds"):
            table.add_column(column, justify="right")
        total = Counts()
        for name, counts, seconds in self._rows:
            color = "red" if counts.failed or counts.skipped else "green"
            cells = (counts.passed, counts.failed, counts.skipped, f"{seconds:.1f}")
            table.add_row(f"[{color}]{name}", *map(str, cells))
            total += counts
        console.print(table)
        failed = total.failed + total.skipped
        print(f"{total.passed} passed, {failed} failed", flush=True)
        return 0 if failed == 0 and total.passed > 0 else 1


def run(command: list, env: dict[str, str] | None = None) -> bool:
    """Runs a command in the root with its output shown; returns whether it succeeded."""
    sys.stdout.flush()
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=env).returncode == 0


def run_quietly(commands: list[list]) -> tuple[bool, str]:
    """Runs commands until one fails; returns whether none did, and what they said."""
    said = []
    for command in commands:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said.append(done.stdout)
        if done.returncode != 0:
            return False, "".join(said)
    return True, "".join(said)


def output(command: list) -> str:
    """The stdout of a command that must succeed."""
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def tracked_files(*suffixes: str) -> list[Path]:
    """Absolute paths of the files under version control, those with one of `suffixes` if given."""
    names = output(["git", "ls-files", "-z"]).split("\0")
    paths = (ROOT / name for name in names if name)
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def read_junit(path: Path) -> Counts:
    """Counts the cases of a JUnit file as GoogleTest, ctest and pytest write it."""
    counts = Counts()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts
