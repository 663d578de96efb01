# SPDX-License-Identifier: Apache-2.0
"""Dynamic short convolution in plain PyTorch: the meaning of `mortar.dynamic_conv`.

y[t, d] = act(sum_w kernels[t, d, w] * x[t + w - W + 1, d]), where positions before a sequence's
first token come from its initial state, or are zero. Written for reading and for checking:
differentiable, any floating dtype (float64 makes it the oracle), summed in at least float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """First row and length, int64 [N] each, of every sequence in the rows of x [B, T, D]."""
    batch, length, _ = x.shape
    if cu_seqlens is None:
        starts = torch.arange(batch, device=x.device) * length
        return starts, torch.full_like(starts, length)
    bounds = cu_seqlens.to(x.device, torch.int64)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _read(rows: Tensor, state: Tensor | None, start: Tensor, seq: Tensor, offset: Tensor) -> Tensor:
    """Row `offset` of sequence `seq`, for arrays of both: from `rows` [M, D] when offset >= 0,
    else column S + offset of `state` [N, D, S], or zero where there is none."""
    if len(rows) == 0:
        rows = rows.new_zeros(1, rows.shape[1])  # something to index; nothing of it is used
    from_rows = rows[(start[seq] + offset).clamp(0, len(rows) - 1)]
    before = torch.zeros_like(from_rows)
    if state is not None and state.shape[2] > 0:
        column = state.shape[2] + offset
        picked = state[seq, :, column.clamp(0, state.shape[2] - 1)]
        before = torch.where((column >= 0).unsqueeze(-1), picked, before)
    return torch.where((offset >= 0).unsqueeze(-1), from_rows, before)


def dynamic_conv(
    x: Tensor,
    kernels: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    final_state_len: int | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reference of `mortar.dynamic_conv`.

    x: [B, T, D]; kernels: [B, T, D, W]; cu_seqlens: [N + 1] with B = 1, else N = B;
    initial_state: [N, D, S], the last S inputs before each sequence, newest last.
    final_state_len: S' of the final state to return, None for none; positions before the initial
    state count as zero. activation: None or "silu".
    Returns (y [B, T, D] in the dtype of x, final state [N, D, S'] in the dtype of the initial
    state, else of x; or None).
    """
    batch, length, channels = x.shape
    width = kernels.shape[-1]
    starts, lengths = _sequences(x, cu_seqlens)
    wide = torch.promote_types(torch.promote_types(x.dtype, kernels.dtype), torch.float32)
    rows = x.reshape(batch * length, channels).to(wide)
    state = None if initial_state is None else initial_state.to(wide)

    seq = torch.repeat_interleave(torch.arange(len(starts), device=x.device), lengths)
    step = torch.arange(len(seq), device=x.device) - starts[seq]
    taps = torch.arange(width, device=x.device) - (width - 1)
    window = _read(rows, state, starts, seq[:, None].expand(-1, width), step[:, None] + taps)
    y = (window * kernels.reshape(batch * length, channels, width).to(wide).transpose(1, 2)).sum(1)
    if activation == "silu":
        y = F.silu(y)
    elif activation is not None:
        raise ValueError(f"dynamic_conv: activation must be None or 'silu', got {activation!r}")
    y = y.reshape(batch, length, channels).to(x.dtype)
    if final_state_len is None:
        return y, None

    seq = torch.arange(len(starts), device=x.device)[:, None].expand(-1, final_state_len)
    offset = lengths[:, None] + torch.arange(-final_state_len, 0, device=x.device)
    final = _read(rows, state, starts, seq, offset).transpose(1, 2)
    return y, final.to(x.dtype if initial_state is None else initial_state.dtype)


def dynamic_conv_step(
    x: Tensor,
    kernels: Tensor,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of `mortar.dynamic_conv_step`, which updates `state` in place; this one returns
    (y [B, D], new state) and leaves `state` alone. Rows whose slot lies outside [0, slots) give
    zero and change nothing.

    x: [B, D]; kernels: [B, D, W]; state: [N, D, S] with S = W - 1 or W; slots: [B], -1 skips.
    """
    ids = torch.arange(len(x), device=x.device) if slots is None else slots.to(torch.int64)
    live = (ids >= 0) & (ids < len(state))
    y = torch.zeros_like(x)
    new_state = state.clone()
    if live.any():
        rows, final = dynamic_conv(
            x[live].unsqueeze(1),
            kernels[live].unsqueeze(1),
            initial_state=state[ids[live]],
            final_state_len=state.shape[2],
            activation=activation,
        )
        y[live] = rows.squeeze(1)
        new_state[ids[live]] = final
    return y, new_state
