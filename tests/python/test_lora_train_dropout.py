# SPDX-License-Identifier: Apache-2.0
"""Dropout of LoRA training: what is drawn, how often, and that every pass sees the same mask."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lora_train_cases import (
    BF16,
    FP16,
    FP32,
    Case,
    Problem,
    assert_bitwise,
    check_forward,
    check_gradients,
    drawn,
    weight_gradients,
)
from mortar import lora, lora_train
from mortar.reference import lora_train as reference


def mask_of(x_like, p, drops_delta=False, **options):
    """Which elements a call drops, seen from outside: with identity weights y is the masked x."""
    n = x_like.shape[-1]
    eye = torch.eye(n, device=x_like.device, dtype=options.pop("dtype", FP32))
    on = "delta" if drops_delta else "input"
    y = lora.linear(torch.ones_like(x_like), eye, eye, dropout=p, dropout_on=on, **options)
    return y != 0


@pytest.mark.parametrize("drops_delta", [False, True], ids=["input", "delta"])
@pytest.mark.parametrize("form", ["one", "segments", "plan"])
@pytest.mark.parametrize("dtypes", [(FP32,) * 3, (BF16,) * 3, (BF16, FP32, FP16)], ids=str)
def test_matches_reference(device, form, drops_delta, dtypes):
    ranks = ((6, 3),) if form == "one" else ((6, 3), (9, 0), (2, 8), (1, 1), (5, 5))
    p = (0.3, 0.0, 0.7, 1.0, 0.05)[: len(ranks)]
    rows = (23,) if form == "one" else (9, 4, 13, 5, 11)
    case = Case(
        Problem(rows, 41, (24, 19), ranks, dtypes, p, drops_delta, form=form,
                base_rows=3 if form == "plan" else 0), device)  # fmt: skip
    case.leaves()
    torch.manual_seed(7)
    y = case.forward()
    torch.autograd.backward(y, case.dy)
    rng = drawn(7, device)
    with torch.no_grad():
        check_forward(case, y, rng)
        check_gradients(case, case.x.grad, *weight_gradients(case), rng)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_frequency(device, p):
    """Elements are kept with probability 1 - p: within five standard deviations."""
    kept = mask_of(torch.empty(512, 64, device=device), p)
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())


def test_kept_elements_are_scaled_up(device):
    torch.manual_seed(0)
    eye = torch.eye(16, device=device)
    y = lora.linear(torch.ones(400, 16, device=device), eye, eye, dropout=0.5)
    assert set(y.flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("drops_delta", [False, True], ids=["input", "delta"])
def test_nothing_is_left_with_p_one(device, drops_delta):
    case = Case(Problem(p=(1.0,), drops_delta=drops_delta), device)
    case.leaves()
    state = torch.get_rng_state()
    y = case.forward()
    torch.autograd.backward(y, case.dy)
    assert torch.equal(y[0], case.base[0])
    for t in (case.x, *case.adapters[0][0]):
        assert torch.equal(t.grad, torch.zeros_like(t))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("form", ["segments", "plan"])
@pytest.mark.parametrize("drops_delta", [False, True], ids=["input", "delta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_p_one_leaves_no_nan(device, value, drops_delta, form):
    """Of an adapter whose x, A, B and dy are not finite; its neighbour is as ever."""
    problem = Problem((150, 40), ranks=(6, 3), p=(1.0, 0.0), drops_delta=drops_delta, form=form)
    case = Case(problem, device)
    dropped = case.row_adapter == 0
    case.x[dropped] = case.dy[0][dropped] = value
    for t in case.adapters[0][0]:
        t[1, 2] = value
    leaves = case.leaves()
    y = case.forward()
    dx, da, db, other_da, other_db, _ = torch.autograd.grad(y, leaves, case.dy)
    assert torch.equal(y[0][dropped], case.base[0][dropped])
    for t in (dx[dropped], da, db):
        assert torch.equal(t, torch.zeros_like(t))
    for t in (dx[~dropped], other_da, other_db):
        assert t.isfinite().all()
        assert t.any()


@pytest.mark.parametrize("drops_delta", ["input", "delta"])
def test_p_one_adds_nothing_to_given_gradients(device, drops_delta):
    nan = float("nan")
    x, dy, a, b = (torch.full(s, nan, device=device) for s in ((9, 8), (9, 5), (3, 8), (5, 3)))
    grads = [torch.full_like(t, 3.0) for t in (x, a, b)]
    lora_train.backward(
        dy, a, b, x=x, dx=grads[0], da=grads[1], db=grads[2], add=True, dropout=1.0,
        dropout_on=drops_delta,
    )  # fmt: skip
    assert all((t == 3.0).all() for t in grads)


def state_of(device):
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def test_what_is_drawn(device):
    """p = 0 and eval draw nothing and drop nothing; 0 < p < 1 draws once per call."""
    case = Case(Problem(), device)
    a, b = case.adapters[0][0]
    plain = lora.linear(case.x, a, b)
    state = state_of(device)
    assert torch.equal(lora.linear(case.x, a, b, dropout=0.0), plain)
    assert torch.equal(lora.linear(case.x, a, b, dropout=0.9, training=False), plain)
    assert torch.equal(state_of(device), state)
    first = lora.linear(case.x, a, b, dropout=0.5)
    assert not torch.equal(state_of(device), state)
    assert not torch.equal(lora.linear(case.x, a, b, dropout=0.5), first)


def test_seeds_of_torch_decide(device):
    x = torch.empty(64, 32, device=device)
    torch.manual_seed(3)
    state = state_of(device)
    first, second = mask_of(x, 0.5), mask_of(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(mask_of(x, 0.5), first)
    (torch.cuda.set_rng_state if device.type == "cuda" else torch.set_rng_state)(state)
    with torch.random.fork_rng():
        mask_of(x, 0.5)
    assert torch.equal(mask_of(x, 0.5), first)
    # Different calls, as layers and steps are: independent, so a quarter is kept by both.
    both = (first & second).double().mean().item()
    assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.numel())


def test_rows_and_columns_are_independent(device):
    torch.manual_seed(0)
    kept = mask_of(torch.empty(2048, 64, device=device), 0.5).double() - 0.5
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.roll(8, 1), kept.roll(4, 0)):
        correlation = 4 * (kept * other).mean().item()
        assert abs(correlation) < 5 / math.sqrt(kept.numel())


def test_mask_depends_on_neither_dtype_nor_strides(device):
    masks = []
    for dtype in (FP32, FP16, BF16):
        for x in (torch.empty(48, 40, dtype=dtype, device=device),
                  torch.empty(40, 48, dtype=dtype, device=device).t()):  # fmt: skip
            torch.manual_seed(11)
            masks.append(mask_of(x, 0.4, dtype=dtype))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    want = reference.keep_mask(drawn(11, device), 48, 40, 0.4)
    assert torch.equal(masks[0], want)


def test_slices_share_the_mask_of_x(device):
    eye = torch.eye(32, device=device)
    x = torch.ones(64, 32, device=device)
    one, other = lora.linear(x, [eye, eye], [eye, eye], dropout=0.5)
    assert torch.equal(one, other)
    one, other = lora.linear(x, [eye, eye], [eye, eye], dropout=0.5, dropout_on="delta")
    assert not torch.equal(one, other)


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_sees_the_same_masks(device, use_reentrant, save_h):
    case = Case(Problem(p=(0.4,)), device)
    leaves = case.leaves()

    def layer(x, base):
        y = lora.linear(x, *case.adapters[0][0], 0.5, base=base, dropout=0.4, save_h=save_h)
        return lora.linear(y, *turned, 0.5, base=x, dropout=0.2, save_h=save_h)

    turned = [torch.randn(4, 24, device=device), torch.randn(40, 4, device=device)]
    torch.manual_seed(2)
    y = layer(case.x, case.base[0])
    dy = torch.randn_like(y)
    want = [y, *torch.autograd.grad(y, leaves, dy)]
    torch.manual_seed(2)
    y = checkpoint(layer, case.x, case.base[0], use_reentrant=use_reentrant)
    y.backward(torch.randn_like(y).copy_(dy))
    assert_bitwise([y, *(t.grad for t in leaves)], want)


def test_dropped_nan_does_not_matter(device):
    torch.manual_seed(1)
    keep = reference.keep_mask(drawn(1, device), 64, 32, 0.5)
    x = torch.where(keep, 1.0, float("nan")).to(device)
    eye = torch.eye(32, device=device)
    torch.manual_seed(1)
    y = lora.linear(x, eye, eye, dropout=0.5)
    assert torch.equal(y, 2.0 * keep)
