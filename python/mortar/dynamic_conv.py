# SPDX-License-Identifier: Apache-2.0
"""Dynamic short convolution: a causal depthwise convolution with a kernel of its own per token.

    y[b, t, d] = act(sum_w kernels[b, t, d, w] * x[b, t + w - W + 1, d])

The method is Jet-Nemotron's (arXiv:2508.15884). `dynamic_conv` trains and prefills, dense or
packed, from and to states, with gradients; `dynamic_conv_step` decodes one token per sequence and
updates its states in place. Products and sums are float32, every output is rounded once, results
are bitwise repeatable. Inputs may be negative-bit views, a state that is updated not (ValueError).

Below them lie the operators `torch.ops.mortar.dynamic_conv*`:

    dynamic_conv            returns new tensors and has a gradient
    dynamic_conv_backward   that gradient
    dynamic_conv_out        writes into given tensors: the fast path where no gradient is wanted
    dynamic_conv_step       writes into y and the state
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._dynamic_conv_ops import convolve, convolve_now, renamed, step_into
from ._ffi import lib
from ._library import in_words, is_eager

__all__ = ["check", "dynamic_conv", "dynamic_conv_step", "traffic"]


def _is_silu(op: str, activation: str) -> bool:
    if activation in ("silu", "swish"):
        return True
    raise ValueError(f"{op}: activation must be None, 'silu' or 'swish', got {activation!r}")


def _in_words_of(op: str, error: Exception, required: dict, optional: dict) -> Exception:
    """What to raise for an `error` that a call of `op` ended in: an argument that is no tensor is
    told first, and a sentence of the library gets the name that the user typed."""
    for name, value in (required | optional).items():
        if not isinstance(value, Tensor) and (name in required or value is not None):
            wanted = "a torch.Tensor" if name in required else "a torch.Tensor or None"
            got = "None" if value is None else type(value).__name__
            return TypeError(f"{op}: {name} must be {wanted}, got {got}")
    if isinstance(error, RuntimeError):
        given = [(n, t) for n, t in (required | optional).items() if t is not None]
        error = in_words(op, given, error)
    return renamed(op, error)


def dynamic_conv(
    x: Tensor,
    kernels: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    state_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves every sequence of a batch with its tokens' own kernels.

    Args:
        x: [B, T, D], float32, float16 or bfloat16, dense in D.
        kernels: [B, T, D, W], any of these dtypes, W from 1 to 8, dense in (D, W). The last tap,
            w = W - 1, meets the token itself.
        cu_seqlens: int32 or int64 [N + 1] on the device of x: x is then N sequences packed into
            one row (B = 1), sequence n being the tokens cu_seqlens[n] : cu_seqlens[n + 1].
            Sequences may be empty. Without it every row is a sequence and N = B. On a GPU its
            content is never read back to the host, and `check` is what reports bad content.
        initial_state: [N, D, L] in the dtype of x, any strides, L = W or W - 1: the last L inputs
            before each sequence, newest last. Zeros if absent.
        output_final_state: also return the state after each sequence.
        activation: None or "silu", applied to the sum before it is rounded.
        state_len: L of the final state; that of initial_state if there is one (no other is
            possible then), else W - 1 by default.

    Returns:
        y [B, T, D] in the dtype of x; with output_final_state the pair of y and the final state
        [N, D, L], whose memory is new.

    Differentiable once in x, kernels and initial_state, through y and through the final state.
    Nothing but the inputs is kept for the backward.

    Raises:
        ValueError: a shape, stride, length or W is wrong, or, on the CPU, the content of
            cu_seqlens; nothing has been written then.
        TypeError: a dtype or device is wrong.
    """
    silu = activation is not None and _is_silu("dynamic_conv", activation)
    try:
        length = -1
        if output_final_state:
            length = _final_state_len(x, kernels, initial_state, state_len)
        if is_eager(x):
            outputs = convolve_now(x, kernels, cu_seqlens, initial_state, length, silu)
            if outputs is not None:
                return outputs
        y, final_state = convolve(x, kernels, cu_seqlens, initial_state, length, silu)
        return (y, final_state) if output_final_state else y
    except Exception as error:
        optional = {"cu_seqlens": cu_seqlens, "initial_state": initial_state}
        raise _in_words_of("dynamic_conv", error, {"x": x, "kernels": kernels}, optional) from None


def _final_state_len(
    x: Tensor, kernels: Tensor, initial_state: Tensor | None, state_len: int | None
) -> int:
    for name, tensor, ndim in (("x", x, 3), ("kernels", kernels, 4)):
        if tensor.ndim != ndim:
            raise ValueError(
                f"dynamic_conv: {name} must have {ndim} dimensions, got {tuple(tensor.shape)}"
            )
    if initial_state is not None and initial_state.ndim != 3:
        shape = tuple(initial_state.shape)
        raise ValueError(f"dynamic_conv: initial_state must have 3 dimensions, got {shape}")
    width = kernels.shape[3]
    if state_len is None:
        return max(width - 1, 0) if initial_state is None else initial_state.shape[-1]
    if isinstance(state_len, float) or state_len not in (width, width - 1):
        raise ValueError(
            f"dynamic_conv: state_len must be W - 1 = {width - 1} or W = {width}, got {state_len!r}"
        )
    return state_len


def dynamic_conv_step(
    x: Tensor,
    kernels: Tensor,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Decodes one token of each of N sequences and updates their states in place.

    Args:
        x: [N, D] or [N, 1, D], float32, float16 or bfloat16, dense in D.
        kernels: [N, D, W], any of these dtypes, dense in (D, W).
        state: [S, D, L] in the dtype of x, any strides that do not overlap, L = W or W - 1, newest
            input last: shifted by one, with x as the new last entry.
        slots: int32 [N]: row i uses state[slots[i]]. A slot outside [0, S), by convention -1, is
            padding: its row of y is zero and no state changes. The same live slot twice in one
            call leaves both results and that state unspecified: see `check`. Without slots S = N
            and row i uses state[i]. A captured CUDA graph may be replayed with other slots.
        activation: None or "silu", applied to the sum before it is rounded.

    Returns:
        y in the shape and dtype of x.

    Raises:
        ValueError, TypeError: as `dynamic_conv`.
        RuntimeError: a gradient is wanted: a state that is overwritten has none. Use
            `dynamic_conv` with initial_state and T = 1.
    """
    silu = activation is not None and _is_silu("dynamic_conv_step", activation)
    try:
        return step_into(x, kernels, state, slots, torch.empty_like(x), silu)
    except Exception as error:
        required = {"x": x, "kernels": kernels, "state": state}
        raise _in_words_of("dynamic_conv_step", error, required, {"slots": slots}) from None


def check(
    *,
    cu_seqlens: Tensor | None = None,
    num_tokens: int = 0,
    slots: Tensor | None = None,
    num_slots: int = 0,
) -> None:
    """Reads cu_seqlens (for T = num_tokens) and slots (for S = num_slots) back and checks them.

    The ops do not (but for cu_seqlens on the CPU, where reading is free): bad contents give
    unspecified results, though never an access out of bounds. This waits for the device: a
    debugging aid, not for the hot path.

    Raises:
        ValueError: cu_seqlens decreases, does not start at 0 or does not end at num_tokens; a slot
            lies outside [-1, num_slots) or occurs twice. The message names the first such entry.
    """
    try:
        lib.dynamic_conv_check(cu_seqlens, num_tokens, slots, num_slots)
    except (RuntimeError, TypeError, ValueError) as error:
        optional = {"cu_seqlens": cu_seqlens, "slots": slots}
        raise _in_words_of("dynamic_conv.check", error, {}, optional) from None


class Traffic(NamedTuple):
    """Fewest bytes that each op can move."""

    forward: int
    backward: int
    step: int


def traffic(
    batch: int, time: int, channels: int, width: int, state_len: int, x_bytes: int, k_bytes: int
) -> Traffic:
    """Bytes of a forward and a backward over [batch, time, channels], states left out, and of a
    step of `batch` rows; x_bytes and k_bytes are those of one element of x and of kernels."""
    sizes = (batch, time, channels, width, state_len, x_bytes, k_bytes)
    return Traffic(*lib.dynamic_conv_traffic(*sizes))
