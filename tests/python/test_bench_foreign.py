# SPDX-License-Identifier: Apache-2.0
"""Peers that run in a process of their own: one that dies costs its row and nothing else."""

import contextlib

import torch

import foreign_rows
from harness import Options, run_case
from harness.foreign import ForeignProcess
from harness.machine import Ceiling
from harness.tables import _peer


def _error(written):
    """The message about a peer that writes this in place of 2."""
    return f"ArithmeticError: error {written / 2 - 1:.3g} "


def test_a_peer_that_dies_leaves_the_others():
    options, ceiling = Options(torch.device("cpu"), quick=True), Ceiling(1e10, 1e12)
    with contextlib.closing(ForeignProcess(foreign_rows.cases, options)) as foreign:
        harmless, deadly, last = (
            run_case(case, options, ceiling, foreign) for case in foreign_rows.cases(options)
        )
    for row in (harmless, last):
        assert row["providers"].keys() == {"own", "bad"}
        assert row["providers"]["bad"]["us"] > 0
    assert deadly["providers"].keys() == {"own"}
    assert deadly["failed"]["bad"] == f"crashed, exit status {-6}"
    cells = [_peer(row, "bad", "own").text for row in (harmless, deadly, last)]
    assert cells[1] == "crashed" and "crashed" not in cells[0] + cells[2]
    for row in (harmless, deadly, last):
        assert row["failed"]["wrong"].startswith(_error(foreign_rows.SPAWNED))


def test_without_a_process_foreign_peers_run_here():
    case = foreign_rows.Row("harmless")
    row = run_case(case, Options(torch.device("cpu"), quick=True), Ceiling(1e10, 1e12))
    assert row["providers"].keys() == {"own", "bad"}
    assert row["failed"]["wrong"].startswith(_error(foreign_rows.MAIN))
