# SPDX-License-Identifier: Apache-2.0
"""Arguments that Python allows and a kernel cannot see through: objects of other types, negations,
tangents, and gradients that are asked for later."""

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from lora_cases import Problem, make
from mortar import lora

PROBLEM = Problem(tokens=12, hidden=40, widths=(24,), ranks=(8, 3), x_dtype=torch.float32,
                  w_dtype=torch.float32, y_dtype=torch.float32)  # fmt: skip
FORMS = ["table", "stacked"]


def negation(t):
    """The same values, as a view that negates what lies in memory."""
    view = torch._neg_view(-t)
    assert view.is_neg()
    return view


class Call:
    def __init__(self, device, form="table"):
        t = make(PROBLEM, device)
        self.x, self.y, self.weights, self.plan = t.x, t.y, t.weights(form), t.plan()
        self.h = lora.shrink(self.x, self.weights, self.plan, zero_rows=t.token_adapter)

    def run(self, op, **spoilt):
        names = {"apply": "y x weights plan", "shrink": "x weights plan h",
                 "expand": "y h weights plan"}[op].split()  # fmt: skip
        return getattr(lora, op)(*[spoilt.get(name, getattr(self, name)) for name in names])


@pytest.mark.parametrize("value", [None, [1.0], np.zeros((12, 40), np.float32), 3, "x"],
                         ids=["None", "list", "numpy", "int", "str"])  # fmt: skip
@pytest.mark.parametrize("op, name", [("apply", "y"), ("apply", "x"), ("shrink", "x"),
                                      ("expand", "y"), ("expand", "h")])  # fmt: skip
def test_what_is_no_tensor_is_named(device, op, name, value):
    call = Call(device)
    got = "None" if value is None else type(value).__name__
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(TypeError, match=f"^lora_{op}: {name} must be a tensor, got {got}$"),
        ):
            call.run(op, **{name: value})


@pytest.mark.parametrize("value", [None, (1, 2), "plan"], ids=["None", "tuple", "str"])
@pytest.mark.parametrize("name, kind", [("weights", "Weights"), ("plan", "Plan")])
@pytest.mark.parametrize("op", ["apply", "shrink", "expand"])
def test_what_is_no_plan_or_weights_is_named(device, op, name, kind, value):
    call = Call(device)
    got = "None" if value is None else type(value).__name__
    with pytest.raises(
        TypeError, match=f"^lora_{op}: {name} must be a mortar.lora.{kind}, got {got}$"
    ):
        call.run(op, **{name: value})


@pytest.mark.parametrize("name", ["workspace", "zero_rows"])
def test_what_may_be_left_out_is_a_tensor_else(device, name):
    call = Call(device)
    with pytest.raises(TypeError, match=f"^lora_shrink: {name} must be a tensor, got list$"):
        lora.shrink(call.x, call.weights, call.plan, call.h, **{name: [0]})


def test_x_without_dimensions_where_h_is_made(device):
    call = Call(device)
    with pytest.raises(
        ValueError, match=r"^lora_shrink: x must have 2 dimensions, got shape \(\)$"
    ):
        lora.shrink(call.x.sum(), call.weights, call.plan)


def test_arguments_of_plan_are_named(device):
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="^lora_plan: token_adapter must be a tensor, got list$"):
        lora.plan([0, 1], 2)
    with pytest.raises(ValueError, match=r"^lora_plan: token_adapter must have 1 dimension, got"):
        lora.plan(ids.sum(), 2)
    with pytest.raises(TypeError, match="^lora_plan: out must be a mortar.lora.Plan, got Tensor$"):
        lora.plan(ids, 2, out=ids)
    for adapters in (0, 4097, 2**64):
        wanted = f"^lora_plan: num_adapters must be 1 to 4096, got {adapters}$"
        with pytest.raises(ValueError, match=wanted):
            lora.plan(ids, adapters)
    with pytest.raises(ValueError, match="^lora_plan: token_adapter must have at most 1048576 tok"):
        lora.plan(ids.new_zeros(2**20 + 1), 2)
    for plan in (None, lora.plan(ids, 2).data):
        got = type(plan).__name__
        with pytest.raises(TypeError, match=f"^check: plan must be a mortar.lora.Plan, got {got}$"):
            lora.check(plan)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("offset", 0.0, "an integer of 64 bits, got float"),
        ("offset", 2**63, "an integer of 64 bits, got another type"),
        ("scale", "1", "a number, got str"),
        ("scale", None, "a number, got None"),
        ("add_inputs", "no", "a bool, got str"),
    ],
)
def test_numbers_of_another_type_are_named(device, name, value, message):
    call = Call(device)
    with pytest.raises(TypeError, match=f"^lora_apply: {name} must be {message}$"):
        lora.apply(call.y, call.x, call.weights, call.plan, **{name: value})


@pytest.mark.parametrize("form", FORMS)
def test_negated_inputs_are_read_right(device, form):
    call = Call(device, form)
    want = lora.apply(call.y.clone(), call.x, call.weights, call.plan)
    got = lora.apply(call.y.clone(), negation(call.x), call.weights, call.plan)
    assert torch.equal(got, want)
    h = lora.shrink(negation(call.x), call.weights, call.plan, torch.zeros_like(call.h))
    assert torch.equal(h, lora.shrink(call.x, call.weights, call.plan, torch.zeros_like(call.h)))
    want = lora.expand(call.y.clone(), call.h, call.weights, call.plan)
    assert torch.equal(lora.expand(call.y.clone(), negation(call.h), call.weights, call.plan), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op, name", [("apply", "y"), ("shrink", "h"), ("expand", "y")])
def test_negated_outputs_are_refused(device, op, name, form):
    call = Call(device, form)
    values = getattr(call, name).clone()
    out = negation(values)
    for spoilt in ({}, {"x": negation(call.x)}):
        with pytest.raises(ValueError, match=f"^lora_{op}: {name} must hold its own values"):
            call.run(op, **{name: out}, **spoilt)
    assert torch.equal(out, values)


def test_negated_weights_are_refused(device):
    a, b = torch.zeros(2, 8, 40, device=device), torch.zeros(2, 24, 8, device=device)
    with pytest.raises(ValueError, match=r"^Weights.stacked: b\[0\] must hold its own values"):
        lora.Weights.stacked([a], [negation(b)])
    with pytest.raises(
        ValueError, match="^Weights.from_adapters: A of adapter 0, slice 0 must hold its own"
    ):
        lora.Weights.from_adapters([(negation(a[0]), b[0])])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op, name", [("apply", "x"), ("apply", "y"), ("shrink", "x"),
                                      ("expand", "h"), ("expand", "y")])  # fmt: skip
def test_tangents_are_refused(device, op, name, form, grad):
    call = Call(device, form)
    values = getattr(call, name)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(values, torch.ones_like(values))
        with pytest.raises(RuntimeError, match=f"^lora_{op}: arguments must not have tangents"):
            call.run(op, **{name: dual})
        call.run(op)  # without a tangent all is well


def test_tangents_of_weights_are_refused(device):
    call = Call(device)
    with forward_ad.dual_level():
        a = torch.zeros(8, 40, device=device)
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        weights = lora.Weights.from_adapters([(dual, torch.zeros(24, 8, device=device))] * 2)
        with pytest.raises(RuntimeError, match="^lora_apply: arguments must not have tangents"):
            call.run("apply", weights=weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["apply", "shrink", "expand"])
def test_gradients_asked_for_later_are_refused(device, op, form):
    """Of weights that were made without: with or without a table."""
    call = Call(device, form)
    call.run(op)
    assert not call.weights.requires_grad
    call.weights.tensors()[0 if op == "shrink" else -1].requires_grad_()
    assert call.weights.requires_grad
    before = call.y.clone(), call.h.clone()
    with pytest.raises(RuntimeError, match=f"^lora_{op}: arguments must not require gradients"):
        call.run(op)
    assert torch.equal(call.y, before[0]) and torch.equal(call.h, before[1])
    with torch.no_grad():
        call.run(op)
