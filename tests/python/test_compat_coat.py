# SPDX-License-Identifier: Apache-2.0
"""COAT's three functions: results, dtypes, layouts, what is mended, and install()."""

import importlib
import math
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mortar
from fp8_rmsnorm_cases import (
    E4M3,
    E5M2,
    FLOATS,
    FP8,
    assert_gradients_match,
    assert_same_bytes,
    random_case,
)
from mortar.compat import coat
from mortar.reference import fp8_rmsnorm as reference


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (41, 48), (1, 16), (2, 5, 144)], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward(device, dtype, shape, weight_dtype):
    """Any M and N: the original repository's transpose needs M % 32 == 0."""
    case = random_case(device, shape, dtype, weight_dtype=weight_dtype)
    results = coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 16, 1e-5)
    qy, s_y, qy_t, (w, rstd, num_warps) = results
    rows, hidden = math.prod(shape[:-1]), shape[-1]
    assert qy.dtype == dtype and qy.shape == shape
    assert s_y.dtype == torch.bfloat16 and s_y.shape == ()
    assert w is case.weight and isinstance(num_warps, int)
    assert rstd.dtype == torch.float32 and rstd.shape == (rows,)
    direct = mortar.fp8_rmsnorm(case.x, case.weight, x_scale=case.x_scale, transpose=True,
                                numerics="compat")  # fmt: skip
    assert_same_bytes(qy, direct.q)
    assert s_y.float() == direct.scale
    flat = coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 16, 1e-5, True)[2]
    assert flat.shape == (hidden, rows)
    assert_same_bytes(flat, qy.reshape(rows, hidden).t())
    if len(shape) == 3:
        assert qy_t.shape == shape
        qy_t = qy_t.reshape(hidden, rows)
    assert_same_bytes(qy_t, flat)


def test_the_chain_of_roundings(device):
    case = random_case(device, (33, 272), E4M3)
    qy, s_y, _, (_, rstd, _) = coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 16, 1e-5)
    inputs = [t.cpu() for t in (case.x, case.x_scale, case.weight, rstd)]
    q, scale, _ = reference.compat(*inputs, E4M3)
    assert s_y.cpu() == scale
    assert (qy.cpu().view(torch.uint8) == q.view(torch.uint8)).double().mean() > 0.999


@pytest.mark.parametrize("g_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward(device, g_dtype, weight_dtype):
    """dx is bfloat16 whatever g is; dw is summed in float32 and rounded once to w's dtype."""
    case = random_case(device, (300, 96), E4M3, weight_dtype=weight_dtype)
    _, _, _, (w, rstd, num_warps) = coat.fp8_rmsnorm_forward(
        case.x, case.x_scale, case.weight, 16, 1e-5
    )
    g = torch.randn(300, 96, device=device).to(g_dtype)
    dx, dw = coat.fp8_rmsnorm_backward(case.x, case.x_scale, g, w, rstd, 16, num_warps)
    assert dx.dtype == torch.bfloat16 and dx.shape == g.shape and dw.dtype == weight_dtype
    if g_dtype == torch.float32:  # rounded to g's dtype first, which float16 is too coarse for
        g = g.float()
    if g_dtype != torch.float16:
        assert_gradients_match(dx, dw, g, case, rstd)
    for _ in range(5):  # the original's lock makes every run of dw another
        again = coat.fp8_rmsnorm_backward(case.x, case.x_scale, g.to(g_dtype), w, rstd, 16, 8)
        assert_same_bytes(again[1], dw)


def test_backward_reads_any_strides(device):
    case = random_case(device, (3, 4, 48), E4M3)
    rstd = coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 16, 1e-5)[3][1]
    dense = torch.randn(3, 4, 48, device=device).bfloat16()
    want = coat.fp8_rmsnorm_backward(case.x, case.x_scale, dense, case.weight, rstd, 16, 8)
    room = torch.zeros(4, 3, 50, device=device).bfloat16()
    time_first = room[..., 1:49].transpose(0, 1)
    channels_first = torch.zeros(3, 48, 4, device=device).bfloat16().transpose(1, 2)
    time_first.copy_(dense)
    channels_first.copy_(dense)
    for g in (time_first, channels_first, dense.flatten(0, 1)):
        got = coat.fp8_rmsnorm_backward(case.x, case.x_scale, g, case.weight, rstd, 16, 8)
        assert got[0].shape == case.x.shape
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name, dtype", [("E4M3", E4M3), ("E5M2", E5M2), (E4M3, E4M3)], ids=str)
def test_division(device, x_dtype, name, dtype):
    x = torch.randn(2, 7, 40, device=device).to(x_dtype)
    y, s_y, y_t = coat.fp8_division_transpose(x, 8, name)
    assert s_y.dtype == x_dtype and s_y == (x.abs().max() + 1e-10) / reference.LARGEST[dtype]
    assert y.shape == x.shape and y.dtype == dtype and y_t.shape == (40, 14)
    assert_same_bytes(y_t, y.reshape(14, 40).t())
    quotients = x.float() / s_y.float()
    limits = reference.LARGEST[dtype]
    error = (y.double() - quotients.double().clamp(-limits, limits)).abs()
    units = reference.step(quotients, dtype)
    assert (error <= units * (0.5 + 2**-8)).all()
    only, same = coat.fp8_division_transpose(x, 8, name, s_y, only_transposed=True)
    assert same is s_y
    assert_same_bytes(only, y_t)


def test_division_by_a_power_of_two_is_exact(device):
    x = torch.randn(9, 64, device=device).bfloat16()
    s_y = torch.tensor(2.0**-7, dtype=torch.bfloat16, device=device)
    y, _, _ = coat.fp8_division_transpose(x, 16, "E4M3", s_y)
    assert_same_bytes(y.cpu(), reference.round_to(x.cpu().float() * 128, E4M3))


def test_stochastic_division(device):
    """Unbiased, zero stays zero, and new noise each call: none of which the original has."""
    one = torch.ones((), device=device)
    x = torch.full((512, 512), 1.03125, device=device)
    first, second = (coat.fp8_division_transpose(x, 16, "E4M3", one, stochastic=True)[0]
                     for _ in range(2))  # fmt: skip
    assert abs(first.double().mean().item() - 1.03125) < 6 * 0.125 / 2 / 512
    assert (first.view(torch.uint8) != second.view(torch.uint8)).any()
    zeros = coat.fp8_division_transpose(torch.zeros_like(x), 16, "E4M3", one, stochastic=True)[0]
    assert (zeros.float() == 0).all()


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_division_of_zeros_and_of_nothing(device, x_dtype):
    """By a positive scale: in float16 1e-10 / 448 is 0."""
    for shape in ((3, 32), (0, 32), (2, 0, 32), (0, 2, 32)):
        x = torch.zeros(shape, device=device, dtype=x_dtype)
        y, s_y, y_t = coat.fp8_division_transpose(x, 16, "E4M3")
        assert s_y > 0 and s_y.dtype == x_dtype
        assert y.shape == shape and (y.float() == 0).all() and y_t.shape[0] == 32
    small = torch.full((3, 32), 2.0**-20, device=device, dtype=x_dtype)
    y, s_y, _ = coat.fp8_division_transpose(small, 16, "E4M3")
    torch.testing.assert_close(y.float() * s_y.float(), small.float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_nan_reaches_its_scale_and_every_value(device, only, dtype):
    x = torch.randn(2, 5, 32, device=device).bfloat16()
    x[1, 2, 3] = math.nan
    if only:
        y_t, s_y = coat.fp8_division_transpose(x, 16, dtype, only_transposed=True)
    else:
        y, s_y, y_t = coat.fp8_division_transpose(x, 16, dtype)
        assert y.shape == x.shape and y.float().isnan().all()
    assert s_y.isnan() and y_t.shape == (32, 10) and y_t.float().isnan().all()


def test_forward_of_nothing(device):
    for shape in ((0, 32), (2, 0, 32), (0, 2, 32)):
        x = torch.zeros(shape, device=device).to(E4M3)
        s_x = torch.ones(*shape[:-1], 2, device=device)
        qy, s_y, qy_t, _ = coat.fp8_rmsnorm_forward(x, s_x, torch.ones(32, device=device), 16, 1e-5)
        assert qy.shape == shape and s_y > 0
        assert qy_t.shape == (shape if len(shape) == 3 else (32, 0))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float64], ids=str)
def test_scales_of_any_float_and_strides(device, scale_dtype):
    """The originals convert what they read, and activations in float16 have scales in float16."""
    case = random_case(device, (5, 64), E4M3)
    scales = case.x_scale.to(scale_dtype)
    strided = scales.t().contiguous().t()
    rstd = torch.ones(5, device=device)
    results = [
        (*coat.fp8_rmsnorm_forward(case.x, s_x, case.weight, 16, 1e-5)[:3],
         *coat.fp8_rmsnorm_backward(case.x, s_x, case.x.float(), case.weight, rstd, 16, 8))
        for s_x in (scales.float(), scales, strided)
    ]  # fmt: skip
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert_same_bytes(a, b)
    with pytest.raises(TypeError, match="^fp8_rmsnorm: x_scale must have dtype .*, got int32$"):
        coat.fp8_rmsnorm_forward(case.x, scales.int(), case.weight, 16, 1e-5)


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, *args: torch.compile(f, fullgraph=True, backend="aot_eager"),
        lambda f, *args: make_fx(f)(*args),
        lambda f, *args: make_fx(f, tracing_mode="fake")(*args),
    ],
    ids=["compile", "make_fx", "fake"],
)
def test_forward_is_traced_whole(device, trace):
    """No result of the traced call is a constant of the program."""

    def forward(x, s_x, w):
        return coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)[:3]

    first, second = (random_case(device, (4, 64), E4M3) for _ in range(2))
    traced = trace(forward, first.x, first.x_scale, first.weight)
    for case in (first, second):
        inputs = (case.x, case.x_scale, case.weight)
        for a, b in zip(traced(*inputs), forward(*inputs), strict=True):
            assert_same_bytes(a, b)


def test_it_runs_on_parameters(device):
    """Like the originals, where weights are quantised outside of any graph."""
    weight = torch.nn.Parameter(torch.randn(16, 32, device=device).bfloat16())
    y, s_y, y_t = coat.fp8_division_transpose(weight, 16, "E4M3")
    assert not (y.requires_grad or s_y.requires_grad or y_t.requires_grad)


def test_errors(device):
    case = random_case(device, (4, 48), E4M3)
    with pytest.raises(ValueError, match="^fp8_rmsnorm_forward: s_x must have .* QB = 32, 1.5, "):
        coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 32, 1e-5)
    with pytest.raises(ValueError, match="^fp8_rmsnorm_forward: QB must be positive, got 0"):
        coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, 0, 1e-5)
    with pytest.raises(TypeError, match="^fp8_division_transpose: fp8type must be .* got 'E3M4'"):
        coat.fp8_division_transpose(case.x.float(), 16, "E3M4")
    with pytest.raises(TypeError, match="^fp8_rmsnorm_forward: QB must be an integer, got str$"):
        coat.fp8_rmsnorm_forward(case.x, case.x_scale, case.weight, "16", 1e-5)
    with pytest.raises(TypeError, match="^fp8_rmsnorm_forward: s_x must be a tensor, got None"):
        coat.fp8_rmsnorm_forward(case.x, None, case.weight, 16, 1e-5)
    with pytest.raises(ValueError, match=r"^fp8_rmsnorm_backward: g must have 2 or 3 dimensions"):
        coat.fp8_rmsnorm_backward(
            case.x, case.x_scale, case.x.float().sum(), case.weight, case.weight, 16, 8
        )
    for s_y, got in (("1", "str"), (torch.ones(2, device=device), "shape")):
        with pytest.raises(
            TypeError, match=f"^fp8_division_transpose: s_y must be one .* got {got}"
        ):
            coat.fp8_division_transpose(case.x.float(), 16, "E4M3", s_y)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_division_by_a_number(device, default):
    """Whatever the default dtype is, which Transformers changes while it loads a model."""
    x = torch.randn(32, 48, device=device)
    want = coat.fp8_division_transpose(x, 16, "E4M3", torch.tensor(0.3, device=device))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        got = coat.fp8_division_transpose(x, 16, "E4M3", 0.3)
    finally:
        torch.set_default_dtype(before)
    assert got[1] == 0.3
    for a, b in ((got[0], want[0]), (got[2], want[2])):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- install -------------------------------------------------------------------------------------

_STAND_IN = {
    "activation/real_quantization/func_rmsnorm.py":
        "def fp8_rmsnorm_forward(*args, **kwargs):\n    return 'original forward'\n"
        "def fp8_rmsnorm_backward(*args, **kwargs):\n    return 'original backward'\n"
        "from ._division_transpose import fp8_division_transpose\n",
    "activation/real_quantization/_division_transpose.py":
        "def fp8_division_transpose(*args, **kwargs):\n    return 'original division'\n",
    "activation/real_quantization/__init__.py":
        "from ._division_transpose import fp8_division_transpose\n"
        "from .func_rmsnorm import fp8_rmsnorm_backward, fp8_rmsnorm_forward\n",
    "activation/__init__.py": "",
    "__init__.py": "",
    "models/__init__.py": "",
    "models/coat_llama.py":
        "from ..activation.real_quantization import (\n"
        "    fp8_division_transpose, fp8_rmsnorm_backward, fp8_rmsnorm_forward)\n"
        "def block():\n    return fp8_rmsnorm_forward()\n",
}  # fmt: skip
_PLACES = {"coat": "coat", "llava.model.coat": "llava/model/coat"}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Both copies of COAT in modules of the same names, and a model outside of one of them."""
    for place in _PLACES.values():
        for name, text in _STAND_IN.items():
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in ("llava/__init__.py", "llava/model/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "llava/model/qwen.py").write_text(
        "from llava.model.coat.activation.real_quantization import fp8_rmsnorm_forward\n"
        "def fp8_rmsnorm_backward():\n    return 'my own'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    coat.uninstall()
    for name in [n for n in sys.modules if n.split(".")[0] in ("coat", "llava")]:
        del sys.modules[name]


def test_install_without_coat():
    with pytest.raises(RuntimeError, match="mortar.compat.coat.install: import coat.activation"):
        coat.install()


def test_install(packages):
    models = [importlib.import_module(f"{name}.models.coat_llama") for name in _PLACES]
    qwen = importlib.import_module("llava.model.qwen")
    assert coat.install() == [f"{name}.activation.real_quantization" for name in _PLACES]
    homes = [m for n, m in sys.modules.items() if "real_quantization" in n]
    assert len(homes) == 6
    for module in (*models, *homes):
        for name in ("fp8_rmsnorm_forward", "fp8_rmsnorm_backward", "fp8_division_transpose"):
            assert getattr(module, name, getattr(coat, name)) is getattr(coat, name)
    assert qwen.fp8_rmsnorm_forward is coat.fp8_rmsnorm_forward
    assert qwen.fp8_rmsnorm_backward() == "my own"
    coat.install()
    coat.uninstall()
    for model in models:
        assert model.block() == "original forward"
        assert model.fp8_division_transpose() == "original division"
    assert qwen.fp8_rmsnorm_forward() == "original forward"
    coat.uninstall()


def test_install_again_finds_what_came_later(packages):
    importlib.import_module("coat.activation.real_quantization")
    coat.install()
    late = importlib.import_module("llava.model.qwen")
    assert late.fp8_rmsnorm_forward() == "original forward"
    assert len(coat.install()) == 2
    assert late.fp8_rmsnorm_forward is coat.fp8_rmsnorm_forward
    coat.uninstall()
    assert late.fp8_rmsnorm_forward() == "original forward"
