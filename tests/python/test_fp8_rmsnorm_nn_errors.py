# SPDX-License-Identifier: Apache-2.0
"""The modules: what they refuse, and the hooks that run."""

import pytest
import torch

import mortar
from fp8_rmsnorm_cases import E4M3, random_case
from mortar.nn import Fp8RMSNorm, Fp8RMSNormLinear, fp8_linear


def test_errors(device):
    case = random_case(device, (4, 48), E4M3)
    for module in (Fp8RMSNorm, lambda n, **options: Fp8RMSNormLinear(n, 32, **options)):
        with pytest.raises(ValueError, match="^Fp8RMSNorm: numerics must be one of 'fast', 'comp"):
            module(48, numerics="exact")
    norm = Fp8RMSNorm(48).to(device)
    with pytest.raises(TypeError, match="^Fp8RMSNorm: carrier must be given with an 8-bit x"):
        norm(case.x.requires_grad_(), case.x_scale)
    with pytest.raises(ValueError, match="^Fp8RMSNorm: carrier must have the shape of x"):
        norm(case.x, case.x_scale, carrier=torch.zeros(4, 47, device=device))
    for dtype in (torch.int32, torch.float64, E4M3):
        carrier = torch.zeros(4, 48, device=device).to(dtype)
        with pytest.raises(
            TypeError, match="^Fp8RMSNorm: carrier must be a tensor of dtype float32"
        ):
            norm(case.x, case.x_scale, carrier=carrier)
    x, weight = torch.randn(4, 48, device=device), torch.randn(8, 48, device=device)
    with torch.no_grad():
        rows = Fp8RMSNorm(48, scaling="row").to(device)(x)
        flat = Fp8RMSNorm(48, transpose=False).to(device)(x)
        alone = Fp8RMSNorm(48, transpose="only").to(device)(x)
    with pytest.raises(ValueError, match=r"^fp8_linear: activation .* scale of shape \(4,\)"):
        fp8_linear(rows, weight)
    with pytest.raises(ValueError, match="^fp8_linear: activation .* got no q"):
        fp8_linear(alone, weight)
    with pytest.raises(ValueError, match=r"^fp8_linear: weight must have shape \[O, 48\], got"):
        fp8_linear(flat, weight[:, 1:])
    with pytest.raises(TypeError, match="^fp8_linear: weight must have dtype .* got float64$"):
        fp8_linear(flat, weight.double())
    for arguments, name in (((None, weight), "activation"), ((flat, None), "weight")):
        with pytest.raises(TypeError, match=f"^fp8_linear: {name} must be of type .* got NoneType"):
            fp8_linear(*arguments)
    with pytest.raises(ValueError, match="^fp8_linear: activation must have q_t .* got None"):
        fp8_linear(flat, weight.requires_grad_())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        layer = Fp8RMSNormLinear(48, 32, device=device)
        leaf = x.requires_grad_()
        dx = torch.autograd.grad(layer(leaf), leaf, torch.ones(4, 32, device=device,
                                 requires_grad=True), create_graph=True)[0]  # fmt: skip
        dx.sum().backward()


def test_records_of_other_rows_are_refused(device):
    """Else PyTorch's products would fail in the backward, about two matrices."""
    norm, weight = Fp8RMSNorm(48).to(device), torch.randn(8, 48, device=device)
    full = norm(torch.randn(2, 4, 48, device=device))
    cut = full._replace(q=full.q[:, 3:])
    with pytest.raises(
        ValueError, match=r"^fp8_linear: activation .* normed of shape \(2, 1, 48\)"
    ):
        fp8_linear(cut, weight)
    cut = cut._replace(normed=full.normed[:, 3:])
    assert fp8_linear(cut, weight).shape == (2, 1, 8)
    with pytest.raises(ValueError, match=r"^fp8_linear: activation .* q_t of .*, got \(48, 8\)$"):
        fp8_linear(cut, weight.requires_grad_())


def test_a_transposed_weight(device):
    norm, weight = Fp8RMSNorm(48).to(device), torch.randn(48, 8, device=device, requires_grad=True)
    dense = weight.detach().t().contiguous().requires_grad_()
    activation = norm(torch.randn(6, 48, device=device, requires_grad=True))
    out, want = fp8_linear(activation, weight.t()), fp8_linear(activation, dense)
    out.sum().backward(retain_graph=True)
    want.sum().backward()
    assert torch.equal(out, want) and torch.equal(weight.grad, dense.grad.t())


@pytest.mark.parametrize("outputs", [65540, 65537], ids=["even", "prime"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_more_outputs_than_a_row_may_have(device, outputs, wanted):
    """As the head of a model has, with a large vocabulary."""
    made = mortar.fp8_rmsnorm(torch.randn(3, 16, device=device), torch.ones(16, device=device),
                              transpose=True)  # fmt: skip
    y = torch.zeros(3, 16, device=device, requires_grad=wanted[0])
    weight = torch.randn(outputs, 16, device=device, requires_grad=wanted[1])
    out = fp8_linear(made._replace(normed=y), weight)
    dy_out = torch.randn_like(out)
    out.backward(dy_out)
    for leaf, want in (
        (y, dy_out.double() @ weight.detach().double()),
        (weight, dy_out.double().t() @ (made.q.double() * made.scale)),
    ):
        assert (leaf.grad is not None) == leaf.requires_grad
        # e5m2 and e4m3 are good to 2^-3 of every value.
        assert leaf.grad is None or (leaf.grad - want).norm() < want.norm() / 8


@pytest.mark.parametrize("name", ["x", "x_scale", "residual"])
def test_what_is_no_tensor_is_named(device, name):
    given = {"x": torch.ones(4, 48, device=device), name: [1.0]}
    for module in (Fp8RMSNorm(48, device=device), Fp8RMSNormLinear(48, 32, device=device)):
        with pytest.raises(TypeError, match=f"^Fp8RMSNorm: {name} must be a tensor, got list$"):
            module(**given)


def test_settings_cannot_be_assigned():
    layer = Fp8RMSNorm(32, eps=1e-6, weight_offset=1.0)
    assert (layer.eps, layer.weight_offset) == (1e-6, 1.0)
    for name in ("eps", "weight_offset"):
        with pytest.raises(AttributeError, match=name):
            setattr(layer, name, 0.5)
    assert (layer.eps, layer.weight_offset) == (1e-6, 1.0)


def test_what_has_no_gradient_or_is_no_fp8_dtype_is_refused(device):
    x, scale = torch.ones(4, 32, device=device).to(E4M3), torch.ones(4, 2, device=device)
    layer = Fp8RMSNorm(32, device=device)
    with pytest.raises(RuntimeError, match="^Fp8RMSNorm: x_scale must not require a gradient"):
        layer(x, scale.requires_grad_())
    with torch.no_grad():
        layer(x, scale)
    with pytest.raises(TypeError, match="^Fp8RMSNormLinear: gradient_dtype must be torch.float8"):
        Fp8RMSNormLinear(32, 16, gradient_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="^fp8_linear: gradient_dtype must be .* got torch.float16"):
        fp8_linear(layer(x, scale.detach()), torch.ones(16, 32, device=device),
                   gradient_dtype=torch.float16)  # fmt: skip


def test_hooks_of_the_norm_run_beside_a_frozen_weight(device):
    layer, seen = Fp8RMSNormLinear(32, 16, device=device), []
    layer.weight.requires_grad_(False)
    layer.norm.register_full_backward_hook(lambda *a: seen.append("backward"))
    layer.norm.register_full_backward_pre_hook(lambda *a: seen.append("before it"))
    everywhere = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        layer(torch.ones(4, 32, device=device)).sum().backward()
    finally:
        everywhere.remove()
    assert seen == ["Fp8RMSNorm", "Fp8RMSNormLinear", "before it", "backward"]


@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())], ids=["vmap", "grad"]
)
def test_transforms_of_torch_func_are_refused(device, transform):
    layer, x = Fp8RMSNormLinear(32, 16, device=device), torch.ones(2, 4, 32, device=device)
    refused = r"^\w+: cannot run inside transforms of torch.func"
    with pytest.raises(RuntimeError, match=refused):
        transform(layer)(x)
    if transform is torch.vmap:
        with pytest.raises(RuntimeError, match=refused):
            transform(lambda x: mortar.fp8_quantize(x).scale)(x)


@pytest.mark.parametrize("grad", [True, False])
def test_hooks_of_the_norm_of_a_linear_run(device, grad):
    layer, seen = Fp8RMSNormLinear(32, 16, device=device), []
    layer.norm.register_forward_hook(lambda module, args, out: seen.append(out.q.shape))
    with torch.set_grad_enabled(grad):
        layer(torch.ones(4, 32, device=device))
    assert seen == [(4, 32)]


class _Twice(Fp8RMSNorm):
    def forward(self, x, *args, **kwargs):
        return super().forward(torch.cat((x, x)), *args, **kwargs)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", ""])
@pytest.mark.parametrize("how", ["subclass", "instance"])
def test_another_forward_of_the_norm_runs(device, grad, how):
    """Accelerate, which brings weights to the GPU layer by layer, replaces it on the instance."""
    layer, x = Fp8RMSNormLinear(32, 16).to(device), torch.randn(4, 32, device=device)
    if how == "subclass":
        layer.norm = _Twice(32).to(device)
    else:
        forward = layer.norm.forward
        layer.norm.forward = lambda x, *args, **kwargs: forward(torch.cat((x, x)), *args, **kwargs)
    with torch.set_grad_enabled(grad):
        assert layer(x).shape == (8, 16)
