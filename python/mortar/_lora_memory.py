# SPDX-License-Identifier: Apache-2.0
"""Workspaces that the calls of a step share: a plan keeps one, and so does vLLM's metadata.

The library says how much a call needs where it was given less, so nothing is computed here."""

from threading import get_ident

import torch

# What torch.cuda's own functions call; only builds of PyTorch with CUDA have them.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def place_of(x: torch.Tensor) -> tuple[int, int] | None:
    """(device, stream) that a workspace of calls with this x belongs to. None where it must not
    outlive its call: while the stream is being captured, as the memory is then the graph's, and on
    another device than the current one, whose streams PyTorch does not tell about."""
    if not x.is_cuda:
        return (-1, 0) if x.is_cpu else None
    device = x.get_device()
    if device != _current_device() or _is_capturing():
        return None
    return (device, _current_stream(device))


class Memory:
    """uint8 tensors of PyTorch's allocator: one for each thread, of the stream used last."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: dict[int, tuple[tuple[int, int], torch.Tensor]] = {}

    def get(self, x: torch.Tensor) -> torch.Tensor | None:
        """What was kept for calls with this x on the current thread and stream."""
        kept = self.kept.get(get_ident())
        return kept[1] if kept is not None and kept[0] == place_of(x) else None

    def more(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """So many bytes, which later calls find again where they may."""
        memory = torch.empty(size, dtype=torch.uint8, device=x.device)
        place = place_of(x)
        if place is not None:
            self.kept[get_ident()] = (place, memory)
        return memory
