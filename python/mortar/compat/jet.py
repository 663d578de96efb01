# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the dynamic convolution of Jet-Nemotron (`jetai.modeling.hf.dconv_*`).

The three functions have the signatures and layouts of the originals; like them they make inputs
dense that are not. They are right where the originals are not: the gradients of packed sequences
stay in their sequence, every W from 1 to 8 works, a cache of any strides is updated in place,
offsets are 64-bit, sums are float32, nothing is read back to the host, and CPU tensors work too.

`install()` puts them, and the forward pass of `mortar.nn.DynamicShortConvolution`, into an
imported jetai, which mends prefill as well: packed prompts keep apart and get a state each, and
a prompt shorter than the cache shifts it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from .._dynamic_conv_ops import step_into
from ..dynamic_conv import dynamic_conv
from ..nn import DynamicShortConvolution
from ._arguments import check_dimensions, in_words_of
from ._install import Replacements, found

__all__ = [
    "causal_conv_step_triton",
    "dynamic_conv_triton_autograd",
    "dynamic_conv_triton_cache",
    "install",
    "uninstall",
]


def _dense(t: Tensor, dims: int) -> Tensor:
    """The tensor itself, or a contiguous copy where its last `dims` dimensions are not dense."""
    try:
        if t.is_contiguous():  # most of them are, at a tenth of the host time of a look at strides
            return t
    except AttributeError:
        return t  # for dynamic_conv to name: it is no tensor
    expected = 1
    for d in range(1, dims + 1):
        if t.shape[-d] > 1 and t.stride(-d) != expected:
            return t.contiguous()
        expected *= t.shape[-d]
    return t


def dynamic_conv_triton_autograd(
    x: Tensor, kernels: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Training: y [B, T, D] with gradients for x and kernels.

    x: [B, T, D]; kernels: [B, T, D, W]; cu_seqlens: [N + 1], sequences packed with B = 1.
    """
    try:
        return dynamic_conv(_dense(x, 1), _dense(kernels, 2), cu_seqlens=cu_seqlens)
    except RuntimeError as error:
        raise in_words_of("dynamic_conv_triton_autograd", error, x=x, kernels=kernels) from None


def dynamic_conv_triton_cache(x: Tensor, kernels: Tensor, cache: Tensor | None = None) -> Tensor:
    """Prefill: y [B, T, D] of x preceded by the rows of the cache, which is read only.

    x: [B, T, D]; kernels: [B, T, D, W]; cache: [B, T_cache, D], any T_cache. Has gradients, for the
    cache as well (the original has none).
    """
    function, state = "dynamic_conv_triton_cache", None
    try:
        if cache is not None:
            check_dimensions(function, x=(x, 3), kernels=(kernels, 4), cache=(cache, 3))
            rows = kernels.shape[-1] - 1
            # The rows that reach x, as a view; zeros in front of a cache that is shorter.
            recent = cache[:, max(cache.shape[1] - rows, 0) :].to(x.dtype)
            if recent.shape[1] < rows:
                recent = torch.nn.functional.pad(recent, (0, 0, rows - recent.shape[1], 0))
            state = recent.transpose(1, 2)
        return dynamic_conv(_dense(x, 1), _dense(kernels, 2), initial_state=state)
    except RuntimeError as error:
        raise in_words_of(function, error, x=x, kernels=kernels, cache=cache) from None


def causal_conv_step_triton(x: Tensor, cache: Tensor, kernels: Tensor) -> Tensor:
    """Decoding: y [B, D] of one token; the cache is shifted left and x appended, in place.

    x: [B, 1, D]; cache: [B, D, W], any strides; kernels: [B, D, W]. No activation, no gradient.
    """
    try:
        if not (x.is_contiguous() and kernels.is_contiguous()):
            x, kernels = _dense(x, 1), _dense(kernels, 2)
        # A view of x as [B, D] would cost the host as much as torch.mul.
        y = x.new_empty(x.shape[0], x.shape[-1])
        return step_into(x, kernels, cache, None, y, False)
    except (AttributeError, IndexError):
        check_dimensions(
            "causal_conv_step_triton", x=(x, 3), kernels=(kernels, 3), cache=(cache, 3)
        )
        raise
    except RuntimeError as error:
        raise in_words_of(
            "causal_conv_step_triton", error, x=x, kernels=kernels, cache=cache
        ) from None


# ---- install -------------------------------------------------------------------------------------

_MODULES = ("dconv_fwdbwd", "dconv_fwd_cache", "dconv_step")
_FUNCTIONS = (dynamic_conv_triton_autograd, dynamic_conv_triton_cache, causal_conv_step_triton)

_replacements = Replacements()


def _packages() -> Iterator[str]:
    """Packages, among the imported ones, that hold Jet-Nemotron's modules: `jetai.modeling.hf` or
    the folder that transformers makes of a model's remote code."""
    for name in list(sys.modules):
        package, _, stem = name.rpartition(".")
        if stem == "dynamic_conv" and all(f"{package}.{m}" in sys.modules for m in _MODULES):
            yield package


def install() -> list[str]:
    """Puts Mortar under every imported jetai; models made before or after run on it.

    Replaces the three functions in whichever module has taken hold of them, and the forward pass
    of its DynamicShortConvolution. Calling it again changes nothing. `uninstall` takes it back.

    Returns:
        The packages that were found, such as ["jetai.modeling.hf"].

    Raises:
        RuntimeError: no jetai has been imported.
    """
    packages = found(
        list(_packages()),
        "mortar.compat.jet.install",
        "import jetai.modeling.hf.dynamic_conv (or load the model)",
    )
    for package in packages:
        for stem, ours in itertools.product(_MODULES, _FUNCTIONS):
            original = vars(sys.modules[f"{package}.{stem}"]).get(ours.__name__, ours)
            _replacements.replace_everywhere(original, ours)
        layer = sys.modules[f"{package}.dynamic_conv"].DynamicShortConvolution
        if layer.forward is not DynamicShortConvolution.forward:
            _replacements.replace(layer, "forward", DynamicShortConvolution.forward)
    return packages


def uninstall() -> None:
    """Restores all that install() replaced; nothing if it has not run."""
    _replacements.undo()
