# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for Jet-Nemotron: signatures, layouts, install(), and a test for each known defect of
the originals:

1. the backward ignores cu_seqlens: gradients leak across the sequences of a pack;
2. prefill drops cu_seqlens: packed prompts leak into each other and share one state;
3. a prefill of 1 < T < W tokens on top of a cache does not shift the cache;
4. packing reads the lengths back to the host, and empty sequences shift the sequence ids;
5. offsets are 32-bit: wrong beyond 2^31 elements;
6. W = 3 does not compile, W > 4 is refused, a strided cache is not updated;
7. the gradient of x is filled with zeros first, and dY is read twice.
"""

import importlib
import inspect
import itertools
import sys

import pytest
import torch

from conftest import DEVICES
from dynamic_conv_cases import (
    FLOATS,
    Case,
    Recorder,
    assert_bitwise,
    assert_matches_oracle,
    boundaries,
    random_case,
)
from mortar.compat import jet
from mortar.compat.jet import (
    causal_conv_step_triton,
    dynamic_conv_triton_autograd,
    dynamic_conv_triton_cache,
)
from mortar.dynamic_conv import traffic
from mortar.nn import DynamicShortConvolution


def run_training(case: Case) -> dict[str, torch.Tensor]:
    x, kernels = case.x.detach().requires_grad_(), case.kernels.detach().requires_grad_()
    y = dynamic_conv_triton_autograd(x, kernels, case.cu_seqlens)
    dx, dkernels = torch.autograd.grad(y, (x, kernels), case.dy)
    return {"y": y.detach(), "dx": dx, "dkernels": dkernels}


def test_signatures():
    def names(function):
        return {n: p.default for n, p in inspect.signature(function).parameters.items()}

    required = inspect.Parameter.empty
    assert names(dynamic_conv_triton_autograd) == {
        "x": required, "kernels": required, "cu_seqlens": None,
    }  # fmt: skip
    assert names(dynamic_conv_triton_cache) == {"x": required, "kernels": required, "cache": None}
    assert names(causal_conv_step_triton) == {
        "x": required, "cache": required, "kernels": required,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_training(device, dtype):
    case = random_case(device, 2, 13, 21, 4, dtype)
    assert_matches_oracle(case, run_training(case))


def test_inputs_that_are_not_dense_are_made_so(device):
    """As the originals do, in all three functions."""
    case = random_case(device, 2, 6, 10, 4)
    case.x = torch.randn(2, 10, 6, device=device).transpose(1, 2)
    case.kernels = torch.randn(2, 6, 4, 10, device=device).transpose(2, 3)
    assert_matches_oracle(case, run_training(case))
    cached = dynamic_conv_triton_cache(case.x, case.kernels)
    assert_bitwise(cached, run_training(case)["y"])
    cache = torch.zeros(2, 10, 4, device=device)
    y = causal_conv_step_triton(case.x[:, :1], cache, case.kernels[:, 0])
    assert_bitwise(y, cached[:, 0])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_cached_prefill(device, rows, width):
    """A cache [B, T_cache, D] of any length stands before x."""
    case = random_case(device, 2, 7, 11, width)
    cache = torch.randn(2, rows, 11, device=device)
    before = cache.clone()
    y = dynamic_conv_triton_cache(case.x, case.kernels, cache)
    padded_kernels = torch.cat([torch.zeros(2, rows, 11, width, device=device), case.kernels], 1)
    whole = dynamic_conv_triton_cache(torch.cat([cache, case.x], 1), padded_kernels)
    assert_bitwise(y, whole[:, rows:])
    assert torch.equal(cache, before)


def test_cached_prefill_has_gradients(device):
    """The original raises NotImplementedError."""
    case = random_case(device, 2, 5, 6, 4)
    cache = torch.randn(2, 3, 6, device=device, requires_grad=True)
    case.initial_state = cache.detach().transpose(1, 2)
    x, kernels = case.x.detach().requires_grad_(), case.kernels.detach().requires_grad_()
    y = dynamic_conv_triton_cache(x, kernels, cache)
    dx, dkernels, dcache = torch.autograd.grad(y, (x, kernels, cache), case.dy)
    results = {"y": y.detach(), "dx": dx, "dkernels": dkernels,
               "dinitial_state": dcache.transpose(1, 2)}  # fmt: skip
    assert_matches_oracle(case, results)


def test_steps_follow_training(device):
    case = random_case(device, 3, 9, 17, 4, torch.bfloat16)
    whole = dynamic_conv_triton_autograd(case.x, case.kernels)
    cache = torch.zeros(3, 17, 4, device=device, dtype=torch.bfloat16)
    for t in range(9):
        y = causal_conv_step_triton(case.x[:, t : t + 1], cache, case.kernels[:, t])
        assert y.shape == (3, 17)
        assert_bitwise(y, whole[:, t])
    assert torch.equal(cache, case.x[:, -4:].transpose(1, 2))


# ---- the known defects ---------------------------------------------------------------------------


def test_defect_1_backward_of_packed_sequences(device):
    """The originals' dX and dK are off by a fifth here: they ignore cu_seqlens."""
    case = random_case(device, channels=16, width=4, lengths=[3, 8, 1, 5])
    results = run_training(case)
    assert_matches_oracle(case, results)
    case.cu_seqlens = None
    leaking = run_training(case)
    for name in ("dx", "dkernels"):
        assert (leaking[name] - results[name]).norm() > 0.05 * results[name].norm()


def test_defect_2_packed_prompts_keep_apart_and_get_a_state_each(device):
    layer = DynamicShortConvolution(8, 4, implementation="triton").to(device).eval()
    torch.nn.init.normal_(layer.kernel_generator.w2.bias)
    lengths, x = [5, 2, 7], torch.randn(1, 14, 8, device=device)
    with torch.no_grad():
        y, cache = layer(x, cu_seqlens=boundaries(lengths, device), output_final_state=True)
        assert cache.shape == (3, 8, 4)
        for n, (start, end) in enumerate(itertools.pairwise([0, 5, 7, 14])):
            alone, state = layer(x[:, start:end], output_final_state=True)
            torch.testing.assert_close(y[:, start:end], alone)
            assert_bitwise(cache[n : n + 1], state)
        decoded, _ = layer(torch.randn(3, 1, 8, device=device), cache=cache)
    assert decoded.shape == (3, 1, 8)


def test_defect_3_a_short_prompt_shifts_the_cache(device):
    layer = DynamicShortConvolution(8, 4).to(device).eval()
    cache = torch.arange(4.0, device=device).expand(2, 8, 4).clone()
    x = torch.full((2, 2, 8), 9.0, device=device)
    with torch.no_grad():
        layer(x, cache=cache, output_final_state=True)
    assert cache[1, 3].tolist() == [2, 3, 9, 9]


def test_defect_4_empty_sequences_and_nothing_read_back(device):
    case = random_case(device, channels=16, width=4, lengths=[0, 3, 0, 0, 4, 0])
    with Recorder() as recorder:
        results = run_training(case)
    assert_matches_oracle(case, results)
    reads = ("_local_scalar_dense", "_to_copy", "copy_", "nonzero")
    assert not [name for name in recorder.names if any(word in name for word in reads)]


def test_defect_5_offsets_beyond_32_bits(device):
    """Batch rows more than 2^31 elements apart (on a CPU only the touched pages exist)."""
    stride = 2**31 + 16
    case = random_case(device, 2, 3, 5, 4, torch.bfloat16)
    near = run_training(case)
    room = torch.empty(stride + 64, dtype=torch.bfloat16, device=device)
    case.kernels = room.as_strided(case.kernels.shape, (stride, 20, 4, 1)).copy_(case.kernels)
    for name, value in run_training(case).items():
        assert_bitwise(value, near[name], name)


@pytest.mark.parametrize("width", [1, 3, 5, 6, 7, 8])
def test_defect_6_widths_that_are_no_power_of_two_and_beyond_four(device, width):
    case = random_case(device, 2, 9, 7, width)
    assert_matches_oracle(case, run_training(case))


def test_defect_6_a_strided_cache_is_updated_itself(device):
    """The originals update a contiguous copy of it."""
    room = torch.randn(2, 4, 7, device=device)
    cache = room.transpose(1, 2)
    expected = torch.cat([room[:, 1:], torch.ones(2, 1, 7, device=device)], 1)
    x, kernels = torch.ones(2, 1, 7, device=device), torch.randn(2, 7, 4, device=device)
    y = causal_conv_step_triton(x, cache, kernels)
    assert torch.equal(room, expected)
    torch.testing.assert_close(y, (expected.transpose(1, 2) * kernels).sum(-1))


def test_defect_7_traffic_is_the_floor(device):
    """No zero-filled buffer, dY read once: outputs are allocated and written by one op."""
    case = random_case(device, 1, 8, 16, 4, torch.bfloat16)
    x, kernels = case.x.requires_grad_(), case.kernels.requires_grad_()
    y = dynamic_conv_triton_autograd(x, kernels)
    with Recorder() as backward:
        torch.autograd.grad(y, (x, kernels), case.dy)
    wasted = ("zero", "fill", "clone", "copy")
    assert not [name for name in backward.names if any(word in name for word in wasted)]
    assert traffic(1, 4096, 3072, 4, 4, 2, 2)[:2] == (4096 * 36_864, 4096 * 67_584)


# ---- install -------------------------------------------------------------------------------------

FAKE_PACKAGE = {
    "__init__": "",
    "dconv_fwdbwd": """
def dynamic_conv_triton_autograd(x, kernels, cu_seqlens=None):
    raise NotImplementedError("original")
""",
    "dconv_fwd_cache": """
def dynamic_conv_triton_cache(x, kernels, cache=None):
    raise NotImplementedError("original")
""",
    "dconv_step": """
def causal_conv_step_triton(x, cache, kernels):
    raise NotImplementedError("original")
""",
    "dynamic_conv": """
from collections import OrderedDict
from torch import nn
from .dconv_fwdbwd import dynamic_conv_triton_autograd
from .dconv_fwd_cache import dynamic_conv_triton_cache
from .dconv_step import causal_conv_step_triton

class DynamicShortConvolution(nn.Module):
    def __init__(self, hidden_size, kernel_size):
        super().__init__()
        self.kernel_size, self.activation = kernel_size, "silu"
        self.kernel_generator = nn.Sequential(OrderedDict(
            w1=nn.Linear(hidden_size, hidden_size, bias=False),
            act=nn.SiLU(),
            w2=nn.Linear(hidden_size, hidden_size * kernel_size),
        ))

    def get_kernel(self, x):
        return self.kernel_generator(x).unflatten(-1, (-1, self.kernel_size))

    def forward(self, x, mask=None, cache=None, output_final_state=False, cu_seqlens=None,
                generator_input=None, **kwargs):
        return dynamic_conv_triton_autograd(x, self.get_kernel(x), cu_seqlens), cache
""",
    "jet_block": """
from .dynamic_conv import DynamicShortConvolution
""",
    "modeling_jet_nemotron": """
from .dynamic_conv import DynamicShortConvolution
from .dconv_fwdbwd import dynamic_conv_triton_autograd
from .dconv_fwd_cache import dynamic_conv_triton_cache
from .dconv_step import causal_conv_step_triton
""",
}


@pytest.fixture(params=["jetai.modeling.hf", "transformers_modules.jet_nemotron.a1b2c3"])
def jetai(request, tmp_path, monkeypatch):
    """An importable package of jetai's module structure whose functions refuse to work."""
    folder = tmp_path.joinpath(*request.param.split("."))
    folder.mkdir(parents=True)
    for name, source in FAKE_PACKAGE.items():
        folder.joinpath(f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {n: importlib.import_module(f"{request.param}.{n}") for n in FAKE_PACKAGE if n[0] != "_"}
    jet.uninstall()
    root = request.param.split(".")[0]
    for name in [n for n in sys.modules if n.split(".")[0] == root]:
        del sys.modules[name]


def test_what_is_no_tensor_is_named(device):
    case = random_case(device, 1, 3, 4, 4)
    x, k, cache = case.x[:, :1], case.kernels[:, 0], torch.zeros(1, 4, 4, device=device)
    for spoilt, name in (
        ((None, cache, k), "x"),
        ((x, 3, k), "cache"),
        ((x, cache, []), "kernels"),
    ):
        with pytest.raises(TypeError, match=f"^causal_conv_step_triton: {name} must be a tensor"):
            causal_conv_step_triton(*spoilt)
    with pytest.raises(TypeError, match="^dynamic_conv: kernels must be a torch.Tensor, got None$"):
        dynamic_conv_triton_autograd(case.x, None)
    with pytest.raises(
        ValueError, match=r"^dynamic_conv_triton_cache: cache must have 3 dim.*\(4, "
    ):
        dynamic_conv_triton_cache(case.x, case.kernels, cache[0])


def test_install_without_jetai():
    with pytest.raises(RuntimeError, match="mortar.compat.jet.install: import jetai"):
        jet.install()


def test_install_patches_functions_and_layers(jetai, device):
    layer = jetai["jet_block"].DynamicShortConvolution(8, 4).to(device)  # made before install
    x = torch.randn(1, 9, 8, device=device)
    with pytest.raises(NotImplementedError, match="original"):
        layer(x)
    original = jetai["dynamic_conv"].DynamicShortConvolution.forward

    assert len(jet.install()) == 1
    for module, ours in (("dconv_fwdbwd", dynamic_conv_triton_autograd),
                         ("dconv_fwd_cache", dynamic_conv_triton_cache),
                         ("dconv_step", causal_conv_step_triton)):  # fmt: skip
        for holder in (module, "dynamic_conv", "modeling_jet_nemotron"):
            assert getattr(jetai[holder], ours.__name__) is ours
    twin = DynamicShortConvolution(8, 4).to(device)
    twin.load_state_dict(layer.state_dict())
    cu_seqlens = boundaries([4, 0, 5], device)
    y, _ = layer(x, cu_seqlens=cu_seqlens)
    assert_bitwise(y.detach(), twin(x, cu_seqlens=cu_seqlens)[0].detach())
    with torch.no_grad():
        y, cache = layer.eval()(x, output_final_state=True)
        step, same = layer(x[:, :1], cache=cache)
    assert y.shape == x.shape and step.shape == (1, 1, 8) and same is cache

    jet.install()  # again: nothing more to replace, and one uninstall still restores everything
    jet.uninstall()
    assert jetai["dynamic_conv"].DynamicShortConvolution.forward is original
    with pytest.raises(NotImplementedError, match="original"):
        jetai["modeling_jet_nemotron"].causal_conv_step_triton(x, x, x)


if "cuda" in DEVICES:

    def test_defect_4_on_cuda_nothing_waits():
        case = random_case(torch.device("cuda"), channels=16, width=4, lengths=[0, 3, 4, 0])
        run_training(case)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_training(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")
