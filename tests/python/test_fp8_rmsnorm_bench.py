# SPDX-License-Identifier: Apache-2.0
"""The norm's benchmark and demo: rows run, peers are right, bytes are the floor's."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import norm
import norm_peers
from harness import Options, run_case
from harness.machine import Ceiling
from harness.targets import TARGETS
from norm_cases import BackwardCase, CompatCase, ForwardCase, HostCase, Problem, QuantiseCase

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CEILING = Ceiling(4.28e12, 790e12)


def test_rows_cover_the_published_ones():
    for rows in (list(norm._gpu_cases()), list(norm._cpu_cases())):
        labels = [case.label for case in rows]
        assert len(set(labels)) == len(labels)
        assert {t for case in rows for t in case.targets.values()} <= TARGETS.keys()
    floors = {case.label: case.traffic.floor_us(CEILING) for case in norm._gpu_cases()}
    for (m, n), forward, backward in zip(
        norm.SIZES, (6.1, 24.5, 49.0, 49.0, 49.0), (10.0, 40.2, 80.4, 80.4, 80.4), strict=True
    ):  # fmt: skip
        key = f"M={m} N={n} what=e4m3, tensor"
        assert floors[f"forward {key}"] == pytest.approx(forward, rel=0.02)
        assert floors[f"backward {key}"] == pytest.approx(backward, rel=0.02)


TINY = [
    *(ForwardCase(p, "cpu_norm", "variants") for p in norm.variants(24, 256)),
    ForwardCase(Problem(33, 48, x="fp32"), "cpu_norm"),
    BackwardCase(Problem(24, 256), "cpu_norm"), BackwardCase(Problem(24, 96, x="bf16"), "cpu_norm"),
    CompatCase(Problem(24, 256)), QuantiseCase(Problem(24, 256), "cpu_norm"),
    *(HostCase(op) for op in HostCase.OPS),
]  # fmt: skip


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
def test_rows_run_and_are_right(device, case, monkeypatch):
    """Checked against float64 before they are timed: a wrong one would be in `failed`. What is
    compiled elsewhere runs eagerly here."""
    monkeypatch.setattr(norm_peers, "compiled", lambda expression: expression)
    row = run_case(case, Options(device, frozenset({"torch"}), quick=True), CEILING)
    assert not row["failed"] and not row["skipped"]
    assert "mortar" in row["providers"]


def test_coat_loader(tmp_path, monkeypatch):
    """Names what is missing; loads a copy with its relative imports."""
    monkeypatch.setattr(norm_peers, "COAT_FILES", norm_peers.ROOT / ".peers" / "nothing")
    with pytest.raises(FileNotFoundError, match="must hold func_rmsnorm.py"):
        norm_peers.Coat("original")
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "common.py").write_text("LIMIT = 448.0\n")
    (folder / "_division.py").write_text("")
    (folder / "_division_transpose.py").write_text("def fp8_division_transpose(): return 3\n")
    (folder / "func_rmsnorm.py").write_text(
        "from .common import LIMIT\nfrom ._division_transpose import fp8_division_transpose\n"
        "def fp8_rmsnorm_forward(): return LIMIT\ndef fp8_rmsnorm_backward(): return 2\n"
    )
    monkeypatch.setattr(norm_peers, "COAT_FILES", tmp_path)
    coat = norm_peers.Coat("original")
    assert (coat.forward(), coat.backward(), coat.division()) == (448.0, 2, 3)


def test_demo(tmp_path):
    spec = importlib.util.spec_from_file_location("demo_norm", EXAMPLES / "demo_norm.py")
    demo = importlib.util.module_from_spec(spec)
    sys.modules["demo_norm"] = demo
    spec.loader.exec_module(demo)
    text = b"".join(b"line %d of a text about nothing\n" % i for i in range(400))
    corpus = demo.Corpus("numbers", "Numbered lines", "", "line ", text, text[:4000])
    recipe = demo.Recipe(steps=8, rows=4, length=32, hidden=32, heads=2, warmup=2)
    report = demo.run(recipe, corpus, tmp_path, Console(quiet=True))
    assert all(demo.checks(report).values()), report
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sum(report["codes"]) == 4 * 32 * (4 * 32 + 32)
    assert torch.isfinite(torch.tensor(report["runs"]["fp8"]["losses"])).all()
