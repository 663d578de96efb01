# SPDX-License-Identifier: Apache-2.0
"""The emulator of tests/emulator runs kernels that are right and notices faults in them. Collected
only where there is nvcc."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EMULATOR = Path(__file__).resolve().parents[1] / "emulator"
NVCC = shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Runs the example: its case, then environment variables of the emulator."""
    folder = tmp_path_factory.mktemp("emulator")
    environment = os.environ | {
        "PATH": f"{Path(NVCC).parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "MORTAR_EMULATOR_CACHE": str(folder / "cache"),
    }
    runtime = folder / "libcudart_emulated.so"
    subprocess.run([EMULATOR / "build.sh", runtime], check=True, env=environment)
    subprocess.run(
        [NVCC, "-std=c++20", "-arch=compute_90a", "--no-compress", "-lineinfo", "-cudart=none"]
        + [EMULATOR / "example.cu", "-o", folder / "example", f"-L{folder}", "-lcudart_emulated"],
        check=True,
        env=environment,
    )

    def run(*case, **settings):
        variables = {f"MORTAR_EMULATOR_{k.upper()}": str(v) for k, v in settings.items()}
        return subprocess.run(
            [folder / "example", *case], capture_output=True, text=True, env=environment | variables
        )

    return run


@pytest.mark.parametrize("races", [{}, {"races": 1}])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["turn", "copies", "sum"])
def test_right_kernels_run(example, case, seed, races):
    result = example(case, seed=seed, **races)
    assert result.stdout == "right\n", result.stderr


@pytest.mark.parametrize(("case", "does"), [("same", "writes"), ("told", "reads")])
def test_a_race_that_no_order_shows_is_noticed(example, case, does):
    assert example(case).stdout == "right\n"
    result = example(case, races=1)
    assert result.stdout not in ("right\n", "wrong\n")
    assert f"a race: it {does} shared memory that thread" in result.stderr
    assert f"turn_{case}" in result.stderr and "example.cu" in result.stderr


@pytest.mark.parametrize(
    ("case", "statement"),
    [("turn", "bar.sync"), ("copies", "bar.sync"), ("copies", "cp.async.wait_group")],
)
def test_what_a_missing_statement_orders_is_a_race(example, case, statement):
    for seed in range(3):
        result = example(case, seed=seed, races=1, drop=f"{statement} 0")
        assert result.stdout != "right\n"
        # A copy that is never waited for is ordered, but what is read is not there yet.
        assert "a race: it " in result.stderr or statement == "cp.async.wait_group"


@pytest.mark.parametrize(
    ("case", "statement"),
    [("turn", "bar.sync"), ("copies", "bar.sync"), ("copies", "cp.async.wait_group")],
)
def test_a_missing_statement_is_noticed(example, case, statement):
    results = [example(case, seed=seed, drop=f"{statement} 0").stdout for seed in range(3)]
    assert "wrong\n" in results


@pytest.mark.parametrize("case", ["turn", "copies"])
def test_reading_past_an_allocation_is_refused(example, case):
    result = example(case, "1")
    assert result.stdout == "illegal address\n"
    assert case.replace("copies", "turn_copies") in result.stderr
    assert "example.cu" in result.stderr
