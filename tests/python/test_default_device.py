# SPDX-License-Identifier: Apache-2.0
"""A default device (torch.set_default_device, `with torch.device(...)`) other than that of the
tensors changes nothing."""

import pytest
import torch

from lora_cases import Problem, make
from lora_train_cases import Case
from lora_train_cases import Problem as TrainProblem
from mortar import lora
from mortar.compat.peft import accelerate
from peft_models import ADAPTERS, adapted, llama, tokens


def serving(device):
    t = make(Problem(tokens=9, hidden=40, widths=(24,), ranks=(8, 3)), device)

    def call():
        weights = t.weights("table")
        weights.update(0, None)
        plan = lora.plan(t.token_adapter, 2)
        h = lora.shrink(t.x, weights, plan, zero_rows=t.token_adapter)
        y = lora.apply(t.y.clone(), t.x, weights, plan)
        return h, lora.expand(y, h, weights, plan)

    return call


def training(device, double=False, form="segments"):
    case = Case(TrainProblem(rows=(5, 7), ranks=(4, 6), p=(0.0, 0.3), form=form), device)
    if double:
        case.x = case.x.double()
        case.adapters = [[tuple(w.double() for w in q) for q in row] for row in case.adapters]
        case.base = case.dy = [t.double() for t in case.dy]
    leaves, rows = case.leaves(), case.rows()

    def call():
        torch.manual_seed(1)
        y = lora.mixed_linear(
            case.x, case.adapters, rows, case.scales, base=case.base, dropout=case.p
        )
        return (*y, *torch.autograd.grad(y, leaves, case.dy))

    return call


def model(device):
    made = accelerate(adapted(llama(device=device), {"small": ADAPTERS["small"]}))
    ids = tokens(2, 5, device)

    def call():
        with torch.no_grad():
            return (made(input_ids=ids, adapter_names=["small", "__base__"]).logits,)

    return call


@pytest.mark.parametrize(
    "make_call",
    [
        serving,
        training,
        lambda device: training(device, form="plan"),
        lambda device: training(device, double=True),
        model,
    ],
    ids=["serving", "segments", "plan", "float64", "model"],
)
def test_another_default_device(device, make_call):
    results = []
    for other in (device, "meta"):
        torch.manual_seed(0)
        call = make_call(device)
        with torch.device(other):
            results.append(call())
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)
