# SPDX-License-Identifier: Apache-2.0
"""mortar.lora.Weights.update beside queued work. Collected only where there is a GPU."""

import torch

from lora_cases import Problem, make
from mortar import lora

PROBLEM = Problem(tokens=64, hidden=512, widths=(256,), ranks=(16, 8))


def test_queued_work_uses_the_old_adapter_whole():
    """The old tensors come from another stream, which may reuse their memory at once."""
    t = make(PROBLEM, "cuda")
    loading = torch.cuda.Stream()
    with torch.cuda.stream(loading):
        t.adapters = [[tuple(m.clone() for m in p) for p in row] for row in t.adapters]
    torch.cuda.current_stream().wait_stream(loading)
    weights, plan = t.table(), t.plan()
    old = lora.apply(t.y.clone(), t.x, weights, plan)
    new_rows = [[tuple(m * 2 for m in p) for p in row] for row in t.adapters]
    y_old, y_new = t.y.clone(), t.y.clone()
    torch.cuda.synchronize()

    torch.cuda._sleep(50_000_000)
    lora.apply(y_old, t.x, weights, plan)
    sizes = [m.shape for row in t.adapters for p in row for m in p]
    t.adapters.clear()
    for slot, row in enumerate(new_rows):
        weights.update(slot, row, t.scales[slot])
    with torch.cuda.stream(loading):
        junk = [torch.full(s, float("nan"), dtype=torch.bfloat16, device="cuda") for s in sizes]
    lora.apply(y_new, t.x, weights, plan)
    torch.cuda.synchronize()
    del junk
    assert torch.equal(y_old, old)
    fresh = lora.Weights.from_adapters(new_rows, t.scales)
    assert torch.equal(y_new, lora.apply(t.y.clone(), t.x, fresh, plan))


def test_captured_compiled_writes_are_seen():
    """A copy of the table is made without a copy from the host, so it can be captured."""
    t = make(PROBLEM, "cuda")
    weights, plan, y = t.table(), t.plan(), t.y.clone()
    args = list(weights.apply_args)
    doubled = [m * 2 for m in args[-1]]
    args[-1] = doubled
    apply = torch.ops.mortar.lora_apply.table
    want = t.y.clone()
    apply(t.x, plan.data, *args, want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(t.y)
        apply(t.x, plan.data, *args, y)
    graph.replay()
    assert torch.equal(y, want)
    rows = [[tuple(m * 2 for m in p) for p in row] for row in t.adapters]
    fresh = lora.Weights.from_adapters(rows, t.scales)
    assert torch.equal(want, lora.apply(t.y.clone(), t.x, fresh, plan))
