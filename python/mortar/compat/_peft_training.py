# SPDX-License-Identifier: Apache-2.0
"""The forward of a PEFT layer that trains: its base layer, then ``mortar.lora.linear``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import lora
from .._lora_table import DTYPES

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from ._serving import Batch, Session

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TrainedForward:
    """In place of PEFT's forward where a gradient is wanted or the layer is in training mode.

    Reads the layer anew in every call: adapters may have been switched, rescaled or replaced. What
    it cannot do, PEFT's forward does.
    """

    def __init__(self, session: Session, layer: LoraLayer, original: Callable) -> None:
        self._session = session
        self._layer = layer
        self._original = original

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        session, layer = self._session, self._layer
        mixed = session.mixed
        if (
            session.batch is not None
            or kwargs.get("adapter_names") is not None
            or kwargs.get("alora_offsets") is not None
            or layer._disable_adapters
            or layer.merged_adapters
        ):
            return self._original(x, *args, **kwargs)
        if mixed is None:
            session.check_recompute()
            names = [name for name in layer.active_adapters if name in layer.lora_A]
        else:
            names = [name for name in session.ids if name in layer.lora_A]
        if mixed is None and not self._trains(x, names):
            return self._original(x, *args, **kwargs)
        reason = self._reason(x, names)
        if reason is not None:
            _warn(session, reason)
            if mixed is not None:
                kwargs["adapter_names"] = list(mixed.names)
            return self._original(x, *args, **kwargs)
        kwargs.pop("alora_offsets", None)
        y = layer.base_layer(x, *args, **kwargs)
        if not names:
            return y
        if mixed is not None:
            return self._add_mixed(x, y, mixed)
        return self._add_active(x, y, names)

    def _trains(self, x: Tensor, names: list[str]) -> bool:
        layer = self._layer
        if layer.training:
            return True
        if not torch.is_grad_enabled():
            return False
        factors = (m[name].weight for name in names for m in (layer.lora_A, layer.lora_B))
        return x.requires_grad or any(weight.requires_grad for weight in factors)

    def _modules(self, name: str) -> tuple[nn.Module, nn.Module, nn.Module]:
        """A, B and the dropout of an adapter."""
        layer = self._layer
        kinds = (layer.lora_A, layer.lora_B, layer.lora_dropout)
        return tuple([kind._modules[name] for kind in kinds])

    def _reason(self, x: Tensor, names: list[str]) -> str | None:
        """Why PEFT has to do this call; None if Mortar can."""
        layer = self._layer
        if x.dtype not in DTYPES:
            return f"activations of {x.dtype}"
        variants = layer.lora_variant
        for name in names:
            if name in variants:
                return type(variants[name]).__name__
            a, b, dropout = modules = self._modules(name)
            if type(dropout) not in (nn.Dropout, nn.Identity):
                return f"dropout of {type(dropout).__name__}"
            for module in modules:
                own = vars(module)  # several times as fast as a module's own look-up
                if any(own[hooks] for hooks in _HOOKS):
                    return "hooks on the modules of an adapter"
            for weight in (a._parameters["weight"], b._parameters["weight"]):
                if type(weight) not in (nn.Parameter, Tensor):
                    return f"weights of {type(weight).__name__}"
                if weight.dtype not in DTYPES:
                    return f"adapters of {weight.dtype}"
        return None

    def _add_active(self, x: Tensor, y: Tensor, names: list[str]) -> Tensor:
        """y plus the deltas of all active adapters, in one rounding if there is one adapter, and
        otherwise summed in the wider of the dtypes, as PEFT sums them."""
        layer, dtype = self._layer, y.dtype
        for name in names:
            a, b = (module._parameters["weight"] for module in self._modules(name)[:2])
            if len(names) > 1:
                y = y.to(torch.promote_types(y.dtype, a.dtype))
            y = lora.linear(
                x, a, b, layer.scaling[name], base=y, out=y if self._is_free(y) else None,
                dropout=_probability(layer, name),
            )  # fmt: skip
        return y.to(dtype)

    def _add_mixed(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """y plus every sample's own adapter; one call for all adapters of one dtype."""
        layer, session = self._layer, self._session
        if len(x) != batch.size:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{batch.size} and {len(x)} respectively."
            )
        num_tokens = x.numel() // x.shape[-1]
        if not num_tokens:
            return y
        dtypes: dict[torch.dtype, dict] = {}
        for name, number in session.ids.items():
            if name in layer.lora_A:
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                dtypes.setdefault(a.dtype, {})[number] = (name, (a, b))
        count = len(session.ids)
        for there in dtypes.values():
            pairs = [there[i][1] if i in there else None for i in range(count)]
            names = [there[i][0] if i in there else None for i in range(count)]
            scales = [layer.scaling.get(name, 1.0) for name in names]
            p = [0.0 if name is None else _probability(layer, name) for name in names]
            plan = batch.plan(num_tokens, x.device)
            y = lora.mixed_linear(x, pairs, plan, scales, base=y, dropout=p)
        return y

    def _is_free(self, y: Tensor) -> bool:
        """Whether nobody else holds the output of the base layer, so that it may change in place:
        a plain linear layer's, whose backward does not need it."""
        base = self._layer.base_layer
        return (
            not torch.compiler.is_compiling()
            and type(base) is nn.Linear
            and not base._forward_hooks
            and not y._is_view()
            and y.is_contiguous()
            and not (y.is_leaf and y.requires_grad)
        )


def _probability(layer: LoraLayer, name: str) -> float:
    dropout = layer.lora_dropout._modules[name]
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


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
