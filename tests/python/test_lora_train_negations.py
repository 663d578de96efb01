# SPDX-License-Identifier: Apache-2.0
"""Negative-bit views among the arguments of LoRA training: inputs are read right, by every way that
leads to the library, and outputs are refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import nemo_stand_in
from mortar import lora_train
from mortar.compat import nemo
from mortar.compat.peft import accelerate

M, K, N, R = 6, 8, 5, 3
OUT = torch.float32


def negation(t):
    """The same values, held as those of the opposite sign."""
    made = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert made.is_neg() and torch.equal(made, t)
    return made


def tensors(device, *shapes):
    return [torch.randn(*shape, device=device) for shape in shapes]


def forward(x, a, b):
    return (nemo.lora_forward_wrapper(x, a, b, None, 2.0),)


def da_dx(xt, dy, b, a):
    return nemo.lora_da_dx_update_wrapper(xt, dy, b, a, 2.0)


def db(a, xt, dy):
    return (nemo.lora_db_update_wrapper(a, xt, dy, 2.0),)


def nemo_function(x, a, b, res, dy):
    leaves = [t.requires_grad_() for t in (x, a, b, res)]
    y = nemo_stand_in.LoRATritonFunction.apply(x, a, b, 2.0, OUT, True, res)
    return (y, *torch.autograd.grad(y, leaves, dy))


def op(x, a, b, base, dy):
    leaves = [t.requires_grad_() for t in (x, a, b, base)]
    layer = (None, None, None, [N], [0], [2.0], [0.0], False, OUT, True)
    y = torch.ops.mortar.lora_train(x, [base], [a], [b], *layer)[0]
    return (y, *torch.autograd.grad(y, leaves, dy))


def peft_layer(x, a, b, weight, dy):
    linear = torch.nn.Linear(K, N, bias=False, device=x.device)
    config = LoraConfig(r=R, lora_alpha=R, target_modules=["0"])
    model = get_peft_model(torch.nn.Sequential(linear), config)
    layer = accelerate(model).base_model.model[0]
    layer.base_layer._parameters["weight"] = weight
    pairs = ((layer.lora_A, a), (layer.lora_B, b))
    for factors, t in pairs:
        factors["default"]._parameters["weight"] = t.requires_grad_()
    y = model(x.requires_grad_())
    return (y, *torch.autograd.grad(y, (x, a, b), dy))


CALLS = [
    (forward, [(M, K), (K, R), (R, N)]),
    (da_dx, [(K, M), (M, N), (N, R), (R, K)]),
    (db, [(R, K), (K, M), (M, N)]),
    (nemo_function, [(M, K), (R, K), (N, R), (M, N), (M, N)]),
    (op, [(M, K), (R, K), (N, R), (M, N), (M, N)]),
    (peft_layer, [(M, K), (R, K), (N, R), (N, K), (M, N)]),
]


@pytest.mark.parametrize(
    "call, shapes, which", [(call, s, i) for call, s in CALLS for i in range(len(s))]
)
def test_negated_inputs(device, monkeypatch, call, shapes, which):
    given = tensors(device, *shapes)
    other = [t.clone() for t in given]
    other[which] = negation(other[which])
    nemo_stand_in.load(monkeypatch)
    nemo.install()
    try:
        results = call(*given), call(*other)
    finally:
        nemo.uninstall()
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("which", ["dx", "da", "db", "res"])
def test_negated_outputs_are_refused(device, which):
    x, a, b, dy = tensors(device, (M, K), (R, K), (N, R), (M, N))
    wanted = f"{which} must hold its own values .* got a negation"
    with pytest.raises(ValueError, match=wanted):
        if which == "res":
            nemo.lora_forward_wrapper(x, a.t(), b.t(), negation(dy), 1.0)
        out = {"dx": x, "da": a, "db": b}[which]
        lora_train.backward(dy, a, b, x=x, **{which: negation(out)})
