# SPDX-License-Identifier: Apache-2.0

"""The convolution benchmark: its rows run, its peers are right, its bytes are the floor's."""

import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import conv
import conv_peers
from conv_cases import BackwardCase, ForwardCase, HostCase, Problem, StepCase
from harness import Options, Provider, run_case
from harness.machine import Ceiling
from harness.targets import TARGETS
from mortar.reference import dynamic_conv as reference

CEILING = Ceiling(4.28e12, 790e12)


def test_rows_cover_the_baselines():
    """Every shape and width of the published rows, and their floors."""
    for rows in (list(conv._gpu_cases()), list(conv._cpu_cases())):
        labels = [case.label for case in rows]
        assert len(set(labels)) == len(labels)
        assert {t for case in rows for t in case.targets.values()} <= TARGETS.keys()
        assert {case.key.get("W") for case in rows} >= {2, 3, 4, 8}
    floors = {case.label: case.traffic.floor_us(CEILING) for case in conv._gpu_cases()}
    published = {
        "forward B=1 T=4096 D=3072 W=4 dtype=bf16 silu=no": 35.1,
        "forward B=4 T=16384 D=2048 W=4 dtype=bf16 silu=no": 375,
        "backward B=8 T=4096 D=3072 W=4 dtype=bf16 silu=no": 515,
        "backward B=32 T=512 D=3072 W=4 dtype=bf16 silu=no": 258,
        "step rows=128 D=3072 W=4 dtype=bf16 state=dense, W": 2.6,
    }
    for label, floor in published.items():
        assert floors[label] == pytest.approx(floor, rel=0.02)


TINY = [
    ForwardCase(Problem(2, 9, 16, dtype="fp32", silu=True), "cpu_conv"),
    ForwardCase(Problem(1, 30, 16, 3, sequences=7), "conv_packed"),
    BackwardCase(Problem(2, 9, 16, 3), "cpu_conv"),
    BackwardCase(Problem(1, 30, 16, dtype="fp32", sequences=7), "conv_packed"),
    StepCase(3, 16, 4, "bf16", False, "cpu_conv"),
    StepCase(3, 16, 4, "fp32", True, "cpu_conv"),
    *(HostCase(op) for op in HostCase.OPS),
]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
def test_rows_run_and_are_right(device, case):
    """Checked against float64 before they are timed: a wrong one would be in `failed`."""
    row = run_case(case, Options(device, quick=True), CEILING)
    assert not row["failed"] and not row["skipped"]
    assert row["providers"].keys() >= {"mortar"}
    assert ("dense" in row["providers"]) == case.table.startswith("packed")


def test_a_wrong_result_is_found():
    """A packed row computed as if it were dense is not timed."""

    class Leaks(ForwardCase):
        def providers(self, options):
            yield Provider("mortar", lambda s: self._mortar(s, None))

    case = Leaks(Problem(1, 30, 16, sequences=7), "conv_packed")
    row = run_case(case, Options(torch.device("cpu"), quick=True), CEILING)
    assert row["failed"].keys() == {"mortar"} and not row["providers"]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_expressions(silu, width):
    """Peers in PyTorch, as they are before they are compiled, against the reference."""
    x = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(2, 7, 5, width, dtype=torch.float64, requires_grad=True)
    dy, activation = torch.randn(2, 7, 5, dtype=torch.float64), "silu" if silu else None
    expected, _ = reference.dynamic_conv(x, kernels, activation=activation)
    close = {"rtol": 1e-5, "atol": 1e-5}  # they sum in float32
    with torch.no_grad():
        for expression in (conv_peers.unfold_forward, conv_peers.shifts_forward):
            y = torch.empty_like(dy)
            expression(y, x, kernels, silu)
            torch.testing.assert_close(y, expected, **close)
        dx, dk = torch.empty_like(x), torch.empty_like(kernels)
        conv_peers.unfold_backward(dx, dk, x, kernels, dy, silu)
    for result, gradient in zip((dx, dk), torch.autograd.grad(expected, (x, kernels), dy),
                                strict=True):  # fmt: skip
        torch.testing.assert_close(result, gradient, **close)


@pytest.mark.parametrize("silu", [False, True])
def test_step_expression(silu):
    x, kernels, state = torch.randn(3, 5), torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    expected, new_state = reference.dynamic_conv_step(
        x, kernels, state, activation="silu" if silu else None
    )
    y = torch.empty_like(x)
    conv_peers.step(y, x, kernels, state, silu)
    torch.testing.assert_close(y, expected)
    assert torch.equal(state, new_state)


def test_jet_loader(tmp_path, monkeypatch):
    """Names what is missing; loads the two files without the packages that they only import."""
    monkeypatch.setattr(conv_peers, "JET_FILES", conv_peers.ROOT / ".peers" / "nothing")
    with pytest.raises(FileNotFoundError, match="must hold dconv_fwdbwd.py"):
        conv_peers.Jet()
    tmp_path.joinpath("dconv_fwdbwd.py").write_text(
        "from einops import rearrange\n"
        "def dynamic_conv_triton_autograd(x, kernels, cu_seqlens=None): return x\n"
        "class DynamicConvTritonFunc:\n"
        "    def backward(ctx, dy): return dy, ctx.W, None\n"
    )
    tmp_path.joinpath("dconv_step.py").write_text("def causal_conv_step_triton(x, c, k): return x")
    monkeypatch.setattr(conv_peers, "JET_FILES", tmp_path)
    monkeypatch.setitem(sys.modules, "einops", types.ModuleType("einops"))
    sys.modules["einops"].rearrange = None
    sys.modules["einops"].__spec__ = types.SimpleNamespace()
    jet = conv_peers.Jet()
    x, kernels = torch.randn(1, 2, 3), torch.randn(1, 2, 3, 4)
    assert jet.forward(x, kernels) is x
    assert jet.backward(x, kernels, x) == (x, 4)
