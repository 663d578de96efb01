# SPDX-License-Identifier: Apache-2.0
"""What ``mortar.compat.peft.accelerate`` puts on a PEFT model; the part that imports PEFT."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer, LoraModel
from peft.utils.other import AuxiliaryTrainingWrapper

from .. import lora
from .._lora_table import ALIGNMENT, DTYPES, MAX_RANK
from ._peft_training import (
    HOOKS,
    TrainedForward,
    has_hooks,
    has_own_forward,
    training_mixed,
    why_not_plain,
)
from ._serving import KEY, ServedForward, Session

# PEFT's layers over quantised base layers: base(x), plus the plain delta. They are no subclass of
# its Linear and exist only where their package is installed, so they are told by their file.
_QUANTISED = tuple(
    f"peft.tuners.lora.{kind}" for kind in ("aqlm", "awq", "bnb", "eetq", "gptq", "hqq")
)


class PeftSession(Session):
    """Takes the place of the context in which PEFT hands adapter_names to its layers."""

    num_served: int
    left: str
    """What is left to PEFT, and why; empty if nothing is."""

    def __init__(self, lora_model: LoraModel, train_mixed: bool = False) -> None:
        super().__init__(())
        self._model = lora_model
        self._train_mixed = train_mixed
        self._peft_hooks = lora_model._enable_peft_forward_hooks
        self._install()

    def _install(self) -> None:
        modules = list(self._model.modules())
        self._layers = [
            module
            for module in modules
            if isinstance(module, LoraLayer) and (module.lora_A or module.lora_embedding_A)
        ]
        untrained = {layer: _refusal(layer) for layer in self._layers}
        refusals = {layer: why or _cannot_serve(layer) for layer, why in untrained.items()}
        served = [layer for layer, reason in refusals.items() if reason is None]
        left = Counter(filter(None, refusals.values()))
        self.num_served = sum(reason is None for reason in untrained.values())
        self.left = ", ".join(f"{count} x {reason}" for reason, count in sorted(left.items()))

        adapters = {n for layer in self._layers for n in (*layer.lora_A, *layer.lora_embedding_A)}
        self.ids = {name: number for number, name in enumerate(sorted(adapters))}
        self._last = None
        self._configs = dict(self._model.peft_config)
        self._watched = [_Watched(layer) for layer in served]
        for layer in served:
            original = layer.forward
            forward = _PeftForward(self, layer.base_layer, original, _weights(layer, self.ids))
            self.patch(layer, "forward", TrainedForward(self, layer, original, forward).run)
        for module in modules:
            if refusals.get(module) or isinstance(module, AuxiliaryTrainingWrapper):
                # PEFT hands its names to these layers by hooks that it sets for every forward.
                forward = _NamedForward(self, module.forward)
                if module in untrained and untrained[module] is None:
                    forward = TrainedForward(self, module, forward).run
                self.patch(module, "forward", forward)
        self.patch(self._model, "_enable_peft_forward_hooks", self._hooks)
        self.patch(self._model, KEY, self)

    def _hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        names = kwargs.get("adapter_names")
        self.has_mixed = False
        if names is not None:
            return self._named_hooks(names, args, kwargs)
        self._refresh(self._has_new_configs())
        return self._peft_hooks(*args, **kwargs)

    @contextmanager
    def _named_hooks(self, names: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        if self._model.training and self._train_mixed:
            self._check_mixed(kwargs)
            self._refresh(self._has_changed())
            self.has_mixed = True
            with training_mixed(self, self._model, self.batch_of(self.checked(names, False))):
                yield
            return
        if not self._can_serve(kwargs):
            with self._peft_hooks(*args, **kwargs):
                yield
            return
        names = self.checked(names, self._model.training)
        beams = kwargs.get("num_beams")
        if isinstance(beams, int) and beams > 1:
            names = tuple(name for name in names for _ in range(beams))
        with self.serving(names):
            yield

    def _can_serve(self, kwargs: dict[str, Any]) -> bool:
        """Whether this forward is Mortar's; brings the tables up to date if so."""
        if kwargs.get("alora_offsets") is not None:
            return False
        if kwargs.get("num_beams") not in (None, 1) and _has_encoder(self._model):
            return False  # the encoder sees each sample once, the decoder once per beam
        for layer in self._layers:
            if layer.merged_adapters or layer._disable_adapters or layer.training:
                return False
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            return False
        self._refresh(self._has_changed())
        return True

    def _check_mixed(self, kwargs: dict[str, Any]) -> None:
        """Raises what PEFT raises for a mixed batch that does not train."""
        if kwargs.get("alora_offsets") is not None:
            raise ValueError("accelerate: a mixed batch that trains must have no alora_offsets")
        if any(layer.merged_adapters for layer in self._layers):
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call "
                "`unmerge_adapter` first."
            )

    def _refresh(self, changed: bool) -> None:
        if not changed:
            return
        before = self.left
        self.undo()
        self._install()
        if self.left and self.left != before:
            warnings.warn(f"accelerate: layers left to PEFT: {self.left}", stacklevel=2)

    def _has_new_configs(self) -> bool:
        configs = self._model.peft_config  # a loaded adapter may have brought new layers
        return len(configs) != len(self._configs) or any(
            configs.get(name) is not config for name, config in self._configs.items()
        )

    def _has_changed(self) -> bool:
        return self._has_new_configs() or any(watched.changed() for watched in self._watched)


class _PeftForward(ServedForward):
    """Leaves to PEFT what wants a gradient: a saliency map over the inputs, say."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = self._session.batch
        if batch is not None and x.requires_grad and torch.is_grad_enabled():
            return self._original(x, *args, adapter_names=list(batch.names), **kwargs)
        return super().__call__(x, *args, **kwargs)


class _NamedForward:
    """The forward of a layer that is left to PEFT: with the names, as PEFT would call it."""

    def __init__(self, session: Session, original: Callable) -> None:
        self._session = session
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._session.batch or self._session.mixed
        if batch is not None:
            kwargs["adapter_names"] = list(batch.names)
        return self._original(*args, **kwargs)


class _Watched:
    """Tells whether a layer's table still describes it."""

    def __init__(self, layer: LoraLayer) -> None:
        # The dictionaries behind the ModuleDicts: a look-up per forward, layer and adapter.
        self._factors = (layer.lora_A._modules, layer.lora_B._modules)
        self._scaling = layer.scaling
        self._state = self._now()

    def _now(self) -> list[float | None]:
        linears = [linear for factors in self._factors for linear in factors.values()]
        weights = [linear._parameters.get("weight") for linear in linears]
        places = [0 if weight is None else weight.data_ptr() for weight in weights]
        # None of a tensor, which may change in place and equals the number that it holds.
        scales = [None if isinstance(s, torch.Tensor) else s for s in self._scaling.values()]
        return [*places, *scales, any(map(has_hooks, linears))]

    def changed(self) -> bool:
        return self._now() != self._state


def _weights(layer: LoraLayer, ids: dict[str, int]) -> lora.Weights:
    pairs = [
        (layer.lora_A[name].weight.data, layer.lora_B[name].weight.data)
        if name in layer.lora_A
        else None
        for name in ids
    ]
    scales = [layer.scaling.get(name, 1.0) for name in ids]
    return lora.Weights.from_adapters(pairs, scales)


def _refusal(layer: LoraLayer) -> str | None:
    """Why a layer is left to PEFT altogether; None if Mortar can train it."""
    kind = type(layer)
    known = isinstance(layer, Linear) and kind.forward is Linear.forward
    if not known and kind.__module__ not in _QUANTISED:
        return f"{kind.__name__} layers"
    if has_own_forward(layer):
        return "layers with another forward"
    if any(isinstance(scale, torch.Tensor) for scale in layer.scaling.values()):
        return "scales that are tensors"
    for variant in layer.lora_variant.values():
        return type(variant).__name__
    linears = (*layer.lora_A.values(), *layer.lora_B.values())
    for linear in linears:
        reason = why_not_plain(linear)
        if reason is not None:
            return reason
    for name, a in layer.lora_A.items():
        dtypes = sorted({str(a.weight.dtype), str(layer.lora_B[name].weight.dtype)})
        if len(dtypes) > 1 or a.weight.dtype not in DTYPES:
            return f"adapters of {' and '.join(dtypes)}"
    if max(layer.r.values()) > MAX_RANK:
        return f"ranks over {MAX_RANK}"
    return None


def _cannot_serve(layer: LoraLayer) -> str | None:
    """Why PEFT serves the mixed batches of a layer that Mortar can train."""
    linears = (*layer.lora_A.values(), *layer.lora_B.values())
    if any(map(has_hooks, linears)):
        return HOOKS
    weights = [linear.weight.data for linear in linears]
    dtypes = sorted({str(w.dtype) for w in weights})
    if len(dtypes) > 1:
        return f"adapters of {' and '.join(dtypes)}"
    devices = {str(w.device) for w in weights}
    if len(devices) > 1 or weights[0].device.type not in ("cpu", "cuda"):
        return f"adapters on {' and '.join(sorted(devices))}"
    if any(type(w) is not torch.Tensor or not w.is_contiguous() for w in weights):
        return "adapters that are not dense tensors"
    if any(w.data_ptr() % ALIGNMENT for w in weights):
        return f"adapters not aligned to {ALIGNMENT} bytes"
    return None


def _has_encoder(lora_model: LoraModel) -> bool:
    return bool(getattr(getattr(lora_model.model, "config", None), "is_encoder_decoder", False))
