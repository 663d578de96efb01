# SPDX-License-Identifier: Apache-2.0
"""Documents name only what exists: paths, links and commands of ./run."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from suite import ROOT, output, tracked_files

_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_RUN = re.compile(r"\./run +([a-z][a-z-]*)")
_PATH = re.compile(r"[\w.<>{},*+-]+(?:/[\w.<>{},*+-]+)*/?")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SOURCE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".toml", ".md", ".cmake", ".map")
_GENERATED = ("build/", "dist/", ".venv/", "python/mortar/_lib", "bench/results/")


def _expand(path: str) -> list[str]:
    """`a/{b,c}.h` as [`a/b.h`, `a/c.h`]; a `<placeholder>` becomes a wildcard."""
    parts = [part.split(",") for part in re.split(r"[{}]", re.sub(r"<[^>]*>", "*", path))]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _is_path(text: str, top_level: set[str]) -> bool:
    if not _PATH.fullmatch(text) or text.startswith(_GENERATED):
        return False
    if "/" in text:
        return text.split("/")[0] in top_level or text.rstrip("/").endswith(_SOURCE_SUFFIXES)
    return text.endswith(_SOURCE_SUFFIXES) and not text.startswith((".", "*"))


def _exists(path: str, document: Path, names: set[str]) -> bool:
    if "/" not in path and path in names:  # a bare file name: any file of that name will do
        return True
    return any(next(base.glob(path.rstrip("/")), None) for base in (ROOT, document.parent))


def paths_exist() -> Iterator[str]:
    """Back-ticked paths and relative links in *.md that lead nowhere."""
    top_level = {path.name for path in ROOT.iterdir()} | {"src", "docs", "tests", "tools"}
    names = {path.name for path in tracked_files()}
    for document in tracked_files(".md"):
        text = document.read_text()
        prose = _FENCE.sub("", text)
        wanted = {code for code in _CODE.findall(prose) if _is_path(code, top_level)}
        wanted |= {link for link in _LINK.findall(prose) if "://" not in link}
        for path in sorted(wanted):
            if not all(_exists(each, document, names) for each in _expand(path)):
                yield f"{document.relative_to(ROOT)}: `{path}` does not exist"


def commands_exist() -> Iterator[str]:
    """`./run` commands in *.md that ./run does not have."""
    usage = output(["bash", ROOT / "run"])
    known = set(re.findall(r"^  ([a-z-]+)", usage, re.MULTILINE))
    for document in tracked_files(".md"):
        for command in sorted(set(_RUN.findall(document.read_text())) - known):
            yield f"{document.relative_to(ROOT)}: there is no `./run {command}`"
