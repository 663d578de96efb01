# SPDX-License-Identifier: Apache-2.0
"""Dependencies point one way: python -> bindings -> include <- src/<family> -> src/core, device.
Bindings may use core and device as well."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from suite import ROOT, tracked_files

_INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
_FRAMEWORKS = ("torch/", "ATen/", "c10/", "tvm/", "dlpack/", "Python.h")
_LIBRARIES = ("hwy/",)  # whose own files include each other in quotes, and so must their users
_CUDA = ("cuda", "cub/", "thrust/", "nv/")


def _rooms(file: Path) -> tuple[str, ...] | None:
    """The first path elements that a quoted include in `file` may have; None: not restricted."""
    parts = file.relative_to(ROOT).parts
    match parts[0]:
        case "include":
            return ("mortar",)
        case "bindings":
            return ("mortar", "core", "device")
        case "src" if parts[1] == "core":
            return ("mortar", "core")
        case "src" if parts[1] == "device":
            return ("mortar", "core", "device")
        case "src":
            return ("mortar", "core", "device", parts[1])
    return None


def include_direction() -> Iterator[str]:
    """Include lines that point the wrong way, or to a framework that the layer must not know."""
    for file in tracked_files(".h", ".cpp", ".cu", ".cuh"):
        rooms = _rooms(file)
        if rooms is None:
            continue
        name = file.relative_to(ROOT)
        for quote, target in _INCLUDE.findall(file.read_text()):
            if quote == '"' and not target.startswith(_LIBRARIES):
                beside = "/" not in target and (file.parent / target).is_file()
                if not beside and target.split("/")[0] not in rooms:
                    yield f'{name}: may include from {", ".join(rooms)} only, not "{target}"'
            elif quote == "<" and name.parts[0] != "bindings" and target.startswith(_FRAMEWORKS):
                yield f"{name}: only bindings/ may include <{target}>"
            elif name.parts[0] == "include" and target.startswith(_CUDA):
                yield f"{name}: the public API knows no CUDA header, not even <{target}>"


def python_imports() -> Iterator[str]:
    """Imports of the package that reach outside it, into bench, examples, tests or tools."""
    outside = {"bench", "examples", "tests", "tools"}
    for file in tracked_files(".py"):
        if not file.is_relative_to(ROOT / "python"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                if name.split(".")[0] in outside:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: imports {name}"
