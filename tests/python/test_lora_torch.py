# SPDX-License-Identifier: Apache-2.0
"""The LoRA ops as citizens of PyTorch: opcheck, torch.compile, make_fx, fake tensors, autograd."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from lora_cases import Problem, apply_bound, assert_within, make
from mortar import _lora_ops, lora, reference

PROBLEM = Problem(tokens=21, hidden=70, widths=(24, 9), ranks=(8, 3))
FORMS = ["table", "stacked"]


def op_calls(device):
    """(op, arguments) for every op, in every form."""
    t = make(PROBLEM, device)
    ids, plan, y = t.token_adapter, t.plan().data, t.y
    h = torch.zeros(2, 21, 8, device=device)
    table, stacked = t.table(), t.stacked(poison=0.0)
    workspace = torch.zeros(table.workspace_size(t.x) + 16, dtype=torch.uint8, device=device)
    yield torch.ops.mortar.lora_plan.default, (ids, 2, torch.zeros_like(plan))
    for weights, kind in ((stacked, "default"), (table, "table")):
        shrink = getattr(torch.ops.mortar.lora_shrink, kind)
        expand = getattr(torch.ops.mortar.lora_expand, kind)
        apply = getattr(torch.ops.mortar.lora_apply, kind)
        yield shrink, (t.x, plan, *weights.shrink_args, h)
        yield shrink, (t.x, plan, *weights.shrink_args, h, 0.5, ids, workspace)
        yield expand, (h, plan, *weights.expand_args, y, 0, False)
        yield apply, (t.x, plan, *weights.apply_args, y)
        yield apply, (t.x, plan, *weights.apply_args, y, 0, 0.5, True, workspace)


@pytest.mark.parametrize("call", range(11))
def test_opcheck(device, call):
    op, args = list(op_calls(device))[call]
    opcheck(op, args)


def test_opcheck_sees_every_op(device):
    assert len(list(op_calls(device))) == 11


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(device, backend, form):
    t = make(PROBLEM, device)
    weights, plan = t.weights(form), t.plan()

    def layer(x, y, plan):
        base = x.float().sum() * 0 + y
        return lora.apply(base.to(y.dtype), x * 2, weights, plan, scale=0.5).relu()

    want = layer(t.x, t.y, plan)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.equal(compiled(t.x, t.y, plan), want)


def test_compile_with_changing_batch(device):
    """One graph serves every batch size."""
    t = make(PROBLEM, device)
    weights = t.table()
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, y, plan: lora.apply(y, x, weights, plan),
        fullgraph=True,
        backend=count,
        dynamic=True,
    )
    for tokens in (21, 5, 17, 2):
        plan = lora.plan(t.token_adapter[:tokens], 2)
        want = lora.apply(t.y[:tokens].clone(), t.x[:tokens], weights, plan)
        assert torch.equal(compiled(t.x[:tokens].clone(), t.y[:tokens].clone(), plan), want)
    assert graphs == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_plan_and_halves(device, dynamic):
    t = make(PROBLEM, device)
    weights = t.table()

    def step(ids, x, y):
        plan = lora.plan(ids, 2)
        h = lora.shrink(x, weights, plan, zero_rows=ids)
        return lora.expand(y, h, weights, plan)

    want = step(t.token_adapter, t.x, t.y.clone())
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(t.token_adapter, t.x, t.y.clone()), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(device, mode, form):
    t = make(PROBLEM, device)
    weights, plan = t.weights(form), t.plan()

    def layer(x, y, data):
        return lora.apply(y.clone(), x, weights, lora.Plan(data, *plan[1:]))

    want = layer(t.x, t.y, plan.data)
    allow = {} if mode == "real" else {"_allow_non_fake_inputs": True}
    graph = make_fx(layer, tracing_mode=mode, **allow)(t.x, t.y, plan.data)
    assert "mortar.lora_apply" in graph.code
    assert torch.equal(graph(t.x, t.y, plan.data), want)


def test_fake_tensors_are_never_touched(device):
    t = make(PROBLEM, device)
    weights, plan = t.table(), t.plan()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = lora.apply(mode.from_tensor(t.y), mode.from_tensor(t.x), weights, plan)
        assert y.shape == t.y.shape
    before = t.y.clone()
    lora.apply(mode.from_tensor(t.y), mode.from_tensor(t.x), weights, plan)
    assert torch.equal(t.y, before)


def test_meta_tensors(device):
    t = make(PROBLEM, device)
    y = lora.apply(t.y.to("meta"), t.x.to("meta"), t.table(), t.plan())
    assert y.is_meta and y.shape == t.y.shape


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "functionalize"])
def test_transforms_of_torch_func_are_refused(device, transform):
    t = make(PROBLEM, device)
    weights, plan, before = t.table(), t.plan(), t.y.clone()

    def layer(x):
        return lora.apply(t.y, x, weights, plan).float().sum()

    x = t.x.float()
    run = {
        "grad": lambda: torch.func.grad(layer)(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "vmap": lambda: torch.vmap(layer)(x[None]),
        "functionalize": lambda: torch.func.functionalize(layer)(x),
    }[transform]
    with pytest.raises(RuntimeError, match="cannot run inside transforms of torch.func"):
        run()
    assert torch.equal(t.y, before)


def test_shortcut_and_dispatcher_agree(device):
    for op, args in op_calls(device):
        name = op.name().removeprefix("mortar::").replace(".", "_")
        call = getattr(_lora_ops, "call_" + name.removeprefix("lora_"))
        outputs = []
        for run in (op, call):
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            copies = [b if a is not args[-1] else a for a, b in zip(args, copies, strict=True)]
            run(*copies)
            outputs.append([c for c in copies if isinstance(c, torch.Tensor)])
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["x", "y", "weights"])
def test_gradients_are_refused(device, which, form):
    t = make(PROBLEM, device)
    if which == "weights":
        t.adapters[1][0][1].requires_grad_()
        stacked = t.stacked(0.0)
        stacked.apply_args[0][0].requires_grad_()
        a, b, ranks, scales = stacked.apply_args
        weights = t.table() if form == "table" else lora.Weights.stacked(a, b, ranks, scales)
    else:
        weights = t.weights(form)
        getattr(t, which).requires_grad_()
    plan, before = t.plan(), t.y.detach().clone()
    with pytest.raises(RuntimeError, match="lora_apply: arguments must not require gradients"):
        lora.apply(t.y, t.x, weights, plan)
    assert torch.equal(t.y, before)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="must not require gradients"):
        torch.compile(lambda x, y: lora.apply(y, x, weights, plan))(t.x, t.y)
    with torch.no_grad():
        want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
        assert_within(lora.apply(t.y, t.x, weights, plan), want, apply_bound(t, want))


def test_autograd_sees_the_write(device):
    """A tensor that autograd saved and an op then changed must not give wrong gradients."""
    t = make(PROBLEM, device)
    factor = torch.ones_like(t.y, requires_grad=True)
    product = factor * t.y
    lora.apply(t.y, t.x, t.table(), t.plan())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_bound_for_tracing_is_large_enough():
    lengths = [*range(0, 3000, 7), 2**15, 2**15 + 1, 10**5, 2**20]
    for tokens in lengths:
        for adapters in (1, 2, 3, 100, 1000, 4096):
            with patch.object(lora, "_is_compiling", return_value=True):
                bound = lora._plan_size(tokens, adapters)
            assert bound >= lora._plan_size(tokens, adapters)


def test_debug_checks_by_environment(device):
    script = (
        "import torch, mortar\n"
        f"mortar.lora.plan(torch.tensor([0, 5], dtype=torch.int32, device='{device}'), 2)\n"
    )
    for value, message in (("1", "ids in [-1, 2), got 1 others, the first at token 1"), ("0", "")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "MORTAR_DEBUG_CHECKS": value},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == bool(message)
        assert message in done.stderr
