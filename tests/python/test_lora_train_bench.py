# SPDX-License-Identifier: Apache-2.0
"""The LoRA training benchmark: its rows run, its peers are right, its bytes are the floor's."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import train
import train_peers
from harness import Options, run_case
from harness.machine import Ceiling
from harness.targets import TARGETS
from train_cases import BackwardCase, ForwardCase, LayerCase, Problem

CEILING = Ceiling(4.28e12, 790e12)


def test_rows_cover_the_baselines():
    """Every published row, its floor, and a second table of ten others."""
    for rows in (list(train._gpu_cases()), list(train._cpu_cases())):
        labels = [case.label for case in rows]
        assert len(set(labels)) == len(labels)
        assert {t for case in rows for t in case.targets.values()} <= TARGETS.keys()
    floors = {case.label: case.traffic.floor_us(CEILING) for case in train._gpu_cases()}
    for label, floor in {
        "forward M=4096 K=4096 N=4096 r=16 dtype=bf16": 15.7,
        "forward M=8192 K=4096 N=14336 r=64 dtype=bf16": 71.1,
        "backward M=4096 K=4096 N=4096 r=64 dtype=bf16": 24.0,
        "backward M=8192 K=14336 N=4096 r=16 dtype=bf16": 126,
        "backward M=16384 K=2048 N=2048 r=16 dtype=bf16": 47.1,
    }.items():
        assert floors[label] == pytest.approx(floor, rel=0.02)
    assert len(train.OTHER_SHAPES) == 10
    assert not set(train.OTHER_SHAPES) & set(train.SHAPES)


def tiny(**options) -> Problem:
    return Problem(64, 48, (40,), (8,), **options)


TINY = [
    *(case(tiny(dtype=dtype), "cpu_train")
      for case in (ForwardCase, BackwardCase) for dtype in ("fp32", "bf16")),
    *(case(tiny(weights="fp32"), "cpu_train") for case in (ForwardCase, BackwardCase)),
    ForwardCase(tiny(base=True), "cpu_train"),
    ForwardCase(tiny(p=0.1), "cpu_train_dropout"),
    *(case(tiny(p=0.1), "train_dropout", "plain") for case in (ForwardCase, BackwardCase)),
    *(case(Problem(64, 48, (40, 16, 16), (8,)), "train_slices", "apart")
      for case in (ForwardCase, BackwardCase)),
    *(case(Problem(640, 48, (40,), train.RAGGED), "train_adapters", "one")
      for case in (ForwardCase, BackwardCase)),
    LayerCase(8, 64, 1, 0.0, "fp32", "train_host", rank=8, host=True),
    LayerCase(8, 64, 2, 0.1, "bf16", "cpu_train_step", rank=8),
]  # fmt: skip


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
@pytest.mark.filterwarnings("ignore")
def test_rows_run_and_are_right(device, case):
    """Checked against float64 before they are timed: a wrong one would be in `failed`."""
    row = run_case(case, Options(device, quick=True), CEILING)
    assert not row["failed"] and not row["skipped"]
    assert row["providers"].keys() >= {"mortar"}


def test_models_lie_on_the_device_that_is_asked_for():
    """A row that ran on one device before runs on another."""
    case = LayerCase(8, 64, 1, 0.0, "fp32", "train_host", rank=8, host=True)
    for device in map(torch.device, ("cpu", "meta")):
        for name in ("peft", "mortar"):
            assert {p.device for p in case._model(name, device).parameters()} == {device}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peers_compute_the_same(device, dtype):
    options = Options(device, frozenset({"torch"}), quick=True, peer_budget_s=math.inf)
    for case in (
        ForwardCase(tiny(dtype=dtype), "cpu_train"),
        ForwardCase(tiny(dtype=dtype, base=True), "cpu_train"),
        BackwardCase(tiny(dtype=dtype), "cpu_train"),
    ):
        row = run_case(case, options, CEILING)
        assert not row["failed"]
        expected = {"mortar", "eager", "compiled", "products"}
        assert row["providers"].keys() >= expected


def test_missing_peer_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(train_peers, "ROOT", tmp_path)
    monkeypatch.setattr(train_peers, "NEMO_FILE", tmp_path / ".peers" / "nemo" / "lora_kernel.py")
    train_peers.nemo.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"\.peers/nemo must hold lora_kernel\.py"):
        train_peers.nemo()


def test_backward_reference_is_that_of_autograd():
    case = BackwardCase(tiny(dtype="fp32"), "cpu_train")
    s = case.make_buffers(torch.device("cpu"), 0)
    x, (a, b) = s.x.double().requires_grad_(), [w.double().requires_grad_() for w in s.pairs[0]]
    y = 2.0 * (x @ a.T) @ b.T
    want = torch.autograd.grad(y, (x, a, b), s.dy[0].double())
    torch.testing.assert_close(tuple(case.reference(s)), want)
