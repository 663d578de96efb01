# SPDX-License-Identifier: Apache-2.0
"""Reads LoRA adapters as PEFT saves them: ``adapter_config.json`` + ``adapter_model.safetensors``.

    store = mortar.AdapterStore()
    store.open("support", "adapters/support")            # checks everything, then reads it
    module = store.get("support").find("model.layers.0.self_attn.q_proj")
    module.a, module.b, module.scale                     # views into the store's memory

Works without PyTorch: ``a`` and ``b`` are then ``tvm_ffi.Tensor``, which any framework takes
through DLPack (``numpy.from_dlpack``).
"""

import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ._ffi import lib, torch
from ._limits import MEMORY_ALIGNMENT

__all__ = ["Adapter", "AdapterModule", "AdapterStore"]


class AdapterModule:
    """A and B of one target module of one adapter: ``y += scale * (x @ a.T) @ b.T``."""

    name: str
    """As in the base model: ``model.layers.0.self_attn.q_proj``."""
    rank: int
    scale: float
    """alpha / rank, or alpha / sqrt(rank) with rslora; a float32 number."""

    def __init__(self, adapter: Any, index: int, name: str, rank: int, scale: float) -> None:
        self._adapter, self._index = adapter, index
        self.name, self.rank, self.scale = name, rank, scale

    @cached_property
    def a(self) -> Any:
        """[rank, K] on the CPU, float32, float16 or bfloat16: a view into the adapter's memory,
        which it keeps alive. Changing it changes neither the file nor other processes."""
        return self._view(False)

    @cached_property
    def b(self) -> Any:
        """[N, rank], a view as ``a`` and of its dtype."""
        return self._view(True)

    def _view(self, is_b: bool) -> Any:
        tensor = lib.adapter_factor(self._adapter, self._index, is_b)
        return tensor if torch is None else torch.from_dlpack(tensor)

    def __reduce__(self) -> tuple:
        raise TypeError(
            "AdapterModule: a module cannot be copied or pickled, only its tensors a and b can"
        )

    def __repr__(self) -> str:
        return f"AdapterModule({self.name!r}, rank={self.rank}, scale={self.scale:g})"


class Adapter:
    """One adapter folder. Lives on after its store has closed it."""

    name: str
    path: str
    base_model: str
    """base_model_name_or_path of the config, empty if not given."""
    fan_in_fan_out: bool
    """The base model stores its weights as [K, N] (GPT-2's Conv1D); ``a`` and ``b`` do not."""
    modules: tuple[AdapterModule, ...]
    """Sorted by name."""

    def __init__(self, name: str, handle: Any) -> None:
        path, base_model, fan_in_fan_out, names, ranks, scales = lib.adapter_describe(handle)
        self.name, self.path, self.base_model = name, str(path), str(base_model)
        self.fan_in_fan_out = bool(fan_in_fan_out)
        described = zip(names, ranks, scales, strict=True)
        self.modules = tuple(
            AdapterModule(handle, i, str(module), rank, scale)
            for i, (module, rank, scale) in enumerate(described)
        )
        self._by_name = {module.name: module for module in self.modules}

    def find(self, module: str) -> AdapterModule | None:
        """The module of that name, None if this adapter leaves it alone."""
        return self._by_name.get(_text("Adapter.find", "module", module))

    def __reduce__(self) -> tuple:
        raise TypeError("Adapter: an adapter cannot be copied or pickled, open its folder again")

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, {self.path!r}, {len(self.modules)} modules)"


class AdapterStore:
    """Registered adapters by name and id. May be used from several threads: one may close a name
    and open it again with another folder while others ``get`` it."""

    def __init__(self) -> None:
        self._handle = lib.adapter_store_new()
        # Held where an adapter is closed, and where one is looked up and kept: no closed adapter
        # is kept. Reentrant for `slices`.
        self._lock = threading.RLock()
        self._adapters: dict[str, Adapter] = {}

    def open(self, name: str, folder: str | os.PathLike, *, mapped: bool = False) -> int:
        """Opens a PEFT adapter folder under a new name.

        Args:
            name: any text that is not in use.
            folder: holds adapter_config.json and adapter_model.safetensors.
            mapped: True maps the weights instead of reading them into memory: opened in no time,
                and processes share the memory. A file that is cut short while it is mapped ends
                the process (SIGBUS), and one that is written to changes the weights. Only for
                files that are replaced by renaming and never changed.

        Returns:
            Its id: 0, 1, 2, ... An id is never used again.

        Raises:
            ValueError: the name is taken, the folder or a file is missing or malformed, or the
                adapter is one that Mortar cannot serve (DoRA, modules_to_save, a bias, another
                PEFT type, ...); the message has the reason.
            TypeError: a tensor has another dtype than float32, float16 and bfloat16.
            RuntimeError: the machine cannot read a file or has no memory for it.
        After an error the store is as it was.
        """
        op = "AdapterStore.open"
        _text(op, "name", name)
        if not isinstance(folder, str | bytes | os.PathLike):
            raise TypeError(f"{op}: folder must be a path, got {type(folder).__name__}")
        if not isinstance(mapped, bool):
            raise TypeError(f"{op}: mapped must be a bool, got {type(mapped).__name__}")
        return lib.adapter_store_open(self._handle, name, os.fsdecode(folder), mapped)

    def close(self, name: str) -> None:
        """Forgets an adapter. Tensors taken from it stay valid.

        Raises:
            ValueError: no adapter of that name is open.
        """
        _text("AdapterStore.close", "name", name)
        with self._lock:
            lib.adapter_store_close(self._handle, name)
            self._adapters.pop(name, None)

    def names(self) -> list[str]:
        """The names of the open adapters, in the order of their ids."""
        return [str(name) for name in lib.adapter_store_names(self._handle)]

    def id(self, name: str) -> int:
        """The id of an open adapter; ValueError if there is none of that name."""
        return lib.adapter_store_id(self._handle, _text("AdapterStore.id", "name", name))

    def get(self, name: str) -> Adapter:
        """An open adapter; ValueError if there is none of that name."""
        _text("AdapterStore.get", "name", name)
        with self._lock:
            if name not in self._adapters:
                self._adapters[name] = Adapter(name, lib.adapter_store_get(self._handle, name))
            return self._adapters[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(lib.adapter_store_contains(self._handle, name))

    def __len__(self) -> int:
        return lib.adapter_store_size(self._handle)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __reduce__(self) -> tuple:
        raise TypeError("AdapterStore: a store cannot be copied or pickled, open its folders again")

    def slices(
        self,
        modules: str | Sequence[str],
        adapters: Sequence[str | None] | None = None,
        *,
        device: Any = "cpu",
        dtype: Any = None,
    ) -> tuple[list, list[list[float]]]:
        """What ``mortar.lora.Weights.from_adapters`` takes, for modules that share their input.

            weights = mortar.lora.Weights.from_adapters(*store.slices(["...q_proj", "...k_proj"]))

        Args:
            modules: one name per slice (or a bare name).
            adapters: names; the position in this list is the id that a token carries. None: an
                empty slot. Default: all open adapters in the order of their ids.
            device: where the tensors go. On the CPU they are used in place if they lie on a
                16-byte boundary in the file and need no other dtype, else copied.
            dtype: of the tensors, the file's own by default. ``from_adapters`` wants one for all.

        Returns:
            adapters and scales: per adapter a list with (A, B) or None per slice (None for the
            whole adapter if it targets none of the modules), and a list with a scale per slice.

        Raises:
            ValueError: an adapter is not open.
            RuntimeError: PyTorch is not installed.
        """
        op = "AdapterStore.slices"
        if torch is None:
            raise RuntimeError(f"{op}: PyTorch must be installed, got an environment without it")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{op}: dtype must be a torch.dtype, got {type(dtype).__name__}")
        modules = [modules] if isinstance(modules, str) else _texts(op, "modules", modules)
        with self._lock:  # so that no other thread closes one of these in between
            names = (
                self.names() if adapters is None else _texts(op, "adapters", adapters, or_none=True)
            )
            chosen = [None if name is None else self.get(name) for name in names]
        pairs, scales = [], []
        for adapter in chosen:
            found = [None if adapter is None else adapter.find(m) for m in modules]
            row = [m and (_place(m.a, device, dtype), _place(m.b, device, dtype)) for m in found]
            pairs.append(row if any(row) else None)
            scales.append([m.scale if m else 1.0 for m in found])
        return pairs, scales


def _place(tensor: Any, device: Any, dtype: Any) -> Any:
    """The tensor on a device, dense and aligned for the kernels; itself if it is so already."""
    placed = tensor.to(device=device, dtype=dtype)
    return placed if placed.data_ptr() % MEMORY_ALIGNMENT == 0 else placed.clone()


def _text(op: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{op}: {name} must be a str, got {type(value).__name__}")
    return value


def _texts(op: str, name: str, values: Any, or_none: bool = False) -> list:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{op}: {name} must be a list of str, got {type(values).__name__}")
    return [
        value if value is None and or_none else _text(op, f"{name}[{i}]", value)
        for i, value in enumerate(values)
    ]
