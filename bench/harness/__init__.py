# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of all families share. A family's script declares `Case`s and `View`s and
ends in `sys.exit(main("family", cases, VIEWS))`; see lora.py."""

from .cases import Case, Options, Provider, Traffic, relative_error, run_case
from .cli import RESULTS, main
from .machine import ROOT, memory_roofs
from .results import View, judge, load, save, validate
from .tables import Summary, Table, best_of, number, table_of, views_of
from .targets import TARGETS, Limit, Target
from .timing import Timing, time_cpu, time_graphs, time_host, time_synchronised

__all__ = [
    "RESULTS", "ROOT", "TARGETS", "Case", "Limit", "Options", "Provider", "Summary", "Table",
    "Target", "Timing", "Traffic", "View", "best_of", "judge", "load", "main", "memory_roofs",
    "number", "relative_error", "run_case", "save", "table_of", "time_cpu", "time_graphs",
    "time_host", "time_synchronised", "validate", "views_of",
]  # fmt: skip
