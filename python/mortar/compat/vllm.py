# SPDX-License-Identifier: Apache-2.0
"""``lora_shrink`` and ``lora_expand`` with the signatures and semantics of vLLM's punica ops, and
``lora_linear``, which is both in one call.

    VLLM_PLUGINS=mortar vllm serve MODEL --enable-lora ...    # in all processes of the engine

or, in a process that has imported vLLM's ops, ``mortar.compat.vllm.install()``: every LoRA layer
then runs on Mortar, but for those of experts and FP8 adapters, whose ops stay vLLM's. Linear layers
make one call where vLLM makes two, without its buffer of float32 in between.

They work straight on vLLM's own metadata (``LoRAKernelMeta``), as its layers pass it:

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
CUDA graph they may read weights and metadata while the kernel before them still runs: no graph may
write these just before the op (vLLM's are written before the replay).

Beyond vLLM's: float32 weights, activations of another dtype than the weights, slices of different
ranks, strided rows (inputs of shrink whose columns are strided are copied, as vLLM does), CPU
tensors; one rounding of y where vLLM's expand has two; results that do not depend on the rest of
the batch. Wrong arguments raise ValueError or TypeError, by these names, instead of failing an
assertion, and slices of different dtypes are refused instead of being misread.

The functions are the ops ``torch.ops.mortar.vllm_lora_shrink``, ``vllm_lora_expand`` and
``vllm_lora_linear`` (overload ``.tensor`` where ``num_active_loras`` is a tensor), and need no
vLLM.
"""

import contextlib
import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from .._ffi import WRITTEN, lib, torch_function
from .._library import define, in_words, increment_version, is_eager, named, negation, shortcut
from .._lora_memory import ANY_STREAM, Memory
from .._lora_ops import guard_autograd
from ._install import Replacements, found

__all__ = ["install", "lora_expand", "lora_linear", "lora_shrink", "uninstall"]

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
    """What the library takes for a plan: its tensors, and the number of groups where that is one.
    The flag is not among them."""
    _, sorted_tokens, counts, starts, ids, _, active = metadata
    if isinstance(active, _Tensor):
        return (None, sorted_tokens, ids, counts, starts, active), ()
    return (None, sorted_tokens, ids, counts, starts, None), (active,)


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


_SHRINK = _defined(
    "lora_shrink", "float scaling", _shrink_impl, "lora_a_weights",
    x="inputs", a="lora_a_weights", h="output_tensor", scale="scaling",
)  # fmt: skip
_EXPAND = _defined(
    "lora_expand", "int offset_start=0, bool add_inputs=False", _expand_impl, "lora_b_weights",
    h="inputs", b="lora_b_weights", y="output_tensor", offset="offset_start",
)  # fmt: skip
_LINEAR = _defined(
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
    """Whether an eager call is done. Tuples are written out: one more costs a tenth of all this."""
    if output.is_neg():
        raise negation(op.name, "output_tensor")
    if op is _LINEAR:
        last = (*last, len(weights[0]))
        weights = (*weights[0], *weights[1])
    # A negative-bit view or a tensor with a gradient: the dispatcher resolves it, or refuses it. No
    # bfloat16 is such a view, for lack of complex numbers of it, and weights are of one dtype.
    if len(weights) and weights[0].dtype is not _BF16 and any(map(_is_neg, weights)):
        return False
    if _is_grad_enabled() and any(map(_requires_grad, (inputs, output, *weights))):
        return False
    mapping, sorted_tokens, counts, starts, ids, _, active = metadata
    if type(active) is int:
        last = (*last[:3], active, *last[3:]) if op is _LINEAR else (*last, active)
        active = None
    if op is _EXPAND:
        tensors = (inputs, output, None, sorted_tokens, ids, counts, starts, active,
                   None, None, None, *weights)  # fmt: skip
        done = _expand_now(id(tensors), *last, 0)
    else:
        kept = getattr(ids, "_mortar_memory", None) or _new_memory(ids)
        memory, stream = kept.get()
        while True:
            if op is _SHRINK:
                tensors = (inputs, output, memory, mapping, None, sorted_tokens, ids, counts,
                           starts, active, None, None, None, *weights)  # fmt: skip
                done = _shrink_now(id(tensors), stream, *last, len(weights))
            else:
                tensors = (inputs, output, memory, None, sorted_tokens, ids, counts, starts,
                           active, None, None, None, *weights)  # fmt: skip
                done = _apply_now(id(tensors), stream, *last)
            if done <= WRITTEN:
                break
            memory, stream = kept.more(inputs, done), ANY_STREAM
    if done:
        increment_version((output,))
    return bool(done)


def _run(op: _Op, inputs, weights, output, metadata: tuple, last: tuple) -> None:
    """weights: the list of the op, or both of lora_linear."""
    try:
        if is_eager(inputs):
            if metadata[5].item():
                return
            if _run_now(op, inputs, weights, output, metadata, last):
                return
        first = (inputs, *op.lists(weights), output)
        call = op.by_tensor if isinstance(metadata[6], _Tensor) else op.by_int
        call(*first, *metadata, *last)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if op is not _EXPAND and _is_strided(inputs):
            return _run(op, inputs.contiguous(), weights, output, metadata, last)
        first = (inputs, *op.lists(weights), output)
        raise op.in_callers_words(error, first, metadata) from None


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
    metadata = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora,
        lora_token_start_loc, lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    _run(_SHRINK, inputs, lora_a_weights, output_tensor, metadata, (scaling,))


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
    metadata = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora,
        lora_token_start_loc, lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    _run(_EXPAND, inputs, lora_b_weights, output_tensor, metadata, (offset_start, add_inputs))


def lora_linear(
    inputs: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: int | torch.Tensor,
    scaling: float,
    offset_start: int = 0,
    add_inputs: bool = True,
) -> None:
    """``output_tensor[t, offset_s : offset_s + N_s] (+)= scaling * inputs[t] @ A_s.T @ B_s.T`` in
    one call, of one kernel where tokens are few. The sums of the first product are rounded once, to
    the dtype of the weights; ``scaling`` multiplies those of the second, in float32.

    Args:
        inputs: [M, K].
        lora_a_weights: one [L, r, K] or [L, 1, r, K] per slice (1 to 8), all of one dtype.
        lora_b_weights: as many [L, N_s, r] or [L, 1, N_s, r] of that dtype.
        output_tensor, add_inputs: as of ``lora_expand``.

    The rest is described at the top of the module; the groups must lie in the first M sorted
    indices.
    """
    metadata = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora,
        lora_token_start_loc, lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    weights = (lora_a_weights, lora_b_weights)
    _run(_LINEAR, inputs, weights, output_tensor, metadata, (offset_start, scaling, add_inputs))


# ---- install -------------------------------------------------------------------------------------

_OPS = "lora.ops.triton_ops"
_WRAPPER = "lora.punica_wrapper.punica_gpu"  # holds what the linear layers call
_PLUGIN = "mortar"  # the name of the entry point in pyproject.toml
_replacements = Replacements()


def _add_lora_linear(
    self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
) -> None:
    """`PunicaWrapperGPU.add_lora_linear`: one call in place of a buffer and two ops."""
    if buffer is not None:
        raise ValueError("add_lora_linear: buffer must be None, got one")
    inputs, output = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    metadata = self.token_mapping_meta.meta_args(
        inputs.size(0), self.lora_config.specialize_active_lora
    )
    lora_linear(
        inputs, lora_a_stacked, lora_b_stacked, output, *metadata, scale,
        add_inputs=kwargs.get("add_inputs", True),
    )  # fmt: skip


def _replace_linear(module: ModuleType) -> None:
    """Where the wrapper asks its metadata as `_add_lora_linear` does; vLLM's own method calls our
    two ops otherwise."""
    wrapper, meta = (getattr(module, name, None) for name in ("PunicaWrapperGPU", "LoRAKernelMeta"))
    if wrapper is None or meta is None or wrapper.add_lora_linear is _add_lora_linear:
        return
    asked = list(inspect.signature(meta.meta_args).parameters)
    if asked == ["self", "token_nums", "specialize_active_lora"]:
        _replacements.replace(wrapper, "add_lora_linear", _add_lora_linear)


def install() -> list[str]:
    """Puts Mortar under the LoRA layers of this process's vLLM: `lora_shrink` and `lora_expand` in
    whichever module has taken hold of them, and `lora_linear` in its wrapper for GPUs. Calling it
    again changes nothing but for modules that were imported since. `uninstall` takes it back.

    It must come before vLLM compiles or captures a model, and in every process that runs one:
    with several, set `VLLM_PLUGINS=mortar` instead, for which vLLM calls it in each.

    Returns:
        The packages that were found, such as ["vllm.lora.ops.triton_ops"].

    Raises:
        RuntimeError: vLLM's ops have not been imported.
    """
    packages = found(
        [name for name in sys.modules if name.endswith(f".{_OPS}")],
        "mortar.compat.vllm.install",
        f"import vllm.{_OPS}",
    )
    for package in packages:
        for ours in (lora_shrink, lora_expand):
            _replacements.replace_everywhere(getattr(sys.modules[package], ours.__name__), ours)
    for name, module in list(sys.modules.items()):
        if name.endswith(f".{_WRAPPER}"):
            _replace_linear(module)
    return packages


def uninstall() -> None:
    """Restores all that install() replaced; nothing if it has not run."""
    _replacements.undo()


def plugin() -> None:
    """What vLLM calls in each of its processes (entry point `mortar` of `vllm.general_plugins`):
    `install`, where VLLM_PLUGINS names it. vLLM calls all plugins if that variable is not set, but
    other kernels are not to run because a package happens to be there."""
    if _PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(","):
        importlib.import_module(f"vllm.{_OPS}")
        with contextlib.suppress(ImportError):  # of a build without what its layers need
            importlib.import_module(f"vllm.{_WRAPPER}")
        install()
