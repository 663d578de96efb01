# SPDX-License-Identifier: Apache-2.0
"""Result rows as tables of text, for the terminal and for Markdown alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .results import View, judge

PASS, FAIL = "✓", "✗"


@dataclass(frozen=True)
class Cell:
    text: str
    good: bool | None = None  #: a verdict, or None


@dataclass(frozen=True)
class Summary:
    """A table in one line: how many rows were timed, how many meet their limits, and how much
    slower the peers are."""

    rows: int
    failed: int
    must: tuple[int, int]  #: rows that meet it, rows that have it
    aim: tuple[int, int]
    peers: dict[str, tuple[float, int]]  #: geometric mean of time over the subject's, rows

    def __str__(self) -> str:
        """'must 40/42, aim 31/42; geometric mean 9.2x as fast as vllm (42 rows)'."""
        limits = [(name, *counts) for name, counts in (("must", self.must), ("aim", self.aim))]
        text = ", ".join(f"{name} {met}/{of}" for name, met, of in limits if of)
        means = [f"{number(x)}x as fast as {p} ({n} rows)" for p, (x, n) in self.peers.items()]
        if means:
            text += ("; " if text else "") + "geometric mean " + ", ".join(means)
        return text + (f"; {self.failed} failed" if self.failed else "")


@dataclass(frozen=True)
class Table:
    title: str
    headers: list[str]
    rows: list[list[Cell]]
    totals: Summary
    note: str = ""

    @property
    def summary(self) -> str:
        return f"{self.totals}{self.note}"


def number(value: float) -> str:
    """Three significant digits, no exponent: 0.14, 8.36, 58.7, 1042."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _limit(limit: float | None, good: bool) -> Cell:
    if limit is None:
        return Cell("")
    return Cell(f"{number(limit)} {PASS if good else FAIL}", good)


def views_of(result: Mapping[str, Any]) -> list[View]:
    """The views a result file carries."""
    return [View(**{**view, "peers": tuple(view["peers"])}) for view in result["views"]]


def table_of(view: View, result: Mapping[str, Any]) -> Table | None:
    """The table of a view, or None when the run has no row for it."""
    rows = [r for r in result["rows"] if r["table"] == view.table and
            (view.subject in r["providers"] or view.subject in r["failed"])]  # fmt: skip
    if not rows:
        return None
    keys = list(dict.fromkeys(name for row in rows for name in row["case"]))
    peers = [name for name in view.peers if any(best_of(row, name, view.subject) for row in rows)]
    headers = [*keys, f"{view.subject}, us", "quartiles"]
    if view.floors:
        headers += ["GB/s", "% roof", "floor", "x floor"]
    waiting = {n for row in rows for n, p in row["providers"].items() if p["synchronises"]}
    if view.memory:
        headers += ["peak, MB", *(f"{p} peak" for p in peers)]
    headers += ["must", "aim", *(f"{p}{'*' if p in waiting else ''} (x)" for p in peers)]
    note = "; *: with the wait for its result" if waiting.intersection(peers) else ""
    table = Table(view.title, headers, [], _summary(view, rows, peers), note)
    roof = result["roof_bytes_per_s"]
    for row in rows:
        table.rows.append([Cell(str(row["case"].get(key, ""))) for key in keys])
        cells = table.rows[-1]
        if view.subject not in row["providers"]:
            cells.append(Cell("failed", False))
            cells += [Cell("") for _ in headers[len(cells) :]]
            continue
        timing = row["providers"][view.subject]
        us = timing["us"]
        cells += [Cell(number(us)), Cell(f"{number(timing['us_q1'])}-{number(timing['us_q3'])}")]
        if view.floors:
            rate = row["bytes"] / us * 1e6
            floor = row["floor_us"]
            cells += [Cell(number(rate / 1e9)), Cell(f"{100 * rate / roof:.0f}"),
                      Cell(number(floor)), Cell(number(us / floor) if floor else "")]  # fmt: skip
        if view.memory:
            names = (view.subject, *(best_of(row, peer, view.subject) for peer in peers))
            cells += [_peak(row["providers"].get(name, {})) for name in names]
        verdict = judge(row, view.subject)
        cells += [_limit(verdict.must_us, verdict.must), _limit(verdict.aim_us, verdict.aim)]
        cells += [_peer(row, peer, view.subject) for peer in peers]
    return table


def best_of(row: Mapping[str, Any], peer: str, subject: str) -> str | None:
    """The provider of that name, or else the fastest of that group; None if neither took part."""
    providers = row["providers"]
    if peer in providers:
        return peer
    group = [n for n, p in providers.items() if p["group"] == peer and n != subject]
    return min(group, key=lambda name: providers[name]["us"], default=None)


def _peer(row: Mapping[str, Any], peer: str, subject: str) -> Cell:
    name = best_of(row, peer, subject)
    if name is None:
        why = row["failed"].get(peer)
        return Cell("" if why is None else "crashed" if why.startswith("crashed") else "failed")
    us = row["providers"][name]["us"]
    which = "" if name == peer else f" {name}"
    return Cell(f"{number(us)}{which} ({number(us / row['providers'][subject]['us'])})")


def _peak(provider: Mapping[str, Any]) -> Cell:
    peak = provider.get("peak_bytes")
    return Cell("" if peak is None else number(peak / 1e6))


def _summary(view: View, rows: list[dict[str, Any]], peers: list[str]) -> Summary:
    timed = [row for row in rows if view.subject in row["providers"]]
    verdicts = [judge(row, view.subject) for row in timed]
    must = [v.must for v in verdicts if v.must_us is not None]
    aim = [v.aim for v in verdicts if v.aim_us is not None]
    means = {}
    for peer in peers:
        pairs = [(row["providers"], best_of(row, peer, view.subject)) for row in timed]
        ratios = [p[name]["us"] / p[view.subject]["us"] for p, name in pairs if name]
        if ratios:
            means[peer] = (statistics.geometric_mean(ratios), len(ratios))
    return Summary(len(timed), len(rows) - len(timed), (sum(must), len(must)),
                   (sum(aim), len(aim)), means)  # fmt: skip


def roofs_text(result: Mapping[str, Any]) -> str:
    """'roof 30 GB/s (read; copy 20, streaming store 25)'."""
    roofs = result.get("roofs", {"copy": result["roof_bytes_per_s"]})
    best, *others = sorted(roofs, key=roofs.__getitem__, reverse=True)
    others = [f"{name} {roofs[name] / 1e9:,.0f}" for name in others]
    text = "; ".join([best, ", ".join(others)]) if others else best
    return f"roof {roofs[best] / 1e9:,.0f} GB/s ({text})"
