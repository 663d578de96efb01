# SPDX-License-Identifier: Apache-2.0
"""mortar.lora.Weights under torch.compile: what compiled code writes is what the next op reads."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from lora_cases import Problem, make
from mortar import lora

PROBLEM = Problem(tokens=9, hidden=40, widths=(24, 16), ranks=(8, 3))
BACKENDS = ["eager", "aot_eager", "inductor"]
FORMS = ["table", "stacked"]


def compiled(step, backend, **options):
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize("which", ["A", "B"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_table_sees_writes_of_compiled_code(device, backend, which, parameter):
    t = make(PROBLEM, device)
    written = t.adapters[0][1][which == "B"]
    if parameter:
        written = torch.nn.Parameter(written)
        pair = list(t.adapters[0][1])
        pair[which == "B"] = written
        t.adapters[0] = [t.adapters[0][0], tuple(pair)]
    weights, plan = t.table(), t.plan()
    new = torch.randn(written.shape, device=device).to(written.dtype)

    def apply(x, y, new):
        written.copy_(new)
        return lora.apply(y, x, weights, plan)

    def halves(x, y, new):
        written.copy_(new)
        return lora.expand(
            y, lora.shrink(x, weights, plan, zero_rows=t.token_adapter), weights, plan
        )

    with torch.no_grad():
        for step in (apply, halves):
            old = written.clone()
            got = compiled(step, backend)(t.x, t.y.clone(), new)
            assert torch.equal(written, new)  # the write itself is not lost
            want = step(t.x, t.y.clone(), new)
            assert torch.equal(got, want)
            written.copy_(old)
            assert not torch.equal(step(t.x, t.y.clone(), old), want)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["a", "b", "ranks", "scales"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stacked_sees_writes_of_compiled_code(device, backend, which):
    t = make(PROBLEM, device)
    weights, plan = t.stacked(0.0), t.plan()
    written = weights.apply_args[which]
    written = written[0] if isinstance(written, list) else written
    new = torch.ones_like(written) if which == 2 else written * 2

    def step(x, y, new):
        written.copy_(new)
        return lora.apply(y, x, weights, plan)

    old = written.clone()
    got = compiled(step, backend)(t.x, t.y.clone(), new)
    assert torch.equal(got, step(t.x, t.y.clone(), new))
    assert not torch.equal(got, step(t.x, t.y.clone(), old))


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_sees_updates_between_calls(device, backend):
    t = make(PROBLEM, device)
    weights, plan = t.table(), t.plan()
    step = compiled(lambda x, y: lora.apply(y, x, weights, plan), backend)
    for rank in (8, 5, 1):
        row = [
            (torch.randn(rank, 40, device=device), torch.randn(width, rank, device=device))
            for width in (24, 16)
        ]
        weights.update(0, [tuple(m.to(weights.dtype) for m in pair) for pair in row], 0.5)
        want = lora.apply(t.y.clone(), t.x, weights, plan)
        assert torch.equal(step(t.x, t.y.clone()), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_keeps_its_memory_in_compiled_code_too(device, backend):
    t = make(PROBLEM, device)
    weights, plan = t.table(), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    for tensor in weights.tensors():
        tensor.data = torch.full_like(tensor, float("nan"))
    step = compiled(lambda x, y: lora.apply(y, x, weights, plan), backend)
    assert torch.equal(step(t.x, t.y.clone()), want)


def test_weights_are_static_inputs_of_compiled_code(device):
    """So that mode="reduce-overhead" does not copy all adapters for every replay."""
    t = make(PROBLEM, device)
    weights, plan = t.table(), t.plan()
    inputs = []

    def compile_graph(graph, examples):
        static = torch._guards.TracingContext.get().fw_metadata.static_input_indices
        inputs.append((len(examples), len(static)))
        return graph.forward

    backend = aot_autograd(fw_compiler=compile_graph)
    compiled(lambda x, y: lora.apply(y, x, weights, plan), backend)(t.x, t.y)
    # x, y and the plan are not static; the table and every A and B are.
    (total, static), *_ = inputs
    assert static == 1 + len(weights.tensors())
    assert total >= static + 2
