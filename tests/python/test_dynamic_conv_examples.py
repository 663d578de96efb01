# SPDX-License-Identifier: Apache-2.0
"""The examples of the dynamic convolution do what they say."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

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


def tiny(demo, **changes):
    """A demo of a second or two, on text of its own."""
    model = demo.HybridConfig(hidden=32, layers="cac", heads=2, generator_reduction=4)
    recipe = demo.Recipe(steps=6, sequences=5, longest=40, warmup=2, model=model, **changes)
    text = b"".join(b"line %d of a text about nothing\n" % i for i in range(400))
    return recipe, demo.Corpus("numbers", "Numbered lines", "", "line ", text, text[:4000])


def test_demo_trains_decodes_and_reports(tmp_path):
    demo = load("demo_conv")
    recipe, corpus = tiny(demo)
    report = demo.run(recipe, corpus, tmp_path, Console(quiet=True))
    assert all(demo.checks(report).values()), report
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_demo_would_notice_a_leak():
    """Its comparison fails if the packed copy ignores the boundaries of its sequences."""
    demo = load("demo_conv")
    recipe, corpus = tiny(demo)
    leaking, separate = (demo.Trainer(recipe, loss) for loss in
                         (demo.leaking_loss, demo.separate_loss))  # fmt: skip
    for batch in demo.batches(corpus.train, recipe):
        leaking.step(batch)
        separate.step(batch)
    pairs = zip(leaking.losses, separate.losses, strict=True)
    assert max(abs(a - b) / b for a, b in pairs) > demo.MAX_LOSS_DIFFERENCE


def test_demo_would_notice_a_lost_state(monkeypatch):
    """Its comparison fails if decoding starts from an empty convolution state."""
    demo = load("demo_conv")
    recipe, corpus = tiny(demo)
    torch.manual_seed(0)
    model = demo.HybridModel(recipe.model)
    texts, prompts = demo.batches(corpus.test, recipe)[0].texts[-2:], [9, 4]
    assert demo.decode_difference(model, texts, prompts) < demo.MAX_LOGIT_DIFFERENCE
    forward = demo.HybridModel.forward

    def forgetful(self, tokens, cu_seqlens=None, cache=None):
        logits = forward(self, tokens, cu_seqlens, cache)
        for state in cache.conv.values() if cache else ():
            state.zero_()
        return logits

    monkeypatch.setattr(demo.HybridModel, "forward", forgetful)
    assert demo.decode_difference(model, texts, prompts) > demo.MAX_LOGIT_DIFFERENCE
