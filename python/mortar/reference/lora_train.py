# SPDX-License-Identifier: Apache-2.0
"""LoRA training in float64 with explicit loops over adapters and slices.

Both functions take what ``mortar.lora.linear`` and ``mixed_linear`` come to: ``adapters[l][s]`` is
the pair (A [r, K], B [N_s, r]) of adapter l on slice s, or None; ``row_adapter`` [M] names the
adapter of each row, -1 for the base model; ``p[l]`` is its dropout and ``rng`` the int64 [2] seed
and offset. Results are float64, on the device of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_DROP_ALL = 2**16


def _philox(counter: list[Tensor], key: list[int]) -> list[Tensor]:
    """Four random 32-bit words, in int64, of every 128-bit counter."""
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps as uint64 would
        c0, c1, c2, c3 = (
            (p2 >> 32 & _LOW) ^ c1 ^ key[0],
            p2 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ key[1],
            p0 & _LOW,
        )
        key = [(k + step) & _LOW for k, step in zip(key, _KEY_STEPS, strict=True)]
    return [c0, c1, c2, c3]


def threshold(p: float) -> int:
    """p as a multiple of 2^-16: an element is dropped if its 16-bit draw is below this."""
    return int(p * _DROP_ALL + 0.5)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by; 0 where none is kept."""
    drop = threshold(p)
    return 0.0 if drop >= _DROP_ALL else _DROP_ALL / (_DROP_ALL - drop)


def keep_mask(rng: Tensor | None, num_rows: int, columns: int, p: float) -> Tensor:
    """bool [num_rows, columns]: which elements dropout keeps."""
    drop = threshold(p)
    if drop in (0, _DROP_ALL) or rng is None:
        device = "cpu" if rng is None else rng.device
        return torch.full((num_rows, columns), drop == 0, device=device)
    seed, offset = (int(word) for word in rng.tolist())
    index = torch.arange(num_rows * columns, device=rng.device)
    block = index // 16
    words = _philox(
        [
            block & _LOW,
            block >> 32,
            torch.full_like(block, offset & _LOW),
            torch.full_like(block, offset >> 32 & _LOW),
        ],
        [seed & _LOW, seed >> 32 & _LOW],
    )

    def byte(element: Tensor) -> Tensor:
        """Of the 16 of a block: elements 0 to 3 of four have bytes 0, 2, 1 and 3 of their word."""
        word = torch.stack(words).gather(0, (element // 4)[None])[0]
        place = element % 4
        return word >> (8 * (place // 2 + place % 2 * 2)) & 0xFF

    # Upper eight bits: a byte of its own; lower eight: the XOR of those of its octet.
    octet, lower = index % 16 // 8 * 8, torch.zeros_like(index)
    for place in range(8):
        lower ^= byte(octet + place)
    draw = byte(index % 16) << 8 | lower
    return (draw >= drop).view(num_rows, columns)


class Problem(NamedTuple):
    """What a forward and its backward have in common."""

    adapters: Sequence[Sequence[tuple[Tensor, Tensor] | None]]
    scales: Sequence[Sequence[float]]
    row_adapter: Tensor
    widths: Sequence[int]
    p: Sequence[float]
    drops_delta: bool = False
    rng: Tensor | None = None


class _Piece(NamedTuple):
    """The rows of one adapter on one slice."""

    adapter: int
    slice: int
    rows: Tensor
    a: Tensor
    b: Tensor
    factor: float
    keep_x: Tensor | None
    keep_y: Tensor | None


def _pieces(problem: Problem, hidden: int):
    num_rows, total = problem.row_adapter.numel(), sum(problem.widths)
    for adapter, row in enumerate(problem.adapters):
        rows = (problem.row_adapter == adapter).nonzero().flatten()
        p = problem.p[adapter]
        mask = None
        if threshold(p):
            columns = total if problem.drops_delta else hidden
            mask = keep_mask(problem.rng, num_rows, columns, p).to(rows.device)[rows]
        first = 0
        for s, (width, pair) in enumerate(zip(problem.widths, row, strict=True)):
            if pair is not None:
                keep_x = mask if mask is not None and not problem.drops_delta else None
                keep_y = mask[:, first : first + width] if problem.drops_delta and p else None
                a, b = (w.detach().double() for w in pair)
                factor = problem.scales[adapter][s] * keep_scale(p)
                yield _Piece(adapter, s, rows, a, b, factor, keep_x, keep_y)
            first += width


def _kept(t: Tensor, keep: Tensor | None) -> Tensor:
    return t if keep is None else torch.where(keep, t, 0.0)


def forward(problem: Problem, x: Tensor, base: Sequence[Tensor] | None = None) -> list[Tensor]:
    """[S] of y [M, N_s] = base + scale * (drop(x) A^T) B^T."""
    x = x.detach().double()
    ys = [x.new_zeros(x.shape[0], width) for width in problem.widths]
    if base is not None:
        ys = [t.detach().double().clone() for t in base]
    for q in _pieces(problem, x.shape[1]):
        if q.factor:
            h = q.factor * (_kept(x[q.rows], q.keep_x) @ q.a.T)
            ys[q.slice][q.rows] += _kept(h @ q.b.T, q.keep_y)
    return ys


class Gradients(NamedTuple):
    dx: Tensor
    da: list[list[Tensor | None]]
    """[L][S], None where there is no pair."""
    db: list[list[Tensor | None]]


def backward(problem: Problem, x: Tensor, dy: Sequence[Tensor]) -> Gradients:
    """With ds = scale * dy B: dx = ds A (masked as x was), dA = ds^T drop(x), dB = dy^T h."""
    x = x.detach().double()
    dx = torch.zeros_like(x)
    none = [[None] * len(problem.widths) for _ in problem.adapters]
    da, db = none, [list(row) for row in none]
    for q in _pieces(problem, x.shape[1]):
        da[q.adapter][q.slice], db[q.adapter][q.slice] = (torch.zeros_like(w) for w in (q.a, q.b))
        if not q.factor:
            continue
        kept = _kept(x[q.rows], q.keep_x)
        dy_kept = _kept(dy[q.slice].detach().double()[q.rows], q.keep_y)
        ds = q.factor * (dy_kept @ q.b)
        dx[q.rows] += _kept(ds @ q.a, q.keep_x)
        da[q.adapter][q.slice] = ds.T @ kept
        db[q.adapter][q.slice] = dy_kept.T @ (q.factor * (kept @ q.a.T))
    return Gradients(dx, da, db)
