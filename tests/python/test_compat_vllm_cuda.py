# SPDX-License-Identifier: Apache-2.0
"""vLLM's drop-ins inside CUDA graphs, and their host cost."""

import gc
import weakref

import pytest
import torch

from lora_cases import make_map
from mortar.compat.vllm import lora_expand, lora_linear, lora_shrink
from test_lora_cuda import capture, host_cost_and_limit, in_turn
from vllm_cases import make_inputs, prepare


@pytest.mark.parametrize("captured", [1, 3, 9])
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_graph_replays_with_other_tables(captured, kind):
    """Captured for up to ``captured`` groups (the engine rounds up); replayed with other maps, with
    fewer groups, and with no adapter at all."""
    inputs = make_inputs("cuda", tokens=50, widths=(64, 16), slots=8)
    active = captured if kind == "int" else torch.tensor([captured], dtype=torch.int32)
    y = inputs.y.clone()

    def body():
        y.copy_(inputs.y)
        lora_shrink(inputs.x, inputs.a, inputs.h, *inputs.metadata, active, 1.0)
        lora_expand(inputs.h, inputs.b, y, *inputs.metadata, active, add_inputs=True)
        lora_linear(inputs.x, inputs.a, inputs.b, y, *inputs.metadata, active, 0.5)

    graph = capture(body)
    generator = torch.Generator().manual_seed(3)
    for groups in (captured, max(1, captured - 1), 1, 0):
        mapping = make_map("random", 50, max(groups - 1, 1), generator).cuda()
        if groups <= 1:
            mapping.fill_(groups - 1)
        prepare(inputs.metadata, mapping)
        graph.replay()
        want = inputs.y.clone()
        h = torch.zeros_like(inputs.h)
        lora_shrink(inputs.x, inputs.a, h, *inputs.metadata, 9, 1.0)
        lora_expand(h, inputs.b, want, *inputs.metadata, 9, add_inputs=True)
        lora_linear(inputs.x, inputs.a, inputs.b, want, *inputs.metadata, 9, 0.5)
        assert torch.equal(y, want)
        if groups:
            assert torch.equal(inputs.h, h)


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("op", ["shrink", "expand", "linear"])
def test_host_cost(op, kind):
    active = 5 if kind == "int" else torch.tensor([5], dtype=torch.int32)

    def call():
        i = make_inputs("cuda", tokens=8, hidden=1024, widths=(1024, 256, 256), rank=16)
        return {
            "shrink": lambda: lora_shrink(i.x, i.a, i.h, *i.metadata, active, 1.0),
            "expand": lambda: lora_expand(i.h, i.b, i.y, *i.metadata, active, 0, True),
            "linear": lambda: lora_linear(i.x, i.a, i.b, i.y, *i.metadata, active, 1.0),
        }[op]

    with torch.inference_mode():
        times = 2.0 if op == "linear" else 1.6  # it may launch two kernels
        cost, limit = host_cost_and_limit(in_turn([call() for _ in range(4)]), times)
    print(f"host cost of {op} ({kind}): {cost:.1f} us, at most {limit:.1f}")
    assert cost <= limit


def test_the_metadata_keeps_the_workspace():
    """Layers of a step share it; a graph has its own; it goes with the metadata."""
    layers = [make_inputs("cuda", tokens=8, hidden=2048, seed=seed) for seed in range(2)]
    metadata = layers[0].metadata

    def kept():
        return [memory for memory, _ in metadata[4]._mortar_memory.kept.values()]

    seen = []
    for i in layers:
        lora_shrink(i.x, i.a, i.h, *metadata, 5, 1.0)
        seen += kept()
    assert len(seen) == 2 and seen[0] is seen[1]
    graph = capture(lambda: lora_shrink(i.x, i.a, i.h, *metadata, 5, 1.0))
    want, memory = i.h.clone(), weakref.ref(kept()[0])
    del seen
    metadata[4] = metadata[4].clone()
    gc.collect()
    assert memory() is None
    i.h.fill_(float("nan"))
    graph.replay()
    assert torch.equal(i.h, want)
