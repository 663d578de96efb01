# SPDX-License-Identifier: Apache-2.0
"""Loads the binding library: ``lib.<name>(...)`` calls an exported C++ function.

Tensors of any framework that speaks DLPack are passed as they are; errors of the library arrive
as ValueError, TypeError or RuntimeError.
"""

import os
from pathlib import Path

try:
    # PyTorch first: its OpenMP runtime is then the one that the library shares.
    import torch
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    torch = None

import tvm_ffi

__all__ = ["lib", "torch"]


def _library_path() -> Path:
    override = os.environ.get("MORTAR_LIBRARY")
    path = Path(override) if override else Path(__file__).parent / "_lib" / "mortar_ffi.so"
    if not path.is_file():
        source = "MORTAR_LIBRARY" if override else "the package"
        raise ImportError(f"mortar: no binding library at {path} (from {source}); run ./run build")
    return path


lib = tvm_ffi.load_module(str(_library_path()))
