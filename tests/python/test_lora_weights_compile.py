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


class Layer(torch.nn.Module):
    def __init__(self, weights, halves):
        super().__init__()
        self.weights, self.halves = weights, halves

    def forward(self, x, y, ids):
        plan, y = lora.plan(ids, self.weights.num_adapters), y.clone()
        if not self.halves:
            return lora.apply(y, x, self.weights, plan)
        return lora.expand(y, lora.shrink(x, self.weights, plan, zero_rows=ids), self.weights, plan)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_saved_program_uses_the_tensors_that_it_brings(device, tmp_path, form, halves):
    """Another process has nothing where the saved table points to. Here are other values."""
    t = make(PROBLEM, device)
    t.adapters[1][0] = None  # a slice left alone
    weights, inputs = t.weights(form), (t.x, t.y, t.token_adapter)
    layer = Layer(weights, halves)
    with torch.no_grad():
        want = layer(*inputs)
        torch.export.save(torch.export.export(layer, inputs), tmp_path / "layer.pt2")
        loaded = torch.export.load(tmp_path / "layer.pt2").module()
        for tensor in weights.tensors():
            tensor.fill_(float("nan"))
        assert torch.equal(loaded(*inputs), want)
