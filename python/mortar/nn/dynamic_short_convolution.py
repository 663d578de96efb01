# SPDX-License-Identifier: Apache-2.0
"""The layer of hybrid models around `mortar.dynamic_conv`: it makes its kernels from its input."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..dynamic_conv import dynamic_conv, dynamic_conv_step

GENERATOR_ACTIVATIONS = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}

# Tokens whose kernels exist at once when no gradient is wanted: kernels are W times as large as
# the input (Jet-Nemotron-2B: 24.6 KB a token), while 2048 rows already fill the generator's GEMM.
CHUNK_TOKENS = 2048


class DynamicShortConvolution(nn.Module):
    """Dynamic short convolution of Jet-Nemotron (arXiv:2508.15884).

    A generator, Linear - activation - Linear, turns the generator input of every token into a
    kernel [D, W] (w fastest); the bias of its last layer is the static base kernel. Parameters
    have the names and shapes of the module of this name in Jet-Nemotron, so state dicts are
    exchanged freely:

        kernel_generator.w1.weight [H, G]    kernel_generator.w2.weight [D * W, H]
                                             kernel_generator.w2.bias   [D * W]

    Args:
        hidden_size: D, channels.
        kernel_size: W, taps, 1 to 8.
        generator_input_size: G, channels of the generator input; D by default.
        generator_reduction: H = D // generator_reduction; H = D by default.
        generator_activation: between the generator's layers, one of GENERATOR_ACTIVATIONS.
        activation: after the convolution: "silu" (or "swish") or None.
        static_conv_init: called with the static base kernel, a parameter [D * W], to fill it in
            place; zeros by default.
        use_fast_conv1d, implementation: Jet-Nemotron's choices among its own code paths, accepted
            so that its configurations build this module; there is one path here.

    A new module is a static convolution: w2.weight is zero. w1 keeps the start of nn.Linear, since
    with w1 at zero as well neither weight would ever receive a gradient.

    Raises:
        ValueError: kernel_size, activation or generator_activation is none of the above.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        generator_input_size: int | None = None,
        generator_reduction: int | None = None,
        generator_activation: str = "silu",
        activation: str | None = "silu",
        static_conv_init: Callable[[Tensor], object] | None = None,
        use_fast_conv1d: bool = True,
        implementation: str = "mortar",
    ):
        super().__init__()
        if not 1 <= kernel_size <= 8:
            raise ValueError(
                f"DynamicShortConvolution: kernel_size must lie between 1 and 8, got {kernel_size}"
            )
        if activation not in (None, "silu", "swish"):
            raise ValueError(
                "DynamicShortConvolution: activation must be None, 'silu' or 'swish', "
                f"got {activation!r}"
            )
        if generator_activation not in GENERATOR_ACTIVATIONS:
            raise ValueError(
                "DynamicShortConvolution: generator_activation must be one of "
                f"{', '.join(GENERATOR_ACTIVATIONS)}, got {generator_activation!r}"
            )
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.generator_input_size = (
            hidden_size if generator_input_size is None else generator_input_size
        )
        self.generator_hidden_size = (
            hidden_size if generator_reduction is None else hidden_size // generator_reduction
        )
        self.activation = activation
        self.use_fast_conv1d = use_fast_conv1d
        self.implementation = implementation
        self.static_conv_init = static_conv_init
        width = hidden_size * kernel_size
        self.kernel_generator = nn.Sequential(
            OrderedDict(
                w1=nn.Linear(self.generator_input_size, self.generator_hidden_size, bias=False),
                act=GENERATOR_ACTIVATIONS[generator_activation](),
                w2=nn.Linear(self.generator_hidden_size, width, bias=True),
            )
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.kernel_generator.w1.reset_parameters()
        nn.init.zeros_(self.kernel_generator.w2.weight)
        nn.init.zeros_(self.kernel_generator.w2.bias)
        if self.static_conv_init is not None:
            with torch.no_grad():
                self.static_conv_init(self.kernel_generator.w2.bias)

    def get_kernel(self, generator_input: Tensor) -> Tensor:
        """Kernels [..., D, W] of generator inputs [..., G]."""
        return self.kernel_generator(generator_input).unflatten(-1, (-1, self.kernel_size))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        generator_input: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Trains, prefills or decodes.

        With a cache, one token a row and no gradient wanted: one step, in place. Else the whole of
        x at once if a gradient is wanted, and else in chunks of CHUNK_TOKENS that hand their states
        on, without all kernels in memory at once: the same bits where PyTorch gives a token's
        kernels the same bits whatever the number of tokens. Uses `get_kernel`, `kernel_size` and
        `activation` alone, so that `mortar.compat.jet` can lend it to Jet-Nemotron's layer.

        Args:
            x: [B, T, D].
            mask: [B, T], multiplies x; 0 at padded positions.
            cache: [N, D, W] (or [N, D, W - 1]), the last inputs of every sequence, newest last.
                Updated in place, unless a gradient is wanted: a new one is returned then.
            output_final_state: also return the state after x; always done while decoding.
            cu_seqlens: [N + 1], sequences packed into x with B = 1; N = B without it.
            generator_input: [B, T, G]; x by default.

        Returns:
            y [B, T, D] in the dtype of x, and the cache: updated, new, or as it was given.

        Raises:
            ValueError: generator_input has another batch or time than x.
        """
        if mask is not None:
            x = x * mask.unsqueeze(-1).to(x.dtype)
        if generator_input is None:
            generator_input = x
        elif generator_input.shape[:-1] != x.shape[:-1]:  # of which a part might not be looked at
            raise ValueError(
                "DynamicShortConvolution: generator_input must have the batch and time of x, "
                f"{tuple(x.shape[:-1])}, got shape {tuple(generator_input.shape)}"
            )
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad
            or generator_input.requires_grad
            or (cache is not None and cache.requires_grad)
            or any(p.requires_grad for p in self.parameters())
        )
        if cache is not None and cu_seqlens is None and x.shape[1] == 1 and not wants_gradient:
            kernels = self.get_kernel(generator_input[:, 0])
            y = dynamic_conv_step(x[:, 0], kernels, cache, activation=self.activation)
            return y.unsqueeze(1), cache

        keep = output_final_state or (cache is not None and x.shape[1] == 1)
        if wants_gradient or x.shape[1] <= CHUNK_TOKENS:
            y, state = _convolve_at_once(self, x, generator_input, cache, cu_seqlens, keep)
        else:
            y, state = _convolve_in_chunks(self, x, generator_input, cache, cu_seqlens)
        if not keep:
            return y, cache
        if cache is None or wants_gradient:
            return y, state
        return y, cache.copy_(state)


def _convolve_at_once(
    layer: nn.Module,
    x: Tensor,
    generator_input: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    result = dynamic_conv(
        x,
        layer.get_kernel(generator_input),
        cu_seqlens=cu_seqlens,
        initial_state=state,
        output_final_state=output_final_state,
        activation=layer.activation,
        state_len=layer.kernel_size if state is None else None,
    )
    return result if output_final_state else (result, None)


def _convolve_in_chunks(
    layer: nn.Module,
    x: Tensor,
    generator_input: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    for start in range(0, x.shape[1], CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, x.shape[1])
        # A sequence outside the chunk is an empty one in it: its state passes through unchanged.
        bounds = None if cu_seqlens is None else cu_seqlens.clamp(start, end) - start
        y[:, start:end], state = _convolve_at_once(
            layer, x[:, start:end], generator_input[:, start:end], state, bounds, True
        )
    return y, state
