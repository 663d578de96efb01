# SPDX-License-Identifier: Apache-2.0
"""What the convolution benchmark compares with: PyTorch expressions, compiled by Inductor, and
Jet-Nemotron's Triton kernels, loaded from an ignored folder.

For Jet-Nemotron put these files of the public repository NVlabs/Jet-Nemotron (as of November 2025),
folder jetai/modeling/hf, into .peers/jet:

    dconv_fwdbwd.py  dconv_step.py
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import ROOT

JET_FILES = ROOT / ".peers" / "jet"


# ---- Jet-Nemotron ------------------------------------------------------------------------------
class Jet:
    """Jet-Nemotron's Triton functions. `backward` calls theirs below autograd, whose nodes would
    run on the stream of the forward pass and not on a graph's.

    Raises FileNotFoundError if the files are not in place, ImportError without Triton."""

    @staticmethod
    @functools.cache
    def shared() -> Jet:
        """The one instance: importing twice would compile every kernel twice."""
        return Jet()

    def __init__(self) -> None:
        with _stand_in("einops", rearrange=None):
            training, step = (_load(stem) for stem in ("dconv_fwdbwd", "dconv_step"))
        self.forward = training.dynamic_conv_triton_autograd
        self.step = step.causal_conv_step_triton
        self._function = training.DynamicConvTritonFunc

    def backward(self, x: Tensor, kernels: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        context = types.SimpleNamespace(
            saved_tensors=(x, kernels), W=kernels.shape[-1], BLOCK_SIZE_D=128
        )
        return self._function.backward(context, dy)[:2]


def _load(stem: str) -> ModuleType:
    path = JET_FILES / f"{stem}.py"
    if not path.is_file():
        where = JET_FILES.relative_to(ROOT)
        raise FileNotFoundError(f"bench: {where} must hold {stem}.py, see bench/conv_peers.py")
    spec = importlib.util.spec_from_file_location(f"jet_peer_{stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks up the sources of its functions there
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_in(name: str, **names: object) -> Iterator[None]:
    """A module that the files import and never use, where it is not installed."""
    if importlib.util.find_spec(name) is not None:
        yield
        return
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        del sys.modules[name]


# ---- PyTorch expressions -----------------------------------------------------------------------
# Each writes into the tensors it is given: compiled, the copy is the store of the fused kernel.
def windows(x: Tensor, width: int) -> Tensor:
    """[B, T, D, W]: the inputs that meet each token's kernel."""
    return F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1)


def _activate(total: Tensor, silu: bool) -> Tensor:
    return F.silu(total) if silu else total


def unfold_forward(y: Tensor, x: Tensor, kernels: Tensor, silu: bool) -> None:
    """Unfold, multiply, sum."""
    total = (windows(x, kernels.shape[-1]).float() * kernels.float()).sum(-1)
    y.copy_(_activate(total, silu))


def shifts_forward(y: Tensor, x: Tensor, kernels: Tensor, silu: bool) -> None:
    """One multiply-add per tap, of x shifted."""
    width, time = kernels.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    terms = (padded[:, w : w + time].float() * kernels[..., w].float() for w in range(width))
    y.copy_(_activate(sum(terms), silu))


def gradient_of_sum(x: Tensor, kernels: Tensor, dy: Tensor, silu: bool) -> Tensor:
    """dy before the activation."""
    if not silu:
        return dy.float()
    total = (windows(x, kernels.shape[-1]).float() * kernels.float()).sum(-1)
    sigmoid = total.sigmoid()
    return dy.float() * sigmoid * (1 + total * (1 - sigmoid))


def unfold_backward(dx: Tensor, dk: Tensor, x: Tensor, kernels: Tensor, dy: Tensor,
                    silu: bool) -> None:  # fmt: skip
    """The gradients written out: what autograd derives, in one compiled function."""
    width, time = kernels.shape[-1], x.shape[1]
    ds = gradient_of_sum(x, kernels, dy, silu)
    dk.copy_(windows(x, width).float() * ds.unsqueeze(-1))
    scattered = F.pad(ds.unsqueeze(-1) * kernels.float(), (0, 0, 0, 0, 0, width - 1))
    dx.copy_(sum(scattered[:, width - 1 - w : width - 1 - w + time, :, w] for w in range(width)))


def step(y: Tensor, x: Tensor, kernels: Tensor, state: Tensor, silu: bool) -> None:
    """Shift the state, append x, multiply, sum."""
    history = torch.cat([state, x.unsqueeze(-1)], -1)
    width = kernels.shape[-1]
    total = (history[..., -width:].float() * kernels.float()).sum(-1)
    state.copy_(history[..., 1:])
    y.copy_(_activate(total, silu))


@functools.cache
def compiled(expression):
    """The expression through Inductor, compiled for every shape of its own."""
    torch._dynamo.config.recompile_limit = 256
    # Its idle compiler processes would take the host's time from the rows that measure just that.
    torch._inductor.config.compile_threads = 1
    return torch.compile(expression, dynamic=False)
