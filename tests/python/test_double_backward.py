# SPDX-License-Identifier: Apache-2.0
"""Gradients have no gradient, and say so, by whichever way one is wanted of them: also where the
incoming gradient is a constant and only what was saved depends on something."""

import pytest
import torch

import mortar
import nemo_stand_in
from mortar import lora
from mortar._lora_layer_ops import adapted_linear
from mortar.compat import nemo


@pytest.fixture
def factors(device):
    def leaf(*shape):
        return torch.randn(*shape, device=device, requires_grad=True)

    return leaf(4, 16), leaf(8, 4)


def linear(device, factors, monkeypatch):
    return lambda x: lora.linear(x, *factors)


def mixed_linear(device, factors, monkeypatch):
    offsets = torch.tensor([0, 6], dtype=torch.int32, device=device)
    return lambda x: lora.mixed_linear(x, [factors], offsets, [1.0])


def one_node(device, factors, monkeypatch):
    weight = torch.randn(8, 16, device=device)
    return lambda x: adapted_linear(x, weight, None, *factors, 1.0, 0.0)


def nemo_function(device, factors, monkeypatch):
    _, layers = nemo_stand_in.load(monkeypatch)
    nemo.install()
    return lambda x: layers.LoRATritonFunction.apply(x, *factors, 1.0, x.dtype, True)


def dynamic_conv(device, factors, monkeypatch):
    kernels = torch.randn(1, 6, 16, 3, device=device, requires_grad=True)
    return lambda x: mortar.dynamic_conv.dynamic_conv(x[None], kernels)


def fp8_norm(device, factors, monkeypatch):
    module = mortar.nn.Fp8RMSNormLinear(16, 32, device=device)
    return lambda x: module(x)


@pytest.mark.parametrize(
    "make", [linear, mixed_linear, one_node, nemo_function, dynamic_conv, fp8_norm]
)
def test_the_penalty_of_a_gradient_is_refused(device, factors, monkeypatch, make):
    f = make(device, factors, monkeypatch)
    x = torch.randn(6, 16, device=device, requires_grad=True)
    try:
        y = f(x)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (y.sum() + dx.square().sum()).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(dx.square().sum(), x, allow_unused=True)
    finally:
        nemo.uninstall()
