# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear sentence, and nothing written."""

import numpy as np
import pytest
import torch

from conftest import DEVICES
from mortar.dynamic_conv import check, dynamic_conv, dynamic_conv_step, traffic

POISON = 7.0


def forward_arguments(device):
    """Packed, with states: every tensor the forward can take. The outputs are poisoned."""
    return {
        "x": torch.randn(1, 6, 5, device=device),
        "kernels": torch.randn(1, 6, 5, 4, device=device),
        "cu_seqlens": torch.tensor([0, 2, 6], device=device),
        "initial_state": torch.randn(2, 5, 3, device=device),
        "y": torch.full((1, 6, 5), POISON, device=device),
        "final_state": torch.full((2, 5, 3), POISON, device=device),
        "silu": True,
    }


def step_arguments(device):
    return {
        "x": torch.randn(3, 5, device=device),
        "kernels": torch.randn(3, 5, 4, device=device),
        "state": torch.full((6, 5, 3), POISON, device=device),
        "slots": torch.tensor([1, -1, 4], dtype=torch.int32, device=device),
        "y": torch.full((3, 5), POISON, device=device),
        "silu": False,
    }


def backward_arguments(device):
    forward = forward_arguments(device)
    return {
        "dy": torch.randn(1, 6, 5, device=device),
        "dfinal_state": torch.randn(2, 5, 3, device=device),
        **{name: forward[name] for name in ("x", "kernels", "cu_seqlens", "initial_state")},
        "silu": True,
        "state_gradient": True,
    }


def empty(*shape, dtype=torch.float32):
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def strided(shape, stride):
    return lambda device: torch.zeros(1000, device=device).as_strided(shape, stride)


# what is changed -> the argument that the message must name, and the kind of error
FORWARD = {
    "x 2-D": ({"x": empty(6, 5)}, "x", ValueError),
    "kernels 3-D": ({"kernels": empty(6, 5, 4)}, "kernels", ValueError),
    "kernels other T": ({"kernels": empty(1, 7, 5, 4)}, "kernels", ValueError),
    "kernels other D": ({"kernels": empty(1, 6, 4, 4)}, "kernels", ValueError),
    "W 0": ({"kernels": empty(1, 6, 5, 0)}, "kernels", ValueError),
    "W 9": ({"kernels": empty(1, 6, 5, 9)}, "kernels", ValueError),
    "x float64": ({"x": empty(1, 6, 5, dtype=torch.float64)}, "x", TypeError),
    "kernels int": ({"kernels": empty(1, 6, 5, 4, dtype=torch.int32)}, "kernels", TypeError),
    "x not dense": ({"x": strided((1, 6, 5), (60, 10, 2))}, "x", ValueError),
    "kernels not dense in W": (
        {"kernels": strided((1, 6, 5, 4), (240, 40, 8, 2))}, "kernels", ValueError,
    ),
    "kernels not dense in D": (
        {"kernels": strided((1, 6, 5, 4), (240, 40, 8, 1))}, "kernels", ValueError,
    ),
    "packed with B 2": (
        {"x": empty(2, 6, 5), "kernels": empty(2, 6, 5, 4), "y": empty(2, 6, 5)}, "cu_seqlens",
        ValueError,
    ),
    "cu_seqlens 2-D": ({"cu_seqlens": empty(1, 3, dtype=torch.int64)}, "cu_seqlens", ValueError),
    "cu_seqlens empty": ({"cu_seqlens": empty(0, dtype=torch.int64)}, "cu_seqlens", ValueError),
    "cu_seqlens float": ({"cu_seqlens": empty(3)}, "cu_seqlens", TypeError),
    "initial_state other N": ({"initial_state": empty(3, 5, 3)}, "initial_state", ValueError),
    "initial_state other D": ({"initial_state": empty(2, 4, 3)}, "initial_state", ValueError),
    "initial_state too short": ({"initial_state": empty(2, 5, 2)}, "initial_state", ValueError),
    "initial_state too long": ({"initial_state": empty(2, 5, 5)}, "initial_state", ValueError),
    "initial_state half": (
        {"initial_state": empty(2, 5, 3, dtype=torch.float16)}, "initial_state", TypeError,
    ),
    "y other T": ({"y": empty(1, 5, 5)}, "y", ValueError),
    "y bfloat16": ({"y": empty(1, 6, 5, dtype=torch.bfloat16)}, "y", TypeError),
    "y not dense": ({"y": strided((1, 6, 5), (60, 10, 2))}, "y", ValueError),
    "y overlaps itself": ({"y": strided((1, 6, 5), (0, 0, 1))}, "y", ValueError),
    "final_state of other length": ({"final_state": empty(2, 5, 4)}, "final_state", ValueError),
}  # fmt: skip

STEP = {
    "x of two tokens": ({"x": empty(3, 2, 5)}, "x", ValueError),
    "x not dense": ({"x": strided((3, 5), (10, 2))}, "x", ValueError),
    "kernels other N": ({"kernels": empty(2, 5, 4)}, "kernels", ValueError),
    "W 9": ({"kernels": empty(3, 5, 9)}, "kernels", ValueError),
    "state of wrong length": ({"state": empty(6, 5, 2)}, "state", ValueError),
    "state other D": ({"state": empty(6, 4, 3)}, "state", ValueError),
    "state half": ({"state": empty(6, 5, 3, dtype=torch.float16)}, "state", TypeError),
    "state overlaps itself": ({"state": strided((6, 5, 3), (0, 3, 1))}, "state", ValueError),
    "no slots and another S": ({"slots": lambda device: None}, "state", ValueError),
    "slots int64": ({"slots": empty(3, dtype=torch.int64)}, "slots", TypeError),
    "slots other N": ({"slots": empty(4, dtype=torch.int32)}, "slots", ValueError),
    "slots 2-D": ({"slots": empty(3, 1, dtype=torch.int32)}, "slots", ValueError),
    "y other N": ({"y": empty(4, 5)}, "y", ValueError),
}

BACKWARD = {
    "dy other T": ({"dy": empty(1, 7, 5)}, "dy", ValueError),
    "dy half": ({"dy": empty(1, 6, 5, dtype=torch.float16)}, "dy", TypeError),
    "dfinal_state other L": ({"dfinal_state": empty(2, 5, 4)}, "dfinal_state", ValueError),
    "dfinal_state other N": ({"dfinal_state": empty(3, 5, 3)}, "dfinal_state", ValueError),
}


def assert_refused(call, arguments, changes, argument, error, written):
    device = arguments["x"].device
    arguments |= {name: make(device) for name, make in changes.items()}
    before = {name: arguments[name].clone() for name in written}
    with pytest.raises(error, match=rf"^{call.__name__}: .*\b{argument}\b") as caught:
        call(*arguments.values())
    sentence = str(caught.value)
    assert "\n" not in sentence and "got" in sentence, sentence
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), f"{name} was written to"


@pytest.mark.parametrize("changes, argument, error", FORWARD.values(), ids=FORWARD)
def test_forward(device, changes, argument, error):
    assert_refused(torch.ops.mortar.dynamic_conv_out, forward_arguments(device), changes, argument,
                   error, ("y", "final_state"))  # fmt: skip


@pytest.mark.parametrize("changes, argument, error", STEP.values(), ids=STEP)
def test_step(device, changes, argument, error):
    assert_refused(torch.ops.mortar.dynamic_conv_step, step_arguments(device), changes, argument,
                   error, ("y", "state"))  # fmt: skip


@pytest.mark.parametrize("changes, argument, error", BACKWARD.values(), ids=BACKWARD)
def test_backward(device, changes, argument, error):
    assert_refused(torch.ops.mortar.dynamic_conv_backward, backward_arguments(device), changes,
                   argument, error, ())  # fmt: skip


def test_good_arguments_pass(device):
    """What the cases above start from is accepted: each of them fails for its own reason."""
    arguments = forward_arguments(device)
    torch.ops.mortar.dynamic_conv_out(*arguments.values())
    assert not (arguments["y"] == POISON).any()
    step = step_arguments(device)
    torch.ops.mortar.dynamic_conv_step(*step.values())
    assert not (step["state"][[1, 4]] == POISON).all()
    torch.ops.mortar.dynamic_conv_backward(*backward_arguments(device).values())


@pytest.mark.parametrize(
    "pair", [("y", "x"), ("final_state", "initial_state"), ("y", "final_state")]
)
def test_overlapping_outputs(device, pair):
    arguments = forward_arguments(device)
    shared = torch.full((200,), POISON, device=device)
    for name in pair:
        arguments[name] = shared[: arguments[name].numel()].view(arguments[name].shape)
    with pytest.raises(ValueError, match="overlap"):
        torch.ops.mortar.dynamic_conv_out(*arguments.values())
    assert (shared == POISON).all()


def test_friendly_functions_say_what_is_wrong(device):
    x, kernels = torch.randn(2, 6, 5, device=device), torch.randn(2, 6, 5, 4, device=device)
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'relu'"):
        dynamic_conv(x, kernels, activation="relu")
    with pytest.raises(ValueError, match="activation must be"):
        dynamic_conv_step(x[:, 0], kernels[:, 0], x.transpose(1, 2), activation="gelu")
    with pytest.raises(ValueError, match="state_len must be W - 1 = 3 or W = 4, got 5"):
        dynamic_conv(x, kernels, output_final_state=True, state_len=5)
    with pytest.raises(ValueError, match=r"initial_state must have 3 dimensions, got \(\)"):
        dynamic_conv(x, kernels, initial_state=x.sum(), output_final_state=True)
    with pytest.raises(ValueError, match=r"kernels must have 4 dimensions, got \(6, 5, 4\)"):
        dynamic_conv(x, kernels[0], output_final_state=True)
    with pytest.raises(ValueError, match="^dynamic_conv: x must have 3 dimensions"):
        dynamic_conv(x[0], kernels)
    with pytest.raises(ValueError, match="^dynamic_conv: state_len must be .* 3 .* got 3.0$"):
        dynamic_conv(x, kernels, output_final_state=True, state_len=3.0)
    with pytest.raises(ValueError, match="cu_seqlens must have 1 to"):
        dynamic_conv(x[:1], kernels[:1], output_final_state=True,
                     cu_seqlens=torch.zeros(0, dtype=torch.int32, device=device))  # fmt: skip


NO_TENSORS = {"list": [[1.0]], "int": 3, "ndarray": np.zeros((1, 6, 5))}


@pytest.mark.parametrize("bad", [*NO_TENSORS.values(), None], ids=[*NO_TENSORS, "None"])
@pytest.mark.parametrize("state", [False, True], ids=["", "final state"])
@pytest.mark.parametrize("name", ["x", "kernels", "cu_seqlens", "initial_state"])
def test_what_is_no_tensor(device, name, state, bad):
    arguments = forward_arguments(device)
    arguments = {n: arguments[n] for n in ("x", "kernels", "cu_seqlens", "initial_state")}
    arguments[name] = bad
    optional = name in ("cu_seqlens", "initial_state")
    if optional and bad is None:
        return
    wanted = "a torch.Tensor or None" if optional else "a torch.Tensor"
    got = "None" if bad is None else type(bad).__name__
    with pytest.raises(TypeError, match=f"^dynamic_conv: {name} must be {wanted}, got {got}$"):
        dynamic_conv(**arguments, output_final_state=state)


@pytest.mark.parametrize("bad", NO_TENSORS.values(), ids=NO_TENSORS)
@pytest.mark.parametrize("name", ["x", "kernels", "state", "slots"])
def test_what_is_no_tensor_in_a_step(device, name, bad):
    arguments = step_arguments(device)
    arguments = {n: arguments[n] for n in ("x", "kernels", "state", "slots")}
    state = arguments["state"]
    arguments[name] = bad
    wanted = "a torch.Tensor or None" if name == "slots" else "a torch.Tensor"
    sentence = f"^dynamic_conv_step: {name} must be {wanted}, got {type(bad).__name__}$"
    with pytest.raises(TypeError, match=sentence):
        dynamic_conv_step(**arguments)
    assert (state == POISON).all()


def test_fresh_outputs_are_refused_the_same_way_with_gradients(device):
    x = torch.randn(2, 6, 5, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="^dynamic_conv: kernels must have 1 to 8 taps"):
        dynamic_conv(x, torch.randn(2, 6, 5, 9, device=device))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_check_reports_bad_boundaries(device, dtype):
    def contents(*values):
        return torch.tensor(values, dtype=dtype, device=device)

    check(cu_seqlens=contents(0, 0, 5, 5, 12), num_tokens=12)
    for bad, pattern in (
        (contents(0, 7, 5, 12), r"cu_seqlens.*5"),
        (contents(1, 5, 12), r"cu_seqlens.*start.*0.*1"),
        (contents(0, 5, 11), r"cu_seqlens.*12.*11"),
        (contents(0, 5, 13), r"cu_seqlens.*12.*13"),
    ):
        with pytest.raises(ValueError, match=pattern):
            check(cu_seqlens=bad, num_tokens=12)


def test_check_reports_bad_slots(device):
    def contents(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    check(slots=contents(3, -1, 0, -1), num_slots=4)
    for bad, pattern in (
        (contents(0, 4), r"slots.*4"),
        (contents(0, -2), r"slots.*-2"),
        (contents(2, -1, 2), r"slots.*2"),
    ):
        with pytest.raises(ValueError, match=pattern):
            check(slots=bad, num_slots=4)


def test_traffic_is_the_formula():
    """B T D (2 x + W k), B T D (3 x + 2 W k) and, a row, D ((2 + 2 L) x + W k) bytes."""
    moved = traffic(2, 10, 3, width=4, state_len=3, x_bytes=2, k_bytes=4)
    assert moved == (60 * (2 * 2 + 4 * 4), 60 * (3 * 2 + 2 * 4 * 4), 6 * (8 * 2 + 4 * 4))


if "cuda" in DEVICES:

    @pytest.mark.parametrize("name", ["kernels", "cu_seqlens", "initial_state", "y"])
    def test_mixed_devices(name):
        arguments = forward_arguments(torch.device("cuda"))
        arguments[name] = arguments[name].cpu()
        with pytest.raises(TypeError, match=r"device|cpu"):
            torch.ops.mortar.dynamic_conv_out(*arguments.values())
