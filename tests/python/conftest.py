# SPDX-License-Identifier: Apache-2.0
"""Every test that takes ``device`` runs on the CPU and, where there is one, on the GPU."""

import os
import platform
import shutil

# Before OpenMP starts: idle threads sleep instead of spinning, so that tests on a busy machine
# take 50 ms where they took 10 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import mortar  # noqa: F401  registers the ops
from mortar._ffi import lib

HAS_CUDA = torch.cuda.is_available() and lib.has_cuda()
DEVICES = ["cpu", "cuda"] if HAS_CUDA else ["cpu"]

# Tests that only a GPU can run do not exist elsewhere.
collect_ignore_glob = [] if HAS_CUDA else ["test_*_cuda.py"]

# The emulator needs nvcc, whose PTX it runs, and x86-64.
if not (shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
        and platform.machine() == "x86_64"):  # fmt: skip
    collect_ignore_glob.append("test_emulator.py")


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
