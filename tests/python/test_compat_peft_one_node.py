# SPDX-License-Identifier: Apache-2.0
"""A PEFT layer over a plain frozen linear layer: one node of autograd, and when it is not."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules import module as global_hooks

import mortar.compat.peft
from mortar.compat import _peft_training

HIDDEN, WIDTH = 24, 40


def made(device, bias=False, dropout=0.0, **options):
    """The layer under Mortar and the same under PEFT."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(HIDDEN, WIDTH, bias=bias)).to(device)
    config = LoraConfig(
        r=4, lora_dropout=dropout, target_modules=["0"], init_lora_weights=False, **options
    )
    theirs = get_peft_model(base, config).train()
    ours = mortar.compat.peft.accelerate(copy.deepcopy(theirs))
    return tuple(m.base_model.model[0] for m in (ours, theirs))


def parameters(layer):
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def gradients(layer, x, dy=None):
    y = layer(x)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    return y.detach(), torch.autograd.grad(y, wanted, torch.ones_like(y) if dy is None else dy)


def is_one_node(y):
    return "_AdaptedLinear" in type(y.grad_fn).__name__


def assert_same(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


SHAPES = {
    "vector": lambda **o: torch.randn(HIDDEN, **o),
    "rows": lambda **o: torch.randn(5, HIDDEN, **o),
    "batch": lambda **o: torch.randn(2, 3, HIDDEN, **o),
    "none": lambda **o: torch.randn(0, HIDDEN, **o),
    "transposed": lambda **o: torch.randn(3, 2, HIDDEN, **o).transpose(0, 1),
    "columns": lambda **o: torch.randn(HIDDEN, 5, **o).t(),
    "expanded": lambda **o: torch.randn(1, 1, HIDDEN, **o).expand(2, 3, HIDDEN),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients_are_those_of_peft(device, shape, bias):
    ours, theirs = made(device, bias)
    x = SHAPES[shape](device=device).requires_grad_()
    assert is_one_node(ours(x))
    assert_same(gradients(ours, x), gradients(theirs, x))
    dy = torch.randn_like(ours(x)).mT.contiguous().mT if x.ndim > 1 else torch.randn_like(ours(x))
    assert_same(gradients(ours, x, dy), gradients(theirs, x, dy))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("wants_x", [True, False])
def test_what_is_frozen_has_no_gradient(device, frozen, wants_x):
    ours, theirs = made(device)
    for layer in (ours, theirs):
        for i in frozen:
            parameters(layer)[i].requires_grad_(False)
    x = torch.randn(6, HIDDEN, device=device, requires_grad=wants_x)
    if len(frozen) == 2 and not wants_x:
        assert not ours(x).requires_grad
    else:
        assert is_one_node(ours(x))
        assert_same(gradients(ours, x), gradients(theirs, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half_adapters", [False, True])
def test_half_layers(device, dtype, half_adapters):
    """dx is rounded twice: the base's, and the sum."""
    ours, theirs = made(device)
    for layer in (ours, theirs):
        layer.base_layer.to(dtype)
        if half_adapters:
            layer.to(dtype)
    x = torch.randn(7, HIDDEN, device=device).to(dtype).requires_grad_()
    got = gradients(ours, x)
    assert is_one_node(ours(x))
    exact = gradients(copy.deepcopy(theirs).double(), x.detach().double().requires_grad_())
    for g, e in zip((got[0], *got[1]), (exact[0], *exact[1]), strict=True):
        assert (g.double() - e).abs().max() <= 3 * torch.finfo(dtype).eps * e.abs().max()


def _trained_base(layer):
    layer.base_layer.weight.requires_grad_()


def _trained_bias(layer):
    layer.base_layer.bias.requires_grad_()


def _hooked(layer):
    layer.seen = []
    layer.base_layer.register_forward_hook(lambda *a: layer.seen.append(1))


def _patched(layer):
    layer.seen, original = [], layer.base_layer.forward

    def forward(x):
        layer.seen.append(1)
        return original(x)

    layer.base_layer.forward = forward


@pytest.mark.parametrize("change", [_trained_base, _trained_bias, _hooked, _patched])
def test_other_bases_stay_apart(device, change):
    ours, theirs = made(device, bias=True)
    for layer in (ours, theirs):
        change(layer)
    x = torch.randn(2, 3, HIDDEN, device=device, requires_grad=True)
    assert not is_one_node(ours(x))
    assert_same(gradients(ours, x), gradients(theirs, x))
    if hasattr(ours, "seen"):
        assert ours.seen


def test_global_hooks_see_the_base(device):
    ours, _ = made(device)
    seen = []
    handle = global_hooks.register_module_forward_hook(lambda m, *a: seen.append(type(m)))
    try:
        ours(torch.randn(2, HIDDEN, device=device))
    finally:
        handle.remove()
    assert nn.Linear in seen


@pytest.mark.parametrize("way", ["hook", "global hook", "forward"])
def test_what_others_keep_of_the_base_stays(device, way):
    """Its output is not added to in place where a hook or a patched forward may hold it."""
    ours, theirs = made(device)
    x, kept = torch.randn(5, HIDDEN, device=device), []
    base = ours.base_layer
    if way == "forward":
        original = base.forward
        base.forward = lambda x: kept.append(original(x)) or kept[-1]
    else:
        everywhere = global_hooks.register_module_forward_hook
        register = base.register_forward_hook if way == "hook" else everywhere
        handle = register(lambda m, args, y: kept.append(y) if m is base else None)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    if way != "forward":
        handle.remove()
    assert torch.equal(kept[0], theirs.base_layer(x))


def test_dispatch_modes_see_the_base(device):
    from torch.utils.flop_counter import FlopCounterMode

    ours, _ = made(device)
    with FlopCounterMode(display=False) as counter:
        y = ours(torch.randn(4, HIDDEN, device=device))
    assert not is_one_node(y)
    assert counter.get_total_flops() >= 2 * 4 * HIDDEN * WIDTH


def test_what_is_saved(device):
    """x, h and the weights, and the hooks see them; a changed weight is noticed."""
    ours, _ = made(device)
    x, packed = torch.randn(6, HIDDEN, device=device, requires_grad=True), []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = ours(x)
    shapes = {(6, HIDDEN), (6, 8), (WIDTH, HIDDEN), (4, HIDDEN), (WIDTH, 4)}
    assert {tuple(t.shape) for t in packed} == shapes
    want = gradients(ours, x)[1]
    for g, w in zip(torch.autograd.grad(y.sum(), (x, *parameters(ours))), want, strict=True):
        assert torch.equal(g, w)
    y = ours(x)
    with torch.no_grad():
        ours.base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("frozen", [0, 1])
def test_nothing_is_saved_that_no_gradient_needs(device, frozen):
    """x is for dA alone, h for dB alone."""
    ours, _ = made(device)
    parameters(ours)[frozen].requires_grad_(False)
    x, packed = torch.randn(6, HIDDEN, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        ours(x)
    shapes = {tuple(t.shape) for t in packed}
    assert ((6, HIDDEN) in shapes) == (frozen == 1)
    assert ((6, 8) in shapes) == (frozen == 0)


def test_a_graph_that_is_kept_and_a_layer_used_twice(device):
    ours, theirs = made(device)
    x = torch.randn(6, HIDDEN, device=device, requires_grad=True)
    y = ours(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    between = nn.Linear(WIDTH, HIDDEN, device=device).requires_grad_(False)

    def twice(layer):
        layer.zero_grad()
        layer(between(layer(x))).sum().backward()
        return layer(x).detach(), [p.grad for p in parameters(layer)]

    assert_same(twice(ours), twice(theirs))


def test_the_gradient_has_no_gradient(device):
    ours, _ = made(device)
    x = torch.randn(6, HIDDEN, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_backward_under_autocast_keeps_the_dtype(device):
    ours, _ = made(device)
    x = torch.randn(6, HIDDEN, device=device, requires_grad=True)
    want = gradients(ours, x)[1]
    y = ours(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert not is_one_node(ours(x))
        y.sum().backward()
    assert x.grad.dtype is torch.float32
    assert (x.grad - want[0]).norm() <= 0.02 * want[0].norm()
    ours.base_layer.weight.zero_()  # the delta's part is not rounded with the product
    want, y = gradients(ours, x)[1], ours(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, want[0])


def test_autocast_to_the_dtype_of_the_layer(device):
    ours, _ = made(device)
    ours.base_layer.to(torch.bfloat16)
    x = torch.randn(6, HIDDEN, device=device).to(torch.bfloat16).requires_grad_()
    want = gradients(ours, x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert is_one_node(ours(x))
        got = gradients(ours, x)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(g, w) for g, w in zip(got[1], want[1], strict=True))


def test_dropout_repeats_with_the_seed(device, monkeypatch):
    ours, _ = made(device, dropout=0.5)
    x = torch.randn(64, HIDDEN, device=device, requires_grad=True)

    def run():
        torch.manual_seed(5)
        return gradients(ours, x)

    first, again = run(), run()
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(g, w) for g, w in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0], gradients(ours, x)[0])
    monkeypatch.setattr(_peft_training, "takes", lambda *a: False)
    assert_same(first, run())  # the base, and mortar.lora.linear: the same mask
