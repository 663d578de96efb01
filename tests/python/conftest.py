# SPDX-License-Identifier: Apache-2.0
"""Every test that takes ``device`` runs on the CPU and, where there is one, on the GPU."""

import pytest
import torch

import mortar  # noqa: F401  registers the ops
from mortar._ffi import lib

DEVICES = ["cpu"]
if torch.cuda.is_available() and lib.has_cuda():
    DEVICES.append("cuda")


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
