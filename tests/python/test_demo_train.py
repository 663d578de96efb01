# SPDX-License-Identifier: Apache-2.0
"""The training demo from end to end, on its tiny model, and the example of docs/training.md."""

import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo_train

    return demo_train


def test_losses_are_those_of_peft(demo, tmp_path, capsys, device):
    arguments = ["--quick", "--steps=3", f"--device={device.type}", f"--out={tmp_path}"]
    assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "largest difference of a loss" in printed
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "train.json").read_text())
    assert report["difference_one"] < 1e-3
    assert report["difference_four"] < 1e-3
    runs = report["runs"]
    assert runs["Mortar"]["kept_mb"] <= runs["PEFT"]["kept_mb"]
    assert len(runs["together"]["losses"]) == 4
    assert all(len(curve) == 3 for curve in runs["together"]["losses"].values())


@pytest.mark.parametrize("wrong", ["--dropout=1.5", "--device=tpu", "--steps=0"])
def test_bad_arguments(demo, wrong):
    with pytest.raises(SystemExit) as caught:
        demo.parse([wrong])
    assert caught.value.code == 2


def test_example_of_the_document():
    text = (EXAMPLES.parent / "docs" / "training.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict = {}
    exec(code, names)
    assert names["B"].detach().abs().max() > 0  # it has trained
