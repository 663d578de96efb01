# SPDX-License-Identifier: Apache-2.0
"""Result files: `<results>/<machine>/<family>.json`, one per machine and family; tables that a
later run did not reach stay in a file of another name, with the commit that they are of.

A file holds what was measured; everything that can be computed from it (GB/s, ratios, verdicts) is
computed when it is shown, so that the two cannot disagree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .targets import TARGETS, Limit

SCHEMA = 1
_ROW_FIELDS = {
    "table": str, "case": dict, "bytes": int, "flops": int, "floor_us": float, "targets": dict,
    "sets": int, "providers": dict, "failed": dict, "skipped": dict,
}  # fmt: skip
_PROVIDER_FIELDS = {
    "group": str, "synchronises": bool, "rel_error": float, "us": float, "us_q1": float,
    "us_q3": float, "samples": int, "calls": int,
}  # fmt: skip
_FILE_FIELDS = {"schema": int, "family": str, "machine": dict, "roof_bytes_per_s": float,
                "floor_bytes_per_s": float, "views": list, "rows": list}  # fmt: skip


@dataclass(frozen=True)
class View:
    """A table over the rows of one `table`: `subject` against whoever else was timed.

    `peers` names the other columns: a provider, or a group, of which the fastest is shown;
    `floors` is off where bytes say nothing (host cost); `memory` shows the peak of a call; `plot`
    is how its picture shows the rows: each on a line of its own ("rows"), all as points of time
    against the floor ("floor"), or as bars of speed in percent of the first peer's ("share")."""

    title: str
    table: str
    subject: str
    peers: tuple[str, ...] = ()
    floors: bool = True
    plot: str = "rows"
    memory: bool = False


@dataclass(frozen=True)
class Verdict:
    """A provider's time in a row against its limits (None: no such limit)."""

    us: float
    must_us: float | None
    aim_us: float | None

    @property
    def must(self) -> bool:
        return self.must_us is None or self.us <= self.must_us

    @property
    def aim(self) -> bool:
        return self.aim_us is None or self.us <= self.aim_us


def judge(row: Mapping[str, Any], provider: str) -> Verdict:
    """Holds a provider's time against the row's target and its peers in the same run."""
    timing = row["providers"][provider]
    peers: dict[str, float] = {}
    for name, other in row["providers"].items():
        if name != provider:
            peers[other["group"]] = min(other["us"], peers.get(other["group"], other["us"]))
    target = TARGETS.get(row["targets"].get(provider, ""))

    def us(limit: Limit | None) -> float | None:
        value = (
            float("inf") if limit is None else limit.us(row["floor_us"], peers, row.get("flops", 0))
        )
        return None if value == float("inf") else value

    return Verdict(timing["us"], us(target.must if target else None), us(target and target.aim))


def validate(result: Mapping[str, Any]) -> None:
    """Raises ValueError with the first field that is missing or of the wrong type."""

    def check(where: str, value: Mapping[str, Any], fields: Mapping[str, type]) -> None:
        for name, kind in fields.items():
            allowed = (int, float) if kind is float else kind
            if not isinstance(value.get(name), allowed):
                got = type(value.get(name)).__name__
                raise ValueError(f"{where}: {name} must be {kind.__name__}, got {got}")

    check("result", result, _FILE_FIELDS)
    if result["schema"] != SCHEMA:
        raise ValueError(f"result: schema must be {SCHEMA}, got {result['schema']}")
    for i, row in enumerate(result["rows"]):
        check(f"row {i}", row, _ROW_FIELDS)
        for name, provider in row["providers"].items():
            check(f"row {i}, {name}", provider, _PROVIDER_FIELDS)
        unknown = set(row["targets"].values()) - set(TARGETS)
        if unknown:
            raise ValueError(f"row {i}: targets must be names of TARGETS, got {sorted(unknown)}")


def load(path: Path) -> dict[str, Any]:
    """Reads and validates a result file."""
    result = json.loads(path.read_text())
    try:
        validate(result)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return result


def save(result: Mapping[str, Any], path: Path) -> None:
    """Validates and writes a result file whole or not at all: a run that is cut short leaves the
    rows it had."""
    validate(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)
