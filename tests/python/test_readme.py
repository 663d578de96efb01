# SPDX-License-Identifier: Apache-2.0
"""The Python examples of README.md and of the documents run; README's does what it says."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]
_TOOL = _ROOT / "tools" / "readme_example.py"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("document", ["dynamic_conv", "fp8_rmsnorm", "serving", "training"])
def test_examples_of_the_documents(document):
    blocks = _BLOCK.findall((_ROOT / "docs" / f"{document}.md").read_text())
    # What needs COAT, which is not there, test_compat_coat.py tries with a stand-in.
    alone = [block for block in blocks if "compat.coat" not in block]
    assert alone
    for block in alone:
        exec(block, {})
