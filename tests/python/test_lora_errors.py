# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the LoRA ops: one clear sentence, and nothing written."""

from dataclasses import replace

import pytest
import torch

from lora_cases import Problem, make
from mortar import lora
from mortar._ffi import lib

PROBLEM = Problem(tokens=12, hidden=40, widths=(24, 16), ranks=(8, 3))


class Call:
    """The arguments of one apply, shrink or expand, to be spoilt one at a time."""

    def __init__(self, device, form):
        t = make(PROBLEM, device)
        self.t, self.device = t, device
        self.weights, self.plan = t.weights(form), t.plan()
        self.x, self.y = t.x, t.y
        self.h = torch.full((2, 12, 8), 7.0, device=device)
        self.options = {}

    def run(self, op):
        if op == "apply":
            lora.apply(self.y, self.x, self.weights, self.plan, **self.options)
        elif op == "shrink":
            lora.shrink(self.x, self.weights, self.plan, self.h, **self.options)
        else:
            lora.expand(self.y, self.h, self.weights, self.plan, **self.options)


def new(call, *shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device=call.device)


def x_of_three_dimensions(c):
    c.x = c.x[None]
    return ValueError, r"x must have 2 dimensions, got shape \(1, 12, 40\)"


def x_of_another_width(c):
    c.x = new(c, 12, 41)
    return ValueError, "x must have K = 40 columns as a has, got 41"


def x_of_integers(c):
    c.x = c.x.int()
    return TypeError, "x must have dtype float32 or float16 or bfloat16, got int32"


def x_of_double(c):
    c.x = c.x.double()
    return TypeError, "x must have dtype .*, got float64"


def x_transposed(c):
    c.x = new(c, 40, 12).T
    return ValueError, "x must have stride 1 in its last dimension, got stride 12"


def x_of_more_rows(c):
    c.x = new(c, 13, 40)
    return ValueError, r"[yh] must have shape \((13|2, 13), any\), got"


def y_of_three_dimensions(c):
    c.y = c.y[None]
    return ValueError, r"y must have (shape \(12, any\)|2 dimensions), got .*\(1, 12, 40\)"


def y_too_narrow(c):
    c.y = c.y[:, :39]
    return ValueError, r"y must have at least offset \+ sum of widths = 0 \+ 40 columns, got 39"


def y_too_narrow_for_offset(c):
    c.options["offset"] = 1
    return ValueError, r"y must have at least offset \+ sum of widths = 1 \+ 40 columns, got 40"


def negative_offset(c):
    c.options["offset"] = -1
    return ValueError, "offset must be at least 0, got -1"


def y_of_integers(c):
    c.y = c.y.long()
    return TypeError, "y must have dtype .*, got int64"


def y_expanded(c):
    c.y = new(c, 1, 40).expand(12, 40)
    return ValueError, "y must not overlap itself"


def y_transposed(c):
    c.y = new(c, 40, 12).T
    return ValueError, "y must have stride 1 in its last dimension, got stride 12"


def y_overlaps_x(c):
    both = new(c, 12, 60)
    c.x, c.y = both[:, :40], both[:, 20:]
    return ValueError, "y and x must not overlap in memory"


def y_overlaps_h(c):
    both = new(c, 2000, dtype=torch.float32)
    c.h, c.y = both[:192].view(2, 12, 8), both[100:580].view(12, 40)
    return ValueError, "y and h must not overlap in memory"


def h_overlaps_x(c):
    both = new(c, 2000, dtype=torch.float32)
    c.h, c.x = both[:192].view(2, 12, 8), both[100:580].view(12, 40)
    return ValueError, "h and x must not overlap in memory"


def h_of_two_dimensions(c):
    c.h = c.h[0]
    return ValueError, r"h must have shape \(2, 12, any\), got \(12, 8\)"


def h_of_other_tokens(c):
    c.h = new(c, 2, 11, 8, dtype=torch.float32)
    return ValueError, r"h must have shape \(2, 12, any\), got \(2, 11, 8\)"


def h_of_other_slices(c):
    c.h = new(c, 3, 12, 8, dtype=torch.float32)
    return ValueError, r"h must have shape \(2, 12, any\), got \(3, 12, 8\)"


def h_too_narrow(c):
    c.h = c.h[..., :7]
    return ValueError, r"h must have at least 8 columns \(the largest rank\), got 7"


def h_of_another_16_bit_type(c):
    c.h = c.h.half()
    return TypeError, r"h must have dtype float32 or that of x \(bfloat16\), got float16"


def h_of_integers(c):
    c.h = c.h.int()
    return TypeError, "h must have dtype .*, got int32"


def h_strided(c):
    c.h = new(c, 2, 12, 16, dtype=torch.float32)[..., ::2]
    return ValueError, "h must have stride 1 in its last dimension, got stride 2"


def h_expanded(c):
    c.h = new(c, 1, 12, 8, dtype=torch.float32).expand(2, 12, 8)
    return ValueError, "h must not overlap itself"


def zero_rows_of_floats(c):
    c.options["zero_rows"] = c.t.token_adapter.float()
    return TypeError, "zero_rows must have dtype int32 or int64, got float32"


def zero_rows_too_short(c):
    c.options["zero_rows"] = c.t.token_adapter[:11]
    return ValueError, r"zero_rows must have shape \(12\), got \(11\)"


def plan_too_small(c):
    c.plan = c.plan._replace(data=c.plan.data[:20])
    return ValueError, "plan must have at least .* elements for 12 tokens and 2 adapters, got 20"


def plan_of_long(c):
    c.plan = c.plan._replace(data=c.plan.data.long())
    return TypeError, "plan must have dtype int32, got int64"


def plan_of_two_dimensions(c):
    c.plan = c.plan._replace(data=c.plan.data[None])
    return ValueError, "plan must have 1 dimension, got shape"


def plan_misaligned(c):
    data = torch.empty(c.plan.data.numel() + 1, dtype=torch.int32, device=c.device)
    c.plan = c.plan._replace(data=data[1:])
    return ValueError, "plan must be aligned to 16 bytes, got address"


def plan_strided(c):
    c.plan = c.plan._replace(data=c.plan.data.repeat_interleave(2)[::2])
    return ValueError, "plan must be contiguous, got strides"


def workspace_of_floats(c):
    c.options["workspace"] = new(c, 1 << 20, dtype=torch.float32)
    return TypeError, "workspace must have dtype uint8, got float32"


def workspace_of_two_dimensions(c):
    c.options["workspace"] = new(c, 1 << 20, 1, dtype=torch.uint8)
    return ValueError, "workspace must have 1 dimension, got shape"


def workspace_too_small(c):
    size = c.weights.workspace_size(c.x)
    c.options["workspace"] = new(c, size - 1, dtype=torch.uint8)
    return ValueError, f"workspace must have at least {size} bytes, got {size - 1}"


def workspace_misaligned(c):
    size = c.weights.workspace_size(c.x)
    c.options["workspace"] = new(c, size + 1, dtype=torch.uint8)[1:]
    return ValueError, "workspace must be aligned to 16 bytes, got address"


def workspace_overlaps_x(c):
    both = new(c, 1 << 22, dtype=torch.uint8)
    c.options["workspace"] = both
    c.x = both[:960].view(torch.bfloat16).view(12, 40)
    return ValueError, "workspace and x must not overlap in memory"


SPOILT = {
    "apply": [
        x_of_three_dimensions, x_of_another_width, x_of_integers, x_of_double, x_transposed,
        x_of_more_rows, y_of_three_dimensions, y_too_narrow, y_too_narrow_for_offset,
        negative_offset, y_of_integers, y_expanded, y_transposed, y_overlaps_x, plan_too_small,
        plan_of_long, plan_of_two_dimensions, plan_misaligned, plan_strided, workspace_of_floats,
        workspace_of_two_dimensions, workspace_too_small, workspace_misaligned,
        workspace_overlaps_x,
    ],
    "shrink": [
        x_of_three_dimensions, x_of_another_width, x_of_integers, x_of_double, x_transposed,
        x_of_more_rows, h_of_two_dimensions, h_of_other_tokens, h_of_other_slices, h_too_narrow,
        h_of_another_16_bit_type, h_of_integers, h_strided, h_expanded, h_overlaps_x,
        zero_rows_of_floats, zero_rows_too_short, plan_too_small, plan_of_long, plan_misaligned,
        workspace_of_floats,
    ],
    "expand": [
        y_of_three_dimensions, y_too_narrow, y_too_narrow_for_offset, negative_offset,
        y_of_integers, y_expanded, y_transposed, y_overlaps_h, h_of_two_dimensions,
        h_of_other_tokens, h_of_other_slices, h_too_narrow, h_of_integers, h_strided,
        plan_too_small, plan_of_long, plan_of_two_dimensions, plan_misaligned,
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", ["table", "stacked"])
@pytest.mark.parametrize(
    "op, spoil",
    [(op, spoil) for op, spoils in SPOILT.items() for spoil in spoils],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_refuses(device, op, spoil, form):
    call = Call(device, form)
    error, message = spoil(call)
    written = {"apply": ["y"], "shrink": ["h"], "expand": ["y"]}[op]
    before = [getattr(call, name).clone() for name in written]
    with pytest.raises(error, match=f"^lora_{op}: {message}"):
        call.run(op)
    for name, old in zip(written, before, strict=True):
        assert torch.equal(getattr(call, name), old)


@pytest.mark.parametrize("form", ["table", "stacked"])
def test_the_call_is_right_before_it_is_spoilt(device, form):
    for op in SPOILT:
        Call(device, form).run(op)


@pytest.mark.parametrize("tracing", [False, True])
@pytest.mark.parametrize("op", ["apply", "shrink", "expand"])
@pytest.mark.parametrize("tokens, adapters", [(24, 2), (6, 2), (12, 3), (12, 1)])
def test_plan_for_another_batch(device, op, tokens, adapters, tracing, monkeypatch):
    """Said by the plan's own sizes, without a look at the device; also where the op itself, which
    has the plan's tensor alone, is called."""
    call = Call(device, "table")
    ids = call.t.token_adapter.repeat(2)[:tokens].contiguous()
    call.plan = lora.plan(ids, adapters, out=lora.Plan(call.plan.data.new_empty(5000), 0, 0))
    before = call.y.clone(), call.h.clone()
    monkeypatch.setattr(lora, "is_eager", lambda first: not tracing)
    message = f"^lora_{op}: plan must be made for 12 tokens and 2 adapters, got one for {tokens} "
    with pytest.raises(ValueError, match=f"{message}and {adapters}$"):
        call.run(op)
    assert torch.equal(call.y, before[0])
    assert torch.equal(call.h, before[1])


def bad_tables(device):
    flat = torch.zeros(60, dtype=torch.int64, device=device)
    yield "dimensions", flat[:4].view(2, 2)
    yield "shape", flat[:12].view(2, 2, 3)
    yield "dtype", flat[:16].view(2, 2, 4).float()
    yield "strides", flat[:20].view(2, 2, 5)[..., :4]
    yield "alignment", flat[1:17].view(2, 2, 4)


@pytest.mark.parametrize("kind", [kind for kind, _ in bad_tables("cpu")])
def test_tables_are_checked(device, kind):
    call = Call(device, "table")
    _, *rest = call.weights.apply_args
    before = call.y.clone()
    with pytest.raises((ValueError, TypeError), match="^lora_weights: table must "):
        torch.ops.mortar.lora_apply.table(
            call.x, call.plan.data, dict(bad_tables(device))[kind], *rest, call.y
        )
    assert torch.equal(call.y, before)


PLAN = [
    (lambda ids: (ids.float(), 2), TypeError, "must have dtype int32 or int64, got float32"),
    (lambda ids: (ids[None], 2), ValueError, "token_adapter must have 1 dimension"),
    (lambda ids: (ids[::2], 2), ValueError, "token_adapter must be contiguous, got strides"),
    (lambda ids: (ids, 0), ValueError, "num_adapters must be 1 to 4096, got 0"),
    (lambda ids: (ids, 4097), ValueError, "num_adapters must be 1 to 4096, got 4097"),
    (lambda ids: (ids, 2.5), TypeError, "num_adapters must be an integer, got float"),
    (lambda ids: (ids.new_zeros(2**20 + 1), 2), ValueError, "tokens must be 0 to 1048576"),
]


@pytest.mark.parametrize("spoil, error, message", PLAN, ids=[case[-1] for case in PLAN])
def test_plan_refuses(device, spoil, error, message):
    ids = torch.zeros(12, dtype=torch.int32, device=device)
    args = spoil(ids)
    out = lora.Plan(torch.full((10**7,), 5, dtype=torch.int32, device=device), 0, 0)
    with pytest.raises(error, match=f"^lora_plan: .*{message}"):
        lora.plan(*args, out=out)
    assert (out.data == 5).all()


def test_plan_needs_room(device):
    ids = torch.zeros(12, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="^lora_plan: plan must have at least .* got 20"):
        lora.plan(ids, 2, out=lora.Plan(ids.new_empty(20), 12, 2))
    with pytest.raises(ValueError, match="^lora_plan: plan and token_adapter must not overlap"):
        data = ids.new_zeros(1000)
        lora.plan(data[:12], 2, out=lora.Plan(data, 12, 2))


def test_check_reports_ids_out_of_range(device):
    ids = torch.tensor([0, -1, 1, 2, 0, -2], dtype=torch.int32, device=device)
    plan = lora.plan(ids, 2)
    with pytest.raises(
        ValueError,
        match=r"^lora_plan: token_adapter must hold ids in \[-1, 2\), got 2 others, the first at "
        "token 3$",
    ):
        lora.check(plan)


def test_flat_calls_are_checked(device):
    """The bound functions themselves: too few arguments, and arguments of a wrong kind."""
    for op in (lib.lora_apply, lib.lora_shrink, lib.lora_expand, lib.lora_weights):
        with pytest.raises(TypeError, match=r"lora_\w+: \w+ is required, got 0 arguments"):
            op()
    with pytest.raises(TypeError, match="lora_apply: y must be a tensor, got int"):
        lib.lora_apply(torch.zeros(1, 1, device=device), 3)
    with pytest.raises(TypeError, match="lora_launch_plan: x must be a tensor, got list or tuple"):
        lib.lora_launch_plan([1], torch.zeros(1, 1, device=device), 0)
    with pytest.raises(TypeError, match="lora_train_check: offsets must be a tensor, got list"):
        lib.lora_train_check([0, 3], 1, 3)
    t = make(replace(PROBLEM, widths=(24,)), device)
    with pytest.raises(TypeError, match="lora_weights: dtype must be a dtype"):
        lib.lora_weights(t.table().apply_args[0], 3.5, 8, 40, 24)
    with pytest.raises(ValueError, match=r"lora_weights: a must hold as many .* len\(a\) = 3"):
        lib.lora_weights(None, None, None, 3, t.x, t.y)
