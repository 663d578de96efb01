# SPDX-License-Identifier: Apache-2.0
"""What the LoRA training benchmark compares with: cuBLAS products, addmm with alpha as Unsloth
writes it, PEFT's expression, eager and compiled, and NeMo Automodel's Triton kernels, loaded from
an ignored folder.

For NeMo put lora_kernel.py of the public repository NVIDIA-NeMo/Automodel (as of August 2026),
folder nemo_automodel/components/_peft, into .peers/nemo.
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

NEMO_FILE = ROOT / ".peers" / "nemo" / "lora_kernel.py"


@functools.cache
def nemo() -> ModuleType:
    """NeMo's module of the three wrappers.

    Raises FileNotFoundError if the file is not in place, ImportError without Triton."""
    if not NEMO_FILE.is_file():
        where = NEMO_FILE.parent.relative_to(ROOT)
        raise FileNotFoundError(f"bench: {where} must hold lora_kernel.py, see train_peers.py")
    if importlib.util.find_spec("triton") is None:
        raise ImportError("bench: NeMo's kernels need Triton")
    spec = importlib.util.spec_from_file_location("nemo_peer_lora_kernel", NEMO_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks up the sources of its functions there
    with _stand_in():
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """The one module of its own project that the file imports, for two names."""
    names = ("nemo_automodel", "nemo_automodel.shared", "nemo_automodel.shared.import_utils")
    made = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    sys.modules.update(made)
    vars(sys.modules[names[-1]]).update(
        MISSING_TRITON_MSG="Triton is not installed", null_decorator=lambda *a, **k: lambda f: f
    )
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


# ---- PyTorch expressions -----------------------------------------------------------------------
def products_forward(y: Tensor, x: Tensor, base: Tensor | None, a: Tensor, b: Tensor,
                     scale: float) -> None:  # fmt: skip
    """Two products; the sum with the base, where there is one, in the second."""
    h = torch.mm(x, a.t())
    if base is None:
        torch.addmm(y, h, b.t(), beta=0, alpha=scale, out=y)
    else:
        torch.addmm(base, h, b.t(), alpha=scale, out=y)


def addmm_forward(y: Tensor, x: Tensor, base: Tensor | None, a: Tensor, b: Tensor,
                  scale: float) -> None:  # fmt: skip
    """In place onto the base's output, as Unsloth does: the base is copied first, or zeros."""
    if base is None:
        y.zero_()
    else:
        y.copy_(base)
    y.addmm_(x @ a.t(), b.t(), alpha=scale)


def peft_forward(y: Tensor, x: Tensor, base: Tensor | None, a: Tensor, b: Tensor, scale: float,
                 p: float = 0.0) -> None:  # fmt: skip
    """PEFT's layer without its base product."""
    delta = F.linear(F.linear(F.dropout(x.to(a.dtype), p), a), b) * scale
    y.copy_(delta if base is None else base + delta)


def products_backward(dx: Tensor, da: Tensor, db: Tensor, x: Tensor, h: Tensor, dy: Tensor,
                      a: Tensor, b: Tensor, scale: float) -> None:  # fmt: skip
    """Four products, with h = scale * x A^T of the forward given."""
    ds = torch.mm(dy, b)
    torch.addmm(dx, ds, a, beta=0, alpha=scale, out=dx)
    torch.addmm(da, ds.t(), x, beta=0, alpha=scale, out=da)
    torch.mm(dy.t(), h, out=db)


def peft_backward(dx: Tensor, da: Tensor, db: Tensor, x: Tensor, h: Tensor, dy: Tensor, a: Tensor,
                  b: Tensor, scale: float) -> None:  # fmt: skip
    """What autograd derives from PEFT's expression."""
    wide, narrow = dy.to(a.dtype) * scale, x.to(a.dtype)
    ds = wide @ b
    dx.copy_(ds @ a)
    da.copy_(ds.t() @ narrow)
    db.copy_(wide.t() @ (narrow @ a.t()))


def dropped_backward(dx: Tensor, da: Tensor, db: Tensor, kept: Tensor, mask: Tensor, h: Tensor,
                     dy: Tensor, a: Tensor, b: Tensor, scale: float, p: float) -> None:  # fmt: skip
    """The same with dropout, of what autograd keeps: x after dropout, its mask and h = kept A^T."""
    wide = dy.to(a.dtype) * scale
    ds = wide @ b
    dx.copy_(ds @ a * mask * (1 / (1 - p)))
    da.copy_(ds.t() @ kept)
    db.copy_(wide.t() @ h)


@functools.cache
def compiled(expression):
    """The expression through Inductor, compiled for every shape of its own."""
    torch._dynamo.config.recompile_limit = 256
    torch._inductor.config.compile_threads = 1
    return torch.compile(expression, dynamic=False)
