# SPDX-License-Identifier: Apache-2.0
"""The Python example of README.md runs and does what it says."""

import importlib.util
from pathlib import Path

import torch

_TOOL = Path(__file__).resolve().parents[2] / "tools" / "readme_example.py"


def _code_block(language: str) -> str:
    spec = importlib.util.spec_from_file_location("readme_example", _TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.code_block(language)


def test_python_example():
    torch.manual_seed(0)
    names: dict = {}
    exec(_code_block("python"), names)
    x, y, token_adapter = (names[name].double() for name in ("x", "y", "token_adapter"))
    for row, adapter in enumerate(token_adapter.int().tolist()):
        if adapter < 0:
            assert torch.equal(y[row], torch.zeros_like(y[row]))
            continue
        a, b = names["adapters"][adapter]
        expected = [2.0, 0.5][adapter] * (x[row] @ a.double().T) @ b.double().T
        # Half an ulp of a bfloat16 is up to 2^-8 of its value; the float32 sums add less than that.
        assert (y[row] - expected).abs().max() <= 2**-7 * expected.abs().max()
