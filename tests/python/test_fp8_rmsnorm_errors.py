# SPDX-License-Identifier: Apache-2.0
"""Bad input: one sentence that names function and argument, and nothing written."""

import functools
import re

import pytest
import torch
from torch.autograd import forward_ad

import mortar
from conftest import DEVICES
from fp8_rmsnorm_cases import E4M3, random_case
from mortar.fp8 import Fp8Output

POISON = 7.0

# (function's keywords after x and weight, the sentence)
NORM = [
    ({"weight": torch.ones(31)}, ValueError, "weight must have shape (32), got (31)"),
    ({"weight": torch.ones(32, dtype=torch.float64)}, TypeError, "weight must have dtype"),
    ({"weight": torch.ones(64)[::2]}, ValueError, "weight must be contiguous"),
    ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
    ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    ({"x": torch.ones(4, 32, dtype=torch.int32)}, TypeError, "x must have dtype"),
    ({"x": torch.ones(4, 32, dtype=torch.complex64)}, TypeError, "x must have dtype"),
    ({"x": torch.ones(32)}, ValueError, "x must have at least 2 dimensions, got (32,)"),
    ({"x": torch.ones(32, 4).t()}, ValueError, "x must have stride 1 in its last dimension"),
    ({"x": torch.ones(2, 3, 32)[:, :2]}, ValueError, "x must have leading dimensions that one"),
    ({"x": torch.ones(3, 2, 32).transpose(0, 1)}, ValueError, "x must have leading dimensions"),
    ({"x": torch.ones(2, 65537), "weight": torch.ones(65537)}, ValueError,
     "x must have 1 to 65536 columns, got shape (2, 65537)"),
    ({"x_scale": torch.ones(4, 2)}, ValueError, "x_scale must be left out for x of float32"),
    ({"x_scale": 3}, TypeError, "x_scale must be a tensor, got int"),
    ({"residual": torch.ones(4, 31)}, ValueError, "residual must have shape (4, 32), got (4, 31)"),
    ({"residual": torch.ones(4, 32).double()}, TypeError, "residual must have dtype"),
    ({"eps": -1.0}, ValueError, "eps must be positive and finite, got -1"),
    ({"eps": "small"}, TypeError, "eps must be a number, got"),
    ({"fp8_dtype": torch.bfloat16}, TypeError,
     "fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.bfloat16"),
    ({"scaling": "block"}, ValueError,
     "scaling must be one of 'tensor', 'row', 'group', got 'block'"),
    ({"scaling": ["row"]}, ValueError, "scaling must be one of 'tensor', 'row', 'group', got"),
    ({"numerics": "exact"}, ValueError, "numerics must be one of 'fast', 'compat', got 'exact'"),
    ({"numerics": "compat", "scaling": "row"}, ValueError, "scaling must be tensor with numerics"),
    ({"group": 48, "scaling": "group"}, ValueError, "group must be 16, 32, 64 or 128, got 48"),
    ({"group": 16.0}, TypeError, "group must be an int, got float"),
    ({"transpose": "both"}, ValueError, "transpose must be False, True or 'only', got 'both'"),
    ({"scale_layout": "col"}, ValueError, "scale_layout must be 'row', or 'col' with scaling="),
    ({"scale": torch.ones(1)}, ValueError, "scale must have shape (), got (1)"),
    ({"scale": torch.ones(4), "scaling": "row", "transpose": True}, TypeError,
     "scale must be the pair (scale, scale_t) with transpose=True and scaling='row', got Tensor"),
    ({"scale": (torch.ones(4), None), "scaling": "row", "transpose": True}, TypeError,
     "scale_t must be a tensor, got NoneType"),
    ({"scale": torch.ones((), dtype=torch.bfloat16)}, TypeError, "scale must have dtype float32"),
    ({"scale": 1.0}, TypeError, "scale must be a tensor, got float"),
]  # fmt: skip


def label(value) -> str:
    return "-".join(value) if isinstance(value, dict) else ""


def moved(value, device):
    """A tensor on the device with the strides that it has: `to` makes gaps between rows go."""
    if not isinstance(value, torch.Tensor):
        return value
    room = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    place = (value.size(), value.stride(), value.storage_offset())
    return room.view(value.dtype).as_strided(*place).copy_(value)


@pytest.mark.parametrize("make", [lambda t: t[::2], lambda t: t.view(4, 16)[:, 8:].t()])
def test_moved_tensors_keep_their_strides(device, make):
    value = make(torch.arange(64.0))
    there = moved(value, device)
    assert there.stride() == value.stride() and torch.equal(there.cpu(), value)


@pytest.mark.parametrize("changes, kind, sentence", NORM, ids=label)
def test_norm(device, changes, kind, sentence):
    arguments = {"x": torch.ones(4, 32), "weight": torch.ones(32)} | changes
    arguments = {k: moved(v, device) for k, v in arguments.items()}
    if "residual" not in arguments and getattr(arguments["x"], "ndim", 0) == 2:
        arguments["residual"] = torch.full(arguments["x"].shape, POISON, device=device)
    x, weight = arguments.pop("x"), arguments.pop("weight")
    with pytest.raises(kind, match="^fp8_rmsnorm: " + re.escape(sentence)):
        mortar.fp8_rmsnorm(x, weight, **arguments)
    residual = arguments.get("residual")
    if residual is not None and "residual" not in changes:
        assert (residual == POISON).all()


@pytest.mark.parametrize("groups", [1, 3, 5, 8])
def test_groups_of_x_that_do_not_fit(device, groups):
    x = torch.ones(4, 80, device=device).to(E4M3)
    scale = torch.ones(4, groups, device=device)
    if groups == 5:
        scale = scale[:3]
    with pytest.raises(ValueError, match="^fp8_rmsnorm: x_scale must have shape"):
        mortar.fp8_rmsnorm(x, torch.ones(80, device=device), x_scale=scale)
    with pytest.raises(ValueError, match="^fp8_rmsnorm: x_scale "):
        mortar.fp8_rmsnorm(x, torch.ones(80, device=device))


def test_a_residual_over_x(device):
    x = torch.ones(4, 32, device=device)
    for residual in (x, x.flatten()[:128].view(4, 32)):
        with pytest.raises(ValueError, match="^fp8_rmsnorm: .*residual.*x"):
            mortar.fp8_rmsnorm(x, torch.ones(32, device=device), residual=residual)
    assert (x == 1).all()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_given_scales_must_be_positive(value):
    """Read on the CPU alone: a GPU is not waited for."""
    y = torch.ones(4, 32)
    with pytest.raises(ValueError, match="^fp8_quantize: scale must be positive and finite"):
        mortar.fp8_quantize(y, scale=torch.tensor(value))


QUANTIZE = [
    ({"y": torch.ones(4, 32).to(E4M3)}, TypeError, "y must have dtype"),
    ({"y": None}, TypeError, "y must be a tensor, got NoneType"),
    ({"y": torch.ones(3)}, ValueError, "y must have at least 2 dimensions, got (3,)"),
    ({"fp8_dtype": "E4M3"}, TypeError, "fp8_dtype must be torch.float8_e4m3fn or"),
    ({"scaling": None}, ValueError, "scaling must be one of"),
]


@pytest.mark.parametrize("changes, kind, sentence", QUANTIZE, ids=label)
def test_quantize(device, changes, kind, sentence):
    arguments = {"y": torch.ones(4, 32)} | changes
    with pytest.raises(kind, match="^fp8_quantize: " + re.escape(sentence)):
        mortar.fp8_quantize(moved(arguments.pop("y"), device), **arguments)


def record(**changes) -> Fp8Output:
    q = torch.zeros(4, 32).to(E4M3)
    return Fp8Output(q=q, scale=torch.full((), POISON), rstd=torch.full((4,), POISON))._replace(
        **changes
    )


# (out, further options, the sentence)
RECORDS = [
    ((1, 2), {}, TypeError, "out must be an Fp8Output, got tuple"),
    (record(), {"transpose": True}, ValueError,
     "out must have what transpose=True makes, got q and no q_t"),
    (record(), {"transpose": "only"}, ValueError, "out must have what transpose='only' makes"),
    (record(q=None), {}, ValueError, "out must have what transpose=False makes, got no q and no"),
    (record(), {"normed": True}, ValueError, "out must have what normed=True makes, got no normed"),
    (record(normed=torch.zeros(4, 32)), {}, ValueError, "out must have what normed=False makes"),
    (record(), {"fp8_dtype": torch.float8_e5m2}, TypeError,
     "out must have q and q_t of fp8_dtype=torch.float8_e5m2, got torch.float8_e4m3fn"),
    (record(q_t=torch.zeros(32, 4).to(E4M3), scale_t=torch.ones(())), {"transpose": True},
     ValueError, "out must have one tensor as scale and scale_t with scaling='tensor', got two"),
    (record(q=3), {"fp8_dtype": E4M3}, TypeError, "out must have q and q_t of fp8_dtype="),
    (record(scale=None), {}, ValueError, "scale is required, got nothing"),
    (record(q=torch.zeros(4, 31).to(E4M3)), {}, ValueError, "q must have shape (4, 32), got"),
    (record(rstd=torch.ones(3)), {}, ValueError, "rstd must have shape (4), got (3)"),
    (record(q=torch.zeros(4, 32)), {}, TypeError, "q must have dtype float8_e4m3fn or float8_e5m2"),
    (record(amax="0"), {}, TypeError, "amax must be a tensor, got str"),
]  # fmt: skip


@pytest.mark.parametrize("out, options, kind, sentence", RECORDS, ids=label)
def test_record(device, out, options, kind, sentence):
    if isinstance(out, Fp8Output):
        out = Fp8Output(*(moved(t, device) for t in out))
    x, weight = torch.ones(4, 32, device=device), torch.ones(32, device=device)
    with pytest.raises(kind, match="^fp8_rmsnorm: " + re.escape(sentence)):
        mortar.fp8_rmsnorm(x, weight, out=out, **options)
    if isinstance(out, Fp8Output) and out.scale is not None:
        assert out.scale == POISON and (out.rstd[:3] >= 1).all()


def gradient_arguments(device) -> dict:
    case = random_case(device, (4, 32))
    return {"dy": torch.ones(4, 32, device=device).bfloat16(), "x": case.x, "weight": case.weight,
            "rstd": torch.ones(4, device=device)}  # fmt: skip


BACKWARD = [
    ({"dy": torch.ones(4, 31).bfloat16()}, ValueError, "dy must have shape (4, 32), got (4, 31)"),
    ({"dy": torch.ones(32, 4).t().bfloat16()}, ValueError, "dy must have stride 1"),
    ({"dy": None}, TypeError, "dy must be a tensor, got NoneType"),
    ({"rstd": torch.ones(3)}, ValueError, "rstd must have shape (4), got (3)"),
    ({"rstd": torch.ones(4).bfloat16()}, TypeError, "rstd must have dtype float32"),
    ({"residual_grad": torch.ones(4, 32)}, TypeError, "residual_grad must have the dtype of dy"),
    ({"dx": torch.full((4, 32), POISON)}, TypeError, "dx must have the dtype of dy (bfloat16)"),
    ({"dw": torch.full((31,), POISON)}, ValueError, "dw must have shape (32), got (31)"),
    ({"accumulate_dw": True}, ValueError, "dw must be given with accumulate_dw, got None"),
    ({"residual_grad": "none"}, TypeError, "residual_grad must be a tensor, got str"),
]


@pytest.mark.parametrize("changes, kind, sentence", BACKWARD, ids=label)
def test_backward(device, changes, kind, sentence):
    arguments = gradient_arguments(device) | {k: moved(v, device) for k, v in changes.items()}
    dw = torch.full((32,), POISON, device=device)
    if "dw" not in arguments and "accumulate_dw" not in arguments:
        arguments["dw"] = dw
    with pytest.raises(kind, match="^fp8_rmsnorm_backward: " + re.escape(sentence)):
        mortar.fp8_rmsnorm_backward(**arguments)
    assert (dw == POISON).all()


def test_dx_over_part_of_dy(device):
    arguments = gradient_arguments(device)
    room = torch.ones(6, 32, device=device).bfloat16()
    with pytest.raises(ValueError, match="^fp8_rmsnorm_backward: dx "):
        mortar.fp8_rmsnorm_backward(**(arguments | {"dy": room[:4], "dx": room[1:5]}))
    assert (room == 1).all()


def test_gradients_are_not_lost_in_silence(device):
    x, weight = torch.ones(4, 32, device=device), torch.ones(32, device=device)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="^fp8_rmsnorm: has no gradient .* mortar.nn.Fp8RMSNorm"):
        mortar.fp8_rmsnorm(x, weight)
    with pytest.raises(RuntimeError, match="^fp8_quantize: has no gradient"):
        mortar.fp8_quantize(x)
    with pytest.raises(RuntimeError, match="^fp8_rmsnorm_backward: has no gradient"):
        mortar.fp8_rmsnorm_backward(x, x, weight, torch.ones(4, device=device))
    with torch.no_grad():
        mortar.fp8_rmsnorm(x, weight)


@pytest.mark.parametrize("by_op", [False, True], ids=["", "op"])
@pytest.mark.parametrize("name", ["rstd", "dx", "dw"])
def test_gradients_of_what_the_backward_gets_are_not_lost(device, name, by_op):
    arguments = gradient_arguments(device)
    dx, dw = torch.zeros_like(arguments["dy"]), torch.zeros(32, device=device)
    arguments |= {"dx": dx, "dw": dw}
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match="^fp8_rmsnorm_backward: has no gradient"):
        if by_op:
            operands = {"x_scale": None, "residual_grad": None, "weight_offset": 0.0}
            op = torch.ops.mortar.fp8_rmsnorm_backward_out
            op(**operands | arguments, accumulate_dw=False)
        else:
            mortar.fp8_rmsnorm_backward(**arguments)
    assert not (dx.any() or dw.any())


@pytest.mark.parametrize("scaling", ["tensor", "row", "group"])
@pytest.mark.parametrize("function", ["fp8_rmsnorm", "fp8_quantize"])
def test_gradients_of_scales_and_of_a_record_are_not_lost(device, function, scaling):
    x, weight = torch.ones(4, 32, device=device), torch.ones(32, device=device)
    options = {"scaling": scaling, "group": 16, "transpose": True}
    call = functools.partial(getattr(mortar, function), x, **options)
    if function == "fp8_rmsnorm":
        call = functools.partial(call, weight=weight)
    made = call()
    scale = made.scale.clone().requires_grad_()
    given = scale if scaling == "tensor" else (scale, made.scale_t)
    refused = pytest.raises(RuntimeError, match=f"^{function}: has no gradient of its own")
    with refused:
        call(scale=given)
    out = made._replace(q_t=torch.zeros(32, 4, device=device).requires_grad_().to(E4M3))
    with refused:
        call(out=out)
    assert not out.q_t.float().any()
    # A residual of the record is not used.
    call(out=made._replace(residual=torch.zeros(4, 32, device=device, requires_grad=True)))
    with torch.no_grad():
        call(scale=given, out=out)
    assert out.q_t.float().all()


def test_a_weight_that_was_left_on_meta(device):
    """The dispatcher alone would return what the outputs' memory happens to hold."""
    x, weight = torch.ones(4, 32, device=device), torch.ones(32, device="meta")
    place = re.escape(str(x.device))
    with pytest.raises(TypeError, match=f"^fp8_rmsnorm: weight must be on {place}, got meta"):
        mortar.fp8_rmsnorm(x, weight)
    with pytest.raises(TypeError, match=f"^fp8_rmsnorm_backward: weight must be on {place}, got"):
        mortar.fp8_rmsnorm_backward(x, x, weight, torch.ones(4, device=device))


def test_tangents_are_not_lost_in_silence(device):
    x, weight = torch.ones(4, 32, device=device), torch.ones(32, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="^fp8_rmsnorm: arguments must not have tangents"):
            mortar.fp8_rmsnorm(dual, weight, normed=True)
        with pytest.raises(RuntimeError, match="^fp8_quantize: arguments must not have tangents"):
            mortar.fp8_quantize(dual)
        mortar.fp8_rmsnorm(x, weight)


if "cuda" in DEVICES:

    def test_mixed_devices():
        x, weight = torch.ones(4, 32, device="cuda"), torch.ones(32)
        with pytest.raises(TypeError, match="^fp8_rmsnorm: weight must be on cuda:0, got cpu"):
            mortar.fp8_rmsnorm(x, weight)
        with pytest.raises(TypeError, match="^fp8_rmsnorm: residual must be on cuda:0, got cpu"):
            mortar.fp8_rmsnorm(x, weight.cuda(), residual=torch.ones(4, 32))


@pytest.mark.parametrize("name, value, num", [("scaling", 256, 3), ("scaling", 2**33, 3),
                                              ("numerics", -1, 2)])  # fmt: skip
def test_numbers_that_an_option_does_not_have(device, name, value, num):
    y, q = torch.ones(4, 32, device=device), torch.ones(4, 32, device=device).to(E4M3)
    scale = torch.full((), POISON, device=device)
    options = {"scaling": 0, "group": 128, "pow2_scale": False, "given_scale": False,
               "numerics": 0, "rng": None} | {name: value}  # fmt: skip
    outputs = {"q": q, "scale": scale, "q_t": None, "scale_t": None, "amax": None}
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, {num}\), got {value}"):
        torch.ops.mortar.fp8_quantize_out(y, **options, **outputs)
    assert scale == POISON


def test_the_op_has_the_name_of_the_function(device):
    """Compiled code, which calls the op, says what the function says."""
    x, q = torch.ones(4, 32, device=device), torch.ones(4, 32, device=device).to(E4M3)
    names = [
        argument.name for argument in torch.ops.mortar.fp8_rmsnorm_out.default._schema.arguments
    ]
    arguments = dict.fromkeys(names) | {
        "x": x, "weight": x[0, :31], "q": q, "scale": x.sum(), "eps": 1e-5, "weight_offset": 0.0,
        "scaling": 0, "group": 128, "pow2_scale": False, "given_scale": False, "numerics": 0,
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^fp8_rmsnorm: weight must have shape \(32\), got \(31\)$"
    ):
        torch.ops.mortar.fp8_rmsnorm_out(**arguments)
