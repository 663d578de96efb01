# SPDX-License-Identifier: Apache-2.0
"""Inputs of vLLM's punica ops: weights in slots, and metadata as its engine prepares it."""

from dataclasses import dataclass

import torch

from lora_cases import BF16, FP32, make_map

STALE = 2**31 - 1  # what a buffer holds that nobody filled for this step


@dataclass
class Inputs:
    x: torch.Tensor
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    h: torch.Tensor
    y: torch.Tensor
    metadata: list[torch.Tensor]
    """token_lora_mapping ... no_lora_flag_cpu, in the order of the signature."""

    @property
    def mapping(self) -> torch.Tensor:
        return self.metadata[0]

    @property
    def adapters(self):
        """The slots, for the reference."""
        slots = range(self.a[0].shape[0])
        return [
            [
                (a[i].flatten(0, -2), b[i].flatten(0, -2))
                for a, b in zip(self.a, self.b, strict=True)
            ]
            for i in slots
        ]

    @property
    def widths(self) -> list[int]:
        return [b.shape[-2] for b in self.b]


def new_metadata(max_loras: int, max_tokens: int, device) -> list[torch.Tensor]:
    """The persistent buffers: mapping, sorted indices, counts, starts, ids, flag."""
    sizes = (max_tokens, max_tokens, max_loras + 1, max_loras + 2, max_loras + 1)
    buffers = [torch.full((n,), STALE, dtype=torch.int32, device=device) for n in sizes]
    return [*buffers, torch.tensor([False])]


def prepare(metadata, mapping: torch.Tensor) -> None:
    """Fills the buffers for one step: ids ascending with -1 first and -1 behind, counts padded
    with 0; what the mapping does not reach keeps its old content."""
    held, indices, counts, starts, ids, flag = metadata
    flag[0] = bool((mapping == -1).all())
    ids.fill_(-1)
    counts.zero_()
    starts.zero_()
    if flag.item():
        return
    n = mapping.numel()
    held[:n] = mapping
    indices[:n] = mapping.sort(stable=True).indices
    present, many = mapping.unique(return_counts=True)
    ids[: present.numel()] = present
    counts[: present.numel()] = many
    starts[1 : 1 + many.numel()] = many.cumsum(0)


def make_inputs(
    device,
    tokens: int = 24,
    hidden: int = 96,
    widths: tuple[int, ...] = (64,),
    rank: int = 8,
    slots: int = 4,
    dtype=BF16,
    h_dtype=FP32,
    four_dims: bool = False,
    map: str = "random",
    seed: int = 0,
) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=g).to(of).to(device)

    one = (1,) if four_dims else ()
    metadata = new_metadata(slots, tokens, device)
    prepare(metadata, make_map(map, tokens, slots, g).to(device))
    return Inputs(
        x=normal(tokens, hidden),
        a=[normal(slots, *one, rank, hidden) for _ in widths],
        b=[normal(slots, *one, n, rank) for n in widths],
        h=normal(len(widths), tokens, rank, of=h_dtype),
        y=normal(tokens, sum(widths)),
        metadata=metadata,
    )
