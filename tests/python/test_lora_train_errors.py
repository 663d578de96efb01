# SPDX-License-Identifier: Apache-2.0
"""Bad input of LoRA training: one sentence, and nothing written."""

import pytest
import torch

from lora_train_cases import BF16, Case, Problem
from mortar import lora, lora_train


@pytest.fixture
def case(device):
    return Case(Problem(), device)


def bad_call(case, message, error=ValueError, **changes):
    """`linear` with some arguments replaced; given outputs must stay as they were."""
    a, b = case.adapters[0][0]
    args = {"x": case.x, "a": a, "b": b, "base": case.base[0], **changes}
    out = args.get("out")
    before = None if out is None else out.clone()
    with pytest.raises(error, match=message) as caught:
        lora.linear(**args)
    assert "\n" not in str(caught.value)
    if out is not None:
        assert torch.equal(out, before)


def test_shapes(case):
    a, b = case.adapters[0][0]
    out = torch.full_like(case.base[0], 3.0)
    for changes, message in (
        ({"a": a[:, :-1]}, r"a must have shape"),
        ({"a": a[:-1]}, r"b must have shape \(24, 5\)"),
        ({"b": b[:-1]}, "base must have shape"),
        ({"base": case.base[0][:-1]}, r"base must have shape \(19, 24\), got \(18, 24\)"),
        ({"a": a[0]}, r"a must have 2 dimensions"),
        ({"x": case.x[:, 0, None, None]}, "base must have shape"),
        ({"a": a[:0], "b": b[:, :0]}, r"a must have 1 to 512 rows, got 0"),
        ({"a": [a, a]}, r"b must have one matrix per slice = 2, got 1"),
    ):
        bad_call(case, message, out=out, **changes)


def test_rank_over_the_limit(case, device):
    a, b = torch.zeros(513, 40, device=device), torch.zeros(24, 513, device=device)
    bad_call(case, "1 to 512 rows, got 513", a=a, b=b)


def test_dtypes(case):
    a, b = case.adapters[0][0]
    bad_call(case, "x must have dtype", TypeError, x=case.x.int())
    bad_call(case, "b must have dtype", TypeError, b=b.to(BF16))
    bad_call(case, "a must have dtype", TypeError, a=a.double(), b=b.double())
    bad_call(case, "x must be a tensor, got list", TypeError, x=[1.0])


def test_out_of_another_dtype_than_the_base(case):
    out = torch.zeros(19, 24, dtype=BF16, device=case.x.device)
    bad_call(case, r"base\[0\] must have dtype", TypeError, out=out)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("training", [True, False])
def test_probability(case, p, training):
    bad_call(case, "dropout must be 0 to 1", dropout=p, training=training)


def test_words(case):
    bad_call(case, 'dropout_on must be "input" or "delta"', dropout_on="post")


def test_types(case):
    bad_call(case, "linear: dropout must be a number, got str", TypeError, dropout="0.1")
    bad_call(case, "linear: dropout must be a number, got NoneType", TypeError, dropout=None)
    bad_call(case, "linear: scale must be a number, or one for each", TypeError, scale=None)
    bad_call(case, "linear: scale must be a number, got str", TypeError, scale="2")
    bad_call(case, "scale must have one entry per slice = 1, got 2", scale=[1.0, 2.0])
    bad_call(case, "linear: a must be a tensor, got NoneType", TypeError, a=None)
    bad_call(case, "linear: b must be a tensor, got int", TypeError, b=1)
    bad_call(case, "linear: dtype must be a torch.dtype, got str", TypeError, dtype="float32")
    a, b = (w.double() for w in case.adapters[0][0])
    bad_call(case, "b must have dtype float64", TypeError, x=case.x.double(), a=a, base=None)
    numpy_scale = lora.linear(case.x, a.float(), b.float(), a.new_tensor(2.0).cpu().numpy()[()])
    assert torch.equal(numpy_scale, lora.linear(case.x, a.float(), b.float(), 2))


def test_out_whose_rows_no_stride_steps_through(case, device):
    x = case.x[:18].view(2, 9, -1)
    out = torch.full((9, 2, 24), 3.0, device=device).transpose(0, 1)
    bad_call(case, "out must have leading dimensions that one stride", x=x, base=None, out=out)
    bad_call(case, "out must have leading dimensions that one stride", x=x, base=out, out=out)


def test_overlap(case):
    a, b = case.adapters[0][0]
    room = torch.zeros(19, 64, device=case.x.device)
    x, out = room[:, :40].copy_(case.x), room[:, 38:62]
    bad_call(case, r"y\[0\] and x must not overlap", x=x, out=out)
    shared = torch.zeros(1, 24, device=case.x.device).expand(19, 24)
    bad_call(case, r"y\[0\] must", out=shared)


def test_views_that_overlap_while_a_gradient_is_wanted(case):
    """The results of views are copied there: as without gradients, nothing is then."""
    a, b = case.adapters[0][0]
    a = a.clone().requires_grad_()
    room = torch.zeros(19, 80, device=case.x.device)
    x = room[:, :40].copy_(case.x)
    shared = torch.zeros(1, 24, device=case.x.device).expand(19, 24)
    for second, message in (
        (shared, r"y\[1\] must not overlap itself"),
        (room[:, 38:62], r"y\[1\] and x must not overlap"),
        (room[:, 50:74], r"y\[1\] and y\[0\] must not overlap"),
    ):
        out = [room[:, 56:], second]
        before = room.clone()
        with pytest.raises(ValueError, match=f"^lora_train_forward: {message}"):
            lora.linear(x, [a, a], [b, b], base=out, out=out)
        assert torch.equal(room, before)


@pytest.mark.parametrize("kind", ["split", "no_grad", "leaf"])
def test_views_that_autograd_would_refuse(case, kind):
    """The first slice might change, the second must not: neither has when the error comes."""
    a, b = case.adapters[0][0]
    a = a.clone().requires_grad_()
    room = torch.zeros(19, 48, device=case.x.device)
    leaf = room.clone().requires_grad_()
    views = {"split": room.split(24, 1)[1], "leaf": leaf[:, 24:]}
    with torch.no_grad():
        views["no_grad"] = room[:, 24:]
    out = [room[:, :24], views[kind]]
    with pytest.raises(RuntimeError, match="^linear: out must be no view") as caught:
        lora.linear(case.x, [a, a], [b, b], base=out, out=out)
    assert "\n" not in str(caught.value)
    assert not room.any()
    assert not leaf.any()


def test_more_than_eight_slices(case):
    a, b = case.adapters[0][0]
    with pytest.raises(ValueError, match="num_slices must be 1 to 8, got 9"):
        lora.linear(case.x, [a] * 9, [b] * 9)


def mixed(case, rows, **options):
    return lora.mixed_linear(case.x, case.adapters, rows, case.scales, base=case.base, **options)


@pytest.fixture
def several(device):
    return Case(Problem((4, 6, 9), ranks=(2, 3, 4), form="segments"), device)


def test_rows(several, device):
    for offsets, message in (
        ([0, 4, 10], r"offsets must have shape \(4\)"),
        ([[0, 4, 10, 19]], r"offsets must have"),
    ):
        with pytest.raises(ValueError, match=message):
            mixed(several, torch.tensor(offsets, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match="offsets must have dtype"):
        mixed(several, torch.tensor([0, 4, 10, 19], device=device))
    with pytest.raises(TypeError, match="rows must be a mortar.lora.Plan or a tensor"):
        mixed(several, [0, 4, 10, 19])
    plan = lora.plan(several.row_adapter[1:], 3)
    with pytest.raises(ValueError, match="plan for 19 tokens and 3 adapters, got one for 18"):
        mixed(several, plan)


@pytest.mark.parametrize("offsets, message", [
    ((1, 4, 10, 19), "start at 0, got 1"),
    ((0, 4, 3, 19), "must not decrease, got 3 after 4"),
    ((0, 4, 10, 18), "end at M = 19, got 18"),
    ((0, 4, 10, 20), "end at M = 19, got 20"),
])  # fmt: skip
def test_segments_that_do_not_cover_the_rows(several, device, offsets, message):
    tensor = torch.tensor(offsets, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        lora_train.check(tensor, 3, 19)
    if device.type == "cpu":
        out = torch.full_like(several.base[0], 3.0)
        with pytest.raises(ValueError, match=message):
            mixed(several, tensor, out=out)
        assert (out == 3).all()


def test_adapter_ids_out_of_range_are_reported(several):
    ids = several.row_adapter.clone()
    ids[3] = 3
    with pytest.raises(ValueError, match=r"ids in \[-1, 3\), got 1 others, the first at token 3"):
        lora.check(lora.plan(ids, 3))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # nothing is read back from a GPU
@pytest.mark.parametrize("place", [4, 8, 26, 28, 29, 30, 32], ids="word {}".format)
@pytest.mark.parametrize("value", [-1, 19, 10**6])
def test_a_plan_that_was_written_over(several, place, value):
    """The number of groups, a row, and the first groups' adapter, start and count."""
    plan = lora.plan(several.row_adapter, 3)
    plan.data[place] = value
    out = torch.full_like(several.base[0], 3.0)
    with pytest.raises(ValueError, match="plan must be as lora_plan made it"):
        mixed(several, plan, out=out)
    assert (out == 3).all()


def test_counts(several):
    rows = several.rows()
    with pytest.raises(ValueError, match="scales must have one entry per adapter = 3, got 2"):
        lora.mixed_linear(several.x, several.adapters, rows, [1.0, 2.0])
    with pytest.raises(ValueError, match="dropout must have one entry per adapter = 3, got 1"):
        mixed(several, rows, dropout=[0.5])
    with pytest.raises(TypeError, match="mixed_linear: dropout must be a list, got NoneType"):
        mixed(several, rows, dropout=None)
    for scales in (1.0, torch.tensor(1.0)):
        got = type(scales).__name__
        with pytest.raises(TypeError, match=f"mixed_linear: scales must be a list, got {got}"):
            lora.mixed_linear(several.x, several.adapters, rows, scales)
    for widths, message in (([], "one entry per slice = 1, got 0"), ([2**70], "a list of sizes")):
        with pytest.raises((TypeError, ValueError), match=f"mixed_linear: widths must .*{message}"):
            mixed(several, rows, widths=widths)
    with pytest.raises(ValueError, match="adapters must hold at least one adapter"):
        lora.mixed_linear(several.x, [], rows, [])
    with pytest.raises(ValueError, match="adapters must hold at least one pair"):
        lora.mixed_linear(several.x, [None, None, None], rows, [1.0] * 3)
    with pytest.raises(ValueError, match="adapters must hold a pair for every slice"):
        lora.mixed_linear(several.x, [[None, p] for (p, *_) in several.adapters], rows, [1.0] * 3)


@pytest.mark.parametrize(
    "spoil, got",
    [
        (lambda a, b: (a, b, b), "tuple of 3"),
        (lambda a, b: (a,), "tuple of 1"),
        (lambda a, b: a, "Tensor"),
        (lambda a, b: [a, b], "Tensor"),  # a list is one of slices
    ],
    ids=["three", "one", "tensor", "list"],
)
def test_what_is_no_pair_is_named(case, spoil, got):
    rows = torch.tensor([0, len(case.x)], dtype=torch.int32, device=case.device)
    wanted = rf"^mixed_linear: adapter 0, slice 0 must be a pair \(A, B\) or None, got {got}$"
    with pytest.raises(TypeError, match=wanted):
        lora.mixed_linear(case.x, [spoil(*case.adapters[0][0])], rows, [1.0])


@pytest.mark.parametrize(
    "adapters, got", [(3, "int"), (None, "NoneType"), (torch.ones(2), "Tensor")]
)
def test_what_is_no_list_of_adapters_is_named(case, adapters, got):
    with pytest.raises(TypeError, match=f"^mixed_linear: adapters must be a list, got {got}$"):
        lora.mixed_linear(case.x, adapters, torch.zeros(2), [1.0])


def test_backward(case, device):
    a, b = case.adapters[0][0]
    da = torch.full_like(a, 3.0)
    for options, message in (
        ({"da": da}, "x is required for da"),
        ({"da": da, "x": case.x[:-1]}, "x must have shape"),
        ({"da": da[:-1], "x": case.x}, "da must have shape"),
        ({"da": da, "x": case.x, "dropout": 0.5}, "rng is required with dropout"),
        ({"da": da, "db": da, "x": case.x}, "db must have shape"),
        ({"da": [da, da], "x": case.x}, "da must have one tensor per slice = 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            lora_train.backward(case.dy[0], a, b, **options)
        assert (da == 3).all()
    with pytest.raises(ValueError, match="dy must have one tensor per slice = 1, got 2"):
        lora_train.backward(case.dy * 2, a, b, x=case.x, da=da)
    with pytest.raises(TypeError, match="backward: add must be a bool, got str"):
        lora_train.backward(case.dy, a, b, x=case.x, da=da, add="yes")
    with pytest.raises(ValueError, match=r"backward: b must have 2 dimensions, got shape \(\)"):
        lora_train.backward(case.dy, a, b.sum(), x=case.x, da=da)
    with pytest.raises(TypeError, match="backward: da must be a tensor, got str"):
        lora_train.backward(case.dy, a, b, x=case.x, da=["da"])


@pytest.mark.parametrize("name", ["scale", "dropout"])
def test_numbers_that_want_a_gradient(case, name):
    """They would get none. A tensor without dimensions is a number else."""
    (a, b), number = case.adapters[0][0], torch.tensor(0.5)
    want = lora.linear(case.x, a, b, scale=0.5)
    assert torch.equal(lora.linear(case.x, a, b, scale=number), want)
    assert torch.equal(lora.linear(case.x, a, b, scale=[number]), want)
    number.requires_grad_()
    with pytest.raises(TypeError, match=f"^linear: {name} must be a number, which has no gradient"):
        lora.linear(case.x, a, b, **{name: number})
    with torch.no_grad():
        assert torch.equal(lora.linear(case.x, a, b, scale=number), want)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda x, a, b: (x[:, 1:], a, b), r"a must have shape \(6, 39\), got \(6, 40\)"),
        (lambda x, a, b: (x, a[1:], b), r"b must have shape \(24, 5\), got \(24, 6\)"),
    ],
)
def test_float64_shapes(case, spoil, message):
    x, a, b = spoil(*(t.double() for t in (case.x, *case.adapters[0][0])))
    with pytest.raises(ValueError, match=message):
        lora.linear(x, a, b)


def test_float64_with_segments_that_do_not_cover_the_rows(case, device):
    x, a, b = (t.double() for t in (case.x, *case.adapters[0][0]))
    for last, message in ((len(x) - 1, "cover all rows and end at M"), (-1, "not decrease")):
        offsets = torch.tensor([0, last], dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"offsets must .*{message}"):
            lora.mixed_linear(x, [(a, b)], offsets, [1.0])


def test_float64_with_a_plan(several):
    several.x = several.x.double()
    several.adapters = [[tuple(w.double() for w in q) for q in row] for row in several.adapters]
    plan = lora.plan(several.row_adapter, 3)
    with pytest.raises(TypeError, match="got float64"):
        lora.mixed_linear(several.x, several.adapters, plan, several.scales)
