# SPDX-License-Identifier: Apache-2.0
"""The examples of the dynamic convolution do what they say."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    """An example as a module; its neighbours are importable, as when it runs as a script."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("width", [2, 3, 4])
def test_sglang_state_layout(device, width):
    errors = load("sglang_state_layout").serve(device, channels=33, width=width)
    assert errors["output"] < 1e-6
    assert errors["state"] == 0
