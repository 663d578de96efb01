# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  bench/ is no package: its folder goes on the path first
"""The benchmark harness: it times what is right, and what it writes and shows agree."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness
import render
from harness import Case, Limit, Options, Provider, Target, Traffic, View, cases, machine
from harness.results import judge

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
    case = Axpy(1000, {"right": 2, "peer": 2, "yardstick": 2})
    spent = {("axpy", name): [9.0] for name in case.factors}
    row = run(case, peer_budget_s=9.5, warm_ups=spent)
    assert set(row["providers"]) == {"right", "yardstick"}  # no peer: a limit is a multiple of it
    assert "10 s" in row["skipped"]["peer"]


@pytest.mark.parametrize(
    "spent",
    [
        {("another table", "peer"): [9.0]},  # its first row of a table
        {("axpy", "peer"): [9.0, 0.01]},  # nothing to compile any more
        {("axpy", "peer"): [4.0]},  # as much again is left
    ],
)
def test_a_peer_that_is_cheap_or_new_to_a_table_takes_part_whatever_others_spent(spent):
    row = run(Axpy(1000, {"right": 2, "peer": 2}), peer_budget_s=8.5, warm_ups=spent)
    assert set(row["providers"]) == {"right", "peer"}


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
    row = {"floor_us": 10.0, "flops": 0, "targets": {"mortar": "t"}, "providers": {
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


def test_peaks_of_memory_are_shown():
    row = run(Axpy(100, {"right": 2, "peer": 2}))
    row["providers"]["right"]["peak_bytes"] = 1_500_000
    table = harness.table_of(View("Toy", "axpy", "right", ("peer",), memory=True), result([row]))
    cells = dict(zip(table.headers, (cell.text for cell in table.rows[0]), strict=True))
    assert cells["peak, MB"] == "1.50" and cells["peer peak"] == ""


def test_limits_of_arithmetic():
    """The larger of the two formulas counts."""
    limit = Limit(8.0, 1.6, {"torch": 1.0}, work_base_us=10.0, flops_per_s=500e12)
    assert limit.us(10.0, {}, flops=0) == pytest.approx(24.0)
    assert limit.us(10.0, {}, flops=10**10) == pytest.approx(30.0)
    assert limit.us(10.0, {"torch": 29.0}, flops=10**10) == 29.0


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
    (docs / "results-gone.md").write_text("the page of a family that is no more")
    assert render.main([*where, "--check"]) == 1
    (docs / "results-gone.md").unlink()
    rows[0]["providers"]["right"]["us"] += 1
    harness.save(result(rows), results / "toy-machine" / "toy.json")
    capsys.readouterr()
    assert render.main([*where, "--check"]) == 1
    assert "python bench/render.py" in capsys.readouterr().out


def test_a_new_family_is_rendered_from_its_file_alone_and_gpus_come_first(tmp_path):
    rows = [run(Axpy(size, {"right": 2, "peer": 2})) for size in (100, 1000)]
    for row in rows:
        row["providers"]["right"]["us"], row["providers"]["peer"]["us"] = 2.0, 5.0
    results, docs = tmp_path / "results", tmp_path / "docs"
    older, newer = result(rows), result(rows) | {"family": "novel"}
    newer["machine"] |= {"target": "AVX2"}
    newer["roofs"] = {"copy": 1e10, "read": 2e10, "streaming store": 1.5e10}
    gpu = newer | {
        "machine": newer["machine"] | {"name": "Zippy GPU", "device": "cuda", "cuda": 13}
    }
    harness.save(older, results / "a-machine" / "toy.json")
    harness.save(newer, results / "a-machine" / "novel.json")
    harness.save(gpu, results / "zippy-gpu" / "novel.json")
    assert render.main(["--results", str(results), "--docs", str(docs)]) == 0
    assert {p.name for p in docs.glob("*.md")} == {
        "results.md",
        "results-toy.md",
        "results-novel.md",
    }
    summary = (docs / "results.md").read_text()
    assert summary.index("## Zippy GPU") < summary.index("## Toy machine")
    assert summary.count("| Toy | 2 | 2/2 | 2/2 | peer 2.50 |") == 3
    assert summary.count("](results-novel.md)") == 2 and "](results-a-machine-toy.png)" in summary
    assert "roof 20 GB/s (read; streaming store 15, copy 10)" in summary
    assert "Mortar's CPU target AVX2" in summary and "roof 20 GB/s (copy)" in summary
    tables = (docs / "results-novel.md").read_text()
    assert tables.count("### Toy\n") == 2 and "#### " not in tables


def test_the_cpu_roof_is_the_best_of_three_ways_to_move_memory():
    roofs = harness.memory_roofs(CPU, quick=True)
    assert set(roofs) == {"copy", "read", "streaming store"}
    assert all(1e8 < rate < 1e13 for rate in roofs.values())


def test_results_name_the_cpu_target_of_the_library():
    info = machine.describe(CPU)
    assert info["target"] and "capability" not in info


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


def test_a_host_row_runs_on_the_cpu(tmp_path):
    (row,), _ = run_lora(CPU, "host op=apply", tmp_path)
    assert row["case"] == {"op": "apply", "layer": "tiny"}
    assert set(row["providers"]) == {"mortar", "torch.mul"} and not row["failed"]
    assert row["providers"]["mortar"]["rel_error"] < 0.02


GPU_ROWS = ["apply layer=qkv tokens=8 ", "plan tokens=1024 adapters=16", "host op=apply layer=qkv"]


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


def test_rows_that_are_no_regular_expression_are_refused(capsys):
    with pytest.raises(SystemExit):
        harness.main("toy", lambda options: [], [], argv=["--rows", "("])
    assert "'(' is no regular expression" in capsys.readouterr().err
