# SPDX-License-Identifier: Apache-2.0
"""Renders bench/results/*/*.json as docs/results.md and plots beside it.

python bench/render.py            write docs/results.md and docs/results-*.png
python bench/render.py --check    exit 1 if docs/results.md is not what the JSON files give
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, View, best_of, load, table_of, views_of

DOCS = ROOT / "docs"
PAGE = "results.md"
_INTRODUCTION = """\
# Measured

Made from the files in `bench/results/` by `python bench/render.py`; how it was measured is in
[measuring.md](measuring.md). Times are microseconds per call, medians, with the quartiles beside
them. *GB/s* is the op's own fewest bytes over its time, *% roof* is that against a large copy in
the same run, *floor* is the fewest bytes (or the arithmetic) at the machine's ceiling. *must* and
*aim* are the limits of the row. *(x)* is the peer's time over Mortar's.
"""
# Okabe-Ito: told apart by everyone.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
_MARKERS = ["o", "s", "^", "D", "v", "P"]


def result_files(results: Path) -> list[Path]:
    return sorted(results.glob("*/*.json"))


def _machine(result: Mapping[str, Any]) -> str:
    info = result["machine"]
    software = [f"PyTorch {info['torch']}"]
    if info["device"] == "cuda":
        software.append(f"CUDA {info['cuda']}")
        software += [f"driver {info['driver_version']}"] if "driver_version" in info else []
        clocks = [f"{part} {info[key]}" for part, key in
                  (("SM", "clocks_sm"), ("at most", "clocks_max_sm"), ("memory", "clocks_mem"))
                  if key in info]  # fmt: skip
        software += [f"clocks: {', '.join(clocks)}"] if clocks else []
    else:
        software.append(f"{info['threads']} threads, {info['capability']}")
        software.append(f"load average before {info.get('load_average', 'unknown')}")
    rates = [f"copy roof {result['roof_bytes_per_s'] / 1e9:,.0f} GB/s"]
    rates.append(f"floors at {result['floor_bytes_per_s'] / 1e9:,.0f} GB/s")
    flags = "".join(f", {name}" for name in ("warm", "quick") if result.get(name))
    return (
        f"{info['date']}, commit {info['commit']}, `{info['command']}`{flags}. "
        f"{'; '.join(software)}; {'; '.join(rates)}.\n"
    )


def _markdown_table(view: View, result: Mapping[str, Any]) -> str:
    table = table_of(view, result)
    if table is None:
        return ""
    lines = [f"#### {table.title}", ""]
    lines.append(f"| {' | '.join(table.headers)} |")
    lines.append(f"|{'---:|' * len(table.headers)}")
    lines += [f"| {' | '.join(cell.text for cell in row)} |" for row in table.rows]
    lines += ["", f"{table.summary}." if table.summary else "", ""]
    return "\n".join(lines)


def _plot_name(path: Path) -> str:
    return f"results-{path.parent.name}-{path.stem}.png"


def plotted_view(result: Mapping[str, Any]) -> View | None:
    """The first view with floors that has at least two rows."""
    for view in views_of(result):
        rows = _timed_rows(view, result)
        if view.floors and len(rows) > 1:
            return view
    return None


def _timed_rows(view: View, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        r for r in result["rows"] if r["table"] == view.table and view.subject in r["providers"]
    ]


def page(files: Sequence[Path]) -> str:
    """The whole of docs/results.md."""
    parts = [_INTRODUCTION]
    machine = None
    for path in files:
        result = load(path)
        if path.parent.name != machine:
            machine = path.parent.name
            parts.append(f"## {result['machine']['name']}\n")
        parts.append(f"### {result['family']}\n")
        parts.append(_machine(result))
        if plotted_view(result):
            parts.append(f"![{result['family']}: time per row]({_plot_name(path)})\n")
        parts += [text for view in views_of(result) if (text := _markdown_table(view, result))]
    return "\n".join(parts).rstrip() + "\n"


def _panels(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by their first key, when it is a word that takes few values; else all in one panel."""
    first = next(iter(rows[0]["case"]))
    values = list(dict.fromkeys(r["case"].get(first) for r in rows))
    if all(isinstance(v, str) for v in values) and len(values) <= 4:
        return {v: [r for r in rows if r["case"].get(first) == v] for v in values}
    return {"": list(rows)}


def _label(row: Mapping[str, Any], panel: str) -> str:
    return " / ".join(str(v) for v in row["case"].values() if str(v) != panel)


def plot(view: View, result: Mapping[str, Any], target: Path) -> None:
    """Time per row on a logarithmic axis: the floor, the subject and its peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = _timed_rows(view, result)
    panels = _panels(rows)
    tallest = max(len(members) for members in panels.values())
    figure, axes = plt.subplots(
        1, len(panels), squeeze=False, sharex=True, layout="constrained",
        figsize=(4.2 * len(panels) + 1.5, 0.26 * tallest + 1.9),
    )  # fmt: skip
    names = [view.subject, *view.peers]
    for axis, (panel, members) in zip(axes[0], panels.items(), strict=True):
        places = range(len(members))
        floors = [row["floor_us"] for row in members]
        axis.hlines(places, floors, [row["providers"][view.subject]["us"] for row in members],
                    color="#999999", linewidth=1)  # fmt: skip
        axis.scatter(floors, places, marker="|", s=90, color="black", label="floor", zorder=3)
        # The subject last: where marks coincide, it lies on top.
        for i, name in reversed(list(enumerate(names))):
            best = [(y, row["providers"], best_of(row, name, view.subject if i else ""))
                    for y, row in enumerate(members)]  # fmt: skip
            points = [(providers[which]["us"], y) for y, providers, which in best if which]
            if points:
                axis.scatter(*zip(*points, strict=True), marker=_MARKERS[i % 6], s=30, label=name,
                             facecolors=_COLOURS[0] if i == 0 else "none",
                             edgecolors=_COLOURS[i % 6], zorder=4)  # fmt: skip
        axis.set(xscale="log", xlabel="us per call", yticks=list(places), title=panel or None)
        axis.set_yticklabels([_label(row, panel) for row in members], fontsize=8)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(axis="x", which="both", color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
        axis.invert_yaxis()
    keys = [key for key in rows[0]["case"] if rows[0]["case"][key] not in panels]
    axes[0][0].set_ylabel(" / ".join(keys))
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    order = [name for name in ["floor", *names] if name in handles]
    figure.legend([handles[name] for name in order], order, loc="outside lower center",
                  ncols=len(order), frameon=False)  # fmt: skip
    figure.suptitle(f"{view.title} ({result['machine']['name']})", fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def plots(files: Sequence[Path], docs: Path) -> Iterator[Path]:
    """Draws every result file's plot; yields what it wrote."""
    for path in files:
        result = load(path)
        if view := plotted_view(result):
            target = docs / _plot_name(path)
            plot(view, result, target)
            yield target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renders docs/results.md from bench/results.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to")
    args = parser.parse_args(argv)
    files = result_files(args.results)
    text = page(files)
    target = args.docs / PAGE
    if args.check:
        wanted = [args.docs / _plot_name(f) for f in files if plotted_view(load(f))]
        missing = [plot.name for plot in wanted if not plot.is_file()]
        if missing:
            print(f"render: {', '.join(missing)} missing; run python bench/render.py")
        same = target.is_file() and target.read_text() == text
        if not same:
            print(f"render: {target.name} is not what the result files give; "
                  "run python bench/render.py")  # fmt: skip
        return int(bool(missing) or not same)
    args.docs.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    for written in [target, *plots(files, args.docs)]:
        print(f"written: {written.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
