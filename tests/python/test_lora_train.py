# SPDX-License-Identifier: Apache-2.0
"""LoRA training against the float64 reference: values, gradients, switches, layouts, bits."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_train_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    MIXTURES,
    Case,
    Problem,
    assert_bitwise,
    check_forward,
    check_gradients,
    weight_gradients,
)
from mortar import lora, lora_train

FORMS = {
    "one": {"rows": (37,), "ranks": (6,)},
    "slices": {"rows": (21,), "ranks": ((4, 13, 9),), "widths": (24, 8, 17)},
    "segments": {"rows": (9, 0, 23, 1), "ranks": (4, 16, 3, 64), "form": "segments"},
    "plan": {"rows": (9, 0, 23, 1), "ranks": (4, 16, 3, 64), "form": "plan", "base_rows": 7},
    "sliced plan": {
        "rows": (12, 5, 8), "ranks": ((4, 0), (8, 16), (0, 3)), "widths": (24, 40),
        "form": "plan", "base_rows": 3,
    },
}  # fmt: skip


def run(case: Case):
    """Forward and backward, checked against the reference."""
    leaves = case.leaves()
    y = case.forward()
    torch.autograd.backward(y, case.dy)
    with torch.no_grad():
        check_forward(case, y)
        check_gradients(case, case.x.grad, *weight_gradients(case))
        for base, dy in zip(case.base or [], case.dy, strict=case.base is not None):
            assert torch.equal(base.grad, dy)
    return [*y, *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_matches_reference(device, form, dtypes):
    run(Case(Problem(**FORMS[form], dtypes=dtypes), device))


@pytest.mark.parametrize("form", FORMS)
def test_without_a_base_and_without_h(device, form):
    case = Case(Problem(**FORMS[form], with_base=False), device)
    kept = run(case)
    for leaf in case.leaves():
        leaf.grad = None
    y = case.forward(save_h=False)
    torch.autograd.backward(y, case.dy)
    assert_bitwise([*y, *(t.grad for t in case.leaves())], kept)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 70),
    hidden=st.integers(1, 90),
    width=st.integers(1, 90),
    rank=st.integers(1, 80),
    dtypes=st.sampled_from(MIXTURES),
    seed=st.integers(0, 2**20),
)
def test_any_size(device, rows, hidden, width, rank, dtypes, seed):
    run(Case(Problem((rows,), hidden, (width,), (rank,), dtypes, seed=seed), device))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_gradients_of_no_rows_are_zeros(device, dtype):
    """They are written, whatever their memory held before."""
    case = Case(Problem((0,), 75, (90,), (1,), (dtype,) * 3), device)
    used = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in (75, 90) for _ in range(8)]
    del used
    run(case)


@pytest.mark.parametrize("rank", [1, 8, 24, 130, 512])
def test_ranks(device, rank):
    run(Case(Problem((33,), 72, (56,), (rank,), (BF16, BF16, BF16)), device))


@pytest.mark.parametrize("wanted", ["x", "a", "b", "xa", "xb", "ab", "base", ""])
def test_only_what_is_wanted(device, wanted):
    case = Case(Problem(), device)
    named = dict(zip(("x", "a", "b", "base"), case.leaves(), strict=True))
    whole = torch.autograd.grad(case.forward(), list(named.values()), case.dy)
    chosen = ["base"] if wanted == "base" else list(wanted)
    for name, leaf in named.items():
        leaf.requires_grad_(name in chosen)
    y = case.forward()
    assert y[0].requires_grad == bool(wanted)
    if not wanted:
        return
    torch.autograd.backward(y, case.dy)
    for (name, leaf), want in zip(named.items(), whole, strict=True):
        if name in chosen:
            assert_bitwise([leaf.grad], [want])
        else:
            assert leaf.grad is None


def test_nothing_is_saved_that_no_gradient_needs(device):
    case = Case(Problem(), device)
    case.leaves()
    sizes = {}

    def count(t):
        return sizes.setdefault("all", []).append(tuple(t.shape)) or t

    x, (a, b) = case.x, case.adapters[0][0]
    for wanted, expected in (
        ((True, True, True), {(19, 40), (19, 8)}),
        ((True, False, False), set()),
        ((True, False, True), {(19, 8)}),
        ((False, True, False), {(19, 40)}),
    ):
        sizes.clear()
        for t, wants in zip((x, a, b), wanted, strict=True):
            t.requires_grad_(wants)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            case.forward()
        assert set(sizes["all"]) - {tuple(a.shape), tuple(b.shape)} == expected


@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (BF16, BF16, BF16)], ids=str)
def test_same_bits_whatever_the_strides(device, dtypes):
    """Transposed, sliced and misaligned views of everything; also an expanded dy."""
    case = Case(Problem((37,), 40, (24,), (6,), dtypes), device)
    want = run(case)
    transposed, shifted = Case(case.problem, device), Case(case.problem, device)

    def turned(t):
        return t.detach().t().contiguous().t()

    def moved(t):
        room = torch.full((t.shape[0] + 1, t.shape[1] + 3), float("nan"), device=device)
        view = room.to(t.dtype)[1:, 1:-2]
        return view.copy_(t.detach())

    for other, change in ((transposed, turned), (shifted, moved)):
        other.x = change(other.x)
        other.adapters = [[tuple(change(w) for w in other.adapters[0][0])]]
        other.base, other.dy = [change(other.base[0])], [change(other.dy[0])]
        assert_bitwise(run(other), want)


def test_expanded_gradient(device):
    case = Case(Problem(), device)
    case.leaves()
    case.dy = [torch.ones_like(case.dy[0])]
    case.forward()[0].sum().backward()
    check_gradients(case, case.x.grad, *weight_gradients(case))


def test_leading_dimensions_without_columns(device):
    """No stride steps through them, and none needs to."""
    case = Case(Problem((24,)), device)
    a, b = case.adapters[0][0]
    base = torch.zeros(2, 6, 4, 1, device=device)[:, ::2, :, :0]
    x = case.x.view(2, 3, 4, 40)
    for out in (None, base):
        assert lora.linear(x, a, b[:0], base=base, out=out).shape == base.shape
    bare = torch.zeros(2, 6, 4, 1, device=device)[:, ::2, :, :0]
    assert (lora.linear(bare, a[:, :0], b) == 0).all()


def test_leading_dimensions(device):
    case = Case(Problem((24,)), device)
    a, b = case.adapters[0][0]
    want = lora.linear(case.x, a, b, 0.5, base=case.base[0])
    for lead in ((2, 3, 4), (1, 24), (24, 1, 1)):
        got = lora.linear(
            case.x.view(*lead, 40), a, b, 0.5, base=case.base[0].view(*lead, 24)
        )  # fmt: skip
        assert got.shape == (*lead, 24)
        assert torch.equal(got.view(24, 24), want)
    row = lora.linear(case.x[3], a, b, 0.5, base=case.base[0][3])
    assert row.shape == (24,)
    assert torch.equal(row, want[3])


@pytest.mark.parametrize("form", FORMS)
def test_in_place_and_given_outputs_have_the_same_bits(device, form):
    case = Case(Problem(**FORMS[form], dtypes=(BF16, FP32, BF16)), device)
    with torch.no_grad():
        want = case.forward()
        given = [torch.full_like(t, float("nan")) for t in want]
        assert all(y is t for y, t in zip(case.forward(out=given), given, strict=True))
        assert_bitwise(given, want)
        base = [t.clone() for t in case.base]
        case.forward(out=base, base=base)
        assert_bitwise(base, want)


@pytest.mark.parametrize("slices", [1, 2])
def test_in_place_onto_views_has_gradients(device, slices):
    """Onto columns of one product for q and k, as wide as x so that no shape tells gradients
    apart; the tensor that they are views of has the gradient, too."""
    case = Case(Problem(hidden=24, widths=(24,) * slices, ranks=((6,) * slices,)), device)
    leaves = case.leaves()
    a, b = ([pair[i] for pair in case.adapters[0]] for i in (0, 1))
    results = []
    for in_place in (True, False):
        product = torch.cat([*case.base, case.x], 1) * 1.0
        views = [product[:, 24 * s : 24 * (s + 1)] for s in range(slices)]
        if in_place:
            y = lora.linear(case.x, a, b, 0.5, base=views, out=views)
            assert all(one is view for one, view in zip(y, views, strict=True))
        else:
            y = lora.linear(case.x, a, b, 0.5, base=views)
            product = torch.cat([*y, product[:, 24 * slices :]], 1)
        weights = torch.arange(1.0, product.numel() + 1, device=device).view_as(product)
        results.append([product, *torch.autograd.grad((product * weights).sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_in_place_onto_views_of_what_has_no_gradient(device):
    """Columns of one frozen product: the first slice gives it the gradient that the next one then
    finds."""
    case = Case(Problem(widths=(24, 8), ranks=((6, 6),)), device)
    a, b = ([pair[i].requires_grad_() for pair in case.adapters[0]] for i in (0, 1))
    results = []
    for in_place in (True, False):
        product = torch.cat(case.base, 1)
        views = [product[:, :24], product[:, 24:]]
        y = lora.linear(case.x, a, b, 0.5, base=views, out=views if in_place else None)
        product = product if in_place else torch.cat(y, 1)
        results.append([product, *torch.autograd.grad(product.square().sum(), [*a, *b])])
    assert_bitwise(*results)


def test_in_place_onto_the_base_has_gradients(device):
    case = Case(Problem(), device)
    leaves = case.leaves()
    want = torch.autograd.grad(case.forward(), leaves, case.dy)
    base = [case.base[0].clone()]  # not a leaf
    y = case.forward(base=base, out=base)
    assert y[0] is base[0]
    assert_bitwise(torch.autograd.grad(y, leaves, case.dy), want)
    with pytest.raises(RuntimeError, match="out must be the base"):
        case.forward(out=[torch.empty_like(case.base[0])])


@pytest.mark.parametrize("other", ["leaf", "inference"])
def test_in_place_onto_what_autograd_would_refuse(device, other):
    """The first slice might change, the second must not: neither has when the error comes."""
    case = Case(Problem(widths=(24, 24), ranks=((6, 6),)), device)
    case.leaves()
    fresh = [t.detach() * 1.0 for t in case.base]
    with torch.inference_mode(other == "inference"):
        base = [fresh[0], fresh[1].clone()]
    kept = [t.clone() for t in fresh]
    wanted = "no tensor of inference mode"
    if other == "leaf":
        base[1].requires_grad_()
        wanted = "no leaf that requires a gradient"
    for both in (base, base[::-1]):
        with pytest.raises(RuntimeError, match=f"^linear: out must be {wanted}"):
            case.forward(base=both, out=both)
        for got, old in zip(base, kept, strict=True):
            assert torch.equal(got, old)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_backward_accumulates_into_what_is_there(device, grad_dtype):
    case = Case(Problem(dtypes=(BF16, BF16, BF16), p=(0.25,)), device)
    a, b = case.adapters[0][0]
    rng = torch.tensor([5, 7], device=device)
    dx, da, db = (torch.randn(t.shape, device=device).to(grad_dtype) for t in (case.x, a, b))
    before = [t.double() for t in (dx, da, db)]
    options = {"x": case.x, "dropout": 0.25, "rng": rng}
    lora_train.backward(case.dy[0], a, b, 0.5, dx=dx, da=da, db=db, add=True, **options)
    alone = [torch.full_like(t.float(), float("nan")) for t in (dx, da, db)]
    lora_train.backward(case.dy[0], a, b, 0.5, **options,
                        **dict(zip(("dx", "da", "db"), alone, strict=True)))  # fmt: skip
    check_gradients(case, alone[0], [[alone[1]]], [[alone[2]]], rng)
    roundoff = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}[grad_dtype]
    for got, old, new in zip((dx, da, db), before, alone, strict=True):
        want = old + new.double()
        # Two float32 roundings of the sum, or of `alone`, and one to the gradient's dtype.
        slack = 1.01 * roundoff * want.abs() + 2.0**-22 * (old.abs() + new.abs()) + 1e-7
        assert ((got.double() - want).abs() <= slack).all()


def test_an_adapter_without_rows_gets_zeros(device):
    case = Case(Problem(**FORMS["segments"]), device)
    run(case)
    for weight in case.adapters[1][0]:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_several_adapters_equal_separate_steps(device):
    """Each adapter's gradients depend on its own rows, not on who else is in the batch."""
    case = Case(Problem(**FORMS["segments"], with_base=False), device)
    run(case)
    start = 0
    for (a, b), rows, scale in zip(
        (row[0] for row in case.adapters), case.problem.rows, case.scales, strict=True
    ):
        part = slice(start, start + rows)
        x = case.x.detach()[part].requires_grad_()
        alone = [w.detach().clone().requires_grad_() for w in (a, b)]
        y = lora.linear(x, *alone, scale)
        got = torch.autograd.grad(y, [x, *alone], case.dy[0][part])
        for one, other in zip(got, (case.x.grad[part], a.grad, b.grad), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        start += rows


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("form", ["one", "segments", "plan"])
def test_empty(device, form, rows):
    case = Case(Problem((rows,), ranks=(6,), form=form), device)
    run(case)


def test_repeatable(device):
    problem = Problem((301,), 130, (77,), (17,), (BF16, BF16, BF16), p=(0.3,))
    results = []
    for _ in range(3):
        torch.manual_seed(5)
        case = Case(problem, device)
        leaves = case.leaves()
        y = case.forward()
        results.append([*y, *torch.autograd.grad(y, leaves, case.dy)])
    assert_bitwise(results[1], results[0])
    assert_bitwise(results[2], results[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_rows(device, value):
    case = Case(Problem((19,)), device)
    case.x[3, 5] = value
    leaves = case.leaves()
    y = case.forward()[0]
    dx, da, db, _ = torch.autograd.grad(y, leaves, case.dy)
    finite = torch.isfinite(y).all(1)
    assert not finite[3]
    assert finite.sum() == 18
    assert torch.isfinite(dx).all()  # dx does not read x
    assert not torch.isfinite(da[:, 5]).any()
    assert torch.isfinite(da[:, :5]).all()
    assert not torch.isfinite(db).any()


def test_float16_overflow_is_left_as_inf(device):
    case = Case(Problem(dtypes=(FP16, FP16, FP16), with_base=False), device)
    with torch.no_grad():
        case.x.fill_(100.0)
        for w in case.adapters[0][0]:
            w.fill_(100.0)
    assert torch.isinf(case.forward()[0]).all()
