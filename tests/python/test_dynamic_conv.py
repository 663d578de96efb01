# SPDX-License-Identifier: Apache-2.0
"""Values of the dynamic convolution, forward and backward, against float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DEVICES
from dynamic_conv_cases import (
    FLOATS,
    WIDTHS,
    Case,
    assert_bitwise,
    assert_matches_oracle,
    boundaries,
    random_case,
    run,
)
from mortar.dynamic_conv import dynamic_conv
from mortar.reference import dynamic_conv as reference

DTYPE_PAIRS = list(itertools.product(FLOATS, FLOATS))
# One element, vectors and blocks of channels and of time and one to either side, odd, empty.
SHAPES = [
    (1, 1, 1),
    (1, 2, 7),
    (2, 3, 8),
    (3, 5, 9),
    (2, 17, 15),
    (1, 31, 16),
    (2, 32, 33),
    (1, 33, 64),
    (1, 65, 127),
    (2, 129, 130),
    (1, 7, 1030),
    (2, 0, 4),
    (0, 3, 4),
    (2, 3, 0),
]
PACKS = [
    [5],
    [0],
    [0, 0, 0],
    [1] * 9,
    [0, 3, 0, 0, 1, 2, 0],
    [4, 0, 64, 1, 65, 0],
    [2, 130, 1, 0, 3, 33],
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("pair", DTYPE_PAIRS, ids=lambda p: "-".join(str(d)[6:] for d in p))
def test_widths_and_dtypes(device, width, activation, pair):
    assert_matches_oracle(random_case(device, 2, 11, 19, width, *pair, activation=activation))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes(device, shape, width, dtype):
    for state_len in (None, width - 1, width):
        assert_matches_oracle(
            random_case(device, *shape, width, dtype, state_len=state_len, activation="silu")
        )


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_packed(device, lengths, width):
    choices = itertools.product((None, width - 1, width), (torch.int32, torch.int64))
    for state_len, index_dtype in choices:
        assert_matches_oracle(
            random_case(device, channels=21, width=width, dtype=torch.bfloat16, lengths=lengths,
                        state_len=state_len, activation="silu", index_dtype=index_dtype)
        )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("time", [0, 1, 2, 5, 12])
def test_states(device, width, extra, time):
    """Sequences shorter than the state shift it; both states carry gradients."""
    state_len = width - 1 + extra
    assert_matches_oracle(random_case(device, 2, time, 6, width, state_len=state_len))
    assert_matches_oracle(random_case(device, 2, time, 6, width, state_len=state_len,
                                      final_state=False))  # fmt: skip
    final_only = random_case(device, 2, time, 6, width, final_state=True)
    final_only.final_state_len = state_len
    final_only.dfinal_state = torch.randn(2, 6, state_len, device=device)
    assert_matches_oracle(final_only)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    width=st.sampled_from(list(WIDTHS)),
    extra=st.sampled_from([None, 0, 1]),
    silu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_boundaries(device, lengths, width, extra, silu, seed):
    """A packed sequence has the bits that it has alone, gradients included."""
    torch.manual_seed(seed)
    case = random_case(
        torch.device(device),
        channels=5,
        width=width,
        lengths=lengths,
        state_len=None if extra is None else width - 1 + extra,
        activation="silu" if silu else None,
    )
    packed = run(case)
    bounds = [0, *itertools.accumulate(lengths)]
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = run(_alone(case, n, start, end))
        for name in ("y", "dx", "dkernels"):
            assert_bitwise(packed[name][:, start:end], alone[name], name)
        for name in ("final_state", "dinitial_state"):
            if name in packed:
                assert_bitwise(packed[name][n : n + 1], alone[name], name)


def _alone(case: Case, n: int, start: int, end: int) -> Case:
    """Sequence n of a packed case as a batch of its own."""
    return Case(
        case.x[:, start:end],
        case.kernels[:, start:end],
        None,
        None if case.initial_state is None else case.initial_state[n : n + 1],
        case.final_state_len,
        case.activation,
        case.dy[:, start:end],
        None if case.dfinal_state is None else case.dfinal_state[n : n + 1],
    )


@pytest.mark.parametrize("width", [3, 4, 8])
def test_repeats_and_permutes_bitwise(device, width):
    lengths = [9, 0, 40, 3, 1, 70]
    case = random_case(device, channels=37, width=width, dtype=torch.bfloat16, lengths=lengths,
                       state_len=width, activation="silu")  # fmt: skip
    first = run(case)
    for _ in range(20):
        for name, again in run(case).items():
            assert_bitwise(first[name], again, name)

    order = [4, 2, 5, 0, 1, 3]
    bounds = [0, *itertools.accumulate(lengths)]
    tokens = torch.cat([torch.arange(bounds[n], bounds[n + 1], device=device) for n in order])
    moved = run(
        Case(
            case.x[:, tokens],
            case.kernels[:, tokens],
            boundaries([lengths[n] for n in order], device),
            case.initial_state[order],
            case.final_state_len,
            case.activation,
            case.dy[:, tokens],
            case.dfinal_state[order],
        )
    )
    for name in ("y", "dx", "dkernels"):
        assert_bitwise(first[name][:, tokens], moved[name], name)
    for name in ("final_state", "dinitial_state"):
        assert_bitwise(first[name][order], moved[name], name)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views(device, width, dtype):
    """Slices at odd offsets, broadcast rows, time first, states stored [N, L, D]: read in place."""
    case = random_case(device, 3, 9, 13, width, dtype, state_len=width, activation="silu")
    room = torch.randn(3, 11, 17, device=device).to(dtype)
    case.x = room[:, 1:10, 3:16]
    case.kernels = torch.randn(3, 12, 15, width, device=device).to(dtype)[:, 2:11, 1:14]
    case.initial_state = torch.randn(3, width, 13, device=device).to(dtype).transpose(1, 2)
    assert_matches_oracle(case)
    case.x = torch.randn(9, 3, 13, device=device).to(dtype).transpose(0, 1)
    case.dy = torch.randn(9, 3, 20, device=device).to(dtype)[..., 5:18].transpose(0, 1)
    assert_matches_oracle(case)
    case.kernels = torch.randn(1, 1, 13, width, device=device).to(dtype).expand(3, 9, 13, width)
    assert_matches_oracle(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_its_outputs_whole_and_nothing_else(device, dtype):
    """Poisoned outputs in larger poisoned buffers: results inside, poison around."""
    case = random_case(device, channels=21, width=4, dtype=dtype, lengths=[3, 0, 40, 2],
                       state_len=3, activation="silu")  # fmt: skip
    tokens = case.x.shape[1]
    room = torch.full((1, tokens + 4, 27), float("nan"), device=device, dtype=dtype)
    state_room = torch.full((6, 23, 5), float("nan"), device=device, dtype=dtype)
    y, final_state = room[:, 2:-2, 3:24], state_room[1:-1, 1:-1, 1:-1]
    torch.ops.mortar.dynamic_conv_out(
        case.x, case.kernels, case.cu_seqlens, case.initial_state, y, final_state, True
    )
    expected = run(case)
    assert_bitwise(y.clone(), expected["y"])
    assert_bitwise(final_state.clone(), expected["final_state"])
    y.fill_(float("nan"))
    final_state.fill_(float("nan"))
    assert room.isnan().all() and state_room.isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [3, 4])
def test_a_bad_number_stays_in_its_sequence(device, bad, width):
    """Nothing of a neighbour is even multiplied by zero: 0 * NaN would show."""
    lengths = [6, 0, 5, 7]
    clean = random_case(device, channels=9, width=width, lengths=lengths, state_len=width,
                        activation="silu")  # fmt: skip
    expected = run(clean)
    dirty = Case(**{k: v.clone() if torch.is_tensor(v) else v for k, v in vars(clean).items()})
    for tensor in (dirty.x, dirty.kernels, dirty.dy):
        tensor[:, :6] = bad
        tensor[:, 11:] = bad
    for tensor in (dirty.initial_state, dirty.dfinal_state):
        tensor[[0, 1, 3]] = bad
    results = run(dirty)
    for name in ("y", "dx", "dkernels"):
        assert_bitwise(results[name][:, 6:11], expected[name][:, 6:11], name)
    for name in ("final_state", "dinitial_state"):
        assert_bitwise(results[name][2], expected[name][2], name)


def test_a_bad_number_reaches_its_own_window_only(device):
    case = random_case(device, 1, 12, 4, 4)
    case.x[0, 5, 2] = float("nan")
    bad = dynamic_conv(case.x, case.kernels).isnan()
    expected = torch.zeros_like(bad)
    expected[0, 5:9, 2] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overflow_and_extremes_of_silu(device, dtype):
    """Large sums saturate SiLU instead of giving NaN: 0 on the left, themselves on the right."""
    x = torch.tensor([-300.0, -90.0, -20.0, 0.0, 20.0, 90.0, 300.0], device=device).to(dtype)
    case = Case(x.view(1, 7, 1), torch.ones(1, 7, 1, 1, device=device, dtype=dtype),
                activation="silu", dy=torch.ones(1, 7, 1, device=device, dtype=dtype))  # fmt: skip
    assert_matches_oracle(case)
    if dtype != torch.bfloat16:
        big = torch.full((1, 1, 1), 3e4, device=device).to(dtype)
        assert dynamic_conv(big, big.unsqueeze(-1)).isinf().item() == (dtype == torch.float16)


@pytest.mark.parametrize("contents", [[0, 9, 4, 12], [3, 6, 12], [0, 5, 40], [0, -7, 12], [5, 5]])
def test_bad_boundaries_stay_in_bounds(device, contents):
    """On the CPU, where reading is free, an error; on a GPU unspecified results. In neither case is
    anything outside the outputs touched."""
    case = random_case(device, 1, 12, 6, 4, activation="silu")
    starts = torch.tensor(contents, device=device)
    state = torch.randn(len(contents) - 1, 6, 3, device=device)
    room = torch.full((3, 12, 6), float("nan"), device=device)
    state_room = torch.full((len(contents) + 1, 6, 3), float("nan"), device=device)
    inputs = (case.x, case.kernels, starts, state)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="cu_seqlens must"):
            torch.ops.mortar.dynamic_conv_out(*inputs, room[1:2], state_room[1:-1], True)
        with pytest.raises(ValueError, match="cu_seqlens must"):
            torch.ops.mortar.dynamic_conv_backward(case.dy, state, *inputs, True, True)
        assert room.isnan().all() and state_room.isnan().all()
        return
    torch.ops.mortar.dynamic_conv_out(*inputs, room[1:2], state_room[1:-1], True)
    assert room[[0, 2]].isnan().all() and state_room[[0, -1]].isnan().all()
    gradients = torch.ops.mortar.dynamic_conv_backward(case.dy, state, *inputs, True, True)
    assert [g.shape for g in gradients] == [case.x.shape, case.kernels.shape, state.shape]


def test_offsets_beyond_two_to_the_31(device):
    """Rows that lie more than 2^31 elements apart: on a CPU only the touched pages exist."""
    stride = 2**31 + 8
    kernel_room = torch.empty(stride + 64, dtype=torch.bfloat16, device=device)
    x_room = torch.empty(stride + 64, dtype=torch.bfloat16, device=device)
    case = random_case(device, 2, 3, 5, 4, torch.bfloat16)
    far_kernels = kernel_room.as_strided(case.kernels.shape, (stride, 20, 4, 1)).copy_(case.kernels)
    far_x = x_room.as_strided(case.x.shape, (stride, 5, 1)).copy_(case.x)
    near = run(case)
    case.x, case.kernels = far_x, far_kernels
    far = run(case)
    for name, value in near.items():
        assert_bitwise(far[name], value, name)


@pytest.mark.parametrize("lengths", [None, [3, 0, 1, 4]], ids=["dense", "packed"])
@pytest.mark.parametrize("extra", [0, 1])
def test_reference_gradients_are_numerical_gradients(lengths, extra):
    """gradcheck of the oracle itself, in float64, through both states and SiLU."""
    cu_seqlens = None if lengths is None else boundaries(lengths, torch.device("cpu"))
    batch, sequences = (2, 2) if lengths is None else (1, 4)
    time = 4 if lengths is None else 8
    x = torch.randn(batch, time, 2, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(batch, time, 2, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(sequences, 2, 2 + extra, dtype=torch.float64, requires_grad=True)

    def convolve(x, kernels, state):
        return reference.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens, initial_state=state,
                                      final_state_len=2 + extra, activation="silu")  # fmt: skip

    assert torch.autograd.gradcheck(convolve, (x, kernels, state))


def test_reference_is_the_formula():
    """The oracle against the sum written out, in Python."""
    x, kernels = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3, 4).double()
    state = torch.randn(2, 3, 4).double()
    y, final = reference.dynamic_conv(x, kernels, initial_state=state, final_state_len=4)
    for b, t, d in itertools.product(range(2), range(5), range(3)):
        history = [*state[b, d].tolist(), *x[b, : t + 1, d].tolist()]
        expected = sum(k * v for k, v in zip(kernels[b, t, d].tolist(), history[-4:], strict=True))
        assert y[b, t, d].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(final, x[:, 1:].transpose(1, 2))
