# SPDX-License-Identifier: Apache-2.0
"""Eager calls, which pass tensors by the address of their objects: the same results, errors and
bookkeeping as the ops, whatever they are given."""

import copy
import gc
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_cases import Problem, make
from mortar import lora
from mortar._ffi import lib, torch_function
from mortar.compat import _vllm_ops, vllm
from vllm_cases import make_inputs

PROBLEM = Problem(tokens=21, hidden=600, widths=(24, 9), ranks=(8, 3))
FORMS = ["table", "stacked"]


def results(device, form):
    """What plan, apply, shrink and expand give, and the two of vLLM."""
    t = make(PROBLEM, device)
    weights = t.weights(form)
    size = lib.lora_plan_size(PROBLEM.tokens, t.num_adapters)
    # Zeros: a plan does not write words that nobody reads.
    blank = lora.Plan(torch.zeros(size, dtype=torch.int32, device=device), 0, 0)
    plan = lora.plan(t.token_adapter, t.num_adapters, out=blank)
    h = lora.shrink(t.x, weights, plan, scale=0.5, zero_rows=t.token_adapter)
    y = lora.expand(t.y.clone(), h, weights, plan, add_inputs=False)
    outputs = [plan.data, h, y, lora.apply(t.y.clone(), t.x, weights, plan, scale=0.5)]
    for active in (5, torch.tensor([2], dtype=torch.int32)):
        v = make_inputs(device, widths=(24, 9))
        vllm.lora_shrink(v.x, v.a, v.h, *v.metadata, active, 0.5)
        vllm.lora_expand(v.h, v.b, v.y, *v.metadata, active, add_inputs=True)
        y = v.y.clone()
        vllm.lora_linear(v.x, v.a, v.b, y, *v.metadata, active, 0.5)
        outputs += [v.h, v.y, y]
    return outputs


@pytest.mark.parametrize("form", FORMS)
def test_the_ops_give_the_same(device, form, monkeypatch):
    want = results(device, form)
    calls = []
    for module in (lora, _vllm_ops):
        for name in ("_plan_now", "_shrink_now", "_expand_now", "_apply_now"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *args: calls.append(args) or 0)
    for got, expected in zip(results(device, form), want, strict=True):
        assert torch.equal(got, expected)
    assert len(calls) == 10


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda y: None, "lora_apply: y must be a tensor, got None"),
        (lambda y: 3, "lora_apply: y must be a tensor, got int"),
        (lambda y: y.to_sparse(), "^lora_apply: y must be a dense tensor in memory, got"),
        (lambda y: FakeTensorMode().from_tensor(y), "must hold memory"),
    ],
    ids=["None", "int", "sparse", "fake"],
)
@torch.no_grad()
def test_what_is_no_plain_tensor(device, spoil, message):
    t = make(PROBLEM, device)
    with pytest.raises((TypeError, ValueError, RuntimeError, BufferError), match=message):
        lora.apply(spoil(t.y), t.x, t.table(), t.plan())


def test_an_object_that_cannot_be_read_writes_nothing(device):
    t = make(PROBLEM, device)
    now, weights, plan, y = torch_function("torch_lora_apply"), t.table(), t.plan(), t.y.clone()
    for x in (t.x.to("meta"), t.x.to_sparse(), "x", None.__class__):
        tensors = (x, y, None, plan.data)
        assert now(id(tensors), 0, 1.0, True, 21, 2, weights.handle) == 0
    for tensors in ((), (t.x, y)):
        assert now(id(tensors), 0, 1.0, True, 21, 2, weights.handle) == 0
    assert torch.equal(y, t.y)


def test_gradients_wanted_later_are_refused(device):
    t = make(PROBLEM, device)
    weights, plan = t.stacked(0.0), t.plan()
    weights.apply_args[1][0].requires_grad_()
    with pytest.raises(RuntimeError, match="must not require gradients"):
        lora.apply(t.y, t.x, weights, plan)


def test_weights_can_be_copied(device):
    t = make(PROBLEM, device)
    weights, plan = t.stacked(0.0), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    other = copy.deepcopy(weights)
    weights.apply_args[0][0].zero_()
    del weights
    gc.collect()
    assert torch.equal(lora.apply(t.y.clone(), t.x, other, plan), want)


def test_weights_hold_their_memory(device):
    """Given other memory, a tensor must not leave the weights with an address that is free."""
    t = make(PROBLEM, device)
    weights, plan = t.stacked(0.0), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    for w in weights.tensors():
        w.data = torch.full_like(w, float("nan"))
    gc.collect()
    fill = [torch.full_like(w, float("nan")) for w in weights.tensors() for _ in range(8)]
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
    assert len(fill) == 32


def test_vllm_takes_weights_that_iteration_makes(device):
    """Rows of one tensor: objects that nobody else holds."""
    v = make_inputs(device, widths=(24, 24))
    vllm.lora_shrink(v.x, v.a, v.h.fill_(7), *v.metadata, 5, 1.0)
    other = v.h.clone().fill_(7)
    vllm.lora_shrink(v.x, torch.stack(v.a), other, *v.metadata, 5, 1.0)
    assert torch.equal(other, v.h)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_vllm_flags_of_any_type(device, flag, dtype):
    v = make_inputs(device)
    v.metadata[-1] = torch.tensor([flag]).to(dtype)
    before, version = v.y.clone(), v.y._version
    vllm.lora_expand(v.h, v.b, v.y, *v.metadata, 5, add_inputs=True)
    assert torch.equal(v.y, before) == flag
    assert (v.y._version == version) == flag, "autograd hears of writes, and of nothing else"


def test_vllm_flag_comes_before_everything(device):
    v = make_inputs(device)
    v.metadata[-1].fill_(True)
    v.x.requires_grad_()
    v.metadata[1] = v.metadata[1].to_sparse()
    vllm.lora_shrink(v.x, v.a, v.h, *v.metadata, 5, 1.0)


def test_threads(device):
    """Calls from several threads at once, each giving the GIL away in the middle."""
    t = make(Problem(tokens=64, hidden=1024, widths=(256,)), device)
    weights, plan = t.table(), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    wrong = []

    def run():
        for _ in range(100):
            got = lora.apply(t.y.clone(), t.x, weights, plan)
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
