# SPDX-License-Identifier: Apache-2.0
"""What the FP8 RMSNorm is compared with: PyTorch expressions, eager and compiled, COAT's Triton
kernels from an ignored folder, and the norms of other libraries where they are installed.

For COAT put these files of the public repository NVlabs/COAT (as of August 2025), folder
coat/activation/real_quantization, into .peers/coat/original, and those of NVlabs/VILA, folder
llava/model/coat/activation/real_quantization, into .peers/coat/vila:

    func_rmsnorm.py  _division_transpose.py  _division.py  common.py
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import ROOT

COAT_FILES = ROOT / ".peers" / "coat"
COAT_COPIES = ("original", "vila")
EPS = 1e-5


class Coat:
    """One copy of COAT's functions. Raises FileNotFoundError if its files are not in place,
    ImportError without Triton."""

    @staticmethod
    @functools.cache
    def shared(copy: str) -> Coat:
        """The one instance of a copy: importing twice would compile every kernel twice."""
        return Coat(copy)

    def __init__(self, copy: str):
        folder = COAT_FILES / copy
        for stem in ("func_rmsnorm", "_division_transpose", "_division", "common"):
            if not (folder / f"{stem}.py").is_file():
                where = folder.relative_to(ROOT)
                raise FileNotFoundError(
                    f"bench: {where} must hold {stem}.py, see bench/norm_peers.py"
                )
        package = types.ModuleType(f"coat_peer_{copy}")
        package.__path__ = [str(folder)]
        sys.modules[package.__name__] = package
        norm = importlib.import_module(f"{package.__name__}.func_rmsnorm")
        division = importlib.import_module(f"{package.__name__}._division_transpose")
        self.forward, self.backward = norm.fp8_rmsnorm_forward, norm.fp8_rmsnorm_backward
        self.division = division.fp8_division_transpose


# ---- PyTorch expressions -----------------------------------------------------------------------
# Each writes into the tensors it is given: compiled, the copies are stores of the fused kernels.


def dequantise(x: Tensor, x_scale: Tensor | None) -> Tensor:
    if x_scale is None:
        return x.float()
    groups = x.float().unflatten(1, (x_scale.shape[1], -1))
    return (groups * x_scale.float().unsqueeze(-1)).flatten(1)


def quantise(y: Tensor, s) -> None:
    """y into q, scale and their transposes, by the scheme of the problem of s."""
    _quantise_rows(y, s.q, s.scale, s.scaling, s.given)
    if s.q_t is None:
        return
    if s.scaling == "tensor":
        s.q_t.copy_(s.q.t())
    else:
        _quantise_rows(y.t(), s.q_t, s.scale_t, s.scaling, s.given)


def _quantise_rows(y: Tensor, q: Tensor, scale: Tensor, scaling: str, given: bool) -> None:
    largest = torch.finfo(q.dtype).max
    grouped = y
    if scaling == "group":
        grouped = F.pad(y, (0, -y.shape[1] % 128)).unflatten(1, (-1, 128))
    if not given:
        amax = y.abs().amax() if scaling == "tensor" else grouped.abs().amax(-1)
        scale.copy_(amax.clamp_min(1e-10) / largest)
    divided = grouped / (scale if scaling == "tensor" else scale.unsqueeze(-1))
    if scaling == "group":
        divided = divided.flatten(1)[:, : y.shape[1]]
    q.copy_(divided.clamp(-largest, largest).to(q.dtype))


def forward(s) -> None:
    z = dequantise(s.x, s.x_scale)
    if s.residual is not None:
        s.residual.copy_(z + s.residual)
        z = s.residual.float()
    s.rstd.copy_((z.square().mean(-1) + EPS).rsqrt())
    quantise(z * s.rstd.unsqueeze(-1) * s.weight, s)


def backward(s) -> None:
    z, dy = dequantise(s.x, s.x_scale), s.dy.float()
    normed, g = z * s.rstd.unsqueeze(-1), dy * s.weight
    mean = (g * normed).mean(-1, keepdim=True)
    s.dx.copy_((g - normed * mean) * s.rstd.unsqueeze(-1))
    s.dw.copy_((dy * normed).sum(0))


def quantise_alone(s) -> None:
    quantise(s.x.float(), s)


@functools.cache
def compiled(expression: Callable) -> Callable:
    """The expression through Inductor, compiled for every shape of its own."""
    torch._dynamo.config.recompile_limit = 256
    # Its idle compiler processes would take the host's time from the rows that measure just that.
    torch._inductor.config.compile_threads = 1
    return torch.compile(expression, dynamic=False)


# ---- other libraries' norms --------------------------------------------------------------------


def _liger() -> Callable:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda z, w: liger_rms_norm(z, w, EPS)


def _quack() -> Callable:
    from quack import rmsnorm

    return lambda z, w: rmsnorm(z, w, eps=EPS)


def _flashinfer() -> Callable:
    from flashinfer.norm import rmsnorm

    return lambda z, w: rmsnorm(z, w, eps=EPS)


def _transformer_engine() -> Callable:
    from transformer_engine.pytorch import RMSNorm

    @functools.cache
    def module(hidden: int):
        return RMSNorm(hidden, eps=EPS, device="cuda", dtype=torch.bfloat16)

    return lambda z, w: module(z.shape[1])(z)


#: Module to look for, and what gives norm(z bfloat16 [M, N], weight bfloat16 [N]).
NORMS: dict[str, tuple[str, Callable[[], Callable]]] = {
    "liger": ("liger_kernel", _liger),
    "quack": ("quack", _quack),
    "flashinfer": ("flashinfer", _flashinfer),
    "te": ("transformer_engine", _transformer_engine),
}


def installed_norms() -> list[str]:
    return [name for name, (module, _) in NORMS.items() if importlib.util.find_spec(module)]


def then_cast(name: str, s) -> Callable[[], None]:
    """A library's norm in bfloat16, then a compiled cast and transpose."""
    norm, cast = NORMS[name][1](), compiled(quantise)
    weight = s.weight.bfloat16()

    def call() -> None:
        cast(norm(s.x if s.x_scale is None else dequantise(s.x, s.x_scale).bfloat16(), weight), s)

    return call
