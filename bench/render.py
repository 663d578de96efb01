# SPDX-License-Identifier: Apache-2.0
"""Renders bench/results/*/*.json: docs/results.md with a summary and plots, and the tables of each
family on a page of its own, docs/results-<family>.md. A new family needs its JSON file alone.

python bench/render.py            write the pages and docs/results-*.png
python bench/render.py --check    exit 1 if the pages are not what the JSON files give
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, View, best_of, judge, load, number, table_of, views_of
from harness.tables import roofs_text

DOCS = ROOT / "docs"
PAGE = "results.md"
_SUMMARY = """\
# Measured

Made from the files in `bench/results/` by `python bench/render.py`; how it was measured is in
[measuring.md](measuring.md). *must* and *aim* count the rows within the limits of the project, of
those that have one. Beside each peer stands how many times Mortar's time it takes, in the geometric
mean over the rows in which it took part.
"""
_TABLES = """\
# Measured: {family}

Made from the files in `bench/results/` by `python bench/render.py`; [results.md](results.md) has
the summary of all families and the plots, [measuring.md](measuring.md) how it was measured. Times
are microseconds per call, medians, with the quartiles beside them. *GB/s* is the op's own fewest
bytes over its time, *% roof* is that against the machine's memory in the same run, *floor* is the
fewest bytes (or the arithmetic) at the machine's ceiling. *must* and *aim* are the limits of the
row. *(x)* is the peer's time over Mortar's.
"""
# Okabe-Ito: told apart by everyone.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
_MARKERS = ["o", "s", "^", "D", "v", "P"]


def result_files(results: Path) -> list[Path]:
    """All result files, those of GPUs first."""
    files = sorted(results.glob("*/*.json"))
    return sorted(files, key=lambda path: load(path)["machine"]["device"] != "cuda")


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
        software.append(f"{info['threads']} threads")
        # Files of older runs name PyTorch's choice of instructions in place of Mortar's.
        software.append(
            f"Mortar's CPU target {info['target']}"
            if "target" in info
            else f"PyTorch's CPU target {info['capability']}"
        )
        software.append(f"load average before {info.get('load_average', 'unknown')}")
    rates = [roofs_text(result)]
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
    lines = [f"### {table.title}", ""]
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


def _tables_name(family: str) -> str:
    return f"results-{family}.md"


def _summary_table(result: Mapping[str, Any]) -> str:
    """One row per table of the family's page."""
    lines = [
        "| | rows | must | aim | peers: their time over Mortar's |",
        "|---|---:|---:|---:|---|",
    ]
    for view in views_of(result):
        if (table := table_of(view, result)) is None:
            continue
        totals = table.totals
        limits = [f"{met}/{of}" if of else "" for met, of in (totals.must, totals.aim)]
        peers = ", ".join(f"{peer} {number(x)}" for peer, (x, _) in totals.peers.items())
        failed = f" ({totals.failed} failed)" if totals.failed else ""
        lines.append(f"| {view.title} | {totals.rows}{failed} | {' | '.join(limits)} | {peers} |")
    return "\n".join([*lines, ""])


def summary_page(files: Sequence[Path]) -> str:
    """docs/results.md: per machine and family one small table and the plot."""
    parts = [_SUMMARY]
    machine = None
    for path in files:
        result = load(path)
        if path.parent.name != machine:
            machine = path.parent.name
            parts.append(f"## {result['machine']['name']}\n")
        family = result["family"]
        parts.append(f"### {family}: [all tables]({_tables_name(family)})\n")
        parts += [_machine(result), _summary_table(result)]
        if plotted_view(result):
            parts.append(f"![{family}: time per row]({_plot_name(path)})\n")
    return "\n".join(parts).rstrip() + "\n"


def tables_page(family: str, files: Sequence[Path]) -> str:
    """docs/results-<family>.md: all tables of one family, machine after machine."""
    parts = [_TABLES.format(family=family)]
    for path in files:
        result = load(path)
        if result["family"] == family:
            parts += [f"## {result['machine']['name']}\n", _machine(result)]
            parts += [text for view in views_of(result) if (text := _markdown_table(view, result))]
    return "\n".join(parts).rstrip() + "\n"


def pages(files: Sequence[Path]) -> dict[str, str]:
    """Every page by its name in docs."""
    families = dict.fromkeys(load(path)["family"] for path in files)
    tables = {_tables_name(family): tables_page(family, files) for family in families}
    return {PAGE: summary_page(files), **tables}


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


def plot_against_floor(view: View, result: Mapping[str, Any], target: Path) -> None:
    """Every row as a point, time against the floor on logarithmic axes; those past their limit
    stand out, and lines show the floor itself and three times it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = _timed_rows(view, result)
    figure, axis = plt.subplots(layout="constrained", figsize=(7.5, 5.5))
    names = [*reversed(view.peers), view.subject]
    for i, name in enumerate(names):
        subject = name == view.subject
        points: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for row in rows:
            if which := best_of(row, name, "" if subject else view.subject):
                met = not subject or judge(row, name).must
                points[met].append((row["floor_us"], row["providers"][which]["us"]))
        for met, some in points.items():
            if some:
                label = name if met else f"{name}, past its limit"
                colour = _COLOURS[0 if met and subject else len(names) - i]
                axis.scatter(*zip(*some, strict=True), s=16, label=label, zorder=3 + i,
                             marker=_MARKERS[len(names) - 1 - i], edgecolors=colour,
                             facecolors=colour if subject else "none")  # fmt: skip
    ends = [min(row["floor_us"] for row in rows), max(row["floor_us"] for row in rows)]
    axis.plot(ends, ends, color="black", linewidth=1, label="floor")
    axis.plot(ends, [3 * end for end in ends], color="#999999", linewidth=1, label="3 x floor")
    axis.set(xscale="log", yscale="log", xlabel="floor, us", ylabel="us per call")
    axis.grid(which="major", color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.legend(frameon=False)
    axis.set_title(f"{view.title} ({result['machine']['name']})", fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def plot_share(view: View, result: Mapping[str, Any], target: Path) -> None:
    """Bars of the speed that is left, in percent of the first peer's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = _timed_rows(view, result)
    base, *others = view.peers
    names = [view.subject, *(name for name in others if any(name in r["providers"] for r in rows))]
    figure, axis = plt.subplots(layout="constrained", figsize=(1.2 + 1.1 * len(rows), 4.2))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [y + (i - (len(names) - 1) / 2) * width for y in range(len(rows))]
        shares = [100 * row["providers"][base]["us"] / row["providers"][name]["us"]
                  if name in row["providers"] else 0.0 for row in rows]  # fmt: skip
        bars = axis.bar(places, shares, width, color=_COLOURS[i % 6], label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(rows)), [_label(row, "") for row in rows], fontsize=8)
    axis.set(ylim=(0, 105), ylabel=f"% of {base} speed", xlabel=" / ".join(rows[0]["case"]))
    axis.legend(frameon=False, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(f"{view.title} ({result['machine']['name']})", fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


_PLOTS = {"rows": plot, "floor": plot_against_floor, "share": plot_share}


def plots(files: Sequence[Path], docs: Path) -> Iterator[Path]:
    """Draws every result file's plot; yields what it wrote."""
    for path in files:
        result = load(path)
        if view := plotted_view(result):
            target = docs / _plot_name(path)
            _PLOTS[view.plot](view, result, target)
            yield target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renders docs/results*.md from bench/results.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to")
    args = parser.parse_args(argv)
    files = result_files(args.results)
    wanted = pages(files)
    if args.check:
        return int(bool(_report_stale(args.docs, wanted, files)))
    args.docs.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        (args.docs / name).write_text(text)
    for written in [*(args.docs / name for name in wanted), *plots(files, args.docs)]:
        print(f"written: {written.name}")
    return 0


def _report_stale(docs: Path, wanted: Mapping[str, str], files: Sequence[Path]) -> list[str]:
    """Prints what is wrong with the pages and plots that are there."""
    drawn = [_plot_name(file) for file in files if plotted_view(load(file))]
    problems = [f"{name} is missing" for name in drawn if not (docs / name).is_file()]
    for name, text in wanted.items():
        if not (docs / name).is_file() or (docs / name).read_text() != text:
            problems.append(f"{name} is not what the result files give")
    known = {*wanted, *drawn}
    problems += [f"{path.name} belongs to no result file" for path in sorted(docs.glob("results-*"))
                 if path.name not in known]  # fmt: skip
    for problem in problems:
        print(f"render: {problem}; run python bench/render.py")
    return problems


if __name__ == "__main__":
    sys.exit(main())
