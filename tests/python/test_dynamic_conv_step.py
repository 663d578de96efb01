# SPDX-License-Identifier: Apache-2.0
"""The decode step: values, slots, padding, and agreement with the full convolution."""

import pytest
import torch

from conftest import DEVICES
from dynamic_conv_cases import FLOATS, WIDTHS, assert_bitwise
from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step
from mortar.reference import dynamic_conv as reference

POISON = float("nan")


def inputs(device, rows, channels, width, state_len, slots=None, dtype=torch.float32, kernels=None):
    """x, kernels and a state with `slots` rows (`rows` by default)."""
    x = torch.randn(rows, channels, device=device).to(dtype)
    k = torch.randn(rows, channels, width, device=device).to(kernels or dtype)
    state = torch.randn(slots or rows, channels, state_len, device=device).to(dtype)
    return x, k, state


def assert_step(x, kernels, state, slots=None, activation=None):
    """One call against float64: y within one rounding, the state exactly shifted."""
    before = state.clone()
    y = dynamic_conv_step(x, kernels, state, slots=slots, activation=activation)
    wide = [t.cpu().double() for t in (x, kernels, before)]
    ids = None if slots is None else slots.cpu()
    expected, new_state = reference.dynamic_conv_step(*wide, slots=ids, activation=activation)
    sums, _ = reference.dynamic_conv_step(*(t.abs() for t in wide), slots=ids)
    eps = torch.finfo(x.dtype).eps
    terms = kernels.shape[-1] + 1 + (8 if activation else 0)
    allowed = eps / 2 * expected.abs() * (1 + 2**-8) + 2 * terms * 2**-24 * sums + 2.0**-25
    assert bool(((y.cpu().double() - expected).abs() <= allowed).all())
    assert_bitwise(state.cpu(), new_state.to(state.dtype), "state")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernels", FLOATS, ids=str)
def test_values(device, width, extra, dtype, kernels):
    for activation in (None, "silu"):
        assert_step(*inputs(device, 5, 19, width, width - 1 + extra, None, dtype, kernels),
                    activation=activation)  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 3, 32, 129])
@pytest.mark.parametrize("channels", [0, 1, 8, 33, 1030])
def test_sizes(device, rows, channels):
    assert_step(*inputs(device, rows, channels, 4, 4, dtype=torch.bfloat16), activation="silu")


def test_a_dimension_of_one_token(device):
    """x as a slice of a sequence, [N, 1, D]: the same bits, in that shape."""
    x, kernels, state = inputs(device, 5, 24, 4, 4)
    sequence = torch.randn(5, 7, 24, device=device).to(x.dtype)
    other = state.clone()
    y = dynamic_conv_step(sequence[:, 3:4], kernels, state)
    assert_bitwise(y, dynamic_conv_step(sequence[:, 3], kernels, other).unsqueeze(1), "y")
    assert_bitwise(state, other, "state")


@pytest.mark.parametrize("extra", [0, 1])
def test_slots_and_padding(device, extra):
    """Any order, padding between, unused slots untouched; ids outside the state are padding."""
    x, kernels, state = inputs(device, 7, 21, 4, 3 + extra, slots=9)
    for ids in ([3, -1, 0, 8, -1, 5, 1], [-1] * 7, [8, 9, 2**31 - 1, -(2**31), -2, 0, 1]):
        slots = torch.tensor(ids, dtype=torch.int32, device=device)
        assert_step(x, kernels, state, slots, "silu")


def test_padding_rows_may_hold_anything(device):
    x, kernels, state = inputs(device, 3, 9, 4, 4)
    x[1], kernels[1] = POISON, POISON
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    y = dynamic_conv_step(x, kernels, state, slots=slots)
    assert (y[1] == 0).all() and not y.isnan().any() and not state.isnan().any()


@pytest.mark.parametrize("layout", ["slots-channels-time", "slots-time-channels", "sliced"])
def test_state_layouts_are_updated_in_place(device, layout):
    """[S, D, L], [S, L, D] and a slice of a larger buffer: whatever lies around stays."""
    x, kernels, _ = inputs(device, 4, 13, 4, 4)
    if layout == "slots-time-channels":
        room = torch.randn(6, 4, 13, device=device)
        state = room.transpose(1, 2)
    elif layout == "sliced":
        room = torch.full((6, 15, 7), POISON, device=device)
        state = room[:, 1:14, 2:6]
        state.copy_(torch.randn(6, 13, 4))
    else:
        room = state = torch.randn(6, 13, 4, device=device)
    slots = torch.tensor([5, 0, -1, 2], dtype=torch.int32, device=device)
    x_view = torch.randn(4, 30, device=device)[:, 7:20]
    assert_step(x_view, kernels, state, slots)
    if layout == "sliced":
        state.fill_(POISON)
        assert room.isnan().all()


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_then_steps_equal_one_pass(device, extra, width, dtype):
    """Bit for bit: the states of a prefill lead the steps to what one pass gives."""
    x = torch.randn(3, 14, 11, device=device).to(dtype)
    kernels = torch.randn(3, 14, 11, width, device=device).to(dtype)
    whole, last = dynamic_conv(x, kernels, output_final_state=True, activation="silu",
                               state_len=width - 1 + extra)  # fmt: skip
    y, state = dynamic_conv(x[:, :2], kernels[:, :2], output_final_state=True, activation="silu",
                            state_len=width - 1 + extra)  # fmt: skip
    rows = [y]
    for t in range(2, 14):
        rows.append(
            dynamic_conv_step(x[:, t], kernels[:, t], state, activation="silu").unsqueeze(1)
        )
    assert_bitwise(torch.cat(rows, 1), whole, "y")
    assert_bitwise(state, last, "state")


def test_rows_do_not_see_each_other(device):
    """Batch-invariant and repeatable: a row has the same bits alone and in any order."""
    x, kernels, state = inputs(device, 33, 65, 4, 3, dtype=torch.bfloat16)
    start = state.clone()
    y = dynamic_conv_step(x, kernels, state, activation="silu")
    order = torch.randperm(33, device=device)
    moved_state = start[order]
    moved = dynamic_conv_step(x[order], kernels[order], moved_state, activation="silu")
    assert_bitwise(moved, y[order], "y")
    assert_bitwise(moved_state, state[order], "state")
    one_state = start[7:8].clone()
    one = dynamic_conv_step(x[7:8], kernels[7:8], one_state, activation="silu")
    assert_bitwise(one, y[7:8], "y")


if "cuda" in DEVICES:

    def test_graph_replay_with_changed_slots():
        device = torch.device("cuda")
        x, kernels, start = inputs(device, 6, 64, 4, 4, slots=10)
        slots = torch.full((6,), -1, dtype=torch.int32, device=device)
        state = start.clone()
        dynamic_conv_step(x, kernels, state, slots=slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = dynamic_conv_step(x, kernels, state, slots=slots)
        for ids in ([0, 1, 2, 3, 4, 5], [9, -1, 7, -1, 1, 0], [-1] * 6):
            slots.copy_(torch.tensor(ids, dtype=torch.int32))
            state.copy_(start)
            expected_state = start.clone()
            graph.replay()
            expected = dynamic_conv_step(x, kernels, expected_state, slots=slots)
            assert_bitwise(y, expected, "y")
            assert_bitwise(state, expected_state, "state")
