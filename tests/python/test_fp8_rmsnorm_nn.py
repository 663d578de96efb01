# SPDX-License-Identifier: Apache-2.0
"""The modules: values, gradients, what they keep, checkpointing, autocast, torch.compile."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mortar
import mortar.nn._fp8_carrier as carriers
import mortar.nn._fp8_product as product
from fp8_rmsnorm_cases import E4M3, E5M2, FLOATS, FP8, assert_same_bytes, random_case
from mortar.nn import Fp8RMSNorm, Fp8RMSNormLinear, fp8_linear
from mortar.nn._fp8_product import multiply
from mortar.reference import fp8_rmsnorm as reference


def make(device, features=(48, 32), **options) -> Fp8RMSNormLinear:
    torch.manual_seed(1)
    layer = Fp8RMSNormLinear(*features, **options)
    torch.nn.init.normal_(layer.norm.weight, 1.0, 0.2)
    return layer.to(device)


def wide_gradients(layer, x, dy_out):
    """Output and gradients in float64, without FP8: of x, the norm's weight and the weight."""
    leaves = [t.detach().cpu().double().requires_grad_()
              for t in (x, layer.norm.weight, layer.weight)]  # fmt: skip
    offset = layer.norm.weight_offset
    y, _, _ = reference.rmsnorm(leaves[0], leaves[1], weight_offset=offset, eps=layer.norm.eps)
    out = y @ leaves[2].t()
    return out.detach(), torch.autograd.grad(out, leaves, dy_out.cpu().double())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.cpu().double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(64, 48), (2, 5, 48), (1, 48)], ids=str)
def test_linear_against_float64(device, dtype, shape):
    """e4m3 is good to 2^-4 of every value, e5m2 to 2^-3; products average over these errors."""
    layer = make(device, dtype=dtype, weight_offset=0.5)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    out = layer(x)
    assert out.shape == (*shape[:-1], 32) and out.dtype == dtype
    dy_out = torch.randn_like(out)
    out.backward(dy_out)
    want, gradients = wide_gradients(layer, x, dy_out)
    assert relative(out.detach(), want) < 2**-4
    for got, expected in zip((x, layer.norm.weight, layer.weight), gradients, strict=True):
        assert got.grad.dtype == dtype
        assert relative(got.grad, expected) < 2**-3


def test_linear_is_its_parts(device):
    """The exact FP8 values enter the products, forward and backward."""
    layer = make(device, (48, 32), gradient_dtype=E5M2)
    x = torch.randn(64, 48, device=device, requires_grad=True)
    out = layer(x)
    dy_out = torch.randn_like(out)
    out.backward(dy_out)
    with torch.no_grad():
        norm = mortar.fp8_rmsnorm(x, layer.norm.weight, transpose=True)
        w = mortar.fp8_quantize(layer.weight, transpose=True)
        g = mortar.fp8_quantize(dy_out, E5M2, transpose=True)
        full = multiply(norm.q, norm.scale, w.q, w.scale, torch.float32)
        assert_same_bytes(fp8_linear(norm, layer.weight), full.bfloat16())  # without a carrier
        dweight = multiply(g.q_t, g.scale, norm.q_t, norm.scale, torch.float32)
        dy = multiply(g.q, g.scale, w.q_t, w.scale, torch.float32)
        dx, dw = mortar.fp8_rmsnorm_backward(dy, x, layer.norm.weight, norm.rstd)
    got = (out.detach(), layer.weight.grad, x.grad, layer.norm.weight.grad)
    for a, b in zip(got, (full, dweight, dx, dw), strict=True):
        assert_same_bytes(a, b)


def test_norm_and_linear_are_one(device):
    """Fp8RMSNorm feeding fp8_linear, twice from one norm, has the gradients of the sum."""
    layer = make(device)
    norm = Fp8RMSNorm(48).to(device)
    norm.weight.data.copy_(layer.norm.weight)
    x = torch.randn(2, 8, 48, device=device, requires_grad=True)
    out = layer(x)
    dy_out = torch.randn_like(out)
    out.backward(dy_out)
    expected, x.grad = x.grad, None
    weight = layer.weight.detach().clone().requires_grad_()
    activation = norm(x)
    assert activation.normed.shape == x.shape and activation.normed.isnan().all()
    assert activation.normed.untyped_storage().nbytes() <= 4
    first, second = (fp8_linear(activation, weight) for _ in range(2))
    assert_same_bytes(first.detach(), out.detach())
    (first * dy_out + second * dy_out).sum().backward()
    torch.testing.assert_close(x.grad, 2 * expected)
    torch.testing.assert_close(weight.grad, 2 * layer.weight.grad)


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3], ids=str)
def test_products_have_one_dtype_with_and_without_gradients(device, dtype):
    case = random_case(device, (8, 48), dtype)
    norm, weight = Fp8RMSNorm(48).to(device), torch.randn(32, 48, device=device)
    with_gradient = fp8_linear(norm(case.x, case.x_scale), weight.requires_grad_())
    norm.requires_grad_(False)
    frozen = fp8_linear(norm(case.x, case.x_scale), weight)
    with torch.no_grad():
        without = fp8_linear(norm(case.x, case.x_scale), weight)
    for out in (frozen, without):
        assert_same_bytes(out.detach(), with_gradient.detach())


def test_normed_output_has_a_gradient(device):
    norm = Fp8RMSNorm(48, normed=True, weight_offset=1.0).to(device)
    x = torch.randn(6, 48, device=device, requires_grad=True)
    dy = torch.randn(6, 48, device=device)
    norm(x).normed.float().backward(dy.bfloat16().float())
    leaves = [t.detach().cpu().double().requires_grad_() for t in (x, norm.weight)]
    y, _, _ = reference.rmsnorm(*leaves, weight_offset=1.0)
    want = torch.autograd.grad(y, leaves, dy.bfloat16().cpu().double())
    assert relative(x.grad, want[0]) < 2**-8 and relative(norm.weight.grad, want[1]) < 2**-8


def test_residual(device):
    """The updated residual is new while a gradient is wanted, and passes its gradient on."""
    layer = make(device)
    x, residual = (torch.randn(6, 48, device=device, requires_grad=True) for _ in range(2))
    before = residual.detach().clone()
    out, updated = layer(x, residual=residual)
    assert torch.equal(residual, before) and torch.equal(updated, x + residual)
    dy_out, dupdated = torch.randn_like(out), torch.randn_like(updated)
    torch.autograd.backward([out, updated], [dy_out, dupdated])
    assert torch.equal(x.grad, residual.grad)
    total = updated.detach().requires_grad_()
    again = copy.deepcopy(layer)
    again.zero_grad()
    plain = again(total)
    plain.backward(dy_out)
    assert_same_bytes(plain.detach(), out.detach())
    torch.testing.assert_close(x.grad, total.grad + dupdated)
    assert_same_bytes(again.norm.weight.grad, layer.norm.weight.grad)
    only = layer(x, residual=residual)[1]
    assert torch.equal(torch.autograd.grad(only, residual, dupdated)[0], dupdated)
    with torch.no_grad():
        for changed in (layer, layer.eval()):
            assert changed(x, residual=residual)[1] is not residual
        assert torch.equal(residual, before)
        x, residual = x.detach(), residual.detach()
        assert layer(x, residual=residual)[1] is residual and torch.equal(residual, updated)


@pytest.mark.parametrize("residual_dtype", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_gradients_keep_the_precision_of_what_they_belong_to(device, x_dtype, residual_dtype):
    """y is bfloat16; what reaches the updated residual otherwise may be past float16."""
    norm = Fp8RMSNorm(48, normed=True).to(device)
    inputs = [torch.randn(6, 48, device=device).to(t).requires_grad_()
              for t in (x_dtype, residual_dtype) if t is not None]  # fmt: skip
    out = norm(inputs[0], residual=inputs[1] if len(inputs) == 2 else None)
    outputs = [out.normed, *([] if residual_dtype is None else [out.residual])]
    given = [torch.randn_like(t, dtype=torch.float32).to(t.dtype) for t in outputs]
    if residual_dtype in (torch.float32, torch.bfloat16) and x_dtype == torch.float16:
        given[1] = given[1] * 1e5
    got = torch.autograd.grad(outputs, inputs, given)
    z = (inputs[0] if residual_dtype is None else out.residual).detach().cpu().double()
    z.requires_grad_()
    y, _, _ = reference.rmsnorm(z, norm.weight.detach().cpu().double())
    wide = [g.cpu().double() for g in given]
    want = torch.autograd.grad([y, z][: len(wide)], z, wide)[0]
    for tensor, gradient in zip(inputs, got, strict=True):
        limit = torch.finfo(tensor.dtype).max
        kept = want.abs() < limit
        assert gradient.dtype == tensor.dtype
        error = (gradient.cpu().double() - want)[kept].abs()
        unit = max(torch.finfo(tensor.dtype).eps / 2, 1e-6)
        assert (error <= 1.01 * unit * want[kept].abs() + 1e-6 * want.abs().max()).all()


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_8_bit_input_by_its_carrier(device, dtype):
    """The gradient of x * x_scale arrives at the carrier in its own wide dtype."""
    case = random_case(device, (64, 48), dtype)
    layer = make(device, fp8_dtype=E4M3)
    wide = reference.dequantize(case.x, case.x_scale).float().requires_grad_()
    carrier = torch.empty(64, 48, device=device, requires_grad=True)
    out = layer(case.x, case.x_scale, carrier=carrier)
    assert out.dtype == torch.float32
    dy_out = torch.randn_like(out)
    out.backward(dy_out)
    layer.zero_grad()
    layer(wide).backward(dy_out)
    torch.testing.assert_close(carrier.grad, wide.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert layer(case.x, case.x_scale).dtype == torch.bfloat16


def saved_by(function) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function()
    return saved


def test_what_is_kept(device):
    """x as it came, its scales, rstd, q_t and its scale, and the weights: nothing else, and of
    activations nothing in bfloat16."""
    case = random_case(device, (64, 48), E4M3)
    layer = make(device, dtype=torch.bfloat16)
    carrier = torch.empty(64, 48, dtype=torch.bfloat16, device=device, requires_grad=True)
    saved = saved_by(lambda: layer(case.x, case.x_scale, carrier=carrier))
    pointers = {t.data_ptr() for t in (*layer.parameters(), case.x_scale)}
    kept = [t for t in saved if t.data_ptr() not in pointers]
    assert sorted((str(t.dtype), tuple(t.shape)) for t in kept) == [
        ("torch.float32", ()), ("torch.float32", (64,)),
        ("torch.float8_e4m3fn", (48, 64)), ("torch.float8_e4m3fn", (64, 48)),
    ]  # fmt: skip
    assert any(t.data_ptr() == case.x.data_ptr() for t in kept)


def test_frozen_parts_cost_nothing(device):
    layer = make(device)
    x = torch.randn(16, 48, device=device)
    layer.weight.requires_grad_(False)
    saved = saved_by(lambda: layer(x))
    assert not any(t.dtype in FP8 for t in saved)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.norm.weight.grad is not None
    layer.requires_grad_(False)
    assert not layer(x).requires_grad


def product_bound(a, b_t, factor: float) -> torch.Tensor:
    """What a product may be off by. float32 rounds each of K sums. The tensor cores of a GPU add 32
    products and the sum so far in one step, and cut each of these 33 numbers off below 2^-13 of the
    largest, which is at most the sum of all magnitudes."""
    k = a.shape[1]
    magnitude = factor * (a.double().abs() @ b_t.double().abs().t())
    return magnitude * (-(-k // 32) * 33 * 2**-13 if a.is_cuda else (k + 3) * 2**-24)


@pytest.mark.parametrize(
    "sizes", [(16, 32, 48), (5, 7, 3), (0, 16, 16), (33, 16, 32), (64, 1024, 48)], ids=str
)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_products(device, sizes, dtypes):
    """With any sizes, whether the device multiplies FP8 or not."""
    m, k, n = sizes
    a = torch.randn(m, k, device=device).to(dtypes[0])
    b_t = torch.randn(n, k, device=device).to(dtypes[1])
    scales = [torch.tensor(s, device=device) for s in (0.5, 3.0)]
    want = (a.double() @ b_t.double().t()) * 1.5
    got = multiply(a, scales[0], b_t, scales[1], torch.float32)
    assert ((got.double() - want).abs() <= product_bound(a, b_t, 1.5)).all()


def test_a_cpu_multiplies_in_float32(monkeypatch):
    """Its torch._scaled_mm may be a thousand times as slow."""
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: 1 / 0)
    layer = make(torch.device("cpu"), (32, 16))
    layer(torch.randn(48, 32, requires_grad=True)).square().sum().backward()


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)], ids=str)
def test_empty_batches(device, shape):
    """As of an expert without tokens: the gradient of an empty sum has strides of 0."""
    layer, norm = make(device), Fp8RMSNorm(48, normed=True).to(device)
    x = torch.randn(shape, device=device, requires_grad=True)
    layer(x).sum().backward()
    norm(x).normed.sum().backward()
    assert x.grad.shape == shape
    for p in (*layer.parameters(), *norm.parameters()):
        assert (p.grad == 0).all()


def test_meta_modules():
    layer = make(torch.device("meta"))
    x = torch.randn(8, 48, device="meta", requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == (8, 32) and x.grad.is_meta and layer.weight.grad.is_meta


@pytest.mark.parametrize("gradient", [False, True])
def test_fake_tensors_leave_nothing_behind(device, gradient):
    """Such as an estimate of memory before the first step: the carriers that it saw are fake."""
    carriers._nan.cache_clear()
    layer = make(device)
    with torch.set_grad_enabled(gradient), FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.empty(4, 48, device=device)).shape == (4, 32)
    x = torch.randn(4, 48, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("stochastic", [False, True])
def test_checkpointing_recomputes_the_same_bytes(device, stochastic):
    layer = make(device, stochastic=stochastic, stochastic_gradient=stochastic)
    x = torch.randn(32, 48, device=device)
    dy_out = torch.randn(32, 32, device=device)
    results = []
    for wrap in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        out = checkpoint(layer, leaf, use_reentrant=False) if wrap else layer(leaf)
        torch.manual_seed(6)
        out.backward(dy_out)
        results.append([out.detach(), leaf.grad, layer.weight.grad, layer.norm.weight.grad])
    for a, b in zip(*results, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("leaves", ["x", "x and residual"])
def test_checkpointing_with_a_residual(device, reentrant, leaves):
    """The reentrant one runs the forward under no_grad first, which must leave its inputs alone."""
    layers = make(device, (48, 48)), make(device, (48, 32))

    def block(x, residual):
        y, residual = layers[0](x * 2, residual=residual)
        return layers[1](y, residual=residual)

    x, residual = (torch.randn(32, 48, device=device) for _ in range(2))
    results = []
    for wrap in (False, True):
        inputs = (x.clone().requires_grad_(), residual.clone().requires_grad_(leaves != "x"))
        parameters = [p for layer in layers for p in layer.parameters()]
        outputs = checkpoint(block, *inputs, use_reentrant=reentrant) if wrap else block(*inputs)
        sum(t.square().sum() for t in outputs).backward()
        results.append([*outputs, *(t.grad for t in (*inputs, *parameters) if t.requires_grad)])
        for p in parameters:
            p.grad = None
    for a, b in zip(*results, strict=True):
        assert_same_bytes(a.detach(), b.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_it_alone(device, dtype):
    layer = make(device, (24, 20), dtype=dtype)
    x = torch.randn(8, 24, device=device, dtype=dtype, requires_grad=True)
    plain = layer(x)
    gradient = torch.autograd.grad(plain, x, torch.ones_like(plain))[0]
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
        again = torch.autograd.grad(out, x, torch.ones_like(out))[0]
    assert_same_bytes(out.detach(), plain.detach())
    assert_same_bytes(gradient, again)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("residual", [False, True])
def test_compiles(device, backend, residual):
    torch._dynamo.reset()
    layer = make(device)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(2, 16, 48, device=device)
    added = torch.randn_like(x) if residual else None
    results = []
    for function in (layer, compiled):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        other = added.clone().requires_grad_() if residual else None
        out = function(leaf, residual=other)
        outputs = out if residual else (out,)
        sum(o.square().sum() for o in outputs).backward()
        results.append([*(o.detach() for o in outputs), leaf.grad, layer.weight.grad,
                        layer.norm.weight.grad])  # fmt: skip
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_compiles_for_any_sizes(device, monkeypatch):
    """With torch._scaled_mm, which fixes a width that was traced as a symbol."""
    if device.type == "cpu":
        monkeypatch.setattr(product, "_has_fp8_product", lambda device: True)
    torch._dynamo.reset()
    layer = make(device, (48, 32))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    results = []
    for function in (layer, compiled):
        x, added = (torch.full((16, 48), v, device=device, requires_grad=True) for v in (1.0, 2.0))
        out, updated = function(x, residual=added)
        (out.square().sum() + updated.sum()).backward()
        results.append([out.detach(), updated.detach(), x.grad, added.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_state_dict_and_repr(device):
    layer = make(device)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "weight": (32, 48), "norm.weight": (48,),
    }  # fmt: skip
    assert "48, 32" in repr(layer) and "scaling='tensor'" in repr(layer)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 48, device=device)
    assert_same_bytes(twin(x).detach(), layer(x).detach())
