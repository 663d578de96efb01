# SPDX-License-Identifier: Apache-2.0
"""What no source may hold: absolute paths of a machine, hosts of registries, missing licences."""

import re
from collections.abc import Iterator

from suite import ROOT, tracked_files

_SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake")
_CLANG_FORMATTED = (".h", ".cpp", ".cu", ".cuh")
_MAX_LINES = 400
_MAX_COLUMNS = 100
_BANNED = {
    "an absolute path of one machine": re.compile(r"(?<![\w.})-])/(?:home|root|tmp|work|mnt)/\w"),
    "a package registry's host": re.compile(
        r"(?:pypi|pythonhosted|anaconda|npmjs|crates)\.(?:org|com|io)|download\.pytorch", re.I
    ),
    "a merge conflict marker": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    "a test that is switched off": re.compile(
        r"\bDISABLED_\w|GTEST_SKIP|pytest\.(?:mark\.)?(?:skip|xfail)|unittest\.skip"
    ),
}


def _read(path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:  # a picture or another binary file
        return ""


def banned_text() -> Iterator[str]:
    """Lines with text that must not be in the project."""
    for path in tracked_files():
        if path.is_relative_to(ROOT / "tools/checks"):
            continue
        text = _read(path)
        for what, pattern in _BANNED.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}: {what}: {match.group()}"


def source_form() -> Iterator[str]:
    """Source files without the licence line, or too long or too wide to be read in one go."""
    for path in tracked_files(*_SOURCES):
        text = _read(path)
        if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(text.splitlines()[:3]):
            yield f"{path.relative_to(ROOT)}: the SPDX line is missing"
        if (lines := text.count("\n")) > _MAX_LINES:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {_MAX_LINES}"
        if path.suffix not in _CLANG_FORMATTED:  # ruff knows about the width of Python
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > _MAX_COLUMNS:  # clang-format leaves comments as they are
                where = f"{path.relative_to(ROOT)}:{number}"
                yield f"{where}: {len(line)} columns, at most {_MAX_COLUMNS}"
