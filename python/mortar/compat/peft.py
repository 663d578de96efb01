# SPDX-License-Identifier: Apache-2.0
"""Trains PEFT models, and serves mixed batches of their LoRA adapters, through Mortar.

    model = get_peft_model(base, LoraConfig(...))
    mortar.compat.peft.accelerate(model)                 # and train as before

    model = PeftModel.from_pretrained(base, "adapters/sql", adapter_name="sql")
    model.load_adapter("adapters/chat", adapter_name="chat")
    mortar.compat.peft.accelerate(model.eval())
    with torch.inference_mode():
        model(input_ids, adapter_names=["sql", "chat", "__base__"])      # PEFT's own API
        model.generate(input_ids=input_ids, adapter_names=["sql", "chat", None])
    mortar.compat.peft.restore(model)

While a layer trains (in training mode, or with a gradient wanted) its base layer runs, and then
one ``mortar.lora.linear`` adds the delta of the active adapter: dropout, both products, scale and
sum in one pass, x kept as it is, h beside it and nothing else. Several active adapters are summed.
A plain frozen ``nn.Linear`` and its adapter are one node of autograd (docs/training.md).
Losses are PEFT's but for rounding, the output has PEFT's dtype; dropout draws other numbers from
the same generator.

PEFT runs a mixed batch as a loop: in every layer, for every adapter, it gathers samples,
multiplies twice and scatters. Here the names become ids once per forward, the tokens are grouped
by adapter once for all layers, and every layer makes one ``mortar.lora.apply``.

``attach`` does the same for a plain model of transformers and the folders of a
``mortar.AdapterStore``, without PEFT::

    mortar.compat.peft.attach(model, store)
    model.generate(input_ids, adapter_names=["sql", None])

Samples, not tokens, are named: ``adapter_names`` has one entry per row of the batch, "__base__" or
None for the base model; ``generate`` repeats each name for its beams. Adapters may differ in rank,
scale, dtype (float32 adapters under a bfloat16 model) and target modules. Results differ from
PEFT's in rounding only: the delta is summed in float32 and rounded once, where it is added.

Both set ``forward`` on module instances and touch neither the module tree nor a parameter, so
``state_dict``, ``save_pretrained`` and the rest of PEFT go on working. A copy or a pickle of a
model in service (``copy.deepcopy``) is the plain model, not in service. As with PEFT's own mixed
batch, one model must not run in several threads at once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import lora
from ..adapter_store import AdapterStore
from ._serving import BASE, KEY, ServedForward, Session

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["accelerate", "attach", "restore"]


def accelerate(model: PeftModel, train_mixed: bool = False) -> PeftModel:
    """Lets a PEFT model train, and run its mixed batches (``adapter_names=``), through Mortar.

    Linear layers with plain LoRA are taken over, whatever their ranks, scales and dtypes, over
    quantised base layers and Conv1D too. Other layers (embeddings, convolutions, DoRA and other
    variants, LoRA biases, float64) are left to PEFT, with one warning that lists them. Left to
    PEFT as well are inference without names, and merged or disabled adapters. PEFT's errors come as
    before.

    Adapters may be loaded, deleted, switched, rescaled, moved or changed in place afterwards.

    Args:
        model: a PeftModel with LoRA adapters.
        train_mixed: allows ``model(..., adapter_names=[...])`` in training mode, where PEFT raises
            ValueError (and still does without the flag). Every sample trains its own adapter, with
            its own dropout; gradients equal those of separate steps. Adapters whose parameters
            require no gradient stay as they are: PEFT freezes those that are not active, see
            ``model.base_model.set_adapter([...])``. Gradient checkpointing has to be that of
            ``model.gradient_checkpointing_enable()``.

    Returns:
        model.

    Raises:
        TypeError: not a PeftModel with LoRA adapters.
        ValueError: in service already, or without a layer that Mortar can serve (and why).
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraModel

    from ._peft_session import PeftSession

    lora_model = model.base_model if isinstance(model, PeftModel) else None
    if not isinstance(lora_model, LoraModel):
        raise TypeError(
            "accelerate: model must be a PeftModel with LoRA adapters (attach serves a plain "
            f"model), got {type(model).__name__}"
        )
    if KEY in vars(lora_model):
        raise ValueError(
            "accelerate: model must not be in service already, restore(model) it first"
        )
    session = PeftSession(lora_model, train_mixed)
    if not session.num_served:
        session.undo()
        raise ValueError(
            f"accelerate: model must have linear layers with plain LoRA, got {session.left}"
        )
    if session.left:
        warnings.warn(f"accelerate: layers left to PEFT: {session.left}", stacklevel=2)
    return model


def attach(
    model: torch.nn.Module, store: AdapterStore, names: Sequence[str] | None = None
) -> torch.nn.Module:
    """Lets a plain model serve adapters from an AdapterStore.

    Adds the keyword ``adapter_names`` to ``model.forward`` and, where it has one, to
    ``model.generate``: one name or None per row of the batch. Without it the model is as before.

    Args:
        model: a model of transformers (or any module whose inputs begin with the batch), on its
            device, in eval mode when it serves. A target may be any module that maps the last
            dimension linearly: nn.Linear, Conv1D, a quantised linear.
        store: with the adapters open. Their tensors go to the device of each target; on the CPU
            they are used where they lie in the file.
        names: the adapters to serve. None: all that are open.

    Returns:
        model.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the model is in service already, or an adapter targets a module that the model
            lacks or that has other sizes. The model is then as it was.

    While gradients are enabled and wanted, a mixed batch is a RuntimeError: run it under
    ``torch.inference_mode()`` or ``torch.no_grad()``.
    """
    _check_module("attach", model)
    if not isinstance(store, AdapterStore):
        raise TypeError(f"attach: store must be an AdapterStore, got {type(store).__name__}")
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise TypeError(f"attach: names must be a list of str, got {type(names).__name__}")
    if KEY in vars(model):
        raise ValueError("attach: model must not be in service already, restore(model) it first")
    names = list(store.names() if names is None else names)
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"attach: names[{i}] must be a str, got {type(name).__name__}")
        if name == BASE:
            raise ValueError(f"attach: names must not hold {BASE!r}, which is the base model")
    if not names:
        raise ValueError("attach: names must hold at least one adapter, got none")
    modules = dict(model.named_modules())
    targets = {m.name: name for name in reversed(names) for m in store.get(name).modules}
    weights = {}
    for target, adapter in sorted(targets.items()):
        if target not in modules:
            raise ValueError(
                f"attach: model must have the module {target} that adapter {adapter} targets, "
                f"got {type(model).__name__} without it"
            )
        weights[target] = _stored_weights(store, names, target, modules[target])

    session = Session(names)
    for target, table in weights.items():
        module = modules[target]
        session.patch(
            module, "forward", ServedForward(session, module.forward, module.forward, table)
        )
    for method in ("forward", "generate"):
        if hasattr(model, method):
            session.patch(model, method, _naming(session, model, getattr(model, method)))
    session.patch(model, KEY, session)
    return model


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes ``accelerate`` or ``attach``: the model behaves as before, to the last bit.

    Raises:
        TypeError: not a module.
        ValueError: the model is not in service.
    """
    _check_module("restore", model)
    for owner in (model, getattr(model, "base_model", None)):
        session = vars(owner).get(KEY) if owner is not None else None
        if session is not None:
            session.undo()
            return model
    raise ValueError(
        "restore: model must be in service, got one without a call of accelerate or attach"
    )


def _check_module(op: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _stored_weights(
    store: AdapterStore, names: Sequence[str], target: str, module: torch.nn.Module
) -> lora.Weights:
    found = [m for m in (store.get(name).find(target) for name in names) if m is not None]
    sizes = _sizes(module)
    for entry in found:
        got = (entry.a.shape[1], entry.b.shape[0])
        if sizes not in (None, got):
            raise ValueError(
                f"attach: adapters of {target} must map {sizes[0]} to {sizes[1]} features, "
                f"got one that maps {got[0]} to {got[1]}"
            )
    # Adapters that were saved in different dtypes meet in the widest.
    dtype = functools.reduce(torch.promote_types, (entry.a.dtype for entry in found))
    device = next((t.device for t in (*module.parameters(), *module.buffers())), "cpu")
    return lora.Weights.from_adapters(*store.slices(target, names, device=device, dtype=dtype))


def _sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """(K, N) of a linear layer, None if it does not say."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    if hasattr(module, "nx"):  # Conv1D of transformers
        return module.nx, module.nf
    return None


def _naming(session: Session, model: torch.nn.Module, method: Callable) -> Callable:
    """`method` with the keyword adapter_names. Its signature stays: generate inspects forward's."""
    is_generate = method.__name__ == "generate"

    @functools.wraps(method)
    def named(*args: Any, adapter_names: Sequence[str | None] | None = None, **kwargs: Any) -> Any:
        if adapter_names is None:
            return method(*args, **kwargs)
        names = session.checked(adapter_names, model.training)
        if is_generate:
            names = _repeated(names, _sequences_per_sample(model, kwargs), model)
        with session.serving(names):
            return method(*args, **kwargs)

    return named


def _sequences_per_sample(model: torch.nn.Module, kwargs: dict[str, Any]) -> int:
    """How often generate repeats each row: once per beam or returned sequence."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    settings = (
        kwargs.get(setting, getattr(config, setting, None))
        for setting in ("num_beams", "num_return_sequences")
    )
    return max(setting or 1 for setting in settings)


def _repeated(names: tuple[str, ...], times: int, model: torch.nn.Module) -> tuple[str, ...]:
    # The encoder sees each sample once, the decoder once per beam.
    if times > 1 and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            "attach: generate of an encoder-decoder model must have one sequence per sample, "
            f"got {times}"
        )
    return tuple(name for name in names for _ in range(times))
