# SPDX-License-Identifier: Apache-2.0
"""Random LoRA problems and the step of a whole model: what is timed, and its pictures."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import lora
import model
import render
from harness import Options, run_case
from harness.machine import Ceiling
from harness.results import judge
from lora_grid import (
    GRID_SIZE,
    MOST_ADAPTERS,
    MOST_TOKENS,
    MOST_WEIGHT_BYTES,
    GridCase,
    draw_problem,
    grid_cases,
)
from lora_problem import Layer, LoraProblem
from lora_rows import HostCase
from test_bench import result

CEILING = Ceiling(4.28e12, 650e12)


def drawn(seed: int, count: int) -> list:
    draw = random.Random(seed)
    return [draw_problem(draw) for _ in range(count)]


def test_a_seed_gives_the_same_problems_and_another_gives_others():
    keys = [[key for _, key in drawn(seed, 20)] for seed in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]
    assert len(list(grid_cases(3, 5))) == 5


def test_problems_cover_what_users_have():
    problems = [problem for problem, _ in drawn(11, GRID_SIZE)]
    for p in problems:
        ids = p.token_adapter
        assert 1 <= p.tokens <= MOST_TOKENS and 1 <= p.adapters <= MOST_ADAPTERS
        assert len(ids) == p.tokens and int(ids.min()) >= -1 and int(ids.max()) < p.adapters
        assert (ids >= 0).any()
        size = (
            p.weight_dtype.itemsize * p.max_rank * sum(p.layer.hidden + n for n in p.layer.widths)
        )
        assert p.adapters == 1 or p.adapters * size <= MOST_WEIGHT_BYTES
    few = sum(p.tokens <= 128 for p in problems)  # half of the logarithms of 1 to 16,384
    assert 0.35 * GRID_SIZE < few < 0.65 * GRID_SIZE
    assert {p.max_rank for p in problems} >= {4, 8, 16, 32, 64, 128, 256, 512}
    assert {p.weight_dtype for p in problems} == {torch.bfloat16, torch.float16, torch.float32}
    assert any(not isinstance(p.ranks, int) for p in problems)
    assert {len(p.layer.widths) for p in problems} == {1, 2, 3}


@pytest.mark.parametrize(
    ("tokens", "rank", "weight", "must"),
    [
        (256, 16, None, 3.5 + 1.5),
        (257, 64, None, 5 + 1.4),
        (8, 128, None, 6 + 1.6),
        (8, 16, torch.float32, 7 + 3),
    ],
)
def test_limits_are_by_tokens_rank_and_dtype(tokens, rank, weight, must):
    problem = LoraProblem(Layer("o", 64, (64,)), tokens, 1, rank, torch.bfloat16, weight)
    row = {"floor_us": 1.0, "targets": GridCase(problem, {}).targets,
           "providers": {"mortar": {"group": "mortar", "us": must + 0.01}}}  # fmt: skip
    assert judge(row, "mortar").must_us == pytest.approx(must) and not judge(row, "mortar").must
    row["providers"]["cublas"] = {"group": "cublas", "us": 2.0}
    assert judge(row, "mortar").must_us == pytest.approx(2.1)


def test_a_random_problem_is_right_and_timed(device):
    options = Options(device, quick=True)
    ids = torch.tensor([0, 2, -1, 2, 1, 0, 0, 0], dtype=torch.int32)
    problem = LoraProblem(Layer("toy", 64, (48, 16)), 8, 3, [4, 8, 16], torch.float32,
                          token_adapter=ids)  # fmt: skip
    row = run_case(GridCase(problem, {"number": 0}), options, CEILING)
    assert set(row["providers"]) == {"mortar"} and not row["failed"]


@pytest.mark.parametrize("op", ["apply", "shrink", "expand", "plan", "compat.vllm.lora_shrink"])
def test_rows_of_host_cost_are_right(op, device):
    case = HostCase(op, Layer("toy", 64, (48, 16)))
    row = run_case(case, Options(device, quick=True), CEILING)
    assert {"mortar", "torch.mul"} <= set(row["providers"]) and not row["failed"]


def test_a_step_of_a_model_is_right_and_its_limit_starts_at_the_base(device):
    case = model.ModelCase(5, 2, 4, 2, [Layer("toy", 64, (48, 16))], torch.float32)
    row = run_case(case, Options(device, quick=True), CEILING)
    assert set(row["providers"]) == {"mortar", "base"} and not row["failed"]
    a_and_b = 2 * 4 * (2 * 64 + 48 + 16) * 4
    assert row["bytes"] == 2 * (a_and_b + 5 * 64 * 4)
    row["providers"]["base"]["us"] = 100.0
    row["floor_us"] = 10.0
    assert judge(row, "mortar").must_us == pytest.approx(100 + 128 * 5 + 13)


def test_the_command_line_takes_a_seed(capsys):
    assert lora.run(["--grid", "5", "--device", "cpu", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == GRID_SIZE


@pytest.mark.parametrize("plot", ["floor", "share"])
def test_pictures_are_drawn(plot, tmp_path):
    rows = [
        {"table": "axpy", "case": {"size": size}, "floor_us": float(size), "targets": targets,
         "bytes": 1, "flops": 1, "sets": 1, "failed": {}, "skipped": {}, "providers": {
             name: {"group": name, "synchronises": False, "rel_error": 0.0, "us": us, "us_q1": us,
                    "us_q3": us, "samples": 1, "calls": 1}
             for name, us in (("right", 5.0 * size), ("peer", 4.0 * size))}}
        for size, targets in ((1, {"right": "lora_grid_decode"}), (900, {"right": "conv_forward"}))
    ]  # fmt: skip
    made = result(rows)
    made["views"][0]["plot"] = plot
    view = render.plotted_view(made)
    render._PLOTS[view.plot](view, made, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
