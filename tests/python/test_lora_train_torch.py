# SPDX-License-Identifier: Apache-2.0
"""How LoRA training behaves in PyTorch: gradcheck, opcheck, compile, autocast, graphs, hooks."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from lora_train_cases import BF16, FP32, Case, Problem, assert_bitwise, drawn
from mortar import _lora_train_ops, lora

ops = torch.ops.mortar
SEGMENTS = {"rows": (3, 0, 4), "ranks": ((2, 3), (1, 0), (0, 4)), "widths": (5, 4), "hidden": 6,
            "form": "segments"}  # fmt: skip


def as_double(case: Case) -> Case:
    case.x, case.base = case.x.double(), [t.double() for t in case.base]
    case.adapters = [[q and tuple(w.double() for w in q) for q in row] for row in case.adapters]
    return case


@pytest.mark.parametrize("drops_delta", [False, True], ids=["input", "delta"])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("sizes", [{"rows": (5,), "hidden": 6, "widths": (4,), "ranks": (3,)},
                                   SEGMENTS], ids=["one", "segments"])  # fmt: skip
def test_gradcheck(device, sizes, p, drops_delta):
    shape = Problem(**sizes, p=(p,) * len(sizes["ranks"]), drops_delta=drops_delta)
    case = as_double(Case(shape, device))
    leaves = case.leaves()

    def function(*_):
        torch.manual_seed(1)
        return case.forward(dtype=None)

    assert torch.autograd.gradcheck(function, leaves)


def op_arguments(case: Case, rng=None):
    """(x, base, a, b), (rng, ..., drops_delta) of the ops."""
    slices = len(case.problem.widths)
    flat = [pair for row in case.adapters for pair in row]
    places = [i for i, pair in enumerate(flat) if pair is not None]
    a, b = ([flat[i][column] for i in places] for column in (0, 1))
    scales = [case.scales[i // slices] for i in places]
    offsets = case.rows() if case.problem.form == "segments" else None
    plan = case.rows().data if case.problem.form == "plan" else None
    rest = (rng, offsets, plan, list(case.problem.widths), places, scales, list(case.p),
            case.problem.drops_delta)  # fmt: skip
    return (case.x, case.base or [], a, b), rest


@pytest.mark.parametrize("form", ["segments", "plan"])
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck_forward(device, form, gradient):
    case = Case(Problem(**{**SEGMENTS, "form": form}, p=(0.3,) * 3), device)
    if gradient:
        case.leaves()
    tensors, rest = op_arguments(case, drawn(0, device))
    for save_h in (False, True):
        opcheck(ops.lora_train.default, (*tensors, *rest, FP32, save_h))


def test_opcheck_backward(device):
    case = Case(Problem(**SEGMENTS, p=(0.3,) * 3), device)
    (x, base, a, b), rest = op_arguments(case, drawn(0, device))
    *_, h = ops.lora_train(x, base, a, b, *rest, FP32, True)
    for wants in ((True,) * 9, (False, True) * 4 + (False,), (True, *[False] * 8)):
        opcheck(ops.lora_train_backward.default, (case.dy, x, h, a, b, *rest, wants, BF16))


def test_opcheck_mutating(device):
    case = Case(Problem(**SEGMENTS, p=(0.3,) * 3), device)
    (x, base, a, b), rest = op_arguments(case, drawn(0, device))
    y = [torch.empty_like(t) for t in base]
    opcheck(ops.lora_train_out.default, (x, base, a, b, y, None, *rest))
    da, db = [torch.zeros_like(w) for w in a], [torch.zeros_like(b[1])]
    args = (torch.zeros_like(x), da, db, [0, 1, 2, 3], [1], True, [True] * 4, [False], *rest)
    opcheck(ops.lora_train_backward_out.default, (case.dy, x, None, a, b, *args))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("form", ["one", "segments", "plan"])
def test_compile_forward_and_backward(device, form, dropout):
    """One graph, the same numbers; with the generator of eager mode the same masks."""
    p = (dropout,) * (1 if form == "one" else 3)
    sizes = {"rows": (9,), "ranks": (4,)} if form == "one" else {**SEGMENTS, "form": form}
    case = Case(Problem(**sizes, p=p, dtypes=(BF16, FP32, BF16)), device)
    leaves = case.leaves()
    rows = None if form == "one" else case.rows()
    drops = (1, 2) if form == "one" else (3, 5)

    def function(x, base):
        if form == "one":
            a, b = case.adapters[0][0]
            y = lora.linear(x * drops[0], a, b, 0.5, base=base[0], dropout=dropout)
            return (y * drops[1],)
        y = lora.mixed_linear(x * drops[0], case.adapters, rows, case.scales, base=base, dropout=p)
        return tuple(t * drops[1] for t in y)

    torch.manual_seed(4)
    y = function(case.x, case.base)
    want = [*y, *torch.autograd.grad(y, leaves, case.dy)]
    torch._dynamo.reset()
    torch.manual_seed(4)
    with torch._inductor.config.patch(fallback_random=True):
        y = torch.compile(function, fullgraph=True)(case.x, case.base)
    got = [*y, *torch.autograd.grad(y, leaves, case.dy)]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1.6e-2, atol=1e-5)
        assert g.dtype == w.dtype


def test_compile_onto_the_base_in_place(device):
    case = Case(Problem((9,), 6, (5,), (4,)), device)
    a, b = case.adapters[0][0]
    weight = torch.randn(5, 6, device=device)

    def function(x):
        base = x @ weight.T
        return lora.linear(x, a, b, 0.5, base=base, out=base)

    leaves = case.leaves()[:3]
    want = torch.autograd.grad(function(case.x), leaves, case.dy)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(function, fullgraph=True)(case.x), leaves, case.dy)
    torch.testing.assert_close(got, want)


def test_autocast_decides_the_dtype_of_a_new_result(device):
    case = Case(Problem(with_base=False), device)
    a, b = case.adapters[0][0]
    leaves = case.leaves()
    with torch.autocast(device.type, dtype=BF16):
        y = lora.linear(case.x, a, b)
        base = torch.nn.functional.linear(case.x, torch.randn(24, 40, device=device))
        onto = lora.linear(case.x, a, b, base=base)
    assert y.dtype is onto.dtype is BF16
    assert lora.linear(case.x, a, b).dtype is FP32
    grads = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert all(g.dtype is FP32 for g in grads)


def test_retain_graph_and_a_layer_used_twice(device):
    case = Case(Problem((9,), 24, (24,), (4,), p=(0.3,)), device)
    a, b = case.adapters[0][0]
    leaves = case.leaves()[:3]
    y = lora.linear(case.x, a, b, 0.5, dropout=0.3)
    first = torch.autograd.grad(y, leaves, case.dy, retain_graph=True)
    assert_bitwise(torch.autograd.grad(y, leaves, case.dy), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, case.dy)

    def plain(x, a, b):
        h = 0.5 * (x @ a.T) @ b.T
        return 0.5 * (h @ a.T) @ b.T

    y = lora.linear(lora.linear(case.x, a, b, 0.5), a, b, 0.5)
    got = torch.autograd.grad(y, leaves, case.dy[0])
    want = torch.autograd.grad(plain(case.x, a, b), leaves, case.dy[0])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_saved_tensors_hooks_may_move_everything(device):
    case = Case(Problem(p=(0.3,)), device)
    leaves = case.leaves()
    torch.manual_seed(1)
    want = torch.autograd.grad(case.forward(), leaves, case.dy)
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        y = case.forward()
    assert_bitwise(torch.autograd.grad(y, leaves, case.dy), want)


def test_changing_what_is_saved_is_noticed(device):
    case = Case(Problem(), device)
    case.leaves()
    y = case.forward()
    with torch.no_grad():
        case.adapters[0][0][1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y, case.dy)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("is_base", [True, False])
def test_a_given_output_that_is_saved_elsewhere_is_noticed(device, grad, is_base):
    """Whether gradients are enabled at the time or not, as with PyTorch's own ops."""
    case = Case(Problem(), device)
    out = torch.zeros_like(case.base[0])
    product = out * torch.ones_like(out).requires_grad_()
    with torch.set_grad_enabled(grad):
        base = out if is_base else case.base[0]
        lora.linear(case.x, *case.adapters[0][0], base=base, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_plan_made_anew_before_the_backward_is_noticed(device):
    case = Case(Problem((5, 6), ranks=(2, 3), form="plan"), device)
    case.leaves()
    plan = case.rows()
    y = lora.mixed_linear(case.x, case.adapters, plan, case.scales)
    with torch.no_grad():
        lora.plan(case.row_adapter.flip(0), 2, out=plan)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y, case.dy)


def test_negations(device):
    """Negative-bit views are read as what they stand for, and not written to."""
    case = Case(Problem(), device)
    a, b = case.adapters[0][0]
    given = [case.x, a, b, case.base[0]]
    want = lora.linear(case.x, a, b, base=case.base[0])
    for i, t in enumerate(given):
        negated = list(given)
        negated[i] = torch.conj(torch.complex(t, -t)).imag
        assert negated[i].is_neg()
        x, a, b, base = negated
        assert torch.equal(lora.linear(x, a, b, base=base), want)
    with pytest.raises(ValueError, match="linear: out must hold its own values"):
        lora.linear(x, a, b, base=base, out=base)
    a, b, dy = given[1].requires_grad_(), given[2], case.dy[0]
    negated = torch.conj(torch.complex(dy, -dy)).imag
    of_both = [
        torch.autograd.grad(lora.linear(case.x, [a, a], [b, b]), a, [dy, second])[0]
        for second in (dy, negated)
    ]
    assert torch.equal(*of_both)


def test_result_is_no_view_and_may_change_in_place(device):
    case = Case(Problem(), device)
    leaves = case.leaves()
    y = lora.linear(case.x.unsqueeze(0), *case.adapters[0][0], base=case.base[0].unsqueeze(0))
    assert not y._is_view()
    torch.autograd.grad(y.mul_(2), leaves, case.dy[0].unsqueeze(0))


def test_meta_tensors_have_shapes():
    x, a, b = (torch.empty(s, device="meta") for s in ((2, 3, 8), (4, 8), (6, 4)))
    assert lora.linear(x, a, b).shape == (2, 3, 6)


def test_functional_transforms_of_a_gradient_are_refused(device):
    case = Case(Problem(), device)
    a, b = case.adapters[0][0]
    refused = pytest.raises(
        RuntimeError, match="^linear: cannot run inside transforms of torch.func"
    )
    for out in (None, torch.zeros_like(case.base[0])):
        with refused:
            torch.func.grad(lambda x, out=out: lora.linear(x, a, b, out=out).sum())(case.x)
        with refused:
            torch.vmap(lambda x, out=out: lora.linear(x, a, b, out=out))(case.x[None])
        with refused:
            torch.func.jvp(lambda a, out=out: lora.linear(case.x, a, b, out=out), (a,), (a,))
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match="^linear: arguments must not have tangents"),
        ):
            lora.linear(case.x, forward_ad.make_dual(a, a), b, out=out)


def test_bytes_saved_beside_peft(device):
    """Beside x only h: 2 M r bytes, where PEFT's expression keeps x in float32, its dropped copy
    and the mask."""
    x = torch.randn(256, 512, device=device, dtype=BF16, requires_grad=True)
    a = torch.randn(8, 512, device=device, requires_grad=True)
    b = torch.randn(512, 8, device=device, requires_grad=True)
    known = {t.data_ptr() for t in (x, a, b)}

    def saved_bytes(function):
        sizes = {}

        def note(t):
            if t.data_ptr() not in known:
                sizes[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = function()
        del y
        return sum(sizes.values())

    def peft():
        return torch.nn.functional.dropout(x.float(), 0.1) @ a.T @ b.T * 0.5

    ours = saved_bytes(lambda: lora.linear(x, a, b, 0.5, dropout=0.1))
    assert ours == 256 * 8 * 4 + 16  # h in the dtype of the weights, seed and offset
    assert saved_bytes(peft) > 20 * ours


def test_traced_with_symbols(device):
    """make_fx, whose sizes are symbols, runs the Python code itself."""
    x, a, b = (torch.randn(*s, device=device) for s in ((6, 8), (4, 8), (5, 4)))
    traced = make_fx(lambda *t: lora.linear(*t), tracing_mode="symbolic")(x, a, b)
    torch.testing.assert_close(traced(x, a, b), lora.linear(x, a, b))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_onto_the_base_in_place(device, mode):
    given = [torch.randn(*s, device=device) for s in ((6, 8), (4, 8), (5, 4), (6, 5))]

    def onto(x, a, b, base):
        y = base + 1
        return lora.linear(x, a, b, base=y, out=y)

    traced = make_fx(onto, tracing_mode=mode)(*given)
    others = [t + 1 for t in given]
    torch.testing.assert_close(traced(*others), onto(*others))
    assert onto(*(t.to("meta") for t in given)).shape == (6, 5)


@pytest.mark.parametrize("gradient", [False, True])
def test_no_base_may_come_as_none(device, gradient):
    """As the programs of AOTInductor hand an empty list to an op's implementation."""
    x, a, b = (torch.randn(*s, device=device) for s in ((4, 8), (2, 8), (6, 2)))
    a.requires_grad_(gradient)
    layer = (None, None, None, [6], [0], [1.0], [0.0], False, torch.float32, True)
    y = _lora_train_ops._train_autograd(x, None, [a], [b], *layer)[0]
    assert torch.equal(y, lora.linear(x, a, b))
    assert y.requires_grad == gradient


def test_gradients_have_no_gradient(device):
    """They are differentiable once, and say so."""
    x, a, b, dy = (torch.randn(4, 4, device=device, requires_grad=True) for _ in range(4))
    dx = torch.autograd.grad(lora.linear(x, a, b), x, dy, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (1, 2, 3), (2, 0, 3)], ids=str)
def test_leading_dimensions(device, lead):
    """Any, dense or not: the bits of the flat call, and gradients of the given shapes."""
    x, dy = torch.randn(*lead, 20, device=device), torch.randn(*lead, 12, device=device)
    a, b = (torch.randn(*s, device=device, requires_grad=True) for s in ((5, 20), (12, 5)))
    gapped = torch.randn(*lead, 40, device=device)[..., ::2].copy_(x)
    results = []
    for rows, given in ((x.reshape(-1, 20), dy.reshape(-1, 12)), (x, dy), (gapped, dy)):
        leaf = rows.detach().requires_grad_()
        y = lora.linear(leaf, a, b, 0.5)
        assert y.shape == given.shape
        results.append([y.detach(), *torch.autograd.grad(y, (leaf, a, b), given)])
        assert results[-1][1].shape == rows.shape
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got.reshape(want.shape), want)
