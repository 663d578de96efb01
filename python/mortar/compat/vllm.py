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
ranks, strided rows (inputs of shrink and of linear whose columns are strided are copied, as vLLM
does), CPU tensors; one rounding of y where vLLM's expand has two; results that do not depend on the
rest of the batch. Wrong arguments raise ValueError or TypeError, by these names, instead of failing
an assertion, and slices of different dtypes are refused instead of being misread.

The functions are the ops ``torch.ops.mortar.vllm_lora_shrink``, ``vllm_lora_expand`` and
``vllm_lora_linear`` (overload ``.tensor`` where ``num_active_loras`` is a tensor), and need no
vLLM.
"""

import contextlib
import importlib
import inspect
import os
import sys
from types import ModuleType

import torch

from ._install import Replacements, found
from ._vllm_ops import EXPAND, LINEAR, SHRINK, run

__all__ = ["install", "lora_expand", "lora_linear", "lora_shrink", "uninstall"]


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
    run(SHRINK, inputs, lora_a_weights, output_tensor, metadata, (scaling,))


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
    run(EXPAND, inputs, lora_b_weights, output_tensor, metadata, (offset_start, add_inputs))


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

    The rest is described at the top of the module.
    """
    metadata = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora,
        lora_token_start_loc, lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    weights = (lora_a_weights, lora_b_weights)
    run(LINEAR, inputs, weights, output_tensor, metadata, (offset_start, scaling, add_inputs))


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
