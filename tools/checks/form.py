# SPDX-License-Identifier: Apache-2.0
"""Formatters and linters, at the versions that requirements.txt pins."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from suite import ROOT, tracked_files

_CPP = (".h", ".cpp", ".cu", ".cuh")


def _tool(name: str) -> Path:
    """The program installed beside this Python, or else the one on the PATH."""
    beside = Path(sys.executable).parent / name
    return beside if beside.is_file() else Path(name)


def _problems(command: list) -> Iterator[str]:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        yield done.stdout.strip() or f"{command[0]} failed"


def clang_format(fix: bool = False) -> Iterator[str]:
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    command = [_tool("clang-format"), "--style=file", *mode, *tracked_files(*_CPP)]
    for complaint in _problems(command):
        places = re.findall(r"^(\S+?):(\d+):\d+: error", complaint, re.MULTILINE)
        first = dict(reversed(places))
        yield from (f"{file}:{line}: not formatted; ./run format" for file, line in first.items())
        if not places:
            yield complaint


def ruff(fix: bool = False) -> Iterator[str]:
    paths = tracked_files(".py")
    yield from _problems([_tool("ruff"), "check", "-q", *(["--fix"] if fix else []), *paths])
    yield from _problems([_tool("ruff"), "format", "-q", *([] if fix else ["--check"]), *paths])


def codespell() -> Iterator[str]:
    """Common misspellings, in everything that people write by hand."""
    written = [path for path in tracked_files() if path.suffix not in (".json", ".png")]
    yield from _problems([_tool("codespell"), *written])


def shellcheck() -> Iterator[str]:
    scripts = [ROOT / "run", ROOT / ".ci/run", *tracked_files(".sh")]
    yield from _problems(["shellcheck", *scripts])
