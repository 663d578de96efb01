# SPDX-License-Identifier: Apache-2.0
"""mortar.lora.Weights: the device table, its replacement in place, and what it refuses."""

import gc
import re
import weakref

import pytest
import torch

from lora_cases import BF16, FP16, FP32, Problem, apply_bound, assert_within, make
from mortar import lora, reference
from mortar._ffi import lib

PROBLEM = Problem(tokens=20, hidden=40, widths=(24, 16), ranks=(8, 3, 5))


def pair(rank=4, hidden=40, width=24, dtype=BF16, device="cpu"):
    a, b = torch.randn(rank, hidden), torch.randn(width, rank)
    return a.to(dtype).to(device), b.to(dtype).to(device)


def check_against_reference(t, weights):
    want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
    plan = lora.plan(t.token_adapter, weights.num_adapters)
    assert_within(lora.apply(t.y.clone(), t.x, weights, plan), want, apply_bound(t, want))


def test_attributes(device):
    for weights in (make(PROBLEM, device).table(), make(PROBLEM, device).stacked()):
        assert weights.num_adapters == 3 and weights.num_slices == 2 and weights.max_rank == 8
        assert weights.hidden == 40 and weights.widths == [24, 16] and weights.dtype is BF16
        assert not weights.requires_grad


def test_one_slice_takes_bare_pairs(device):
    bare = [pair(device=device), pair(rank=7, device=device)]
    x, ids = torch.randn(3, 40, device=device), torch.tensor([0, 1, 0], dtype=torch.int32)
    plan = lora.plan(ids.to(device), 2)
    results = [
        lora.apply(torch.zeros(3, 24, device=device), x, lora.Weights.from_adapters(form), plan)
        for form in (bare, [[p] for p in bare], [[list(p)] for p in bare])
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_scales_per_slice_and_empty_slots(device):
    t = make(PROBLEM, device)
    t.scales = [[0.5, -2.0], 3.0, [0.0, 1.0]]
    t.adapters.insert(1, None)
    weights = lora.Weights.from_adapters(t.adapters, [t.scales[0], 1.0, *t.scales[1:]])
    t.adapters[1] = [None, None]
    t.scales.insert(1, 1.0)
    ids = torch.arange(20, dtype=torch.int32, device=device) % 4
    t.token_adapter = ids
    want = reference.lora.apply(t.y, t.x, t.adapters, ids, t.widths, t.scales)
    got = lora.apply(t.y.clone(), t.x, weights, lora.plan(ids, 4))
    # The bound scales its sizes like the result, so it wants them positive.
    t.scales = [[0.5, 2.0], 1.0, 3.0, [0.0, 1.0]]
    assert_within(got, want, apply_bound(t, want))


def test_tensors_stay_alive(device):
    t = make(PROBLEM, device)
    weights = t.table()
    alive = weakref.ref(t.adapters[0][0][0])
    keep = [[(a.clone(), b.clone()) for a, b in row] for row in t.adapters]
    t.adapters.clear()
    gc.collect()
    assert alive() is not None
    t.adapters.extend(keep)
    check_against_reference(t, weights)


def test_update_replaces_one_adapter_in_place(device):
    t = make(PROBLEM, device)
    weights = lora.Weights.from_adapters(t.adapters, t.scales, capacity=5, max_rank=30)
    table = weights.apply_args[0]
    assert weights.num_adapters == 5 and weights.max_rank == 30
    check_against_reference(t, weights)

    t.adapters[1] = [pair(30, device=device), None]
    t.scales[1] = 0.125
    weights.update(1, t.adapters[1], 0.125)
    check_against_reference(t, weights)

    new = [pair(6, device=device), pair(9, width=16, device=device)]
    weights.update(4, new, [1.0, 0.5])
    t.adapters += [[None, None], new]
    t.scales += [1.0, [1.0, 0.5]]
    t.token_adapter = torch.arange(20, dtype=torch.int32, device=device) % 5
    check_against_reference(t, weights)

    weights.update(0, None)
    t.adapters[0] = [None, None]
    check_against_reference(t, weights)
    # Captured graphs hold the address; on the CPU running calls hold the table itself.
    assert (weights.apply_args[0] is table) == (device.type == "cuda")
    assert len(weights.tensors()) == 2 + 4 + 4


def test_stacked_cannot_be_updated(device):
    with pytest.raises(TypeError, match="Weights.update: weights must be made by from_adapters"):
        make(PROBLEM, device).stacked().update(0, None)


def misaligned(rows, columns):
    return torch.zeros(rows * columns + 1, dtype=BF16)[1:].view(rows, columns)


def plain(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


FROM = "Weights.from_adapters: "
TABLES = [
    (None, {}, TypeError, "adapters must be a list of one per adapter, got NoneType"),
    (plain(2, 3), {}, TypeError, "adapters must be a list of one per adapter, got Tensor"),
    ([], {}, ValueError, "adapters must hold at least one (A, B), got none"),
    ([None], {}, ValueError, "adapters must hold at least one (A, B), got none"),
    ([3], {}, TypeError, "adapter 0 must be a pair of tensors (A, B), a list with such a pair or"),
    ([[3]], {}, TypeError, "adapter 0, slice 0 must be a pair of tensors (A, B) or None, got int"),
    ([[pair()[:1]]], {}, TypeError, "(A, B) or None, got tuple of (Tensor)"),
    ([[pair(), [1, 2]]], {}, TypeError, "slice 1 must be a pair of tensors (A, B) or None, got li"),
    (
        [tuple(t.float().numpy() for t in pair())],
        {},
        TypeError,
        "adapter 0, slice 0 must be a pair of tensors (A, B) or None, got ndarray",
    ),
    ([pair()], {"scales": 2.0}, TypeError, "scales must be a list of one per adapter, got float"),
    ([pair()], {"scales": plain(1)}, TypeError, "scales must be a list of one per adapter, got Te"),
    ([pair()], {"scales": ["2"]}, TypeError, "scale of adapter 0 must be a number or a list of on"),
    ([pair()], {"scales": [[None]]}, TypeError, "number or a list of one per slice, got list with"),
    ([pair()], {"scales": [1, 2]}, ValueError, "scales must have one entry per adapter = 1, got 2"),
    ([pair()], {"scales": [[1, 2]]}, ValueError, "one number or one per slice = 1, got 2"),
    ([pair()], {"scales": [1e39]}, ValueError, "scale of adapter 0 must fit float32, got 1e+39"),
    ([pair()], {"scales": [10**400]}, ValueError, "scale of adapter 0 must fit float32, got 100"),
    ([pair(), [pair(), pair()]], {}, ValueError, "adapter 0 must have 2 slices, got 1"),
    ([[pair(), None]], {}, ValueError, "widths must be given, as no adapter has a pair for slice"),
    ([pair()], {"widths": 24}, TypeError, "widths must be a list of integers, got int"),
    ([pair()], {"widths": [2.5]}, TypeError, "widths must be an integer, got float"),
    (
        [pair()],
        {"widths": [23]},
        ValueError,
        "B of adapter 0, slice 0 must have shape (23, 4), got",
    ),
    ([pair()], {"widths": [24, 3]}, ValueError, "adapter 0 must have 2 slices, got 1"),
    ([[pair()] * 9], {}, ValueError, "adapters must have 1 to 8 slices, got 9"),
    ([pair()] * 2, {"capacity": 1}, ValueError, "capacity must be at least the number of adapters"),
    ([pair()], {"capacity": 4097}, ValueError, "capacity must be at most 4096, got 4097"),
    ([pair()], {"capacity": "9"}, TypeError, "capacity must be an integer, got str"),
    ([None] * 4097, {}, ValueError, "adapters must be at most 4096, got 4097"),
    ([pair()], {"max_rank": 3}, ValueError, "have a rank of at most max_rank = 3, got 4"),
    ([pair()], {"max_rank": 513}, ValueError, "max_rank must be 1 to 512, got 513"),
    ([pair()], {"max_rank": 8.0}, TypeError, "max_rank must be an integer, got float"),
    ([pair(0)], {}, ValueError, "must be [rank, K] with a rank of 1 to 512, got shape (0, 40)"),
    ([pair(600)], {}, ValueError, "must be [rank, K] with a rank of 1 to 512, got shape (600, 40)"),
    (
        [(pair(8, 4096)[0].T.contiguous(), pair(8)[1])],  # transposed
        {},
        ValueError,
        "A of adapter 0, slice 0 must be [rank, K] with a rank of 1 to 512, got shape (4096, 8)",
    ),
    (
        [(pair()[0].T.contiguous(), pair()[1])],  # transposed, and no rank too large
        {},
        ValueError,
        "B of adapter 0, slice 0 must have shape (24, 40), got (24, 4) (A has (40, 4))",
    ),
    (
        [pair(), pair(hidden=41)],
        {},
        ValueError,
        "A of adapter 1, slice 0 must have shape (4, 40), g",
    ),
    ([pair(), pair(width=23)], {}, ValueError, "shape (24, 4), got (23, 4) (A has (4, 40))"),
    ([pair(), (pair()[0], pair(5)[1])], {}, ValueError, "must have shape (24, 4), got (24, 5)"),
    (
        [pair(), pair(dtype=FP16)],
        {},
        TypeError,
        "must have dtype torch.bfloat16, got torch.float16",
    ),
    ([(pair()[0], pair(dtype=FP32)[1])], {}, TypeError, "dtype torch.bfloat16, got torch.float32"),
    ([pair(dtype=torch.float64)], {}, TypeError, "float32, float16 or bfloat16, got torch.float64"),
    (
        [pair(), pair(device="meta")],
        {},
        TypeError,
        "A of adapter 1, slice 0 must be on cpu, got met",
    ),
    ([pair(device="meta")], {}, ValueError, "must hold memory, got a Tensor without any"),
    ([(plain(40, 4).T, pair()[1])], {}, ValueError, "must be contiguous, got strides (1, 4)"),
    ([(plain(4, 40).to_sparse(), pair()[1])], {}, ValueError, "contiguous, got torch.sparse_coo"),
    (
        [(torch._neg_view(plain(4, 40)), pair()[1])],
        {},
        ValueError,
        "hold its own values (resolve_n",
    ),
    ([(pair()[0], misaligned(24, 4))], {}, ValueError, "must be aligned to 16 bytes (clone() it)"),
    ([(plain(4), pair()[1])], {}, ValueError, "[rank, K] with a rank of 1 to 512, got shape (4,)"),
]


@pytest.mark.parametrize(
    "adapters, options, error, message", TABLES, ids=[case[-1] for case in TABLES]
)
def test_from_adapters_refuses(adapters, options, error, message):
    with pytest.raises(error, match=f"^{FROM}.*{re.escape(message)}"):
        lora.Weights.from_adapters(adapters, **options)


UPDATES = [
    ((3, None), ValueError, "slot must be in [0, 3), got 3"),
    (("0", None), TypeError, "slot must be an integer, got str"),
    ((0, 5), TypeError, "adapter 0 must be a pair of tensors"),
    ((0, [pair()]), ValueError, "adapter 0 must have 2 slices, got 1"),
    ((0, []), ValueError, "adapter 0 must have 2 slices, got 0"),
    ((1, [pair(9), None]), ValueError, "rank of at most max_rank = 8, got 9"),
    ((1, [pair(4, 41), None]), ValueError, "A of adapter 1, slice 0 must have shape (4, 40)"),
    ((1, [pair(), None], None), TypeError, "scale of adapter 1 must be a number"),
]


@pytest.mark.parametrize("args, error, message", UPDATES, ids=[case[-1] for case in UPDATES])
def test_a_failed_update_changes_nothing(args, error, message):
    t = make(PROBLEM, "cpu")
    weights = t.table()
    before, handle = weights.apply_args[0].clone(), weights.handle
    with pytest.raises(error, match="^Weights.update: .*" + re.escape(message)):
        weights.update(*args)
    assert weights.handle is handle and torch.equal(weights.apply_args[0], before)
    check_against_reference(t, weights)


def test_workspace_size_names_what_it_got(device):
    weights = make(PROBLEM, device).table()
    for wrong, error, got in (
        ([1], TypeError, "a tensor, got list"),
        (None, TypeError, "a tensor, got NoneType"),
        (torch.zeros(40), ValueError, r"shape \[M, K\], got \(40,\)"),
    ):
        with pytest.raises(error, match=f"^Weights.workspace_size: x must (be|have) {got}"):
            weights.workspace_size(wrong)


def a3(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


A, B = a3(3, 8, 40), a3(3, 24, 8)
STACKED = [
    (A, [B], {}, TypeError, "a must be a list of tensors, got Tensor"),
    ([A], None, {}, TypeError, "b must be a list of tensors, got NoneType"),
    ([A], [[1.0]], {}, TypeError, r"b\[0\] must be a tensor, got list"),
    ([A], [B], {"ranks": [8, 8, 8]}, TypeError, "ranks must be a tensor or None, got list"),
    ([A], [B], {"scales": 2.0}, TypeError, "scales must be a tensor or None, got float"),
    ([], [], {}, ValueError, "number of slices must be 1 to 8, got 0"),
    ([A] * 9, [B] * 9, {}, ValueError, "number of slices must be 1 to 8, got 9"),
    ([A, A], [B], {}, ValueError, "a and b must have one tensor per slice each, got 2 and 1"),
    ([A[0]], [B], {}, ValueError, r"a\[0\] must have 3 dimensions, got shape \(8, 40\)"),
    ([A], [B[0]], {}, ValueError, r"b\[0\] must have 3 dimensions, got shape \(24, 8\)"),
    ([A], [a3(2, 24, 8)], {}, ValueError, r"b\[0\] must hold 3 adapters as a\[0\] does"),
    ([A], [a3(3, 24, 7)], {}, ValueError, r"b\[0\] must have rank 8 in its last dimension"),
    ([A, a3(3, 8, 41)], [B, B], {}, ValueError, r"a\[1\] must have width K = 40"),
    ([A, A.float()], [B, B], {}, TypeError, r"a\[1\] must have dtype bfloat16 as a\[0\] has"),
    ([A], [B.half()], {}, TypeError, r"b\[0\] must have dtype bfloat16 .*, got float16"),
    ([A.int()], [B.int()], {}, TypeError, r"a\[0\] must have dtype float32 or .*, got int32"),
    ([A.bool()], [B], {}, TypeError, "a must have dtype .*, got bool"),
    (
        [a3(3, 0, 40)],
        [a3(3, 24, 0)],
        {},
        ValueError,
        r"a\[0\] must have a rank of 1 to 512 .*got shape \(3, 0, 40\)",
    ),
    (
        [a3(3, 513, 4)],
        [a3(3, 2, 513)],
        {},
        ValueError,
        r"a\[0\] must have a rank of 1 to 512 in dimension 1, got shape \(3, 513",
    ),
    ([a3(0, 8, 40)], [a3(0, 24, 8)], {}, ValueError, "number of adapters must be 1 to 4096, got 0"),
    ([a3(3, 40, 8).mT], [B], {}, ValueError, r"a\[0\] must have stride 1 in its last dimension"),
    ([A], [B], {"ranks": torch.zeros(2, dtype=torch.int32)}, ValueError, r"ranks .* \(3\), got"),
    ([A], [B], {"ranks": torch.zeros(3)}, TypeError, "ranks must have dtype int32, got float32"),
    ([A], [B], {"scales": torch.zeros(4)}, ValueError, r"scales must have shape \(3\), got \(4\)"),
    ([A], [B], {"scales": a3(3)}, TypeError, "scales must have dtype float32, got bfloat16"),
    ([A], [B], {"scales": torch.zeros(6)[::2]}, ValueError, "scales must be contiguous"),
]


@pytest.mark.parametrize(
    "a, b, options, error, message", STACKED, ids=[case[-1] for case in STACKED]
)
def test_stacked_refuses(a, b, options, error, message):
    with pytest.raises(error, match="^Weights.stacked: .*" + message):
        lora.Weights.stacked(a, b, **options)


def test_stacked_takes_the_four_dimensions_of_vllm(device):
    t = make(PROBLEM, device)
    flat = t.stacked()
    a, b, ranks, scales = flat.apply_args
    deep = lora.Weights.stacked([m[:, None] for m in a], [m[:, None] for m in b], ranks, scales)
    plan = t.plan()
    want = lora.apply(t.y.clone(), t.x, flat, plan)
    assert torch.equal(lora.apply(t.y.clone(), t.x, deep, plan), want)


def test_no_columns_is_a_sum_of_nothing(device):
    """K = 0, in both forms of weights; rows without an adapter stay."""
    a, b = torch.empty(3, 0, device=device), torch.randn(8, 3, device=device)
    plan = lora.plan(torch.tensor([0, 1, -1], device=device), 2)
    x, old = torch.empty(3, 0, device=device), torch.full((3, 8), 7.0, device=device)
    for weights in (
        lora.Weights.from_adapters([(a, b), (a, b)]),
        lora.Weights.stacked([a.expand(2, 3, 0)], [b.expand(2, 8, 3)]),
    ):
        y = lora.apply(old.clone(), x, weights, plan, add_inputs=False)
        assert y.tolist() == [[0.0] * 8, [0.0] * 8, [7.0] * 8]
        assert torch.equal(lora.apply(old.clone(), x, weights, plan), old)


def test_a_slice_without_columns_has_its_h(device):
    """N_s = 0, in both forms of weights: B has no address then, and shrink needs none."""
    pairs = [(torch.randn(3, 16, device=device), torch.randn(n, 3, device=device)) for n in (0, 8)]
    plan, x = lora.plan(torch.zeros(4, dtype=torch.int32, device=device), 1), torch.randn(4, 16)
    x = x.to(device)
    for weights in (
        lora.Weights.from_adapters([pairs]),
        lora.Weights.stacked([a[None] for a, _ in pairs], [b[None] for _, b in pairs]),
    ):
        h = lora.shrink(x, weights, plan)
        for s, (a, _) in enumerate(pairs):
            torch.testing.assert_close(h[s], x @ a.T)
        y = lora.apply(torch.zeros(4, 8, device=device), x, weights, plan)
        torch.testing.assert_close(y, x @ pairs[1][0].T @ pairs[1][1].T)


def test_traffic_counts_what_is_used():
    """Weights of adapters with tokens, x once, y read and written."""
    sizes = lib.lora_traffic(40, [24, 16], [8, 8, 3, 0, 5, 5], [10, 4, 0], BF16, FP32, True)
    weights = (8 * (40 + 24) + 8 * (40 + 16) + 3 * (40 + 24)) * 4
    y = 2 * 2 * (10 * (24 + 16) + 4 * 24)
    flops = 2 * (10 * 8 * (64 + 56) + 4 * 3 * 64)
    assert list(sizes) == [weights, 2 * 40 * 14, y, flops]
