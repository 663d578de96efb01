# SPDX-License-Identifier: Apache-2.0
"""``lora_shrink`` and ``lora_expand`` with the signatures and semantics of vLLM's punica ops.

Both work straight on vLLM's own metadata (``LoRAKernelMeta``), as its layers pass it:

    token_lora_mapping                int32 [M]      each token's adapter, -1 for none
    token_indices_sorted_by_lora_ids  int32 [M]      tokens grouped by adapter
    num_tokens_per_lora               int32 [G]      tokens of each group
    lora_token_start_loc              int32 [>= G]   where each group begins
    lora_ids                          int32 [G]      adapter of each group, -1 for none
    no_lora_flag_cpu                  bool [1], CPU  set: the ops return without any write
    num_active_loras                  int, or int32 [1] on the CPU: groups to look at

G is max_loras + 1. Nothing is sorted again and nothing is read back from the device, so that
captured CUDA graphs replay with other contents of these buffers: entries of the sorted indices
that no group owns may be stale. Weights are [L, r, K] and [L, N_s, r], or [L, 1, ., .]. Inside a
CUDA graph both may read weights and metadata while the kernel before them still runs: no graph may
write these just before the op (vLLM's are written before the replay).

Beyond vLLM's: float32 weights, activations of another dtype than the weights, slices of different
ranks, strided rows, CPU tensors; one rounding of y where vLLM's expand has two; results that do not
depend on the rest of the batch. Wrong arguments raise ValueError or TypeError, by these names,
instead of failing an assertion, and slices of different dtypes are refused instead of being
misread.

The functions are the ops ``torch.ops.mortar.vllm_lora_shrink`` and ``vllm_lora_expand`` (overload
``.tensor`` where ``num_active_loras`` is a tensor), and need no vLLM.
"""

import re

import torch

from .._ffi import lib, torch_function
from .._library import define, is_eager, shortcut
from .._lora_ops import (
    guard_autograd,
    increment_version,
    wants_gradient,
)

__all__ = ["lora_expand", "lora_shrink"]

_shrink, _expand = lib.lora_shrink, lib.lora_expand
# These return 0 for what the other two take or refuse.
_shrink_now, _expand_now = torch_function("torch_lora_shrink"), torch_function("torch_lora_expand")
_is_grad_enabled = torch.is_grad_enabled


# What the library calls the arguments.
_METADATA_NAMES = {
    "sorted_tokens": "token_indices_sorted_by_lora_ids",
    "ids": "lora_ids",
    "counts": "num_tokens_per_lora",
    "starts": "lora_token_start_loc",
    "zero_rows": "token_lora_mapping",
}
_SHRINK_NAMES = {"x": "inputs", "a": "lora_a_weights", "h": "output_tensor", "scale": "scaling"}
_EXPAND_NAMES = {"h": "inputs", "b": "lora_b_weights", "y": "output_tensor"}
_EXPAND_NAMES["offset"] = "offset_start"
_SUBJECT = re.compile(r"^(?:lora_\w+): (\w+)")
_OTHERS = re.compile(r"\b[ab](?=\[\d\])|(?<= as )\w+(?= has\b)")


def _in_callers_words(op: str, names: dict[str, str], error: Exception, **arguments):
    """The error of a call that failed, by the names that its caller knows."""
    for name, value in arguments.items():
        many = name in ("lora_a_weights", "lora_b_weights")
        number = name == "num_active_loras" and isinstance(value, int)
        for i, t in enumerate(value if many and isinstance(value, list | tuple) else [value]):
            if not isinstance(t, torch.Tensor) and not number:
                place = f"{name}[{i}]" if isinstance(value, list | tuple) and many else name
                got = "None" if t is None else type(t).__name__
                return TypeError(f"{op}: {place} must be a tensor, got {got}")
    if isinstance(error, AttributeError | RuntimeError):
        return error
    names = names | _METADATA_NAMES
    text = _SUBJECT.sub(lambda m: f"{op}: {names.get(m[1], m[1])}", str(error))
    return type(error)(_OTHERS.sub(lambda m: names.get(m[0], m[0]), text))


def _number(value: int | torch.Tensor) -> int:
    return value if type(value) is int else value.item()


def _shrink_impl(
    inputs,
    lora_a_weights,
    output_tensor,
    token_lora_mapping,
    token_indices_sorted_by_lora_ids,
    num_tokens_per_lora,
    lora_token_start_loc,
    lora_ids,
    no_lora_flag_cpu,
    num_active_loras,
    scaling,
):
    if no_lora_flag_cpu.item():
        return
    if _is_grad_enabled():
        guard_autograd("lora_shrink", (inputs, output_tensor, *lora_a_weights), output_tensor)
    _shrink(
        inputs,
        output_tensor,
        None,
        scaling,
        token_lora_mapping,
        None,
        token_indices_sorted_by_lora_ids,
        lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        _number(num_active_loras),
        None,
        None,
        None,
        len(lora_a_weights),
        *lora_a_weights,
    )


def _expand_impl(
    inputs,
    lora_b_weights,
    output_tensor,
    token_lora_mapping,
    token_indices_sorted_by_lora_ids,
    num_tokens_per_lora,
    lora_token_start_loc,
    lora_ids,
    no_lora_flag_cpu,
    num_active_loras,
    offset_start=0,
    add_inputs=False,
):
    if no_lora_flag_cpu.item():
        return
    if _is_grad_enabled():
        guard_autograd("lora_expand", (inputs, output_tensor, *lora_b_weights), output_tensor)
    _expand(
        inputs,
        output_tensor,
        offset_start,
        add_inputs,
        None,
        token_indices_sorted_by_lora_ids,
        lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        _number(num_active_loras),
        None,
        None,
        None,
        0,
        *lora_b_weights,
    )


_METADATA = (
    "Tensor token_lora_mapping, Tensor token_indices_sorted_by_lora_ids, "
    "Tensor num_tokens_per_lora, Tensor lora_token_start_loc, Tensor lora_ids, "
    "Tensor no_lora_flag_cpu"
)


def _define_both(name: str, first: str, last: str, impl):
    """The op with ``int num_active_loras`` and its overload for a tensor, short-cut."""
    calls = []
    for overload, kind in (("", "int"), (".tensor", "Tensor")):
        schema = f"{name}{overload}({first}, {_METADATA}, {kind} num_active_loras, {last}) -> ()"
        calls.append(shortcut(define(schema, impl), impl))
    return calls


_call_shrink, _call_shrink_tensor = _define_both(
    "vllm_lora_shrink",
    "Tensor inputs, Tensor[] lora_a_weights, Tensor(a!) output_tensor",
    "float scaling",
    _shrink_impl,
)
_call_expand, _call_expand_tensor = _define_both(
    "vllm_lora_expand",
    "Tensor inputs, Tensor[] lora_b_weights, Tensor(a!) output_tensor",
    "int offset_start=0, bool add_inputs=False",
    _expand_impl,
)


def _run_now(run, tensors, numbers, inputs, weights, output) -> bool:
    """Whether an eager call is done."""
    for t in (output, *weights):
        if t.is_neg():  # the dispatcher resolves it
            return False
    grad = _is_grad_enabled()
    if grad and wants_gradient((inputs, output, *weights)):
        return False
    done = run(id(tensors), *numbers)
    if grad and done:
        increment_version(output)
    return bool(done)


def lora_shrink(
    inputs: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: int | torch.Tensor,
    scaling: float,
) -> None:
    """``output_tensor[s, t] = scaling * (inputs[t] @ A_s.T)`` with A of token t's adapter.

    Args:
        inputs: [M, K].
        lora_a_weights: one [L, r, K] or [L, 1, r, K] per slice (1 to 8), all of one dtype.
        output_tensor: [S, M, r], float32 or the dtype of inputs. Written whole: rows whose
            ``token_lora_mapping`` is -1 become 0. A row that the mapping gives to an adapter but
            no group owns (the padding of a captured graph) keeps what it held; nothing reads it.

    The rest is described at the top of the module.
    """
    try:
        if is_eager(inputs):
            if no_lora_flag_cpu.item():
                return
            tensors = (
                inputs,
                output_tensor,
                None,
                token_lora_mapping,
                None,
                token_indices_sorted_by_lora_ids,
                lora_ids,
                num_tokens_per_lora,
                lora_token_start_loc,
                None,
                None,
                None,
                *lora_a_weights,
            )
            numbers = (scaling, _number(num_active_loras), len(lora_a_weights))
            if _run_now(_shrink_now, tensors, numbers, inputs, lora_a_weights, output_tensor):
                return
        is_tensor = isinstance(num_active_loras, torch.Tensor)
        (_call_shrink_tensor if is_tensor else _call_shrink)(
            inputs,
            lora_a_weights,
            output_tensor,
            token_lora_mapping,
            token_indices_sorted_by_lora_ids,
            num_tokens_per_lora,
            lora_token_start_loc,
            lora_ids,
            no_lora_flag_cpu,
            num_active_loras,
            scaling,
        )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _in_callers_words(
            "lora_shrink",
            _SHRINK_NAMES,
            error,
            inputs=inputs,
            lora_a_weights=lora_a_weights,
            output_tensor=output_tensor,
            token_lora_mapping=token_lora_mapping,
            token_indices_sorted_by_lora_ids=token_indices_sorted_by_lora_ids,
            num_tokens_per_lora=num_tokens_per_lora,
            lora_token_start_loc=lora_token_start_loc,
            lora_ids=lora_ids,
            no_lora_flag_cpu=no_lora_flag_cpu,
            num_active_loras=num_active_loras,
        ) from None


def lora_expand(
    inputs: torch.Tensor,
    lora_b_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: int | torch.Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """``output_tensor[t, offset_s : offset_s + N_s] (+)= inputs[s, t] @ B_s.T``.

    Args:
        inputs: [S, M, r], float32 or 16-bit; rounded to the dtype of the weights first.
        lora_b_weights: one [L, N_s, r] or [L, 1, N_s, r] per slice (1 to 8), all of one dtype; the
            widths N_s may differ.
        output_tensor: [M, N]; slice s begins at ``offset_start`` plus the widths before it. Rows
            of base tokens are untouched.
        add_inputs: add to what is there (in float32, rounded once) instead of overwriting it.

    The rest is described at the top of the module.
    """
    try:
        if is_eager(inputs):
            if no_lora_flag_cpu.item():
                return
            tensors = (
                inputs,
                output_tensor,
                None,
                token_indices_sorted_by_lora_ids,
                lora_ids,
                num_tokens_per_lora,
                lora_token_start_loc,
                None,
                None,
                None,
                *lora_b_weights,
            )
            numbers = (offset_start, add_inputs, _number(num_active_loras), 0)
            if _run_now(_expand_now, tensors, numbers, inputs, lora_b_weights, output_tensor):
                return
        is_tensor = isinstance(num_active_loras, torch.Tensor)
        (_call_expand_tensor if is_tensor else _call_expand)(
            inputs,
            lora_b_weights,
            output_tensor,
            token_lora_mapping,
            token_indices_sorted_by_lora_ids,
            num_tokens_per_lora,
            lora_token_start_loc,
            lora_ids,
            no_lora_flag_cpu,
            num_active_loras,
            offset_start,
            add_inputs,
        )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _in_callers_words(
            "lora_expand",
            _EXPAND_NAMES,
            error,
            inputs=inputs,
            lora_b_weights=lora_b_weights,
            output_tensor=output_tensor,
            token_lora_mapping=token_lora_mapping,
            token_indices_sorted_by_lora_ids=token_indices_sorted_by_lora_ids,
            num_tokens_per_lora=num_tokens_per_lora,
            lora_token_start_loc=lora_token_start_loc,
            lora_ids=lora_ids,
            no_lora_flag_cpu=no_lora_flag_cpu,
            num_active_loras=num_active_loras,
        ) from None
