# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  bench/ is no package: its folder goes on the path first
"""The benchmark harness: it times what is right, and what it writes and shows agree."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness
import peers
import render
from harness import Case, Limit, Options, Provider, Target, Traffic, View, cases, machine
from harness.results import judge
from lora_problem import Layer, LoraProblem

CPU = torch.device("cpu")


class Axpy(Case):
    """y += 2 x, in place; a provider with another factor is wrong."""

    table = "axpy"
    tolerance = 1e-6
    targets = {"right": "cpu_conv"}

    def __init__(self, size, factors):
        self.key = {"size": size, "kind": "toy"}
        self.traffic = Traffic(12 * size, 2 * size)
        self.factors = factors
        self.called = dict.fromkeys(factors, 0)

    def make_buffers(self, device, seed):
        generator = torch.Generator(device).manual_seed(seed)
        size = self.key["size"]
        return {name: torch.randn(size, generator=generator, device=device) for name in "xy"}

    def outputs(self, buffers):
        return [buffers["y"]]

    def reference(self, buffers):
        return [buffers["y"].double() + 2 * buffers["x"].double()]

    def providers(self, options):
        def bind(name, buffers):
            def call():
                self.called[name] += 1
                buffers["y"].add_(buffers["x"], alpha=self.factors[name])

            return call

        for name in self.factors:
            group = "torch" if name == "peer" else name
            yield Provider(name, lambda buffers, name=name: bind(name, buffers), group)


def run(case, device=CPU, **options):
    ceiling = machine.Ceiling(bandwidth=1e10, flops=1e12)
    return harness.run_case(case, Options(device, quick=True, **options), ceiling)


def test_row_is_complete_and_providers_start_from_the_same_outputs(device):
    row = run(Axpy(1000, {"right": 2, "peer": 2}), device)
    assert set(row["providers"]) == {"right", "peer"}  # in place: each saw the original y
    assert row["floor_us"] == pytest.approx(1.2)
    assert row["providers"]["right"]["us"] > 0
    assert not row["failed"]


def test_a_wrong_provider_is_not_timed(device):
    case = Axpy(1000, {"right": 2, "wrong": 2.001})
    row = run(case, device)
    assert "float64" in row["failed"]["wrong"]
    assert set(row["providers"]) == {"right"}
    assert case.called["wrong"] == 1 < case.called["right"]


def test_a_peer_over_its_warm_up_budget_is_skipped_and_the_subject_never():
    case = Axpy(1000, {"right": 2, "peer": 2})
    row = run(case, peer_budget_s=0.5, seconds_spent={"right": 1.0, "peer": 1.0})
    assert set(row["providers"]) == {"right"}
    assert "0 s" in row["skipped"]["peer"]


def test_buffers_exceed_the_cache(device):
    one = {"x": torch.zeros(1 << 22), "deep": [(torch.zeros(10, dtype=torch.int64),)]}
    size = (1 << 24) + 80
    count = cases.num_sets(one, Options(device), host=False)
    assert count * size >= 3 * machine.cache_bytes(device) > (count - 2) * size
    assert cases.num_sets(one, Options(device, warm=True), host=False) == 1


def test_relative_error_sees_one_bad_row_and_nan():
    ref = torch.randn(4096, 8, dtype=torch.float64)
    out = ref.clone()
    assert harness.relative_error(out, ref) == 0
    out[17] *= 1.5
    assert harness.relative_error(out, ref) == pytest.approx(0.5)
    out[17, 3] = float("nan")
    assert harness.relative_error(out, ref) == float("inf")


def test_cpu_timing_tells_one_millisecond_from_fifteen():
    walks = {"short": [lambda: time.sleep(1e-3)] * 2, "long": [lambda: time.sleep(15e-3)] * 2}
    timing = harness.time_cpu(walks, rounds=5, min_sample_us=3000)
    assert 1000 <= timing["short"].us < timing["long"].us and timing["long"].us >= 15_000
    assert timing["short"].us_q1 <= timing["short"].us <= timing["short"].us_q3
    assert timing["long"].calls == 1 and timing["long"].samples == 5


def test_floor_is_the_larger_of_bytes_and_arithmetic():
    ceiling = machine.Ceiling(bandwidth=4e12, flops=8e14)
    assert Traffic(4_000_000).floor_us(ceiling) == pytest.approx(1.0)
    assert Traffic(4_000_000, 16 * 10**8).floor_us(ceiling) == pytest.approx(2.0)


def test_limits(monkeypatch):
    monkeypatch.setitem(
        harness.TARGETS, "t", Target(Limit(3, 1.5, {"torch": 1.5}), Limit(2, 1, {"torch": 2}))
    )
    row = {"floor_us": 10.0, "targets": {"mortar": "t"}, "providers": {
        "mortar": {"group": "mortar", "us": 17.0},
        "slow": {"group": "torch", "us": 90.0},
        "best": {"group": "torch", "us": 24.0},
    }}  # fmt: skip
    verdict = judge(row, "mortar")
    assert verdict.must_us == pytest.approx(16.0) and not verdict.must  # 24 / 1.5 < 3 + 15
    assert verdict.aim_us == pytest.approx(12.0)
    del row["providers"]["best"]
    assert judge(row, "mortar").must_us == pytest.approx(18.0) and judge(row, "mortar").must
    assert judge(row, "slow").must_us is None


def test_targets_are_those_of_the_design():
    limit = harness.TARGETS["lora_decode"]
    assert limit.must.us(10, {}) == pytest.approx(18) and limit.aim.us(10, {}) == pytest.approx(
        13.8
    )
    assert limit.must.us(10, {"vllm": 15.0}) == 15
    prefill = harness.TARGETS["lora_prefill"]
    assert prefill.must.us(100, {}) == pytest.approx(134)
    assert prefill.aim.us(100, {}) == pytest.approx(113)


def result(rows, name="Toy machine"):
    info = {"device": "cpu", "name": name, "torch": "2", "threads": 2, "capability": "AVX2",
            "date": "2026-01-01 00:00 UTC", "commit": "abc",
            "command": "./run bench toy"}  # fmt: skip
    view = {"title": "Toy", "table": "axpy", "subject": "right", "peers": ["peer"], "floors": True}
    return {"schema": 1, "family": "toy", "machine": info, "roof_bytes_per_s": 2e10,
            "floor_bytes_per_s": 1e10, "views": [view], "rows": rows}  # fmt: skip


def test_results_survive_a_round_trip_and_bad_ones_are_named(tmp_path):
    good = result([run(Axpy(size, {"right": 2, "peer": 2})) for size in (100, 1000)])
    path = tmp_path / "toy-machine" / "toy.json"
    harness.save(good, path)
    assert harness.load(path) == good
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]
    bad = json.loads(path.read_text())
    del bad["rows"][1]["floor_us"]
    path.write_text(json.dumps(bad))
    with pytest.raises(ValueError, match="toy.json: row 1: floor_us must be float, got NoneType"):
        harness.load(path)
    bad["rows"][1]["floor_us"] = 1.0
    bad["rows"][0]["targets"] = {"right": "unheard of"}
    with pytest.raises(ValueError, match="unheard of"):
        harness.validate(bad)


def test_table_derives_everything_from_the_measurement():
    row = run(Axpy(1000, {"right": 2, "peer": 2}))
    row["providers"]["right"]["us"] = 2.4
    row["providers"]["peer"]["us"] = 4.8
    table = harness.table_of(View("Toy", "axpy", "right", ("peer", "absent")), result([row]))
    shown = dict(zip(table.headers, (cell.text for cell in table.rows[0]), strict=True))
    assert shown["GB/s"] == "5.00" and shown["% roof"] == "25"
    assert shown["floor"] == "1.20" and shown["x floor"] == "2.00"
    assert shown["must"] == "3.20 ✓" and shown["peer (x)"] == "4.80 (2.00)"
    assert "absent (x)" not in shown
    assert table.summary.startswith("must 1/1, aim 1/1")
    by_group = harness.table_of(View("Toy", "axpy", "right", ("torch",)), result([row]))
    assert by_group.headers[-1] == "torch (x)" and by_group.rows[0][-1].text == "4.80 peer (2.00)"
    row["providers"]["peer"]["synchronises"] = True
    table = harness.table_of(View("Toy", "axpy", "right", ("peer",)), result([row]))
    assert table.headers[-1] == "peer* (x)" and "with the wait" in table.summary
    assert harness.table_of(View("Other", "other", "right"), result([row])) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.1401, "0.140"), (8.357, "8.36"), (58.71, "58.7"), (1042.3, "1,042")]
)
def test_numbers_have_three_digits(value, text):
    assert harness.number(value) == text


def test_render_check_fails_when_the_page_is_stale(tmp_path, capsys):
    rows = [run(Axpy(size, {"right": 2, "peer": 2})) for size in (100, 1000)]
    results, docs = tmp_path / "results", tmp_path / "docs"
    harness.save(result(rows), results / "toy-machine" / "toy.json")
    where = ["--results", str(results), "--docs", str(docs)]
    assert render.main([*where, "--check"]) == 1
    assert render.main(where) == 0
    assert (docs / "results-toy-machine-toy.png").stat().st_size > 1000
    assert render.main([*where, "--check"]) == 0
    rows[0]["providers"]["right"]["us"] += 1
    harness.save(result(rows), results / "toy-machine" / "toy.json")
    capsys.readouterr()
    assert render.main([*where, "--check"]) == 1
    assert "python bench/render.py" in capsys.readouterr().out


def test_the_results_page_is_what_the_result_files_give():
    assert render.main(["--check"]) == 0


def run_lora(device, rows, out):
    """The rows and the printed tables of `bench/lora.py`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "lora.py"), "--device", device.type, "--quick",
         "--rows", rows, "--out", str(out)],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*/lora.json")
    assert str(out) not in path.read_text() and str(ROOT) not in path.read_text()
    return harness.load(path)["rows"], done.stdout


def test_a_tiny_cpu_row_runs_end_to_end(tmp_path):
    (row,), printed = run_lora(CPU, "decode layer=256 -> 256 .*fp32", tmp_path)
    assert {"mortar", "peft", "grouped", "masked", "gathered"} <= set(row["providers"])
    assert row["providers"]["mortar"]["rel_error"] < 1e-5
    # 8 adapters of rank 16, x read, y read and written: (8 * 16 * 512 + 8 * 256 * 3) * 4 bytes
    assert row["bytes"] == 286_720 and row["flops"] == 2 * 8 * 16 * 512
    assert "Multi-LoRA on the CPU" in printed


GPU_ROWS = ["apply layer=qkv tokens=8 ", "plan tokens=1024 adapters=16", "host op=apply"]


def test_gpu_rows_run_end_to_end(device, tmp_path):
    if device.type == "cpu":
        with pytest.raises(AssertionError, match="no row matches"):
            run_lora(device, "|".join(GPU_ROWS), tmp_path)
        return
    rows, printed = run_lora(device, "|".join(GPU_ROWS), tmp_path)
    assert [row["table"] for row in rows] == ["apply", "plan", "host"]
    assert {"mortar", "two calls", "compat"} <= set(rows[0]["providers"])
    assert rows[0]["sets"] > 10 and 0.5 < rows[0]["providers"]["mortar"]["us"] < 1000
    assert "Planner" in printed


def test_command_line_refuses_what_it_cannot_do(capsys):
    def no_cases(options):
        raise AssertionError("must not be reached")

    assert harness.main("toy", no_cases, [], peers=("torch",), argv=["--peers", "tourch"]) == 2
    assert "--peers must be of torch, got ['tourch']" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert harness.main("toy", no_cases, [], argv=["--device", "cuda"]) == 2
        assert "needs a GPU" in capsys.readouterr().err
    none = harness.main("toy", lambda options: [], [], argv=["--rows", "nothing"])
    assert none == 2 and "no row matches 'nothing'" in capsys.readouterr().out


def test_exit_status_is_1_when_the_subject_is_wrong(capsys, tmp_path):
    views = [View("Toy", "axpy", "right")]
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert harness.main("toy", lambda o: [Axpy(64, {"right": 2})], views, argv=argv) == 0
    assert harness.main("toy", lambda o: [Axpy(64, {"right": 3})], views, argv=argv) == 1
    assert "right failed: ArithmeticError: error" in capsys.readouterr().out


# ---- peers --------------------------------------------------------------------------------------
def lora_problem(adapters, sequence_adapter, length=3, dtype=torch.float32):
    token_adapter = torch.tensor(sequence_adapter, dtype=torch.int32).repeat_interleave(length)
    layer = Layer("toy", 33, (17, 5))
    return LoraProblem(layer, len(token_adapter), adapters, 4, dtype, token_adapter=token_adapter)


@pytest.mark.parametrize(
    ("expression", "sequences"),
    [
        (lambda p, s, m: peers.one_adapter_gemms(s.y, s.x, s.a, s.b), [0, 0, 0]),
        (lambda p, s, m: peers.peft_loop(s.y, s.x, s.a, s.b, m), [2, -1, 0, 2, 1]),
        (lambda p, s, m: peers.grouped_gemms(s.y, s.x, s.a, s.b, p.token_adapter), [2, -1, 0, 2]),
        (lambda p, s, m: peers.masked_gemms(s.y, s.x, s.a, s.b, p.token_adapter), [2, -1, 0, 2]),
        (lambda p, s, m: peers.gathered_bmm(s.y, s.x, s.a, s.b, p.token_adapter), [2, 1, 0, 2]),
    ],
    ids=["one_adapter_gemms", "peft_loop", "grouped_gemms", "masked_gemms", "gathered_bmm"],
)
def test_every_expression_adds_the_delta(expression, sequences):
    problem = lora_problem(max(sequences) + 1, sequences)
    buffers = problem.make_buffers(CPU, 0)
    reference = problem.reference(buffers)[1]
    expression(problem, buffers, sequences)()
    assert harness.relative_error(buffers.y, reference) < 1e-5


def test_reference_leaves_base_tokens_alone_and_pads_ragged_ranks():
    problem = LoraProblem(Layer("toy", 33, (17,)), 12, 3, [1, 4, 2], torch.float32, base_share=0.5)
    buffers = problem.make_buffers(CPU, 0)
    base = problem.token_adapter < 0
    assert base.sum() == 6
    h, y = problem.reference(buffers)
    assert torch.equal(y[base], buffers.y.double()[base]) and not h[:, base].any()
    assert (y[~base] != buffers.y.double()[~base]).all()
    assert not buffers.a[0][0, 1:].any() and not buffers.b[0][2, :, 2:].any()
    active = problem.token_adapter[~base]
    ranks = sum([1, 4, 2][i] for i in set(active.tolist()))
    assert problem.traffic().bytes == 4 * (ranks * (33 + 17) + 6 * (33 + 2 * 17))


def test_vllm_tables():
    t = peers.VllmTables.make(torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32), 4)
    assert t.lora_ids.tolist() == [-1, 0, 2, -1, -1]
    assert t.num_tokens_per_lora.tolist() == [2, 1, 2, 0, 0]
    assert t.lora_token_start_loc.tolist() == [0, 2, 3, 5, 0, 0]
    assert t.token_indices_sorted.tolist() == [1, 4, 2, 0, 3]
    assert t.num_active_loras.tolist() == [3] and t.no_lora_flag_cpu.tolist() == [False]
    assert {x.dtype for x in t.args()} == {torch.int32, torch.bool}


@pytest.fixture
def vllm_folder(tmp_path, monkeypatch):
    """A stand-in for the ignored folder: files that import what vLLM's import."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    monkeypatch.setattr(peers, "VLLM_FILES", folder)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    triton = types.ModuleType("triton")
    triton.language = types.ModuleType("triton.language")
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    return folder


def test_vllm_loader(vllm_folder):
    with pytest.raises(
        FileNotFoundError, match="vllm must hold lora_shrink_op.py, see bench/README"
    ):
        peers.VllmTriton()
    for op in ("shrink", "expand"):
        (vllm_folder / f"lora_{op}_op.py").write_text(
            "from vllm.lora.ops.triton_ops.kernel_utils import TWO\n"
            "from vllm.lora.ops.triton_ops.utils import SIZE\n"
            "from vllm.utils.torch_utils import direct_register_custom_op\n"
            f"def _lora_{op}(): return '{op}', TWO, SIZE\n"
            "try:\n    direct_register_custom_op(op_name='x', op_func=None)\n"
            f"    lora_{op} = None\nexcept AttributeError:\n    lora_{op} = _lora_{op}\n"
        )
    (vllm_folder / "kernel_utils.py").write_text(
        "from vllm.triton_utils import tl, triton\nTWO = 2\n"
    )
    (vllm_folder / "utils.py").write_text(
        "from vllm import envs\nfrom vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.utils.math_utils import next_power_of_2\n"
        "assert not envs.VLLM_BATCH_INVARIANT and current_platform.is_cuda()\n"
        "init_logger(__name__).warning_once('x')\n"
        "SIZE = next_power_of_2(5)\n_LORA_A_PTR_DICT = {1: 1}\n_LORA_B_PTR_DICT = {1: 1}\n"
    )
    (vllm_folder / "lora_kernel_metadata.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass LoRAKernelMeta:\n    x: int = 1\n"
    )
    loaded = peers.VllmTriton()
    assert loaded.shrink() == ("shrink", 2, 8) and loaded.expand() == ("expand", 2, 8)
    assert loaded.metadata().x == 1
    loaded.forget_pointers()
    assert not loaded._utils._LORA_A_PTR_DICT
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
