# SPDX-License-Identifier: Apache-2.0
"""The LoRA ops against the float64 reference: sizes, dtypes, views, maps, and what must not be
written."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_cases import (
    BF16,
    FP16,
    FP32,
    ROUNDOFF,
    Problem,
    apply_bound,
    assert_within,
    make,
    shrink_bound,
)
from mortar import lora, reference

DTYPES = [BF16, FP16, FP32]
FORMS = ["table", "stacked"]

# Around the edges of vectors (8), leaves (256, 512) and tiles (16, 64) of the backends.
SIZES = [
    Problem(tokens=0),
    Problem(tokens=1),
    Problem(tokens=1, hidden=1, widths=(1,), ranks=(1,)),
    Problem(tokens=2, hidden=2, widths=(2,)),
    Problem(tokens=15, hidden=7, widths=(7,), ranks=(1, 2, 3)),
    Problem(tokens=16, hidden=8, widths=(8,), ranks=(7, 8, 9)),
    Problem(tokens=17, hidden=9, widths=(9,), ranks=(15, 16, 17)),
    Problem(tokens=63, hidden=255, widths=(129,), ranks=(31, 32, 33)),
    Problem(tokens=64, hidden=256, widths=(128,), ranks=(63, 64)),
    Problem(tokens=65, hidden=257, widths=(127,), ranks=(65, 100)),
    Problem(tokens=5, hidden=511, widths=(33,), ranks=(127, 128)),
    Problem(tokens=5, hidden=513, widths=(31,), ranks=(129, 256)),
    Problem(tokens=3, hidden=2047, widths=(65,), ranks=(511, 512)),
    Problem(tokens=3, hidden=2049, widths=(63,), ranks=(16,)),
    Problem(tokens=5, hidden=4096, widths=(24,), ranks=(8, 8)),
    Problem(tokens=9, hidden=4097, widths=(24,), ranks=(8, 8)),
    Problem(tokens=130, hidden=96, widths=(40,), ranks=(16,), map="one"),
    Problem(tokens=7, map="base"),
    Problem(tokens=4, ranks=(8,) * 40),
    Problem(tokens=200, hidden=32, widths=(16,), ranks=tuple(range(1, 65)), map="blocks"),
    Problem(widths=(64, 16, 16), ranks=(8, 32)),
    Problem(widths=(1, 8, 17, 64, 5, 128, 3, 2), ranks=(4, 12)),
    Problem(hidden=33, widths=(15, 30), ranks=((8, 0), (0, 16), (24, 3), (0, 0))),
]


def check_apply(problem: Problem, device, form: str, scale: float = 1.0, add_inputs: bool = True):
    t = make(problem, device)
    want = reference.lora.apply(
        t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales, scale, add_inputs
    )
    before = t.y.clone()
    y = lora.apply(t.y, t.x, t.weights(form), t.plan(), scale=scale, add_inputs=add_inputs)
    assert y is t.y
    assert_within(y, want, apply_bound(t, want, scale))
    base = t.token_adapter < 0
    assert torch.equal(y[base], before[base])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("problem", SIZES, ids=str)
def test_sizes(device, problem, form):
    check_apply(problem, device, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_dtypes(device, x_dtype, w_dtype, y_dtype, form):
    problem = Problem(hidden=260, widths=(72, 9), x_dtype=x_dtype, w_dtype=w_dtype, y_dtype=y_dtype)
    check_apply(problem, device, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("add_inputs", [True, False])
@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0])
def test_scale_and_overwrite(device, scale, add_inputs, form):
    check_apply(Problem(widths=(24, 40)), device, form, scale, add_inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("h_dtype", DTYPES)
def test_shrink_then_expand(device, x_dtype, h_dtype, form):
    if h_dtype is not FP32:
        h_dtype = x_dtype
    t = make(Problem(hidden=300, widths=(32, 8), x_dtype=x_dtype), device)
    weights, plan = t.weights(form), t.plan()
    want_h = reference.lora.shrink(t.x, t.adapters, t.token_adapter, t.scales, 0.5)
    h = torch.full(want_h.shape, float("nan"), dtype=h_dtype, device=device)
    assert lora.shrink(t.x, weights, plan, h, scale=0.5, zero_rows=t.token_adapter) is h
    assert_within(h, want_h, shrink_bound(t, 0.5, h_dtype))

    want = reference.lora.expand(t.y, h, t.adapters, t.token_adapter, t.widths)
    absolute = [[(a.abs(), b.abs()) for a, b in row] for row in t.adapters]
    size = reference.lora.expand(
        torch.zeros_like(want), h.abs(), absolute, t.token_adapter, t.widths
    )
    bound = size * (ROUNDOFF[BF16] + 32 * ROUNDOFF[FP32]) + 1.01 * ROUNDOFF[BF16] * want.abs()
    assert_within(lora.expand(t.y, h, weights, plan), want, bound)


def test_shrink_leaves_base_rows_alone(device):
    t = make(Problem(), device)
    h = torch.full((1, 33, 20), 7.0, device=device)
    lora.shrink(t.x, t.table(), t.plan(), h)
    assert (h[0, t.token_adapter < 0] == 7).all()
    for i, rank in enumerate(t.problem.ranks):
        assert (h[0, t.token_adapter == i, rank:] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("add_inputs", [True, False])
def test_writes_its_columns_only(device, add_inputs, form):
    """y lies inside a larger buffer of NaN, at an odd offset, and x likewise."""
    t = make(Problem(tokens=21, hidden=50, widths=(13, 6)), device)
    wide = torch.full((23, 40), float("nan"), dtype=BF16, device=device)
    y = wide[1:22, 3:37]
    y[:, 5:24] = t.y
    x = torch.full((21, 61), float("nan"), dtype=BF16, device=device)[:, 7:57]
    x.copy_(t.x)
    want = reference.lora.apply(
        t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales, add_inputs=add_inputs
    )
    lora.apply(y, x, t.weights(form), t.plan(), offset=5, add_inputs=add_inputs)
    assert_within(y[:, 5:24], want, apply_bound(t, want))
    y[:, 5:24] = float("nan")
    assert wide.isnan().all()


def test_strided_h(device):
    t = make(Problem(widths=(16, 8)), device)
    weights, plan = t.table(), t.plan()
    h = lora.shrink(t.x, weights, plan, zero_rows=t.token_adapter)
    other = torch.full((33, 2, 23), float("nan"), device=device).permute(1, 0, 2)[..., 3:20]
    lora.shrink(t.x, weights, plan, other, zero_rows=t.token_adapter)
    assert torch.equal(other[..., :16], h)
    y = t.y.clone()
    lora.expand(t.y, h, weights, plan)
    lora.expand(y, other, weights, plan)
    assert torch.equal(t.y, y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_values_stay_in_their_row(device, bad):
    t = make(Problem(hidden=130), device)
    weights, plan = t.table(), t.plan()
    clean = lora.apply(t.y.clone(), t.x, weights, plan)
    row = int((t.token_adapter >= 0).nonzero()[3])
    t.x[row, 77] = bad
    got = lora.apply(t.y.clone(), t.x, weights, plan)
    others = torch.arange(33, device=device) != row
    assert torch.equal(got[others], clean[others])
    assert not torch.isfinite(got[row]).any()


@pytest.mark.parametrize("form", FORMS)
def test_ids_out_of_range_count_as_base(device, form):
    t = make(Problem(), device)
    t.token_adapter[::4] = torch.tensor([3, -2, 99, 2**31 - 1, -(2**31), 3, 7, 8, 9]).to(device)
    before = t.y.clone()
    want = reference.lora.apply(t.y, t.x, t.adapters, t.token_adapter, t.widths, t.scales)
    lora.apply(t.y, t.x, t.weights(form), t.plan())
    assert_within(t.y, want, apply_bound(t, want))
    assert torch.equal(t.y[::4], before[::4])


def test_repeats_bitwise(device):
    t = make(Problem(tokens=40, hidden=300, widths=(33, 7)), device)
    weights = t.table()
    first = lora.apply(t.y.clone(), t.x, weights, t.plan())
    for _ in range(1000):
        assert torch.equal(lora.apply(t.y.clone(), t.x, weights, t.plan()), first)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("form", FORMS)
def test_batch_invariant(device, tokens, form):
    """A token's bits depend on neither its place nor its neighbours."""
    t = make(Problem(tokens=tokens, hidden=700, widths=(40, 24), ranks=(8, 40, 16)), device)
    weights = t.weights(form)
    whole = lora.apply(t.y.clone(), t.x, weights, t.plan())
    order = torch.randperm(tokens).to(device)
    shuffled = lora.apply(
        t.y[order], t.x[order], weights, lora.plan(t.token_adapter[order], t.num_adapters)
    )
    assert torch.equal(shuffled, whole[order])
    for row in range(0, tokens, 7):
        one = slice(row, row + 1)
        alone = lora.apply(
            t.y[one].clone(), t.x[one], weights, lora.plan(t.token_adapter[one], t.num_adapters)
        )
        assert torch.equal(alone, whole[one])


def test_both_forms_agree_bitwise(device):
    t = make(Problem(hidden=500, widths=(40, 24)), device)
    one = lora.apply(t.y.clone(), t.x, t.table(), t.plan())
    assert torch.equal(lora.apply(t.y.clone(), t.x, t.stacked(), t.plan()), one)


@pytest.mark.parametrize(
    "tokens, num_adapters",
    [(0, 1), (1, 1), (255, 3), (256, 4096), (257, 2), (5000, 4096), (40_000, 100), (2**20, 4096)],
)
@pytest.mark.parametrize("kind", ["random", "one", "base"])
def test_plan_groups_every_token(device, tokens, num_adapters, kind):
    """With K = N = R = 1 the result says which adapter each token met, and that it met it once."""
    ids = torch.randint(-1, num_adapters, (tokens,), dtype=torch.int32)
    ids = {"random": ids, "one": torch.zeros_like(ids), "base": torch.full_like(ids, -1)}[kind]
    a = torch.arange(1, num_adapters + 1, dtype=FP32).view(-1, 1, 1).to(device)
    weights = lora.Weights.stacked([a], [torch.ones_like(a)])
    x = torch.ones(tokens, 1, device=device)
    plan = lora.plan(ids.to(device), num_adapters)
    y = lora.apply(torch.full_like(x, 0.5), x, weights, plan)
    assert torch.equal(y[:, 0].cpu(), ids + 1.5)
    report = lora.check(plan)
    assert report[:2] == (tokens, num_adapters)
    assert report.num_active == (ids >= 0).sum()
    assert report.num_groups == ids[ids >= 0].unique().numel()
    assert report[4:] == (0, -1)


def test_plan_is_rewritten_in_place(device):
    t = make(Problem(tokens=50), device)
    weights, out = t.table(), t.plan()
    for _ in range(3):
        ids = torch.randint(-1, 3, (30,), dtype=torch.int32, device=device)
        plan = lora.plan(ids, 3, out=out)
        assert plan.data is out.data and plan.num_tokens == 30
        want = reference.lora.apply(t.y[:30], t.x[:30], t.adapters, ids, t.widths, t.scales)
        smaller = replace(t, x=t.x[:30], y=t.y[:30], token_adapter=ids)
        got = lora.apply(t.y[:30].clone(), t.x[:30], weights, plan)
        assert_within(got, want, apply_bound(smaller, want))


def test_workspace_of_the_caller(device):
    t = make(Problem(tokens=40, hidden=300), device)
    weights, plan = t.table(), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    size = weights.workspace_size(t.x)
    buffer = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device=device)
    assert torch.equal(lora.apply(t.y, t.x, weights, plan, workspace=buffer[:size]), want)
    assert (buffer[size:] == 0xA5).all()


problems = st.builds(
    Problem,
    tokens=st.integers(0, 90),
    hidden=st.integers(1, 600),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=4).map(tuple),
    ranks=st.lists(st.integers(1, 70), min_size=1, max_size=9).map(tuple),
    x_dtype=st.sampled_from(DTYPES),
    w_dtype=st.sampled_from(DTYPES),
    y_dtype=st.sampled_from(DTYPES),
    map=st.sampled_from(["random", "base", "one", "blocks"]),
    seed=st.integers(0, 1000),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    problem=problems,
    form=st.sampled_from(FORMS),
    scale=st.floats(-2, 2, width=16),
    add=st.booleans(),
)
def test_any_problem(device, problem, form, scale, add):
    check_apply(problem, device, form, scale, add)
