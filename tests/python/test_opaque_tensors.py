# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory the library cannot read, sparse ones and meta ones among others: every
function refuses each of them, as each of its arguments, in one sentence that names it. And
negative-bit views, whose memory holds other values."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import mortar
from mortar import dynamic_conv, lora, lora_train
from mortar.compat import coat, jet, nemo, vllm
from vllm_cases import make_inputs

OPAQUE = {
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t.to_sparse_csr() if t.ndim == 2 else t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.as_nested_tensor([t], layout=torch.strided),
    "jagged": lambda t: torch.nested.as_nested_tensor([t], layout=torch.jagged),
}


class Call(NamedTuple):
    """A function of tensors by name, and which of them it writes."""

    run: Callable
    tensors: dict[str, Tensor]
    written: tuple[str, ...] = ()
    infers: str = ""
    """The argument that may be a meta tensor: the result, which is a new one, is one then."""


def calls(device) -> dict[str, Call]:
    def r(*shape):
        return torch.randn(*shape, device=device)

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    x, a, b, y, h, ids = r(4, 16), r(2, 16), r(8, 2), r(4, 8), r(1, 4, 2), ints(0, 0, -1, 0)
    weights, plan = lora.Weights.from_adapters([(a, b)]), lora.plan(ids, 1)
    v, n = make_inputs(device), (r(4, 32), torch.ones(32, device=device))
    rstd, quantized = r(4), mortar.fp8_quantize(n[0], transpose=True)
    serving = {
        "plan": Call(lambda ids: lora.plan(ids, 1), {"ids": ids}, infers="ids"),
        "apply": Call(lambda y, x: lora.apply(y, x, weights, plan), {"y": y, "x": x}, ("y",)),
        "shrink": Call(lambda x, h, zero: lora.shrink(x, weights, plan, h, zero_rows=zero),
                       {"x": x, "h": h, "zero": ids}, ("h",)),
        "expand": Call(lambda y, h: lora.expand(y, h, weights, plan), {"y": y, "h": h}, ("y",)),
        "from_adapters": Call(lambda a, b: lora.Weights.from_adapters([(a, b)]), {"a": a, "b": b}),
        "stacked": Call(lambda a, b, ranks, scales: lora.Weights.stacked([a], [b], ranks, scales),
                        {"a": a[None], "b": b[None], "ranks": ints(2), "scales": r(1)}),
        "vllm shrink": Call(
            lambda x, a, h, ids: vllm.lora_shrink(
                x, [a, *v.a[1:]], h, ids, *v.metadata[1:], 5, 1.0),
            {"x": v.x, "a": v.a[0], "h": v.h, "ids": v.metadata[0]}, ("h",)),
        "vllm expand": Call(
            lambda h, b, y: vllm.lora_expand(h, [b, *v.b[1:]], y, *v.metadata, 5),
            {"h": v.h, "b": v.b[0], "y": v.y}, ("y",)),
    }  # fmt: skip
    training = {
        "linear": Call(lambda x, a, b, base: lora.linear(x, a, b, base=base),
                       {"x": x, "a": a, "b": b, "base": y}, infers="x"),
        "linear into": Call(lambda x, out: lora.linear(x, a, b, out=out), {"x": x, "out": y},
                            ("out",), infers="out"),
        "mixed_linear": Call(lambda x, rows: lora.mixed_linear(x, [(a, b)], rows, [1.0]),
                             {"x": x, "rows": ints(0, 4)}, infers="x"),
        "backward": Call(
            lambda dy, x, a, h, dx, da, db: lora_train.backward(
                dy, a, b, x=x, h=h, dx=dx, da=da, db=db),
            {"dy": y, "x": x, "a": a, "h": r(4, 8), "dx": r(4, 16), "da": r(2, 16), "db": r(8, 2)},
            ("dx", "da", "db")),
        "nemo forward": Call(lambda x, a, res: nemo.lora_forward_wrapper(x, a, b.t(), res, 1.0),
                             {"x": x, "a": a.t(), "res": y}, ("res",)),
        "nemo backward": Call(lambda x, dy: nemo.lora_da_dx_update_wrapper(x, dy, b, a, 1.0),
                              {"x": x.t(), "dy": y}),
    }  # fmt: skip
    others = {
        "dynamic_conv": Call(
            lambda x, k, cu: dynamic_conv.dynamic_conv(x, k, cu_seqlens=cu),
            {"x": r(1, 5, 4), "k": r(1, 5, 4, 3), "cu": ints(0, 5)}, infers="x"),
        "step": Call(
            lambda x, k, state, slots: dynamic_conv.dynamic_conv_step(x, k, state, slots=slots),
            {"x": r(2, 4), "k": r(2, 4, 3), "state": r(2, 4, 2), "slots": ints(0, 1)}, ("state",)),
        "fp8_rmsnorm": Call(
            lambda x, w, residual: mortar.fp8_rmsnorm(x, w, residual=residual),
            {"x": n[0], "w": n[1], "residual": r(4, 32)}, ("residual",)),
        "fp8_rmsnorm_backward": Call(
            lambda dy, x, rstd, dx: mortar.fp8_rmsnorm_backward(dy, x, n[1], rstd, dx=dx),
            {"dy": n[0], "x": n[0].clone(), "rstd": r(4), "dx": r(4, 32)}, ("dx",)),
        "fp8_quantize": Call(lambda y: mortar.fp8_quantize(y), {"y": n[0]}, infers="y"),
        "fp8_rmsnorm_backward new": Call(
            lambda dy, w: mortar.fp8_rmsnorm_backward(dy, n[0], w, rstd),
            {"dy": n[0].clone(), "w": n[1]}),
        "fp8_linear": Call(lambda w: mortar.nn.fp8_linear(quantized, w), {"w": r(16, 32)}),
        "check": Call(lambda cu, slots: dynamic_conv.check(
            cu_seqlens=cu, num_tokens=5, slots=slots, num_slots=2),
            {"cu": ints(0, 5), "slots": ints(0, 1)}),
    }  # fmt: skip
    drop_ins = {
        "coat forward": Call(lambda s, w: coat.fp8_rmsnorm_forward(quantized.q, s, w, 16, 1e-5),
                             {"s": r(4, 2), "w": n[1]}),
        "coat backward": Call(
            lambda s, g, v: coat.fp8_rmsnorm_backward(quantized.q, s, g, n[1], v, 16, 8),
            {"s": r(4, 2), "g": n[0], "v": rstd}),
        "coat division": Call(lambda x: coat.fp8_division_transpose(x, 16, "E4M3"), {"x": n[0]},
                              infers="x"),
        "coat division by": Call(lambda s_y: coat.fp8_division_transpose(n[0], 16, "E4M3", s_y),
                                 {"s_y": quantized.scale.view(1, 1)}),
        "jet training": Call(lambda x, k: jet.dynamic_conv_triton_autograd(x, k),
                             {"x": r(1, 5, 4), "k": r(1, 5, 4, 3)}, infers="x"),
        "jet prefill": Call(lambda x, k, cache: jet.dynamic_conv_triton_cache(x, k, cache),
                            {"x": r(1, 5, 4), "k": r(1, 5, 4, 3), "cache": r(1, 6, 4)},
                            infers="x"),
        "jet step": Call(lambda x, cache, k: jet.causal_conv_step_triton(x, cache, k),
                         {"x": r(2, 1, 4), "cache": r(2, 4, 3), "k": r(2, 4, 3)}, ("cache",)),
    }  # fmt: skip
    return serving | training | others | drop_ins


@pytest.mark.parametrize("kind", OPAQUE)
@pytest.mark.parametrize("name", calls(torch.device("cpu")))
@torch.no_grad()
def test_one_sentence_and_nothing_written(device, name, kind):
    call = calls(device)[name]
    call.run(**call.tensors)
    for argument, tensor in call.tensors.items():
        if kind == "meta" and argument == call.infers:
            made = call.run(**call.tensors | {argument: tensor.to("meta")})
            outputs = made if isinstance(made, tuple) else (made,)
            assert all(t.is_meta for t in outputs if isinstance(t, Tensor))
            continue
        held = {k: call.tensors[k].clone() for k in call.written if k != argument}
        with pytest.raises((TypeError, ValueError)) as raised:
            call.run(**call.tensors | {argument: OPAQUE[kind](tensor)})
        assert re.fullmatch(r"[\w.]+: .+ must .+, got .+", str(raised.value)), argument
        assert all(torch.equal(call.tensors[k], old) for k, old in held.items())


@pytest.mark.parametrize(
    "name, op", [("dynamic_conv", "dynamic_conv"), ("step", "dynamic_conv_step")]
    + [(n, n) for n in ("fp8_rmsnorm", "fp8_rmsnorm_backward", "fp8_quantize")]
)  # fmt: skip
@torch.no_grad()
def test_negations_are_read_right_and_not_written(device, name, op):
    def run(**spoilt):
        made = call.run(**{k: t.clone() for k, t in call.tensors.items()} | spoilt)
        outputs = made if isinstance(made, tuple) else (made,)
        return [t.float() for t in outputs if isinstance(t, Tensor)]

    call = calls(device)[name]
    want = run()
    for argument, tensor in call.tensors.items():
        if not tensor.is_floating_point():
            continue
        view = torch._neg_view(-tensor)
        if argument in call.written:
            message = rf"^{op}: {argument} must hold its own values .* got a negation$"
            with pytest.raises(ValueError, match=message):
                run(**{argument: view})
            assert torch.equal(view, tensor)
        else:
            assert all(map(torch.equal, run(**{argument: view}), want)), argument
