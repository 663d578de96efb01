# SPDX-License-Identifier: Apache-2.0
"""Two processes (gloo, or NCCL with two GPUs) find the gradients that one process finds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lora_train_processes as processes
from conftest import HAS_CUDA

DEVICES = ["cpu", *(["cuda"] if HAS_CUDA and torch.cuda.device_count() > 1 else [])]


@pytest.mark.alone  # two more processes, which wait for each other
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one(kind, where, tmp_path):
    script = Path(processes.__file__)
    results = [tmp_path / str(rank) for rank in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, script, kind, str(rank), tmp_path / "meeting", result, where]
        )
        for rank, result in enumerate(results)
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    model, x = processes.make()
    model(x).square().mean().backward()
    want = processes.gradients(model)
    for result in results:
        for got, w in zip(torch.load(result), want, strict=True):
            torch.testing.assert_close(got, w, rtol=1e-5, atol=1e-6)
