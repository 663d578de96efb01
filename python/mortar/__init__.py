# SPDX-License-Identifier: Apache-2.0
"""Mortar: the memory-bound operations between the matrix multiplications of an LLM.

With PyTorch installed, ``import mortar`` registers ``torch.ops.mortar.*``; the friendly layers
above them are ``mortar.lora``, ``mortar.dynamic_conv`` and ``mortar.fp8``, whose functions are
``mortar.fp8_rmsnorm``, ``fp8_rmsnorm_backward`` and ``fp8_quantize``. Without it, the adapter store
and everything else that needs no tensors of PyTorch still work.
"""

import importlib
import importlib.util

from . import _ffi

__version__ = "0.1.0"

_SUBMODULES = (
    "adapter_store",
    "compat",
    "dynamic_conv",
    "fp8",
    "lora",
    "lora_train",
    "nn",
    "reference",
)
# Modules with torch ops, and a function that the library has where it was built with them.
_OP_FAMILIES = {
    "lora": "lora_plan",
    "dynamic_conv": "dynamic_conv_forward",
    "fp8": "fp8_rmsnorm_forward",
}
_FUNCTIONS = {
    "AdapterStore": "adapter_store",
    "fp8_quantize": "fp8",
    "fp8_rmsnorm": "fp8",
    "fp8_rmsnorm_backward": "fp8",
}


def __getattr__(name: str):
    if name in _FUNCTIONS:
        value = getattr(importlib.import_module(f".{_FUNCTIONS[name]}", __name__), name)
        globals()[name] = value  # the next look-up costs nothing
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_FUNCTIONS, *_SUBMODULES})


def _register_ops() -> None:
    """Imports the families that this build of the library holds (MORTAR_FAMILIES)."""
    for family, function in _OP_FAMILIES.items():
        built = _ffi.lib.implements_function(function)
        if built and importlib.util.find_spec(f"{__name__}.{family}"):
            importlib.import_module(f".{family}", __name__)


if _ffi.torch is not None:
    _register_ops()
