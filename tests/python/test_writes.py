# SPDX-License-Identifier: Apache-2.0
"""Whatever writes into given tensors tells autograd, with gradients enabled or not: a backward that
needs what they held before then says so, as with PyTorch's own functions."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mortar
from fp8_rmsnorm_cases import random_case
from lora_cases import Problem, make
from mortar import dynamic_conv, lora, lora_train
from mortar.compat import nemo, vllm
from vllm_cases import make_inputs

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def serving(device) -> Iterator[tuple[str, list[Tensor], Callable]]:
    t = make(Problem(tokens=9, hidden=40, widths=(24,), ranks=(8, 3)), device)
    plan = t.plan()
    for form in ("table", "stacked"):
        weights = t.weights(form)
        h = lora.shrink(t.x, weights, plan, zero_rows=t.token_adapter)
        yield "apply", [t.y], lambda w=weights: lora.apply(t.y, t.x, w, plan)
        yield "shrink", [h], lambda w=weights, h=h: lora.shrink(t.x, w, plan, h)
        yield "expand", [t.y], lambda w=weights, h=h: lora.expand(t.y, h, w, plan)
        yield "ops", [t.y], lambda w=weights: w.call_apply(t.x, plan.data, *w.apply_args, t.y)
    yield "plan", [plan.data], lambda: lora.plan(t.token_adapter, 2, out=plan)
    v = make_inputs(device)
    for active in (5, torch.tensor([5], dtype=torch.int32)):
        metadata = (*v.metadata, active)
        yield "vllm", [v.h], lambda m=metadata: vllm.lora_shrink(v.x, v.a, v.h, *m, 1.0)
        yield "vllm", [v.y], lambda m=metadata: vllm.lora_expand(v.h, v.b, v.y, *m)


def training(device) -> Iterator[tuple[str, list[Tensor], Callable]]:
    x, a, b, y = (torch.randn(s, device=device) for s in ((9, 16), (4, 16), (8, 4), (9, 8)))
    grads = [torch.zeros_like(t) for t in (x, a, b)]
    yield "linear", [y], lambda: lora.linear(x, a, b, out=y)
    yield "in place", [y], lambda: lora.linear(x, a, b, base=y, out=y)
    yield "backward", grads, lambda: lora_train.backward(
        y, a, b, x=x, dx=grads[0], da=grads[1], db=grads[2])  # fmt: skip
    yield "nemo", [y], lambda: nemo.lora_forward_wrapper(x, a.t(), b.t(), y, 1.0)


def convolution(device) -> Iterator[tuple[str, list[Tensor], Callable]]:
    x, kernels = torch.randn(2, 6, device=device), torch.randn(2, 6, 3, device=device)
    state, y = torch.zeros(2, 6, 3, device=device), torch.empty(2, 6, device=device)
    ops = torch.ops.mortar
    yield "step", [state], lambda: dynamic_conv.dynamic_conv_step(x, kernels, state)
    yield "step", [state, y], lambda: ops.dynamic_conv_step(x, kernels, state, None, y, False)
    dense, out = kernels[None], torch.empty(1, 2, 6, device=device)
    yield "out", [out], lambda: ops.dynamic_conv_out(x[None], dense, None, None, out, None, False)


def norm(device) -> Iterator[tuple[str, list[Tensor], Callable]]:
    case = random_case(device, (6, 64))
    x, weight, residual = case.x, case.weight, torch.zeros_like(case.x)
    out = mortar.fp8_rmsnorm(x, weight)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    written = [out.q, out.scale, out.rstd, out.amax]
    yield "residual", [residual], lambda: mortar.fp8_rmsnorm(x, weight, residual=residual)
    yield "record", written, lambda: mortar.fp8_rmsnorm(x, weight, out=out)
    yield "quantize", [out.q, out.scale, out.amax], lambda: mortar.fp8_quantize(x, out=out)
    yield "compat", [out.q, out.scale, out.amax], lambda: mortar.fp8_quantize(
        x, numerics="compat", out=out)  # fmt: skip
    rstd = out.rstd.clone()
    yield "backward", [dx, dw], lambda: mortar.fp8_rmsnorm_backward(
        x, x, weight, rstd, dx=dx, dw=dw)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("calls", [serving, training, convolution, norm])
def test_autograd_hears_of_writes(device, calls, mode):
    for name, written, call in calls(device):
        versions = [t._version for t in written]
        with MODES[mode]():
            call()
        assert all(t._version > v for t, v in zip(written, versions, strict=True)), name


def test_a_backward_refuses_what_was_overwritten(device):
    t = make(Problem(tokens=9, hidden=40, widths=(24,), ranks=(8, 3)), device)
    y = t.y.requires_grad_()
    product = y.exp()  # keeps its result
    with torch.no_grad():
        lora.apply(product, t.x, t.weights("table"), t.plan())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
