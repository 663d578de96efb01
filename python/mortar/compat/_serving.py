# SPDX-License-Identifier: Apache-2.0
"""What ``mortar.compat.peft`` puts on a model: a session, the batch in progress, layer forwards."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import lora

KEY = "_mortar_session"  # of the attribute by which a model in service holds its session
BASE = "__base__"  # PEFT's name for "no adapter"
_ABSENT = object()


class Batch:
    """The adapters of one batch's samples, and the plans made of them."""

    def __init__(
        self, names: tuple[str, ...], ids: Sequence[int], num_adapters: int, stream: Any
    ) -> None:
        self.names = names
        self.size = len(names)
        self.stream = stream
        self._ids = torch.tensor(ids, dtype=torch.int32, device="cpu")
        self._num_adapters = num_adapters
        self._plans: dict[tuple[int, torch.device], lora.Plan] = {}

    def plan(self, num_tokens: int, device: torch.device) -> lora.Plan:
        """The plan of num_tokens tokens, an equal share per sample; made by the first layer.

        One forward may need several: encoders and decoders differ in their tokens per sample.
        """
        plan = self._plans.get((num_tokens, device))
        if plan is None:
            ids = self._ids.repeat_interleave(num_tokens // self.size).to(device)
            plan = lora.plan(ids, self._num_adapters)
            self._plans[num_tokens, device] = plan
        return plan


class Session:
    """What one model serves: the adapters' ids, the batch in progress, and how to undo it all."""

    batch: Batch | None = None
    """None while no mixed batch runs: layers then do what they did before."""
    mixed: Batch | None = None
    """The samples' adapters while a mixed batch trains."""
    has_mixed = False
    """Whether the last forward trained a mixed batch."""

    def __init__(self, names: Sequence[str]) -> None:
        self.ids = {name: number for number, name in enumerate(names)}
        self._last: Batch | None = None
        self.warned: set[str] = set()
        # By owner: what its attributes were before.
        self._patched: dict[int, tuple[Any, dict[str, Any]]] = {}

    def patch(self, owner: Any, attribute: str, value: Any) -> None:
        """Sets an attribute of an instance until ``undo``. Copies and pickles of the instance are
        without it: they go through ``__reduce_ex__``, which is set as well, and replicas of
        nn.DataParallel, whose weights are others, through ``_replicate_for_data_parallel``."""
        _, before = self._patched.setdefault(id(owner), (owner, {}))
        reduce = functools.partial(_reduce_unpatched, owner, before)
        replicate = functools.partial(self._replicate_unpatched, owner, before)
        for name, new in (
            ("__reduce_ex__", reduce),
            ("_replicate_for_data_parallel", replicate),
            (attribute, value),
        ):
            before.setdefault(name, vars(owner).get(name, _ABSENT))
            vars(owner)[name] = new

    def _replicate_unpatched(self, owner: Any, before: dict[str, Any]) -> Any:
        if "replicas" not in self.warned:
            self.warned.add("replicas")
            warnings.warn(
                "mortar.compat.peft: replicas of nn.DataParallel run without Mortar, those of "
                "DistributedDataParallel with it",
                stacklevel=3,
            )
        replica = type(owner)._replicate_for_data_parallel(owner)
        for name, old in before.items():
            if old is _ABSENT:
                vars(replica).pop(name, None)
            else:
                vars(replica)[name] = old
        return replica

    def undo(self) -> None:
        for owner, before in self._patched.values():
            for attribute, previous in before.items():
                if previous is _ABSENT:
                    vars(owner).pop(attribute, None)
                else:
                    vars(owner)[attribute] = previous
        self._patched.clear()

    def checked(self, names: Any, training: bool) -> tuple[str, ...]:
        """The names of a batch, "__base__" for None; raises what PEFT raises."""
        if training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        if not isinstance(names, list | tuple):
            raise TypeError(f"Got adapter names of type {type(names)}, expected a list of str.")
        named = tuple(BASE if name is None else name for name in names)
        unknown = set(named) - self.ids.keys() - {BASE}
        if unknown:
            listed = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"Trying to infer with non-existing adapter(s): {listed}")
        return named

    def check_recompute(self) -> None:
        """A layer that runs in a backward runs again: its names must be known."""
        if self.has_mixed and torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(
                "accelerate: a mixed batch that trains must be checkpointed by the model's "
                "gradient_checkpointing_enable(), got another checkpoint around its layers"
            )

    def batch_of(self, names: tuple[str, ...]) -> Batch:
        """Outlives the forward: the next one with these names, on the same stream, finds its plan
        made."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        batch = self._last
        if batch is None or batch.names != names or batch.stream != stream:
            ids = [-1 if name == BASE else self.ids[name] for name in names]
            batch = self._last = Batch(names, ids, len(self.ids), stream)
        return batch

    @contextmanager
    def serving(self, names: tuple[str, ...]) -> Iterator[None]:
        """Names the samples of every forward within."""
        batch = self.batch_of(names)
        previous, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = previous

    def __reduce__(self) -> tuple:
        # A module whose class copies itself comes here; others leave their session out.
        raise RuntimeError(
            "mortar.compat.peft: this model in service cannot be copied, restore(model) it first"
        )


def _reduce_unpatched(owner: Any, before: dict[str, Any], protocol: int) -> tuple:
    """What copies and pickles of an instance are made from: as if no session had patched it."""
    function, arguments, state, *rest = type(owner).__reduce_ex__(owner, protocol)
    if isinstance(state, dict):
        kept = {name: value for name, value in state.items() if name not in before}
        state = kept | {name: old for name, old in before.items() if old is not _ABSENT}
    return (function, arguments, state, *rest)


class ServedForward:
    """The forward of a target layer: its base layer, then one call for all adapters."""

    def __init__(
        self, session: Session, base: Callable, original: Callable, weights: lora.Weights
    ) -> None:
        self._session = session
        self._base = base
        self._original = original
        self._weights = weights
        self._hidden = weights.hidden
        self._width = weights.widths[0]

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = self._session.batch
        if batch is None:
            return self._original(x, *args, **kwargs)
        if len(x) != batch.size:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{batch.size} and {len(x)} respectively."
            )
        y = self._base(x, *args, **kwargs)
        if not y.is_contiguous():
            y = y.contiguous()
        num_tokens = x.numel() // self._hidden
        if num_tokens:
            lora.apply(
                y.view(num_tokens, self._width),
                x.reshape(num_tokens, self._hidden),
                self._weights,
                batch.plan(num_tokens, x.device),
            )
        return y
