# SPDX-License-Identifier: Apache-2.0
"""Reports registers, spills and local memory of every CUDA kernel in a build tree.

Reads what ptxas said (-Xptxas=-v), kept beside each object by cmake/keep_stderr.sh. Spills fail
unless tools/allowed_spills.toml lists them with a reason.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from suite import ROOT, Counts, console

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel instantiation in one architecture's image; sizes in bytes."""

    source: str  # src/<family>/cuda/<pass>.cu
    name: str  # demangled, with template arguments
    arch: str
    registers: int
    stack: int
    spills: int  # stores + loads
    shared: int  # static only

    @property
    def function(self) -> str:
        """The name without template arguments, namespaces and parameters."""
        plain = re.sub(r"\(anonymous namespace\)::", "", self.name)
        while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
            plain = shorter
        return plain.partition("(")[0].split(" ")[-1].split("::")[-1]


def _demangle(symbols: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.splitlines()


def read_kernels(build: Path) -> list[Kernel]:
    """Every kernel compiled in the build tree `build`, sorted by source and name."""
    found = []
    for log in sorted(build.glob("CMakeFiles/mortar_objects.dir/**/*.cu.o.stderr")):
        source = str(log.relative_to(build / "CMakeFiles/mortar_objects.dir"))
        if not (ROOT / source.removesuffix(".o.stderr")).is_file():
            continue  # a source removed since
        found += [(source.removesuffix(".o.stderr"), m) for m in _ENTRY.finditer(log.read_text())]
    names = _demangle([match["symbol"] for _, match in found])
    kernels = [
        Kernel(
            source,
            name,
            match["arch"],
            int(match["registers"]),
            int(match["stack"]),
            int(match["stores"]) + int(match["loads"]),
            int(match["shared"] or 0),
        )
        for (source, match), name in zip(found, names, strict=True)
    ]
    return sorted(kernels, key=lambda kernel: (kernel.source, kernel.name, kernel.arch))


def _plain(arch: str) -> str:
    """sm_90 for sm_90a as well: which of the two a source has does not change its kernels."""
    return arch.removesuffix("a")


def _span(values: Iterable[int]) -> str:
    low, high = min(values := list(values)), max(values)
    return str(low) if low == high else f"{low}-{high}"


def summary_table(kernels: list[Kernel]) -> Table:
    """One row per kernel function and architecture, over all its template arguments."""
    table = Table(title="CUDA kernels", title_justify="left")
    for column in ("source", "kernel", "arch"):
        table.add_column(column)
    for column in ("variants", "registers", "spill bytes", "stack bytes", "static smem"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.source, kernel.function, kernel.arch), []).append(kernel)
    for (source, function, arch), group in groups.items():
        cells = [str(len(group))]
        for field in ("registers", "spills", "stack", "shared"):
            cells.append(_span(getattr(kernel, field) for kernel in group))
        style = "red" if any(kernel.spills for kernel in group) else None
        table.add_row(source, function, arch, *cells, style=style)
    return table


def check_kernels(build: Path) -> Counts:
    """Prints the report; each kernel image is one check, failed by spills that are not allowed."""
    kernels = read_kernels(build)
    console.print(summary_table(kernels))
    with open(ROOT / "tools/allowed_spills.toml", "rb") as file:
        allowed = tomllib.load(file).get("allow", [])
    counts = Counts()
    used = set()
    for kernel in kernels:
        excuse = next(
            (
                index
                for index, entry in enumerate(allowed)
                if entry["kernel"] in kernel.name
                and _plain(entry.get("arch", kernel.arch)) == _plain(kernel.arch)
                and kernel.spills <= entry["bytes"]
            ),
            None,
        )
        if kernel.spills and excuse is None:
            console.print(
                f"{kernel.source}: {kernel.name} ({kernel.arch}) spills {kernel.spills} bytes",
                markup=False,
            )
        elif kernel.spills:
            used.add(excuse)
        counts += Counts.of(kernel.spills == 0 or excuse is not None)
    for index, entry in enumerate(allowed):
        if index not in used:
            console.print(f"tools/allowed_spills.toml: no kernel needs {entry}", markup=False)
            counts.failed += 1
        elif not entry.get("reason"):
            console.print(f"tools/allowed_spills.toml: no reason given for {entry}", markup=False)
            counts.failed += 1
    with open(build / "kernels.txt", "w") as file:
        for kernel in kernels:
            fields = (kernel.registers, kernel.spills, kernel.stack, kernel.shared)
            print(kernel.source, kernel.arch, *fields, kernel.name, sep="\t", file=file)
    missing = {"sm_80", "sm_90"} - {_plain(kernel.arch) for kernel in kernels}
    if missing:
        console.print(f"no kernel was compiled for {', '.join(sorted(missing))}")
        counts.failed += 1
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="a build tree, e.g. build/release")
    sys.exit(check_kernels(parser.parse_args().build).failed > 0)
