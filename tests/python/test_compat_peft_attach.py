# SPDX-License-Identifier: Apache-2.0
"""attach: adapters of an AdapterStore on a plain model, without PEFT."""

import copy
import inspect
import re

import pytest
import torch

import mortar
from mortar.compat.peft import accelerate, attach, restore
from peft_models import (
    ADAPTERS,
    NAMES,
    adapted,
    assert_no_less_exact,
    assert_same_up_to_rounding,
    gpt2,
    llama,
    logits,
    relative_error,
    tokens,
)


@pytest.fixture
def base(device):
    return llama(device=device)


def stored(model, folder, names=None) -> mortar.AdapterStore:
    """A store with the adapters of a PEFT model, by way of PEFT's own files."""
    model.save_pretrained(folder)
    store = mortar.AdapterStore()
    for name in model.peft_config if names is None else names:
        store.open(name, folder / name)
    return store


def test_is_accelerate_without_peft(base, device, tmp_path):
    model = adapted(base)
    ids = tokens(len(NAMES), 7, device)
    peft = logits(model, ids, NAMES)
    exact = logits(copy.deepcopy(model).double(), ids, NAMES)
    got = logits(attach(base, stored(model, tmp_path)), ids, NAMES)
    assert_no_less_exact(got, peft, exact)
    assert torch.equal(got, logits(accelerate(model), ids, NAMES))


def test_names_choose_and_none_is_the_base_model(base, device, tmp_path):
    model = adapted(base)
    ids = tokens(3, 5, device)
    with torch.inference_mode():
        plain = base(input_ids=ids).logits
    attach(base, stored(model, tmp_path), ["pattern", "odd"])
    got = logits(base, ids, [None, "odd", "__base__"])
    assert torch.equal(got[::2], plain[::2])
    assert_same_up_to_rounding(got[1], logits(model, ids, ["odd"] * 3)[1])
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): small"):
        logits(base, ids, ["small", "odd", None])


def test_restore_gives_back_the_same_bits(base, device, tmp_path):
    ids = tokens(2, 5, device)
    keys, signature = list(base.state_dict()), inspect.signature(base.forward)
    with torch.inference_mode():
        before = base(input_ids=ids).logits
        attach(base, stored(adapted(base), tmp_path))
        assert list(base.state_dict()) == keys
        assert inspect.signature(base.forward) == signature
        assert torch.equal(base(input_ids=ids).logits, before)
        assert not torch.equal(logits(base, ids, ["odd", "small"]), before)
        restore(base)
        assert torch.equal(base(input_ids=ids).logits, before)
    assert not any("forward" in vars(module) for module in base.modules())


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 3, "temperature": 0.5}],
    ids=["greedy", "beams", "sampled"],
)
def test_generate(base, device, tmp_path, settings):
    model = adapted(base)
    attach(base, stored(model, tmp_path))
    ids = tokens(len(NAMES), 6, device)
    repeats = settings.get("num_return_sequences", 1)
    wanted = {"max_new_tokens": 8, "do_sample": False, **settings}
    torch.manual_seed(1)
    got = base.generate(input_ids=ids, adapter_names=NAMES, **wanted)
    # PEFT repeats the names for beams, but not for sequences to return: repeat the rows instead.
    wanted.pop("num_return_sequences", None)
    torch.manual_seed(1)
    peft = model.generate(
        input_ids=ids.repeat_interleave(repeats, 0),
        adapter_names=[name for name in NAMES for _ in range(repeats)],
        **wanted,
    )
    assert torch.equal(got, peft)


def test_conv1d(device, tmp_path):
    base = gpt2(device)
    targets = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    model = adapted(base, {"one": {"r": 3, **targets}, "two": {"r": 8, **targets}})
    ids, names = tokens(3, 7, device), ["two", None, "one"]
    got = logits(attach(base, stored(model, tmp_path)), ids, names)
    peft = logits(model, ids, ["two", "__base__", "one"])
    assert_same_up_to_rounding(got, peft)


def test_half_model_and_adapters_of_two_dtypes(device, tmp_path):
    base = llama(torch.bfloat16, device)
    model = adapted(base)
    names = ["odd", "small", "__base__"]
    ids = tokens(3, 7, device)
    stored(model, tmp_path / "single")
    half = copy.deepcopy(model).to(torch.bfloat16)
    stored(half, tmp_path / "half")
    store = mortar.AdapterStore()
    store.open("odd", tmp_path / "single" / "odd")
    store.open("small", tmp_path / "half" / "small")

    exact = copy.deepcopy(model).double()
    for mine, other in zip(exact.named_parameters(), half.named_parameters(), strict=True):
        if ".small." in mine[0]:
            mine[1].data.copy_(other[1])
    exact = logits(exact, ids, names)
    peft = logits(model, ids, names)  # rounds "small" less, which bfloat16 activations hide
    got = logits(attach(base, store), ids, names)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, exact) <= 2 * relative_error(peft, exact)


def test_gradients_are_refused(base, device, tmp_path):
    attach(base, stored(adapted(base), tmp_path))
    with pytest.raises(RuntimeError, match="no_grad"):
        base(input_ids=tokens(1, 3, device), adapter_names=["odd"])


def test_refusals_leave_the_model_alone(base, tmp_path):
    store = stored(adapted(base), tmp_path)
    with pytest.raises(
        ValueError, match="attach: model must have the module .*GPT2LMHeadModel with"
    ):
        attach(gpt2(), store)
    wide = copy.deepcopy(base)
    wide.model.layers[1].mlp.up_proj = torch.nn.Linear(40, 72)
    with pytest.raises(ValueError, match=r"up_proj must map 40 to 72 features, got .* 48 to 72"):
        attach(wide, store)
    assert not any("forward" in vars(module) for module in wide.modules())
    with pytest.raises(ValueError, match="attach: names must hold at least one adapter"):
        attach(base, mortar.AdapterStore())
    with pytest.raises(ValueError, match="nobody"):
        attach(base, store, ["nobody"])
    attach(base, store)
    with pytest.raises(ValueError, match="attach: model must not be in service already"):
        attach(base, store)


WRONG_TYPES = [
    (lambda m, s: attach(None, s), "attach: model must be a torch.nn.Module, got NoneType"),
    (lambda m, s: attach(m, "store"), "attach: store must be an AdapterStore, got str"),
    (lambda m, s: attach(m, s, "odd"), "attach: names must be a list of str, got str"),
    (lambda m, s: attach(m, s, 3), "attach: names must be a list of str, got int"),
    (lambda m, s: attach(m, s, ["odd", None]), "attach: names[1] must be a str, got NoneType"),
    (lambda m, s: accelerate([m]), "accelerate: model must be a PeftModel with LoRA adapters"),
    (lambda m, s: restore(None), "restore: model must be a torch.nn.Module, got NoneType"),
]


@pytest.mark.parametrize("call, message", WRONG_TYPES, ids=[case[1] for case in WRONG_TYPES])
def test_wrong_types_are_named(call, message):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        call(model, mortar.AdapterStore())
    with pytest.raises(ValueError, match="attach: names must not hold '__base__'"):
        attach(model, mortar.AdapterStore(), ["__base__"])
    assert "forward" not in vars(model)


def test_errors_are_those_of_peft(base, device, tmp_path):
    model = adapted(base)
    attach(base, stored(model, tmp_path))
    ids = tokens(3, 4, device)
    wrong = {"short": ["odd"], "long": ["odd"] * 4, "unknown": ["odd", "x", "y"]}
    for names in wrong.values():
        said = []
        for served in (model, base):
            with pytest.raises(ValueError) as error:
                logits(served, ids, names)
            said.append(str(error.value))
        assert said[0] == said[1]
    with pytest.raises(TypeError, match="expected a list of str"):
        logits(base, ids, "odd")
    with pytest.raises(ValueError, match="training mode"):
        logits(base.train(), ids, ["odd"] * 3)


def test_every_adapter_alone(base, device, tmp_path):
    model = adapted(base)
    store = stored(model, tmp_path)
    ids = tokens(2, 5, device)
    for name in ADAPTERS:
        attach(base, store, [name])
        got = logits(base, ids, [name, None])
        restore(base)
        peft = logits(model, ids, [name, "__base__"])
        assert_same_up_to_rounding(got, peft)
