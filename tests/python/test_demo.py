# SPDX-License-Identifier: Apache-2.0
"""The LoRA demo from end to end, on its tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHORT = ["--device=cpu", "--rounds=2", "--steps=3", "--new-tokens=12"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The demo as a user runs it, in a process of its own."""
    out = tmp_path_factory.mktemp("demo")
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, EXAMPLES / "demo_lora.py", "--quick", *SHORT, "--out", out]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment), out


@pytest.fixture
def demo(monkeypatch, capsys):
    """The demo in this process, which has PyTorch and PEFT loaded: (status, stdout, stderr)."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo_lora

    def run(*arguments):
        try:
            status = demo_lora.main([*map(str, arguments)])
        except SystemExit as exit_:
            status = exit_.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_everything_is_right(first):
    run, out = first
    assert run.returncode == 0, run.stdout + run.stderr
    assert "One batch, every row its own adapter" in run.stdout
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "report.json").read_text())

    ours, theirs = report["max_rel_error_vs_fp64"], report["peft_max_rel_error_vs_fp64"]
    assert 0 < ours < 1e-5
    assert 0 < theirs < 1e-5
    assert [a["rank"] for a in report["adapters"].values()] == [8, 16, 32, 64]
    assert set(report["losses"]) == {*report["adapters"], "(base)"}
    for phase in ("decode", "prefill"):
        base, peft, mortar = (report[f"{phase}_{way}_ms"] for way in ("base", "peft", "mortar"))
        assert min(base, peft, mortar) > 0
        assert report[f"{phase}_speedup_vs_peft"] == pytest.approx(peft / mortar)
        assert report[f"{phase}_added_vs_peft"] == pytest.approx((mortar - base) / (peft - base))


def test_second_run_trains_nothing_and_says_the_same(first, demo):
    _, out = first
    before = json.loads((out / "report.json").read_text())
    status, printed, _ = demo("--quick", *SHORT, "--out", out)
    assert status == 0, printed
    assert "from the cache" in printed
    assert "training" not in printed
    after = json.loads((out / "report.json").read_text())
    for same in ("losses", "max_rel_error_vs_fp64", "peft_max_rel_error_vs_fp64", "adapters"):
        assert after[same] == before[same]


def test_own_model_and_adapters(first, demo, tmp_path):
    """The cached model and two of its adapters, as a user's own."""
    _, out = first
    [base] = out.glob("cache/*/base")
    _save_tokenizer(base)
    own = ["--model", base, "--adapters", base.parent / "perl", base.parent / "c"]
    status, printed, _ = demo(*own, *SHORT, "--out", tmp_path)
    assert status == 0, printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: a["rank"] for name, a in report["adapters"].items()} == {"perl": 64, "c": 16}
    assert report["homes"] == {}


def _save_tokenizer(folder: Path) -> None:
    """Bytes as tokens, in the format that AutoTokenizer reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


WRONG_ARGUMENTS = [
    (["--model", "x"], "--model and --adapters go together"),
    (["--device", "tpu"], "invalid choice"),
    (["--steps", "0"], "--steps: must be at least 1, got 0"),
    (["--model", "/nowhere", "--adapters", "x"], "--model: there is no folder /nowhere"),
]
if not torch.cuda.is_available():
    WRONG_ARGUMENTS.append((["--device", "cuda"], "PyTorch sees no GPU"))


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments(arguments, message, demo, tmp_path):
    status, _, said = demo(*arguments, "--out", tmp_path)
    assert status == 2
    assert message in said


def test_a_place_that_cannot_be_written_is_one_sentence(demo, tmp_path):
    (tmp_path / "file").write_text("")
    status, printed, _ = demo("--quick", "--out", tmp_path / "file" / "out")
    assert status == f"demo: --out: cannot write into {tmp_path}/file/out: Not a directory"
    assert printed == ""


def test_refused_adapters_are_one_sentence(demo, tmp_path, first):
    _, out = first
    [base] = out.glob("cache/*/base")
    _save_tokenizer(base)
    status, _, _ = demo("--model", base, "--adapters", tmp_path / "nothing", "--out", tmp_path)
    assert status.startswith("demo: ")
    assert "nothing" in status
    assert not (tmp_path / "report.json").exists()
