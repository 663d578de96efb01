# SPDX-License-Identifier: Apache-2.0
"""mortar.compat.vllm under the modules of vLLM, which modules of the same names stand for."""

import importlib
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

from mortar.compat import vllm
from vllm_cases import make_inputs

_OPS = "vllm.lora.ops.triton_ops"
_NAMES = ("lora_shrink", "lora_expand")


def _triton(*args, **kwargs):
    raise NotImplementedError("Triton")


class Stand:
    """vLLM's package of ops, the modules that define them, and one that took them from there."""

    def __init__(self, monkeypatch):
        self.ops = {name: types.FunctionType(_triton.__code__, globals(), name) for name in _NAMES}
        parts = _OPS.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        names += [f"{_OPS}.{name}_op" for name in _NAMES] + ["vllm.lora.punica_gpu"]
        self.modules = {name: types.ModuleType(name) for name in names}
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        for name, op in self.ops.items():
            for holder in (_OPS, f"{_OPS}.{name}_op", "vllm.lora.punica_gpu"):
                setattr(self.modules[holder], name, op)

    def held(self) -> list:
        """The ops, as everyone holds them."""
        return [
            getattr(self.modules[holder], name)
            for name in _NAMES
            for holder in (_OPS, f"{_OPS}.{name}_op", "vllm.lora.punica_gpu")
        ]


@pytest.fixture
def stand(monkeypatch):
    yield Stand(monkeypatch)
    vllm.uninstall()


def test_install_needs_vllm():
    with pytest.raises(RuntimeError, match=f"^mortar.compat.vllm.install: import {_OPS} first"):
        vllm.install()


def test_install_replaces_the_ops_everywhere(stand, monkeypatch):
    originals = stand.held()
    assert vllm.install() == [_OPS]
    ours = [vllm.lora_shrink] * 3 + [vllm.lora_expand] * 3
    assert stand.held() == ours
    late = types.ModuleType("late")  # what holds an original as it is imported after install
    late.renamed = originals[0]
    monkeypatch.setitem(sys.modules, "vllm.late", late)
    assert vllm.install() == [_OPS]
    assert late.renamed is vllm.lora_shrink
    assert stand.held() == ours
    for _ in range(2):  # again changes nothing
        vllm.uninstall()
        assert late.renamed is originals[0]
        assert stand.held() == originals


def test_a_layer_runs_on_the_ops(stand, device):
    """As vLLM's add_lora_linear calls them, with tuples of stacked weights."""
    vllm.install()
    layer = stand.modules["vllm.lora.punica_gpu"]
    want, got = (make_inputs(device, widths=(16, 8), four_dims=True) for _ in range(2))
    active = torch.tensor([5], dtype=torch.int32)
    vllm.lora_shrink(want.x, want.a, want.h, *want.metadata, active, 0.5)
    vllm.lora_expand(want.h, want.b, want.y, *want.metadata, active, add_inputs=True)
    layer.lora_shrink(got.x, tuple(got.a), got.h, *got.metadata, active, 0.5)
    layer.lora_expand(
        got.h, tuple(got.b), got.y, *got.metadata, active, offset_start=0, add_inputs=True
    )
    assert torch.equal(got.y, want.y)
    assert not torch.equal(got.y, make_inputs(device, widths=(16, 8), four_dims=True).y)


class Meta:
    """The part of vLLM's LoRAKernelMeta that layers ask."""

    def __init__(self, metadata, active):
        self.metadata, self.active = metadata, active

    def meta_args(self, token_nums, specialize_active_lora):
        mapping, indices, *rest = self.metadata
        return mapping[:token_nums], indices[:token_nums], *rest, self.active


class Wrapper:
    """vLLM's PunicaWrapperGPU."""

    lora_config = types.SimpleNamespace(specialize_active_lora=False)

    def __init__(self, metadata, active=5):
        self.token_mapping_meta = Meta(metadata, active)

    def add_lora_linear(self, y, x, a, b, scale, output_slices, *, buffer=None, **kwargs):
        raise NotImplementedError("Triton")


@pytest.fixture
def wrapper(stand, monkeypatch):
    module = types.ModuleType("vllm.lora.punica_wrapper.punica_gpu")
    module.PunicaWrapperGPU = type("PunicaWrapperGPU", (Wrapper,), dict(vars(Wrapper)))
    module.LoRAKernelMeta = Meta
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("add_inputs", [None, False])
def test_a_linear_layer_is_one_call(wrapper, device, add_inputs):
    """With the leading dimensions of x and y that layers have; what they pass beside is ignored."""
    original = wrapper.PunicaWrapperGPU.add_lora_linear
    for _ in range(2):
        vllm.install()
    want, got = (make_inputs(device, widths=(16, 8), four_dims=True) for _ in range(2))
    given = {} if add_inputs is None else {"add_inputs": add_inputs}
    layer = wrapper.PunicaWrapperGPU(got.metadata)
    layer.add_lora_linear(
        got.y[None], got.x[None], tuple(got.a), tuple(got.b), 0.5, (16, 8), other=1, **given
    )
    vllm.lora_linear(want.x, want.a, want.b, want.y, *want.metadata, 5, 0.5, **given)
    assert torch.equal(got.y, want.y)
    with pytest.raises(ValueError, match="^add_lora_linear: buffer must be None, got one$"):
        layer.add_lora_linear(got.y, got.x, got.a, got.b, 0.5, (16, 8), buffer=got.h)
    vllm.uninstall()
    assert wrapper.PunicaWrapperGPU.add_lora_linear is original


def test_a_wrapper_with_other_metadata_keeps_its_method(wrapper, monkeypatch):
    monkeypatch.setattr(Meta, "meta_args", lambda self, token_nums: self.metadata)
    original = wrapper.PunicaWrapperGPU.add_lora_linear
    vllm.install()
    assert wrapper.PunicaWrapperGPU.add_lora_linear is original


@pytest.mark.parametrize(
    "plugins, runs",
    [(None, False), ("", False), ("other", False), ("mortar", True), ("a,mortar", True)],
)
def test_the_plugin_runs_where_it_is_named(stand, monkeypatch, plugins, runs):
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    for _ in range(2):  # vLLM may load a plugin several times in a process
        vllm.plugin()
        assert (stand.held()[0] is vllm.lora_shrink) is runs


def test_the_plugin_is_an_entry_point():
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, function = points["mortar"].split(":")
    assert getattr(importlib.import_module(module), function) is vllm.plugin
