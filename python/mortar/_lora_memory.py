# SPDX-License-Identifier: Apache-2.0
"""Workspaces that the calls of a step share: a plan keeps one, and so does vLLM's metadata.

The library says how much a call needs where it is given less, or memory of another stream, or
memory that would enter a graph: nothing of that is asked here in every call."""

from threading import get_ident

import torch

# What torch.cuda's own functions call; only builds of PyTorch with CUDA have them.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

#: In place of a stream: the caller of a workspace of his own answers for that.
ANY_STREAM = -1
#: What a call begins with that finds nothing kept.
NOTHING = (None, ANY_STREAM)


def stream_of(x: torch.Tensor) -> int | None:
    """The stream that a workspace of calls with this x belongs to. None where it must not outlive
    its call: while the stream is being captured, as the memory is then the graph's, and on another
    device than the current one, whose streams PyTorch does not tell about."""
    if not x.is_cuda:
        return 0 if x.is_cpu else None
    device = x.get_device()
    if device != _current_device() or _is_capturing():
        return None
    return _current_stream(device)


class Memory:
    """uint8 tensors of PyTorch's allocator: one for each thread, of the stream used last."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, int]] = {}

    def __reduce__(self) -> tuple:
        """Of copies and pickles, which begin with nothing: threads and streams are of this process,
        and torch.multiprocessing would let two processes write to one workspace."""
        return Memory, ()

    def get(self) -> tuple[torch.Tensor | None, int]:
        """What the current thread used last, and the stream that it is for."""
        return self.kept.get(get_ident(), NOTHING)

    def more(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """So many bytes for a call with this x, which later calls find again where they may."""
        memory = torch.empty(size, dtype=torch.uint8, device=x.device)
        stream = stream_of(x)
        if stream is not None:
            self.kept[get_ident()] = (memory, stream)
        return memory
