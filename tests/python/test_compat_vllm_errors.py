# SPDX-License-Identifier: Apache-2.0
"""What mortar.compat.vllm refuses, in the words of its callers, and leaves untouched."""

import pytest
import torch

from mortar.compat.vllm import lora_expand, lora_linear, lora_shrink
from vllm_cases import make_inputs


def spoil_mixed_slices(i):
    i.a[1], i.b[1] = i.a[1].half(), i.b[1].half()
    return TypeError, (
        r"lora_._weights\[1\] must have dtype bfloat16 as lora_._weights\[0\] has, got float16"
    )


def spoil_rank(i):
    i.h = torch.zeros(2, 24, 7, device=i.x.device)
    return (
        ValueError,
        r"(output_tensor|inputs) must have at least 8 columns \(the largest rank\), got 7",
    )


def spoil_tokens(i):
    i.h = torch.zeros(2, 23, 8, device=i.x.device)
    return ValueError, r"(output_tensor|inputs) must have shape \(2, 24, any\), got \(2, 23, 8\)"


def spoil_ids(i):
    i.metadata[4] = i.metadata[4].long()
    return TypeError, "lora_ids must have dtype int32, got int64"


def spoil_counts(i):
    i.metadata[2] = i.metadata[2][:3]
    return ValueError, r"num_tokens_per_lora must have shape \(5\), got \(3\)"


def spoil_starts(i):
    i.metadata[3] = i.metadata[3][:3]
    return ValueError, "lora_token_start_loc must have at least 5 elements as lora_ids has, got 3"


def spoil_indices(i):
    i.metadata[1] = i.metadata[1].float()
    return TypeError, "token_indices_sorted_by_lora_ids must have dtype int32, got float32"


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_mixed_slices,
        spoil_rank,
        spoil_tokens,
        spoil_ids,
        spoil_counts,
        spoil_starts,
        spoil_indices,
    ],
)
def test_refuses(device, spoil):
    inputs = make_inputs(device, widths=(16, 8))
    error, message = spoil(inputs)
    h, y = inputs.h.clone(), inputs.y.clone()
    with pytest.raises(error, match=f"^lora_shrink: {message}"):
        lora_shrink(inputs.x, inputs.a, inputs.h, *inputs.metadata, 5, 1.0)
    with pytest.raises(error, match=f"^lora_expand: {message}"):
        lora_expand(inputs.h, inputs.b, inputs.y, *inputs.metadata, 5)
    assert torch.equal(inputs.h, h) and torch.equal(inputs.y, y)


def of_no_tensors(i):
    yield "inputs", lambda: setattr(i, "x", i.x.tolist())
    yield "lora_ids", lambda: i.metadata.__setitem__(4, [0, 1])
    yield "no_lora_flag_cpu", lambda: i.metadata.__setitem__(5, None)
    yield r"lora_._weights\[0\]", lambda: (i.a.__setitem__(0, None), i.b.__setitem__(0, None))


@pytest.mark.parametrize("which", range(4))
def test_names_what_is_no_tensor(device, which):
    inputs = make_inputs(device)
    name, spoil = list(of_no_tensors(inputs))[which]
    spoil()
    with pytest.raises(TypeError, match=f"^lora_shrink: {name} must be a tensor, got (list|None)$"):
        lora_shrink(inputs.x, inputs.a, inputs.h, *inputs.metadata, 5, 1.0)
    with pytest.raises(TypeError, match=f"^lora_expand: {name} must be a tensor, got (list|None)$"):
        lora_expand(inputs.h if which else inputs.x, inputs.b, inputs.y, *inputs.metadata, 5)


def spoil_pairs(i):
    i.b.append(i.b[0])
    return (
        ValueError,
        "lora_a_weights and lora_b_weights must have one tensor per slice each, got 2",
    )


def spoil_width(i):
    i.y = i.y[:, :20]
    return (
        ValueError,
        r"output_tensor must have at least offset \+ sum of widths = 0 \+ 24 columns, got 20",
    )


def spoil_hidden(i):
    i.x = i.x[:, :90]
    return ValueError, "inputs must have K = 96 columns as lora_a_weights has, got 90"


@pytest.mark.parametrize(
    "spoil", [spoil_pairs, spoil_width, spoil_hidden, spoil_ids, spoil_counts, spoil_indices]
)
def test_linear_refuses(device, spoil):
    inputs = make_inputs(device, widths=(16, 8))
    error, message = spoil(inputs)
    y = inputs.y.clone()
    with pytest.raises(error, match=f"^lora_linear: {message}"):
        lora_linear(inputs.x, inputs.a, inputs.b, inputs.y, *inputs.metadata, 5, 1.0)
    assert torch.equal(inputs.y, y)


def test_gradients_are_refused(device):
    inputs = make_inputs(device)
    inputs.x.requires_grad_()
    with pytest.raises(RuntimeError, match="lora_linear: arguments must not require gradients"):
        lora_linear(inputs.x, inputs.a, inputs.b, inputs.y, *inputs.metadata, 5, 1.0)
    with pytest.raises(RuntimeError, match="lora_shrink: arguments must not require gradients"):
        lora_shrink(inputs.x, inputs.a, inputs.h, *inputs.metadata, 5, 1.0)
