# SPDX-License-Identifier: Apache-2.0
"""Modules of PyTorch built on Mortar's ops."""

import importlib

# Where each name lives; imported when asked for, as a build may hold some families only.
_HOMES = {
    "DynamicShortConvolution": "dynamic_short_convolution",
    "Fp8RMSNorm": "fp8_rmsnorm",
    "Fp8RMSNormLinear": "fp8_rmsnorm",
    "fp8_linear": "fp8_rmsnorm",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])
