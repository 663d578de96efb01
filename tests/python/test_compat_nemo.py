# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for NeMo Automodel: arguments, shapes, mixtures, and install()."""

import inspect
import sys
import types

import pytest
import torch
from torch import nn

import nemo_stand_in
from lora_train_cases import BF16, FP32, MIXTURES, Case, Problem, check_forward, check_gradients
from mortar.compat import nemo


def test_signatures():
    required = inspect.Parameter.empty
    for function, names in (
        (nemo.lora_forward_wrapper, ["x", "lora_A", "lora_B", "res", "scale"]),
        (nemo.lora_da_dx_update_wrapper, ["xt", "dy", "lora_B", "lora_A", "scale"]),
        (nemo.lora_db_update_wrapper, ["lora_A", "xt", "dy", "scale"]),
    ):
        found = {n: p.default for n, p in inspect.signature(function).parameters.items()}
        assert found == {**dict.fromkeys(names, required), "dtype": FP32}


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("rank", [1, 8, 16, 24, 200])
def test_wrappers_match_the_reference(device, dtypes, rank):
    """As NeMo calls them: weights and x transposed, without copies."""
    case = Case(Problem((37,), 44, (28,), (rank,), dtypes, with_base=False), device)
    a, b = case.adapters[0][0]
    out = dtypes[2]
    y = nemo.lora_forward_wrapper(case.x, a.t(), b.t(), None, 0.5, out)
    assert y.dtype is out
    check_forward(case, [y])
    dlora_a, dx = nemo.lora_da_dx_update_wrapper(case.x.t(), case.dy[0], b, a, 0.5, dtype=out)
    dlora_b = nemo.lora_db_update_wrapper(a, case.x.t(), case.dy[0], 0.5, dtype=out)
    assert dlora_a.shape == (44, rank)
    assert dlora_b.shape == (28, rank)
    assert {dlora_a.dtype, dx.dtype, dlora_b.dtype} == {out}
    check_gradients(case, dx, [[dlora_a.t()]], [[dlora_b]])


def test_results_are_float32_unless_asked_otherwise(device):
    case = Case(Problem(dtypes=(BF16, BF16, BF16)), device)
    a, b = case.adapters[0][0]
    x, dy = case.x, case.dy[0]
    assert nemo.lora_forward_wrapper(x, a.t(), b.t(), None, 0.5).dtype is FP32
    assert {t.dtype for t in nemo.lora_da_dx_update_wrapper(x.t(), dy, b, a, 0.5)} == {FP32}
    assert nemo.lora_db_update_wrapper(a, x.t(), dy, 0.5).dtype is FP32


def test_res_is_overwritten_and_returned(device):
    case = Case(Problem(with_base=False), device)
    a, b = case.adapters[0][0]
    res = torch.full((19, 24), float("nan"), device=device)
    y = nemo.lora_forward_wrapper(x=case.x, lora_A=a.t(), lora_B=b.t(), res=res, scale=0.5)
    assert y is res
    check_forward(case, [res])


def test_weights_of_different_dtypes(device):
    case = Case(Problem(with_base=False), device)
    a, b = case.adapters[0][0]
    want = nemo.lora_forward_wrapper(case.x, a.t(), b.to(BF16).float().t(), None, 0.5)
    assert torch.equal(nemo.lora_forward_wrapper(case.x, a.t(), b.to(BF16).t(), None, 0.5), want)


def test_bad_shapes_are_named(device):
    case = Case(Problem(), device)
    a, b = case.adapters[0][0]
    with pytest.raises(ValueError, match="a must have shape"):
        nemo.lora_forward_wrapper(case.x[:, 1:], a.t(), b.t(), None, 1.0)
    with pytest.raises(ValueError, match="x must have shape"):
        nemo.lora_da_dx_update_wrapper(case.x[1:].t(), case.dy[0], b, a, 1.0)
    with pytest.raises(ValueError, match=r"res must have shape \(19, 24\), got \(19, 40\)"):
        nemo.lora_forward_wrapper(case.x, a.t(), b.t(), case.x, 1.0)
    x, at, bt, dy = case.x, a.t(), b.t(), case.dy[0]
    for call in (
        lambda scale, x: nemo.lora_forward_wrapper(x, at, bt, None, scale),
        lambda scale, x: nemo.lora_da_dx_update_wrapper(x.t(), dy, b, a, scale),
        lambda scale, x: nemo.lora_db_update_wrapper(a, x.t(), dy, scale),
    ):
        with pytest.raises(
            TypeError, match=r"^lora_\w+_wrapper: scale must be a number, got NoneT"
        ):
            call(None, x)
        with pytest.raises(
            ValueError, match=r"^lora_\w+: xt? must have 2 dimensions, got shape \("
        ):
            call(1.0, x[0])
    with pytest.raises(
        TypeError, match="^lora_forward_wrapper: lora_A must be a tensor, got list$"
    ):
        nemo.lora_forward_wrapper(x, [a], bt, None, 1.0)
    with pytest.raises(TypeError, match="lora_A must be of a float type, got torch.int32"):
        nemo.lora_forward_wrapper(x, at.int(), bt, None, 1.0)


# ---- install -------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    kernels, layers = nemo_stand_in.load(monkeypatch)
    assert nemo.install() == [nemo_stand_in.PACKAGE]
    yield layers
    nemo.uninstall()


def test_install_needs_nemo():
    with pytest.raises(RuntimeError, match="import nemo_automodel"):
        nemo.install()


def test_install_replaces_the_functions_everywhere(monkeypatch):
    kernels, layers = nemo_stand_in.load(monkeypatch)
    elsewhere = types.ModuleType("elsewhere")
    elsewhere.renamed = nemo_stand_in.lora_forward_wrapper
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    originals = {n: v for n, v in vars(layers).items() if n.startswith("lora_")}
    passes = dict(vars(layers.LoRATritonFunction))
    nemo.install()
    once = dict(vars(layers))
    nemo.install()  # again changes nothing
    assert dict(vars(layers)) == once
    assert elsewhere.renamed is nemo.lora_forward_wrapper
    for module in (kernels, layers):
        assert all(getattr(module, name) is getattr(nemo, name) for name in originals)
    nemo.uninstall()
    nemo.uninstall()
    assert elsewhere.renamed is nemo_stand_in.lora_forward_wrapper
    assert all(getattr(layers, name) is value for name, value in originals.items())
    assert layers.patch_linear_module is nemo_stand_in.patch_linear_module
    for name in ("forward", "setup_context", "backward"):
        assert vars(layers.LoRATritonFunction)[name] is passes[name]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("lead", [(19,), (1, 19)])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtypes", [(FP32,) * 3, (BF16,) * 3, (BF16, FP32, BF16)], ids=str)
def test_function(installed, device, flag, lead, residual, dtypes):
    case = Case(Problem(dtypes=dtypes, with_base=residual), device)
    leaves = case.leaves()
    a, b = case.adapters[0][0]
    x = case.x.view(*lead, 40)
    res = (case.base[0].view(*lead, 24),) if residual else ()
    y = installed.LoRATritonFunction.apply(x, a, b, 0.5, x.dtype, flag, *(res or (None,)))
    assert y.shape == (19, 24)
    assert y.dtype is dtypes[0]
    assert not y._is_view()
    with torch.no_grad():
        check_forward(case, [y])
    y.mul_(1.0)  # may be changed in place
    dx, da, db, *dres = torch.autograd.grad(y, leaves, case.dy[0])
    check_gradients(case, dx, [[da]], [[db]])
    assert all(torch.equal(g, case.dy[0]) for g in dres)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_function_takes_fewer_arguments(installed, device, count):
    case = Case(Problem(with_base=False), device)
    leaves = case.leaves()
    args = (*leaves, 0.5, FP32, False, None)[:count]
    y = installed.LoRATritonFunction.apply(*args)
    dx, da, db = torch.autograd.grad(y, leaves, case.dy[0])
    check_gradients(case, dx, [[da]], [[db]])


def test_only_wanted_gradients_and_only_inputs_saved(installed, device):
    case = Case(Problem(with_base=False), device)
    x, a, b = case.leaves()
    b.requires_grad_(False)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
    ):
        y = installed.LoRATritonFunction.apply(x, a, b, 0.5, FP32, False)
    assert sorted(shapes) == sorted(tuple(t.shape) for t in (x, a, b))
    y.sum().backward()
    assert b.grad is None
    assert a.grad is not None


def test_function_under_autocast(installed, device):
    """Without Triton, products stood here that autocast would turn to bfloat16."""
    case = Case(Problem(), device)
    a, b = case.adapters[0][0]
    with torch.autocast(device.type, dtype=BF16):
        y = installed.LoRATritonFunction.apply(case.x, a, b, 0.5, FP32, False)
        kept = installed.LoRATritonFunction.apply(case.x, a, b, 0.5, FP32, True)
    assert y.dtype is BF16
    assert kept.dtype is FP32


@pytest.mark.parametrize("flag", [True, False])
def test_function_compiles(installed, device, flag):
    case = Case(Problem(), device)
    leaves = case.leaves()

    def function(x, a, b, res):
        return installed.LoRATritonFunction.apply(x, a, b, 0.5, torch.float32, flag, res) * 2

    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True)(*leaves)
    want = function(*leaves)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, case.dy[0]), torch.autograd.grad(want, leaves, case.dy[0])
    )


def test_transformer_engine_does_not_switch_plain_linears_off(installed, device):
    linear = installed.patch_linear_module(nn.Linear(40, 24).to(device), dim=4, use_triton=True)
    assert isinstance(linear, installed.TritonLinearLoRA)
    assert isinstance(linear, nn.Linear)
    for options in ({"use_triton": False}, {"use_dora": True}):
        other = installed.patch_linear_module(nn.Linear(40, 24), dim=4, **options)
        assert not isinstance(other, installed.TritonLinearLoRA)
    linear.to(device)
    x = torch.randn(2, 5, 40, device=device)
    want = x @ linear.weight.T + linear.bias
    want = want + 8.0 * (x @ linear.lora_A.weight.T) @ linear.lora_B.weight.T
    torch.testing.assert_close(linear(x), want, rtol=1e-4, atol=1e-4)
