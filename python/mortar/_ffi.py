# SPDX-License-Identifier: Apache-2.0
"""Loads the binding library: ``lib.<name>(...)`` calls an exported C++ function.

Tensors of any framework that speaks DLPack are passed as they are; errors of the library arrive
as ValueError, TypeError or RuntimeError.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

try:
    # PyTorch first: its OpenMP runtime is then the one that the library shares.
    import torch
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    torch = None

try:
    import tvm_ffi
except ModuleNotFoundError as missing:
    if missing.name != "tvm_ffi":
        raise
    raise ModuleNotFoundError(
        "mortar: needs the package apache-tvm-ffi; type: python -m pip install apache-tvm-ffi",
        name="tvm_ffi",
    ) from None

__all__ = ["WRITTEN", "lib", "torch", "torch_function"]


def _library_path() -> Path:
    override = os.environ.get("MORTAR_LIBRARY")
    # Absolute: the loader looks for a bare name among the system's libraries.
    path = Path(override or Path(__file__).parent / "_lib" / "mortar_ffi.so").absolute()
    if not path.is_file():
        source = "MORTAR_LIBRARY" if override else "the package"
        raise ImportError(
            f"mortar: no binding library at {path} (from {source}); type ./run build in the sources"
        )
    return path


def _load(path: Path):
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ImportError(f"mortar: cannot load {path}: {reason}") from error


lib = _load(_library_path())


def _lend_torch() -> bool:
    """Gives the library what reads PyTorch's tensors from a tuple by its ``id`` (torch_objects.h);
    False if this PyTorch has no such thing."""
    capsule = getattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return False
    api = ctypes.pythonapi
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    functions = (
        api.PyErr_Clear,
        api.PyEval_SaveThread,
        api.PyEval_RestoreThread,
        api.PyTuple_Size,
        api.PyTuple_GetItem,
    )
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return lib.lend_torch(pointer(capsule, b"dlpack_exchange_api"), id(None), *addresses)


_torch_is_lent = _lend_torch()


WRITTEN = 1  # what a torch_function returns after it has run the op


def torch_function(name: str) -> Callable[..., int]:
    """A function of the library that takes the ``id`` of a tuple of all its tensors, and then its
    other arguments.

    It returns 0, with nothing written, where an object is no tensor of PyTorch's or holds no plain
    memory, and -1 where the call says that there is nothing to do. The caller must hold on to the
    tuple.
    """
    if not _torch_is_lent:
        return lambda *args: 0
    function = getattr(lib, name)
    function.release_gil = False  # it reads the objects first and then releases it itself
    return function
