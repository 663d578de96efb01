# SPDX-License-Identifier: Apache-2.0
"""The forward of a PEFT layer that trains: its base layer, then ``mortar.lora.linear``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from .. import lora
from .._library import is_transformed
from .._lora_layer_ops import adapted_linear, takes
from .._lora_table import DTYPES

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from ._serving import Batch, Session


class _Adapter(NamedTuple):
    """One adapter of a layer."""

    name: str
    a: Tensor | None
    b: Tensor | None
    modules: list[nn.Module]
    """A, B and dropout."""

    def probability(self) -> float:
        dropout = self.modules[2]
        return dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0


HOOKS = "hooks or another forward on the modules of an adapter"
_DROPOUTS = (nn.Dropout, nn.Identity)
_TENSORS = (nn.Parameter, Tensor)


class TrainedForward:
    """`run` is in place of PEFT's forward where a gradient is wanted or the layer trains.

    Reads the layer anew in every call: adapters may have been switched, rescaled or replaced. What
    it cannot do, PEFT's forward does.
    """

    def __init__(
        self, session: Session, layer: LoraLayer, original: Callable, served: Callable | None = None
    ) -> None:
        """served: does what serves a mixed batch, PEFT's forward if None."""
        self._session = session
        self._layer = layer
        self._original = original
        self._served = served or original

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        session, layer = self._session, self._layer
        if session.batch is not None:
            return self._served(x, *args, **kwargs)
        if (
            layer._disable_adapters
            or layer.merged_adapters
            or (kwargs and _names_or_offsets(kwargs))
        ):
            return self._original(x, *args, **kwargs)
        mixed, present = session.mixed, layer._modules["lora_A"]._modules
        if mixed is None and session.has_mixed:
            session.check_recompute()
        adapters = []
        for name in layer.active_adapters if mixed is None else session.ids:
            if name in present:
                adapters.append(self._adapter(name))
        if mixed is None and not self._trains(x, adapters):
            return self._original(x, *args, **kwargs)
        reason = self._reason(x, adapters)
        if reason is not None:
            _warn(session, reason)
            if mixed is not None:
                kwargs["adapter_names"] = list(mixed.names)
            return self._original(x, *args, **kwargs)
        kwargs.pop("alora_offsets", None)
        if mixed is None and len(adapters) == 1 and not args and not kwargs:
            y = self._in_one_node(x, adapters[0])
            if y is not None:
                return y
        y = layer._modules["base_layer"](x, *args, **kwargs)
        if not adapters:
            return y
        if mixed is not None:
            return self._add_mixed(x, y, mixed, adapters)
        return self._add_active(x, y, adapters)

    def _adapter(self, name: str) -> _Adapter:
        # Modules and weights are read from the dictionaries that hold them: a module's own look-up
        # takes several times as long, and every layer makes a dozen of them.
        kinds = self._layer._modules
        a, b = kinds["lora_A"]._modules[name], kinds["lora_B"]._modules[name]
        modules = (a, b, kinds["lora_dropout"]._modules[name])
        weights = a._parameters.get("weight"), b._parameters.get("weight")
        return _Adapter(name, *weights, modules)

    def _trains(self, x: Tensor, adapters: list[_Adapter]) -> bool:
        if self._layer.training:
            return True
        if not torch.is_grad_enabled():
            return False
        weights = [weight for adapter in adapters for weight in (adapter.a, adapter.b)]
        return x.requires_grad or any(w is None or w.requires_grad for w in weights)

    def _reason(self, x: Tensor, adapters: list[_Adapter]) -> str | None:
        """Why PEFT has to do this call; None if Mortar can."""
        if x.dtype not in DTYPES:
            return f"activations of {x.dtype}"
        if is_transformed() or forward_ad._current_level >= 0:
            return "transforms of torch.func and forward-mode AD"
        variants, scaling = self._layer.lora_variant, self._layer.scaling
        for name, a, b, modules in adapters:
            if name in variants:
                return type(variants[name]).__name__
            if isinstance(scaling[name], Tensor):  # of PEFT's hot-swapping, changed in place
                return "scales that are tensors"
            if type(modules[2]) not in _DROPOUTS:
                return f"dropout of {type(modules[2]).__name__}"
            for module in modules:
                if has_hooks(module):
                    return HOOKS
            for linear in modules[:2]:
                reason = why_not_plain(linear)
                if reason is not None:
                    return reason
            for weight in (a, b):
                if type(weight) not in _TENSORS:
                    return f"weights of {type(weight).__name__}"
                if weight.dtype not in DTYPES:
                    return f"adapters of {weight.dtype}"
        return None

    def _in_one_node(self, x: Tensor, adapter: _Adapter) -> Tensor | None:
        """The layer's output where its base is a plain, frozen linear layer; None elsewhere."""
        base = self._layer._modules["base_layer"]
        if not _is_its_product(base):
            return None
        weight, bias = base._parameters.get("weight"), base._parameters.get("bias")
        if not _is_frozen(weight) or (bias is not None and not _is_frozen(bias)):
            return None
        if not takes(x, weight, adapter.a, adapter.b):
            return None
        return adapted_linear(
            x, weight, bias, adapter.a, adapter.b, self._layer.scaling[adapter.name],
            dropout=adapter.probability(),
        )  # fmt: skip

    def _add_active(self, x: Tensor, y: Tensor, adapters: list[_Adapter]) -> Tensor:
        """y plus the deltas of all active adapters, in one rounding if there is one adapter, and
        otherwise summed in the wider of the dtypes, as PEFT sums them."""
        scaling, dtype = self._layer.scaling, y.dtype
        for adapter in adapters:
            if len(adapters) > 1:
                y = y.to(torch.promote_types(y.dtype, adapter.a.dtype))
            y = lora.linear(
                x, adapter.a, adapter.b, scaling[adapter.name], base=y,
                out=y if self._is_free(y) else None, dropout=adapter.probability(),
            )  # fmt: skip
        return y if y.dtype is dtype else y.to(dtype)

    def _add_mixed(self, x: Tensor, y: Tensor, batch: Batch, adapters: list[_Adapter]) -> Tensor:
        """y plus every sample's own adapter; one call for all adapters of one dtype."""
        scaling, ids = self._layer.scaling, self._session.ids
        if len(x) != batch.size:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{batch.size} and {len(x)} respectively."
            )
        num_tokens = x.numel() // x.shape[-1]
        if not num_tokens:
            return y
        dtypes: dict[torch.dtype, dict[int, _Adapter]] = {}
        for adapter in adapters:
            dtypes.setdefault(adapter.a.dtype, {})[ids[adapter.name]] = adapter
        for there in dtypes.values():
            slots = [there.get(i) for i in range(len(ids))]
            pairs = [slot and (slot.a, slot.b) for slot in slots]
            scales = [1.0 if slot is None else scaling[slot.name] for slot in slots]
            p = [0.0 if slot is None else slot.probability() for slot in slots]
            plan = batch.plan(num_tokens, x.device)
            y = lora.mixed_linear(x, pairs, plan, scales, base=y, dropout=p)
        return y

    def _is_free(self, y: Tensor) -> bool:
        """Whether nobody else holds the output of the base layer, so that it may change in place:
        a plain linear layer's, whose backward does not need it."""
        base = self._layer._modules["base_layer"]
        return (
            not torch.compiler.is_compiling()
            and _is_its_product(base)
            and not y._is_view()
            and y.is_contiguous()
        )


def why_not_plain(linear: nn.Module) -> str | None:
    """Why a module of an adapter is more than a product with its weight; None if it is not."""
    if type(linear) is not nn.Linear:
        return f"adapters of {type(linear).__name__}"
    if linear._parameters["bias"] is not None:
        return "LoRA biases"
    if linear._parameters.get("weight") is None:
        return "adapters whose weight is no parameter"
    return None


def _names_or_offsets(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("adapter_names") is not None or kwargs.get("alora_offsets") is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its class's forward."""
    there = module.__dict__
    return bool(
        there["_forward_hooks"]
        or there["_forward_pre_hooks"]
        or there["_backward_hooks"]
        or there["_backward_pre_hooks"]
        or ("forward" in there and has_own_forward(module))
    )


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance has another forward than its class. (Who takes back a patch may leave
    the class's own behind.)"""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _is_its_product(base: nn.Module) -> bool:
    """Whether a call of the base layer is its product alone, and nobody else sees what it gives."""
    return type(base) is nn.Linear and not has_hooks(base) and not has_global_hooks()


def _is_frozen(weight: Tensor | None) -> bool:
    return type(weight) in _TENSORS and not weight.requires_grad


def _warn(session: Session, reason: str) -> None:
    if reason not in session.warned:
        session.warned.add(reason)
        warnings.warn(f"accelerate: layers left to PEFT: {reason}", stacklevel=4)


@contextmanager
def training_mixed(session: Session, model: nn.Module, batch: Batch) -> Iterator[None]:
    """Names the samples of every layer within, and of what gradient checkpointing runs again in the
    backward, when the forward is long over."""
    patched = [
        (module, module._gradient_checkpointing_func)
        for module in model.modules()
        if "_gradient_checkpointing_func" in vars(module)
    ]
    for module, checkpoint in patched:
        module._gradient_checkpointing_func = functools.partial(
            _checkpoint, session, batch, checkpoint
        )
    previous, session.mixed = session.mixed, batch
    try:
        yield
    finally:
        session.mixed = previous
        for module, checkpoint in patched:
            module._gradient_checkpointing_func = checkpoint


def _checkpoint(
    session: Session, batch: Batch, checkpoint: Callable, function: Callable, *args, **kwargs
) -> Any:
    def named(*args, **kwargs):
        previous, session.mixed = session.mixed, batch
        try:
            return function(*args, **kwargs)
        finally:
            session.mixed = previous

    return checkpoint(named, *args, **kwargs)
