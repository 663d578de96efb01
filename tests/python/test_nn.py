# SPDX-License-Identifier: Apache-2.0
"""The module around the convolution: training, packing, prefill with a cache, decoding."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mortar.nn.dynamic_short_convolution as implementation
from dynamic_conv_cases import assert_bitwise, boundaries
from mortar.nn import DynamicShortConvolution
from mortar.reference import dynamic_conv as reference


def make(device, width=4, hidden=12, inputs=9, **arguments) -> DynamicShortConvolution:
    """A layer whose kernels really depend on the input."""
    torch.manual_seed(1)
    layer = DynamicShortConvolution(hidden, width, inputs, 2, **arguments)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.to(device)


def expected_output(layer, x, generator_input, cu_seqlens=None, state=None):
    """The layer in float64: generator, convolution, activation."""
    wide = DynamicShortConvolution(layer.hidden_size, layer.kernel_size, layer.generator_input_size,
                                   2).double()  # fmt: skip
    wide.load_state_dict(layer.state_dict())
    generator = wide.kernel_generator
    hidden = F.silu(generator_input.cpu().double() @ generator.w1.weight.T)
    flat = hidden @ generator.w2.weight.T + generator.w2.bias
    kernels = flat.view(*flat.shape[:2], layer.hidden_size, layer.kernel_size)
    y, _ = reference.dynamic_conv(
        x.cpu().double(), kernels, cu_seqlens=None if cu_seqlens is None else cu_seqlens.cpu(),
        initial_state=None if state is None else state.cpu().double(),
        activation=layer.activation and "silu",
    )  # fmt: skip
    return y.detach()


def assert_close(out, expected):
    torch.testing.assert_close(out.detach().cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_forward(device, width, activation):
    layer = make(device, width, activation=activation)
    x, hidden = torch.randn(2, 10, 12, device=device), torch.randn(2, 10, 9, device=device)
    y, cache = layer(x, generator_input=hidden)
    assert cache is None
    assert_close(y, expected_output(layer, x, hidden))


def test_generates_from_x_by_default(device):
    layer = make(device, inputs=12)
    x = torch.randn(2, 10, 12, device=device)
    assert_close(layer(x)[0], expected_output(layer, x, x))


def test_mask_hides_padding(device):
    layer = make(device)
    x, hidden = torch.randn(2, 6, 12, device=device), torch.randn(2, 6, 9, device=device)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=device)
    before = x.clone()
    y, _ = layer(x, mask=mask, generator_input=hidden)
    assert torch.equal(x, before)
    assert_close(y[:1, 2:], expected_output(layer, x[:1, 2:], hidden[:1, 2:]))


def test_packed_sequences_are_independent(device):
    layer = make(device)
    lengths = [4, 0, 1, 6]
    x, hidden = torch.randn(1, 11, 12, device=device), torch.randn(1, 11, 9, device=device)
    cu_seqlens = boundaries(lengths, device)
    y, cache = layer(x, generator_input=hidden, cu_seqlens=cu_seqlens, output_final_state=True)
    assert cache.shape == (4, 12, 4)
    assert_close(y, expected_output(layer, x, hidden, cu_seqlens))
    y.square().sum().backward()
    packed = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    for start, end in itertools.pairwise(itertools.accumulate([0, *lengths])):
        if end > start:
            part, _ = layer(x[:, start:end], generator_input=hidden[:, start:end])
            part.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_prefill_and_decoding_equal_one_pass(device, prompt, width):
    """Any cut, cached second prompts of any length, then token by token, in one cache."""
    layer = make(device, width)
    x, hidden = torch.randn(2, 16, 12, device=device), torch.randn(2, 16, 9, device=device)
    whole = expected_output(layer, x, hidden)
    with torch.no_grad():
        y, cache = layer(x[:, :prompt], generator_input=hidden[:, :prompt], output_final_state=True)
        parts, place = [y], cache.data_ptr()
        for start, end in [(prompt, prompt + 2), *((t, t + 1) for t in range(prompt + 2, 16))]:
            y, same = layer(x[:, start:end], cache=cache, output_final_state=True,
                            generator_input=hidden[:, start:end])  # fmt: skip
            assert same.data_ptr() == place
            parts.append(y)
    assert_close(torch.cat(parts, 1), whole)
    padded = F.pad(x, (0, 0, width, 0))[:, -width:]
    assert torch.equal(cache, padded.transpose(1, 2))


def test_a_cache_is_only_written_when_asked(device):
    """A prefill from a cache without output_final_state leaves the cache as it was."""
    layer = make(device)
    x, hidden = torch.randn(2, 5, 12, device=device), torch.randn(2, 5, 9, device=device)
    cache = torch.randn(2, 12, 4, device=device)
    before = cache.clone()
    with torch.no_grad():
        y, same = layer(x, cache=cache, generator_input=hidden)
    assert same is cache and torch.equal(cache, before)
    assert_close(y, expected_output(layer, x, hidden, state=cache))


def test_gradients_flow_through_a_cache(device):
    """While a gradient is wanted the cache is not overwritten: a new one carries the gradient."""
    layer = make(device)
    x, hidden = torch.randn(2, 6, 12, device=device), torch.randn(2, 6, 9, device=device)
    x.requires_grad_()
    whole, _ = layer(x, generator_input=hidden)
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, x, upstream)[0]
    y, cache = layer(x[:, :3], generator_input=hidden[:, :3], output_final_state=True)
    parts = [y]
    for t in range(3, 6):
        before = cache.detach().clone()
        y, new = layer(x[:, t : t + 1], cache=cache, generator_input=hidden[:, t : t + 1])
        assert torch.equal(cache, before)
        cache = new
        parts.append(y)
    gradient = torch.autograd.grad(torch.cat(parts, 1), x, upstream)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, [5, 0, 14, 1, 3, 0]], ids=["dense", "packed"])
def test_inference_in_chunks_has_the_same_bits(device, lengths, monkeypatch):
    """Chunks hand their states on, whatever sequences their edges cut."""
    layer = make(device, inputs=12)
    # A generator whose rows do not depend on how many there are: bitwise comparable.
    layer.get_kernel = lambda h: torch.stack([h, h * 2, 1 - h, h * h], -1)
    batch = 2 if lengths is None else 1
    sequences = batch if lengths is None else len(lengths)
    x = torch.randn(batch, 23, 12, device=device)
    state = torch.randn(sequences, 12, 4, device=device)
    cu_seqlens = None if lengths is None else boundaries(lengths, device)
    results = []
    for chunk in (100, 7, 1):
        monkeypatch.setattr(implementation, "CHUNK_TOKENS", chunk)
        with torch.no_grad():
            results.append(layer(x, cache=state.clone(), cu_seqlens=cu_seqlens,
                                 output_final_state=True))  # fmt: skip
    for y, cache in results[1:]:
        assert_bitwise(y, results[0][0], "y")
        assert_bitwise(cache, results[0][1], "cache")


def test_state_dict_of_jet_nemotron(device):
    """Names and shapes of the parameters of jetai's module of this name."""
    layer = DynamicShortConvolution(
        hidden_size=12, kernel_size=4, generator_input_size=9, generator_reduction=3,
        generator_activation="silu", activation="silu", static_conv_init=nn.init.ones_,
        use_fast_conv1d=True, implementation="triton",
    ).to(device)  # fmt: skip
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "kernel_generator.w1.weight": (4, 9),
        "kernel_generator.w2.weight": (48, 4),
        "kernel_generator.w2.bias": (48,),
    }
    assert (layer.kernel_generator.w2.bias == 1).all()


def test_w_is_fastest_in_the_generated_kernels(device):
    layer = make(device, width=4, hidden=3)
    with torch.no_grad():
        layer.kernel_generator.w2.weight.zero_()
        layer.kernel_generator.w2.bias.copy_(torch.arange(12.0))
    kernels = layer.get_kernel(torch.randn(2, 5, 9, device=device))
    assert torch.equal(kernels[1, 3].cpu(), torch.arange(12.0).view(3, 4))


def test_a_new_layer_is_its_static_convolution_and_can_learn(device):
    def last_tap(bias):
        bias.zero_().view(-1, 4)[:, 3] = 1

    layer = DynamicShortConvolution(12, 4, activation=None, static_conv_init=last_tap).to(device)
    x = torch.randn(2, 6, 12, device=device)
    y, _ = layer(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert layer.kernel_generator.w2.weight.grad.abs().max() > 0


def test_compiles(device):
    layer = make(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, hidden = torch.randn(2, 6, 12, device=device), torch.randn(2, 6, 9, device=device)
    y, _ = layer(x, generator_input=hidden)
    z, _ = compiled(x, generator_input=hidden)
    torch.testing.assert_close(z, y)
    for output in (y, z):
        output.square().sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        layer.zero_grad()
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"kernel_size": 0}, "kernel_size must lie between 1 and 8, got 0"),
        ({"kernel_size": 9}, "kernel_size must lie between 1 and 8, got 9"),
        ({"activation": "relu"}, "activation must be None, 'silu' or 'swish', got 'relu'"),
        ({"generator_activation": "?"}, "generator_activation must be one of silu, .* got '?'"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=f"DynamicShortConvolution: {sentence}"):
        DynamicShortConvolution(**{"hidden_size": 8, "kernel_size": 4, **arguments})


@pytest.mark.parametrize("time", [1, 3, 40], ids=["decode", "whole", "chunks"])
@pytest.mark.parametrize("more", [-1, 2])
def test_generator_inputs_of_another_time_are_refused(device, time, more, monkeypatch):
    """In decoding and in chunks too, which would leave the tokens that are too many unread."""
    monkeypatch.setattr(implementation, "CHUNK_TOKENS", 16)
    layer, cache = make(device), torch.zeros(2, 12, 4, device=device)
    x = torch.randn(2, time, 12, device=device)
    hidden = torch.randn(2, time + more, 9, device=device)
    sentence = f"generator_input must have the batch and time of x, (2, {time}), got shape "
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(sentence)):
        layer(x, cache=cache, generator_input=hidden)
    assert not cache.any()
