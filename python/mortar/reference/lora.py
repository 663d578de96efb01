# SPDX-License-Identifier: Apache-2.0
"""Multi-LoRA in plain PyTorch, float64: the meaning of ``mortar.lora``.

``adapters`` is a list over adapters of lists over slices of (A [rank, K], B [N_s, rank]) or None;
``token_adapter`` holds one id per token, and any id outside [0, L) is a base token. Nothing is
rounded: results are float64, on the device of the inputs, and new tensors.
"""

from collections.abc import Sequence

import torch

Adapters = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor] | None]]


def unstack(a, b, ranks: torch.Tensor | None = None) -> Adapters:
    """The adapters in stacked weights: a[s] [L, R_s, K], b[s] [L, N_s, R_s], ranks int32 [L]."""
    adapters = []
    for i in range(a[0].shape[0]):
        row = []
        for a_s, b_s in zip(a, b, strict=True):
            full = a_s.shape[-2]
            rank = full if ranks is None else min(max(int(ranks[i]), 0), full)
            a_i, b_i = a_s[i].flatten(0, -2), b_s[i].flatten(0, -2)
            row.append((a_i[:rank], b_i[:, :rank]) if rank else None)
        adapters.append(row)
    return adapters


def _groups(token_adapter: torch.Tensor, num_adapters: int):
    """(adapter, its tokens) for every adapter in use."""
    for i in token_adapter.unique().tolist():
        if 0 <= i < num_adapters:
            yield i, (token_adapter == i).nonzero().flatten()


def _scales(scales, i: int, num_slices: int) -> list[float]:
    own = 1.0 if scales is None else scales[i]
    return [float(own)] * num_slices if not isinstance(own, list | tuple) else list(own)


def shrink(
    x: torch.Tensor,
    adapters: Adapters,
    token_adapter: torch.Tensor,
    scales=None,
    scale: float = 1.0,
) -> torch.Tensor:
    """h [S, M, largest rank], zero where nothing is defined; ``scales``: one per adapter (or one
    list per adapter, with a number per slice)."""
    pairs = [pair for row in adapters for pair in row if pair is not None]
    max_rank = max((a.shape[0] for a, _ in pairs), default=0)
    num_slices = max(len(row) for row in adapters)
    h = torch.zeros(num_slices, x.shape[0], max_rank, dtype=torch.float64, device=x.device)
    for i, tokens in _groups(token_adapter, len(adapters)):
        for s, (pair, own) in enumerate(
            zip(adapters[i], _scales(scales, i, num_slices), strict=True)
        ):
            if pair is not None:
                a = pair[0].double()
                h[s, tokens, : a.shape[0]] = (scale * own) * (x[tokens].double() @ a.T)
    return h


def expand(
    y: torch.Tensor,
    h: torch.Tensor,
    adapters: Adapters,
    token_adapter: torch.Tensor,
    widths: Sequence[int],
    add_inputs: bool = True,
    offset: int = 0,
) -> torch.Tensor:
    """y with every token's slices added to (or overwritten by) h B^T; ``widths``: N_s."""
    out = y.double()
    for i, tokens in _groups(token_adapter, len(adapters)):
        column = offset
        for s, (pair, width) in enumerate(zip(adapters[i], widths, strict=True)):
            if pair is not None:
                b = pair[1].double()
                delta = h[s, tokens, : b.shape[1]].double() @ b.T
                into = out[tokens, column : column + width]
                out[tokens, column : column + width] = into + delta if add_inputs else delta
            column += width
    return out


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: Adapters,
    token_adapter: torch.Tensor,
    widths: Sequence[int],
    scales=None,
    scale: float = 1.0,
    add_inputs: bool = True,
    offset: int = 0,
) -> torch.Tensor:
    """``shrink`` and ``expand``."""
    h = shrink(x, adapters, token_adapter, scales, scale)
    return expand(y, h, adapters, token_adapter, widths, add_inputs, offset)
