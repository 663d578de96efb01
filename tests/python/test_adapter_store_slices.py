# SPDX-License-Identifier: Apache-2.0
"""AdapterStore.slices: what mortar.lora.Weights takes, on 16-byte boundaries."""

import pytest
import torch

import mortar
from adapter_store_cases import random_module, write_adapter


@pytest.mark.parametrize("pad_to", [8, 16])
def test_slices_feed_lora_weights(tmp_path, device, pad_to):
    """Mixed ranks, dtypes and targets against float64; data on and off a 16-byte boundary."""
    hidden, widths = 48, {"q": 40, "k": 24}
    folders = {
        "both": random_module("q", 4, hidden, 40) | random_module("k", 4, hidden, 24),
        "only_k": random_module("k", 4, hidden, 24, torch.bfloat16),
        "neither": random_module("o", 4, hidden, 8),
    }
    store = mortar.AdapterStore()
    for i, (name, tensors) in enumerate(folders.items()):
        store.open(name, write_adapter(tmp_path / name, tensors, pad_to, lora_alpha=4 * (i + 1)))
    names = ["only_k", None, "both", "neither"]
    pairs, scales = store.slices(["q", "k"], names, device=device, dtype=torch.float32)
    assert pairs[1] is None and pairs[3] is None and pairs[0][0] is None
    assert scales[2] == [1.0, 1.0] and scales[0][1] == 2.0
    assert all(t.data_ptr() % 16 == 0 for row in pairs if row for p in row if p for t in p)

    weights = mortar.lora.Weights.from_adapters(pairs, scales)
    token_adapter = torch.tensor([2, -1, 0, 1, 3, 2, 0], dtype=torch.int32, device=device)
    plan = mortar.lora.plan(token_adapter, len(names))
    x = torch.randn(7, hidden, device=device)
    y = torch.randn(7, sum(widths.values()), device=device)
    wanted = y.double().cpu()
    mortar.lora.apply(y, x, weights, plan)
    for t, adapter in enumerate(token_adapter.tolist()):
        column = 0
        for module, width in widths.items():
            name = names[adapter] if adapter >= 0 else None
            found = store.get(name).find(module) if name else None
            if found:
                h = x[t].double().cpu() @ found.a.double().T
                wanted[t, column : column + width] += found.scale * (h @ found.b.double().T)
            column += width
    # Sums of 48 and 4 float32 products of numbers near 1, scaled by at most 2.
    assert torch.allclose(y.double().cpu(), wanted, rtol=1e-5, atol=1e-4)


def test_slices_use_aligned_views_in_place(tmp_path):
    store = mortar.AdapterStore()
    tensors = random_module("m", 4, 8, 8)  # 128 bytes each: both aligned or neither
    store.open("in place", write_adapter(tmp_path / "16", tensors, pad_to=16))
    pairs, scales = store.slices("m")
    module = store.get("in place").modules[0]
    assert pairs[0][0][0].data_ptr() == module.a.data_ptr()
    assert pairs[0][0][1].data_ptr() == module.b.data_ptr()
    assert scales == [[2.0]]


@pytest.mark.parametrize("mapped", [False, True])
def test_slices_copy_views_off_a_boundary(tmp_path, mapped):
    store = mortar.AdapterStore()
    for name in ("m" * n for n in range(1, 17)):  # the header pads to 8 bytes
        folder = write_adapter(tmp_path / name, random_module(name, 4, 8, 8))
        store.open(name, folder, mapped=mapped)
        module = store.get(name).modules[0]
        (((a, b),),), _ = store.slices(name, [name])
        assert torch.equal(a, module.a) and torch.equal(b, module.b)
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
