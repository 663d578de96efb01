# SPDX-License-Identifier: Apache-2.0
"""mortar.compat.vllm against the float64 reference, over grids like those of vLLM's own tests, and
the semantics that its callers rely on."""

import pytest
import torch
from torch.library import opcheck

import mortar
from lora_cases import BF16, FP16, FP32, ROUNDOFF, SMALLEST, assert_within, magnitudes
from mortar import reference
from mortar.compat.vllm import lora_expand, lora_linear, lora_shrink
from vllm_cases import STALE, make_inputs, prepare

RANKS = [1, 4, 8, 16, 32, 64, 128, 256]
# Sizes of served models and their shards: no multiple of 8 among many of them, odd ones too.
HIDDEN_SIZES = [
    2, 3, 7, 8, 14, 19, 37, 54, 64, 107, 128, 148, 231, 256, 347, 462, 513, 925, 1024, 2049, 2752,
    4096, 6848, 11008, 14784, 27392, 49408, 128256,
]  # fmt: skip


def num_active(kind: str, slots: int):
    return slots + 1 if kind == "int" else torch.tensor([slots + 1], dtype=torch.int32)


def check_shrink(inputs, scaling=0.5, active=None):
    x, h = inputs.x, inputs.h.fill_(float("nan"))
    slots = inputs.a[0].shape[0]
    lora_shrink(x, inputs.a, h, *inputs.metadata, active or slots + 1, scaling)
    want = reference.lora.shrink(x, inputs.adapters, inputs.mapping, scale=scaling)
    size = reference.lora.shrink(
        x.abs(), magnitudes(inputs.adapters), inputs.mapping, scale=abs(scaling)
    )
    terms = x.shape[1] + 4
    bound = size * (terms * ROUNDOFF[FP32] + ROUNDOFF[h.dtype]) + SMALLEST[h.dtype]
    assert_within(h, want, bound)
    assert (h[:, inputs.mapping == -1] == 0).all()


def check_expand(inputs, add_inputs=True, offset=0, active=None):
    before = inputs.y.clone()
    slots = inputs.a[0].shape[0]
    args = (inputs.mapping, inputs.widths, add_inputs, offset)
    want = reference.lora.expand(inputs.y, inputs.h, inputs.adapters, *args)
    size = reference.lora.expand(
        torch.zeros_like(want), inputs.h.abs(), magnitudes(inputs.adapters), *args
    )
    lora_expand(
        inputs.h,
        inputs.b,
        inputs.y,
        *inputs.metadata,
        active or slots + 1,
        offset_start=offset,
        add_inputs=add_inputs,
    )
    dtype = inputs.y.dtype
    terms = inputs.h.shape[2] + 4
    bound = size * (terms * ROUNDOFF[FP32] + ROUNDOFF[dtype]) + SMALLEST[dtype]
    assert_within(inputs.y, want, bound + 1.01 * ROUNDOFF[dtype] * want.abs())
    base = inputs.mapping == -1
    assert torch.equal(inputs.y[base], before[base])
    inside = slice(offset, offset + sum(inputs.widths))
    after = inputs.y.clone()
    after[:, inside] = before[:, inside]
    assert torch.equal(after, before)


def check_linear(inputs, scaling=0.5, add_inputs=True, offset=0, active=None):
    """Against the two ops' reference, and bit for bit mortar.lora.apply with a plan."""
    x, y = inputs.x, inputs.y.clone()
    slots = inputs.a[0].shape[0]
    metadata = (*inputs.metadata, active or slots + 1)
    lora_linear(x, inputs.a, inputs.b, y, *metadata, scaling, offset, add_inputs)
    args = (inputs.mapping, inputs.widths, add_inputs, offset)
    hidden = reference.lora.shrink(x, inputs.adapters, inputs.mapping, scale=scaling)
    want = reference.lora.expand(inputs.y, hidden, inputs.adapters, *args)
    adapters = magnitudes(inputs.adapters)
    size = reference.lora.shrink(x.abs(), adapters, inputs.mapping, scale=abs(scaling))
    size = reference.lora.expand(torch.zeros_like(want), size, adapters, *args)
    dtype = y.dtype
    terms = x.shape[1] + inputs.h.shape[2] + 8
    bound = size * (terms * ROUNDOFF[FP32] + 2 * ROUNDOFF[dtype]) + 1000 * SMALLEST[dtype]
    assert_within(y, want, bound + 1.01 * ROUNDOFF[dtype] * want.abs())
    assert torch.equal(y[inputs.mapping == -1], inputs.y[inputs.mapping == -1])
    a, b = ([t.flatten(1, -2) for t in ts] for ts in (inputs.a, inputs.b))
    weights = mortar.lora.Weights.stacked(a, b)
    plan = mortar.lora.plan(inputs.mapping, slots)
    same = mortar.lora.apply(inputs.y.clone(), x, weights, plan, scaling, add_inputs, offset)
    assert torch.equal(y, same)


@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rank", RANKS)
def test_ranks(device, rank, slices, dtype, kind):
    inputs = make_inputs(device, 20, 2049, (257,) * slices, rank, 2, dtype)
    active = num_active(kind, 2)
    check_linear(inputs, active=active)
    check_shrink(inputs, active=active)
    check_expand(inputs, active=active)


@pytest.mark.parametrize("rank", [4, 8, 16, 64, 128, 200])
@pytest.mark.parametrize("tokens", [1, 9, 70, 300, 700])
def test_linear_of_aligned_layers(device, tokens, rank):
    """What layers of served models are: the kernels for whole pieces of 16 bytes."""
    inputs = make_inputs(device, tokens, 1024, (264, 72), rank, 3)
    check_linear(inputs)
    inputs = make_inputs(device, tokens, 264, (64,), rank, 8, map="one", four_dims=True)
    check_linear(inputs, add_inputs=False)


@pytest.mark.parametrize("slots", [1, 8, 32, 128])
@pytest.mark.parametrize("tokens", [1, 4, 64, 300])
def test_slots(device, tokens, slots):
    inputs = make_inputs(device, tokens, 130, (33, 17), 8, slots, map="one")
    check_shrink(inputs)
    inputs = make_inputs(device, tokens + 1, 130, (33, 17), 8, slots, map="blocks")
    check_expand(inputs)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_hidden_sizes(device, hidden, slices, dtype):
    inputs = make_inputs(device, 6, hidden, (5,) * slices, 32, 2, dtype)
    check_shrink(inputs)
    inputs = make_inputs(device, 6, 5, (hidden,) * slices, 32, 2, dtype)
    check_expand(inputs)


@pytest.mark.parametrize("tokens", [2, 17, 130, 520])
@pytest.mark.parametrize("map", ["random", "one", "blocks"])
def test_batches(device, tokens, map):
    inputs = make_inputs(device, tokens, 200, (40, 72), 16, 8, map=map)
    check_linear(inputs)
    check_shrink(inputs)
    check_expand(inputs)


@pytest.mark.parametrize("four_dims", [False, True])
@pytest.mark.parametrize("h_dtype", [FP32, BF16])
@pytest.mark.parametrize("add_inputs", [True, False])
def test_forms(device, four_dims, h_dtype, add_inputs):
    """Slices of different widths (k and v are narrower than q), both forms of weights, both
    kinds of shrink buffer."""
    inputs = make_inputs(device, widths=(64, 8, 24), rank=16, h_dtype=h_dtype, four_dims=four_dims)
    check_linear(inputs, 2.0, add_inputs)
    check_shrink(inputs, scaling=2.0)
    check_expand(inputs, add_inputs)


@pytest.mark.parametrize("add_inputs", [True, False])
def test_offset_start(device, add_inputs):
    """A shard of y, as the fully sharded layers write it."""
    inputs = make_inputs(device, widths=(16, 9))
    inputs.y = torch.randn(24, 60).to(BF16).to(device)
    check_linear(inputs, 1.0, add_inputs, offset=13)
    check_expand(inputs, add_inputs, offset=13)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
@pytest.mark.parametrize("map", ["base", "random"])
def test_the_flag_means_no_write_at_all(device, map, dtype):
    """Whatever the other tensors say; nor does autograd hear of one, or anybody of a wrong
    argument."""
    inputs = make_inputs(device, map=map)
    assert inputs.metadata[-1].item() == (map == "base")
    inputs.metadata[-1] = torch.ones(1, dtype=dtype)
    h, y = torch.full_like(inputs.h, 7), inputs.y.clone()
    versions = h._version, y._version
    for x, columns in ((inputs.x, None), (inputs.x[:, 1:], 1)):
        lora_shrink(x, inputs.a, h[..., :columns], *inputs.metadata, 5, 1.0)
        lora_expand(h[..., :columns], inputs.b, y, *inputs.metadata, 5, add_inputs=False)
        lora_linear(x, inputs.a, inputs.b, y, *inputs.metadata, 5, 1.0, add_inputs=False)
    assert (h == 7).all() and torch.equal(y, inputs.y)
    assert (h._version, y._version) == versions


def test_all_ids_minus_one_without_the_flag(device):
    """What a replayed graph sees when its batch has no adapter: the flag is not looked at."""
    inputs = make_inputs(device)
    prepare(inputs.metadata, torch.full_like(inputs.mapping, -1))
    inputs.metadata[-1][0] = False
    inputs.mapping.fill_(-1)
    before = inputs.y.clone()
    check_shrink(inputs)
    lora_expand(inputs.h, inputs.b, inputs.y, *inputs.metadata, 5, add_inputs=False)
    assert torch.equal(inputs.y, before)
    check_linear(inputs, add_inputs=False)


def test_stale_tail_of_the_indices(device):
    """A padded batch: rows past the step's tokens have stale indices, and are nobody's."""
    inputs = make_inputs(device, tokens=24)
    inputs.metadata[1].fill_(STALE)
    prepare(inputs.metadata, inputs.mapping[:15].clone())
    inputs.metadata[1][15:] = torch.tensor([0, 1, -5, STALE, 24, 3, 2, 1, 0], dtype=torch.int32)
    inputs.mapping[15:] = -1
    check_linear(inputs)
    check_shrink(inputs)
    check_expand(inputs)


def test_index_table_longer_than_the_batch(device):
    """Places in the table are no rows of any buffer: only tokens lie inside the batch."""
    inputs = make_inputs(device, hidden=1000)  # several leaves of K, so a split shrink
    far = 1 << 22
    head = torch.full((far,), STALE, dtype=torch.int32, device=device)
    inputs.metadata[1] = torch.cat([head, inputs.metadata[1]])
    inputs.metadata[3] += far
    check_linear(inputs)
    check_shrink(inputs)
    check_expand(inputs)


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_num_active_limits_the_groups(device, kind):
    inputs = make_inputs(device, tokens=30, map="blocks")  # groups -1, 0, 1, 2, 3
    want, y = inputs.y.clone(), inputs.y.clone()
    lora_expand(inputs.h, inputs.b, want, *inputs.metadata, 5, add_inputs=True)
    two = 2 if kind == "int" else torch.tensor([2], dtype=torch.int32)
    lora_expand(inputs.h, inputs.b, y, *inputs.metadata, two, add_inputs=True)
    first = inputs.mapping <= 0
    assert torch.equal(y[first], want[first])
    assert torch.equal(y[~first], inputs.y[~first])


def test_more_active_than_there_are(device):
    inputs = make_inputs(device)
    check_shrink(inputs, active=1000)
    check_expand(inputs, active=1000)


def test_ids_of_slots_that_do_not_exist(device):
    """Never read out of bounds: such a group is skipped."""
    inputs = make_inputs(device, tokens=30, map="blocks")
    inputs.metadata[4][3] = 77
    inputs.mapping[inputs.mapping == 2] = 77
    before = inputs.y.clone()
    lora_shrink(inputs.x, inputs.a, inputs.h.fill_(7), *inputs.metadata, 5, 1.0)
    lora_expand(inputs.h, inputs.b, inputs.y, *inputs.metadata, 5, add_inputs=True)
    lost = inputs.mapping == 77
    assert lost.any() and (inputs.h[:, lost] == 0).all()
    assert torch.equal(inputs.y[lost], before[lost])


def test_float32_everywhere(device):
    inputs = make_inputs(device, dtype=FP32)
    check_linear(inputs)
    check_shrink(inputs)
    check_expand(inputs)


def test_repeats_bitwise_whatever_the_batch(device):
    inputs = make_inputs(device, tokens=40, hidden=700, widths=(30,), rank=32)
    lora_shrink(inputs.x, inputs.a, inputs.h, *inputs.metadata, 5, 1.0)
    row = int((inputs.mapping == 2).nonzero()[0])
    alone = make_inputs(device, tokens=1, hidden=700, widths=(30,), rank=32)
    prepare(alone.metadata, inputs.mapping[row : row + 1])
    lora_shrink(inputs.x[row : row + 1], inputs.a, alone.h, *alone.metadata, 5, 1.0)
    assert torch.equal(alone.h[:, 0], inputs.h[:, row])


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_opcheck(device, kind):
    inputs = make_inputs(device, tokens=6, hidden=10, widths=(7, 3), rank=2, slots=2)
    overload = "default" if kind == "int" else "tensor"
    active = num_active(kind, 2)
    opcheck(
        getattr(torch.ops.mortar.vllm_lora_shrink, overload),
        (inputs.x, inputs.a, inputs.h, *inputs.metadata, active, 1.0),
    )
    opcheck(
        getattr(torch.ops.mortar.vllm_lora_expand, overload),
        (inputs.h, inputs.b, inputs.y, *inputs.metadata, active, 0, True),
    )
    opcheck(
        getattr(torch.ops.mortar.vllm_lora_linear, overload),
        (inputs.x, inputs.a, inputs.b, inputs.y, *inputs.metadata, active, 0, 0.5, True),
    )


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_compile_fullgraph(device, kind):
    """As in a compiled layer of the engine: the number of active adapters does not recompile."""
    inputs = make_inputs(device, widths=(16, 8))

    def layer(x, y, active):
        h = torch.empty(2, x.shape[0], 8, dtype=torch.float32, device=x.device)
        lora_shrink(x, inputs.a, h, *inputs.metadata, active, 1.0)
        lora_expand(h, inputs.b, y, *inputs.metadata, active, add_inputs=True)
        lora_linear(x, inputs.a, inputs.b, y, *inputs.metadata, active, 0.5)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for many in (5, 3):
        active = many if kind == "int" else torch.tensor([many], dtype=torch.int32)
        want = layer(inputs.x, inputs.y.clone(), active)
        assert torch.equal(compiled(inputs.x, inputs.y.clone(), active), want)


@pytest.mark.parametrize("form", ["transposed", "every second column", "rows apart"])
def test_inputs_of_any_strides(device, form):
    """vLLM makes them contiguous. Rows that are dense are read where they lie."""
    inputs = make_inputs(device)
    x = inputs.x
    inputs.x = {
        "transposed": x.t().contiguous().t(),
        "every second column": torch.stack([x, x], dim=2).flatten(1)[:, ::2],
        "rows apart": torch.cat([x, x], dim=1)[:, : x.shape[1]],
    }[form]
    assert torch.equal(inputs.x, x) and not inputs.x.is_contiguous()
    check_shrink(inputs)
    want = inputs.y.clone()
    lora_linear(x, inputs.a, inputs.b, want, *inputs.metadata, 5, 1.0)
    lora_linear(inputs.x, inputs.a, inputs.b, inputs.y, *inputs.metadata, 5, 1.0)
    assert torch.equal(inputs.y, want)


@pytest.mark.parametrize("negated", ["inputs", "weights"])
def test_negations_are_read_right_and_not_written(device, negated):
    """Views that negate what lies in memory: inputs and weights; an output is refused."""

    def negation(t):
        return torch._neg_view(-t)

    def first(t, kind):
        return negation(t) if negated == kind else t

    want, got = (make_inputs(device, dtype=FP32) for _ in range(2))
    lora_shrink(want.x, want.a, want.h, *want.metadata, 5, 0.5)
    a, b = ([first(t, "weights") for t in ts] for ts in (got.a, got.b))
    lora_shrink(first(got.x, "inputs"), a, got.h, *got.metadata, 5, 0.5)
    assert torch.equal(got.h, want.h)
    lora_expand(want.h, want.b, want.y, *want.metadata, 5)
    lora_expand(first(got.h, "inputs"), b, got.y, *got.metadata, 5)
    assert torch.equal(got.y, want.y)
    lora_linear(want.x, want.a, want.b, want.y, *want.metadata, 5, 1.0)
    lora_linear(first(got.x, "inputs"), a, b, got.y, *got.metadata, 5, 1.0)
    assert torch.equal(got.y, want.y)
    before = got.y.clone()
    with pytest.raises(ValueError, match="^lora_expand: output_tensor must hold its own values"):
        lora_expand(got.h, got.b, negation(got.y), *got.metadata, 5)
    assert torch.equal(got.y, before)
