# SPDX-License-Identifier: Apache-2.0
"""The ops behind ``mortar.compat.vllm``, and eager calls, which go straight to the library."""

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._ffi import WRITTEN, lib, torch_function
from .._library import define, in_words, increment_version, is_eager, named, negation, shortcut
from .._lora_memory import ANY_STREAM, Memory
from .._lora_ops import guard_autograd

_shrink, _expand, _apply = lib.lora_shrink, lib.lora_expand, lib.lora_apply
# These return 0 for what the others take or refuse.
_shrink_now, _expand_now = torch_function("torch_lora_shrink"), torch_function("torch_lora_expand")
_apply_now = torch_function("torch_lora_apply")
_is_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor
_is_neg = _Tensor.is_neg
_requires_grad = operator.attrgetter("requires_grad")
_BF16 = torch.bfloat16


# What the library calls the arguments.
_METADATA_NAMES = {
    "sorted_tokens": "token_indices_sorted_by_lora_ids",
    "ids": "lora_ids",
    "counts": "num_tokens_per_lora",
    "starts": "lora_token_start_loc",
    "zero_rows": "token_lora_mapping",
    "num_groups": "num_active_loras",
}
# What the ops call them, in order.
_METADATA = (
    "token_lora_mapping",
    "token_indices_sorted_by_lora_ids",
    "num_tokens_per_lora",
    "lora_token_start_loc",
    "lora_ids",
    "no_lora_flag_cpu",
)
_SUBJECT = re.compile(r"^(?:lora_\w+): (\w+)")
_OTHERS = re.compile(r"\b[ab](?=\[\d\])|(?<= as )\w+(?= has\b)|(?<= and )b(?= must\b)")


class _Op(NamedTuple):
    """One of the functions."""

    name: str
    weights: tuple[str, ...]
    library: dict[str, str]
    """What the library calls the other arguments."""
    by_int: Callable
    by_tensor: Callable
    """The ops, for either kind of ``num_active_loras``."""

    def lists(self, weights) -> tuple:
        """The lists of weights, in the order of their names."""
        return weights if len(self.weights) > 1 else (weights,)

    def in_callers_words(self, error: Exception, first: tuple, metadata: tuple) -> Exception:
        """The error of a call that failed, by the names that its caller knows."""
        names = ("inputs", *self.weights, "output_tensor", *_METADATA, "num_active_loras")
        for name, value in zip(names, (*first, *metadata), strict=True):
            many = name in self.weights and isinstance(value, list | tuple)
            number = name == "num_active_loras" and isinstance(value, int)
            for i, t in enumerate(value if many else [value]):
                if not isinstance(t, _Tensor) and not number:
                    place = f"{name}[{i}]" if many else name
                    got = "None" if t is None else type(t).__name__
                    return TypeError(f"{self.name}: {place} must be a tensor, got {got}")
        if isinstance(error, AttributeError | RuntimeError):
            given = zip(names, (*first, *metadata), strict=True)
            return in_words(self.name, [t for pair in given for t in named(*pair)], error)
        known = self.library | _METADATA_NAMES
        text = _SUBJECT.sub(lambda m: f"{self.name}: {known.get(m[1], m[1])}", str(error))
        return type(error)(_OTHERS.sub(lambda m: known.get(m[0], m[0]), text))


def _groups(metadata: tuple) -> tuple[tuple, tuple]:
    """What the library takes for a plan: its tensors, and the number of groups where that is one,
    with no flag, which has been looked at."""
    _, sorted_tokens, counts, starts, ids, _, active = metadata
    if isinstance(active, _Tensor):
        return (None, sorted_tokens, ids, counts, starts, active), (None,)
    return (None, sorted_tokens, ids, counts, starts, None), (active, None)


def _is_set(flag) -> bool:
    """Whether a flag that may be anything says that there is nothing to do."""
    return isinstance(flag, _Tensor) and flag.numel() == 1 and bool(flag.item())


def _is_strided(inputs) -> bool:
    """Whether columns of it are apart, which the library does not read."""
    strided = isinstance(inputs, _Tensor) and inputs.layout is torch.strided
    return strided and inputs.ndim == 2 and inputs.stride(1) != 1 and not inputs.is_contiguous()


def _shrink_impl(inputs, lora_a_weights, output_tensor, *rest):
    *metadata, scaling = rest
    if metadata[5].item():
        return
    if _is_grad_enabled():
        guard_autograd("lora_shrink", (inputs, output_tensor, *lora_a_weights))
    if _is_strided(inputs):
        inputs = inputs.contiguous()
    groups, active = _groups(metadata)
    weights = (None, None, None, len(lora_a_weights), *lora_a_weights)
    _shrink(inputs, output_tensor, None, scaling, metadata[0], *groups, *active, *weights)
    increment_version((output_tensor,))


def _expand_impl(inputs, lora_b_weights, output_tensor, *rest):
    metadata, (offset_start, add_inputs) = rest[:7], (*rest[7:], *(0, False)[len(rest) - 7 :])
    if metadata[5].item():
        return
    if _is_grad_enabled():
        guard_autograd("lora_expand", (inputs, output_tensor, *lora_b_weights))
    groups, active = _groups(metadata)
    weights = (None, None, None, 0, *lora_b_weights)
    _expand(inputs, output_tensor, offset_start, add_inputs, *groups, *active, *weights)
    increment_version((output_tensor,))


def _linear_impl(inputs, lora_a_weights, lora_b_weights, output_tensor, *rest):
    *metadata, offset_start, scaling, add_inputs = rest
    if metadata[5].item():
        return
    if _is_grad_enabled():
        tensors = (inputs, output_tensor, *lora_a_weights, *lora_b_weights)
        guard_autograd("lora_linear", tensors)
    if _is_strided(inputs):
        inputs = inputs.contiguous()
    groups, active = _groups(metadata)
    weights = (None, None, None, len(lora_a_weights), *lora_a_weights, *lora_b_weights)
    _apply(
        inputs, output_tensor, None, offset_start, scaling, add_inputs, *groups, *active, *weights
    )
    increment_version((output_tensor,))


def _defined(name: str, last: str, impl: Callable, *weights: str, **library: str) -> _Op:
    """The op with ``int num_active_loras`` and its overload for a tensor, short-cut."""
    lists = "".join(f"Tensor[] {argument}, " for argument in weights)
    first = f"Tensor inputs, {lists}Tensor(a!) output_tensor"
    metadata = ", ".join(f"Tensor {argument}" for argument in _METADATA)
    calls = []
    for overload, kind in (("", "int"), (".tensor", "Tensor")):
        arguments = f"{first}, {metadata}, {kind} num_active_loras, {last}"
        calls.append(shortcut(define(f"vllm_{name}{overload}({arguments}) -> ()", impl), impl))
    return _Op(name, weights, library, *calls)


SHRINK = _defined(
    "lora_shrink", "float scaling", _shrink_impl, "lora_a_weights",
    x="inputs", a="lora_a_weights", h="output_tensor", scale="scaling",
)  # fmt: skip
EXPAND = _defined(
    "lora_expand", "int offset_start=0, bool add_inputs=False", _expand_impl, "lora_b_weights",
    h="inputs", b="lora_b_weights", y="output_tensor", offset="offset_start",
)  # fmt: skip
LINEAR = _defined(
    "lora_linear", "int offset_start, float scaling, bool add_inputs", _linear_impl,
    "lora_a_weights", "lora_b_weights",
    x="inputs", a="lora_a_weights", b="lora_b_weights", y="output_tensor", scale="scaling",
    offset="offset_start",
)  # fmt: skip


def _new_memory(lora_ids: torch.Tensor) -> Memory:
    """Workspaces are the metadata's, as they are a plan's: its tensors are the same in every layer
    of a step. They hang on the one that vLLM does not slice anew for each call."""
    memory = lora_ids._mortar_memory = Memory()
    return memory


def _run_now(op: _Op, inputs, weights, output, metadata: tuple, last: tuple) -> bool:
    """Whether an eager call is done. Tuples are written out: one more costs a tenth of all this.
    The library looks at the flag: item() costs a twentieth."""
    if output.is_neg():
        raise negation(op.name, "output_tensor")
    num_a = len(weights)
    if op is LINEAR:
        num_a = len(weights[0])
        weights = (*weights[0], *weights[1])
    # A negative-bit view or a tensor with a gradient: the dispatcher resolves it, or refuses it. No
    # bfloat16 is such a view, for lack of complex numbers of it, and weights are of one dtype.
    if len(weights) and weights[0].dtype is not _BF16 and any(map(_is_neg, weights)):
        return False
    if _is_grad_enabled() and any(map(_requires_grad, (inputs, output, *weights))):
        return False
    mapping, sorted_tokens, counts, starts, ids, no_lora, active = metadata
    if type(active) is int:
        last = (*last, active)
        active = None
    if op is EXPAND:
        tensors = (inputs, output, None, sorted_tokens, ids, counts, starts, active,
                   no_lora, None, None, None, *weights)  # fmt: skip
        done = _expand_now(id(tensors), *last, 0)
    else:
        kept = getattr(ids, "_mortar_memory", None) or _new_memory(ids)
        memory, stream = kept.get()
        while True:
            if op is SHRINK:
                tensors = (inputs, output, memory, mapping, None, sorted_tokens, ids, counts,
                           starts, active, no_lora, None, None, None, *weights)  # fmt: skip
                done = _shrink_now(id(tensors), stream, *last, num_a)
            else:
                tensors = (inputs, output, memory, None, sorted_tokens, ids, counts, starts,
                           active, no_lora, None, None, None, *weights)  # fmt: skip
                done = _apply_now(id(tensors), stream, *last, num_a)
            if done <= WRITTEN:
                break
            memory, stream = kept.more(inputs, done), ANY_STREAM
    if done == WRITTEN:
        increment_version((output,))
    return bool(done)


def run(op: _Op, inputs, weights, output, metadata: tuple, last: tuple) -> None:
    """weights: the list of the op, or both of lora_linear."""
    try:
        if is_eager(inputs) and _run_now(op, inputs, weights, output, metadata, last):
            return
        first = (inputs, *op.lists(weights), output)
        call = op.by_tensor if isinstance(metadata[6], _Tensor) else op.by_int
        call(*first, *metadata, *last)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if _is_set(metadata[5]):
            return
        if op is not EXPAND and _is_strided(inputs):
            run(op, inputs.contiguous(), weights, output, metadata, last)
            return
        first = (inputs, *op.lists(weights), output)
        raise op.in_callers_words(error, first, metadata) from None
