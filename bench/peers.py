# SPDX-License-Identifier: Apache-2.0
"""What the LoRA benchmarks compare with: cuBLAS and other PyTorch expressions, PEFT's loop, and
vLLM's Triton ops, loaded from an ignored folder (README.md says which files to put there)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness import ROOT

VLLM_FILES = ROOT / ".peers" / "vllm"
_VLLM_STEMS = ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata", "kernel_utils", "utils")
_TRITON_OPS = "vllm.lora.ops.triton_ops"


# ---- vLLM -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class VllmTables:
    """A step's grouping in the layout of vLLM's LoRA kernel metadata, made here with PyTorch."""

    token_lora_mapping: torch.Tensor  #: int32 [M]
    token_indices_sorted: torch.Tensor  #: int32 [M], stable by adapter, base tokens first
    num_tokens_per_lora: torch.Tensor  #: int32 [L + 1], 0 past the ids in use
    lora_token_start_loc: torch.Tensor  #: int32 [L + 2]
    lora_ids: torch.Tensor  #: int32 [L + 1], ascending, -1 first if in use, -1 past the end
    no_lora_flag_cpu: torch.Tensor  #: bool [1], on the CPU
    num_active_loras: torch.Tensor  #: int32 [1], on the CPU: ids in use

    @staticmethod
    def make(token_adapter: torch.Tensor, num_adapters: int) -> VllmTables:
        ids, counts = torch.unique(token_adapter, sorted=True, return_counts=True)
        order = torch.argsort(token_adapter, stable=True)

        def padded(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
            out = torch.full((size,), fill, dtype=torch.int32, device=token_adapter.device)
            out[: len(values)] = values
            return out

        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return VllmTables(
            token_adapter,
            order.to(torch.int32),
            padded(counts, num_adapters + 1, 0),
            padded(starts, num_adapters + 2, 0),
            padded(ids, num_adapters + 1, -1),
            torch.tensor([bool((token_adapter < 0).all())]),
            torch.tensor([len(ids)], dtype=torch.int32),
        )

    def args(self) -> tuple[torch.Tensor, ...]:
        """In the order of lora_shrink's and lora_expand's positional arguments."""
        return (
            self.token_lora_mapping,
            self.token_indices_sorted,
            self.num_tokens_per_lora,
            self.lora_token_start_loc,
            self.lora_ids,
            self.no_lora_flag_cpu,
            self.num_active_loras,
        )


def _stand_ins() -> dict[str, types.ModuleType]:
    """The modules that vLLM's op files import, each with the one or two names that they use."""
    import triton
    import triton.language as tl

    logger = logging.getLogger("vllm")
    logger.warning_once = logger.info_once = lambda *_: None

    def module(name: str, **names: object) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(names)
        return made

    def no_registration(**_: object) -> None:
        # The op files then fall back on the plain functions, as they do where registration fails.
        raise AttributeError

    envs = module(
        "vllm.envs",
        VLLM_BATCH_INVARIANT=False,
        VLLM_TUNED_CONFIG_FOLDER=None,
        VLLM_LORA_DISABLE_PDL=False,
    )
    platform = types.SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda c: torch.cuda.get_device_capability() >= divmod(c, 10),
    )
    modules = [
        module("vllm", envs=envs),
        envs,
        module("vllm.logger", init_logger=lambda _: logger),
        module("vllm.platforms", current_platform=platform),
        module("vllm.triton_utils", tl=tl, triton=triton),
        module("vllm.utils"),
        module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2),
        module("vllm.utils.torch_utils", direct_register_custom_op=no_registration),
        module("vllm.lora"),
        module("vllm.lora.ops"),
        module(_TRITON_OPS),
    ]
    modules[-1].__path__ = [str(VLLM_FILES)]
    return {m.__name__: m for m in modules}


@contextlib.contextmanager
def _modules(extra: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """sys.modules with `extra`, restored afterwards: a vLLM that is installed stays unharmed."""
    saved = {n: m for n, m in sys.modules.items() if n == "vllm" or n.startswith("vllm.")}
    for name in saved:
        del sys.modules[name]
    sys.modules.update(extra)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
            del sys.modules[name]
        sys.modules.update(saved)


class VllmTriton:
    """vLLM's Triton shrink and expand, in their default configurations.

    Raises FileNotFoundError if the files are not in place, ImportError without Triton."""

    @staticmethod
    @functools.cache
    def shared() -> VllmTriton:
        """The one instance: importing twice would compile every kernel twice."""
        return VllmTriton()

    def __init__(self) -> None:
        for stem in _VLLM_STEMS:
            if not (VLLM_FILES / f"{stem}.py").is_file():
                where = VLLM_FILES.relative_to(ROOT)
                raise FileNotFoundError(f"bench: {where} must hold {stem}.py, see bench/README.md")
        with _modules(_stand_ins()):
            self._utils = importlib.import_module(f"{_TRITON_OPS}.utils")
            self.shrink = importlib.import_module(f"{_TRITON_OPS}.lora_shrink_op")._lora_shrink
            self.expand = importlib.import_module(f"{_TRITON_OPS}.lora_expand_op")._lora_expand
            metadata = importlib.import_module(f"{_TRITON_OPS}.lora_kernel_metadata")
            self.metadata = metadata.LoRAKernelMeta

    def forget_pointers(self) -> None:
        """Empties the caches keyed by address, which go stale when memory is used again."""
        self._utils._LORA_A_PTR_DICT.clear()
        self._utils._LORA_B_PTR_DICT.clear()


# ---- PyTorch expressions ------------------------------------------------------------------------
# Each takes y [M, N] (slices side by side), x [M, K], a: S tensors [L, R, K], b: S tensors
# [L, N_s, R], and returns a call that adds the LoRA delta to y.
def columns(y: torch.Tensor, b: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """y's columns of every slice."""
    return list(y.split([weight.shape[1] for weight in b], dim=-1))


def one_adapter_gemms(y, x, a, b):
    """One adapter, two GEMMs: x against all A at once, then addmm per slice."""
    a_all = torch.cat([weight[0] for weight in a]).T  # (K, S * R)
    h = x.new_empty(x.shape[0], a_all.shape[1])
    parts = h.split([weight.shape[1] for weight in a], dim=1)
    pairs = [(out, part, w[0].T) for out, part, w in zip(columns(y, b), parts, b, strict=True)]

    def call() -> None:
        torch.mm(x, a_all, out=h)
        for out, part, weight in pairs:
            out.addmm_(part, weight)

    return call


def peft_loop(y, x, a, b, sequence_adapter: Sequence[int]):
    """PEFT's mixed batch: per linear layer, find each adapter's sequences, gather them, run the
    two linears, scale, scatter-add. x and y are viewed as [sequences, length, features]."""
    num_sequences = len(sequence_adapter)
    names = ["__base__" if i < 0 else f"adapter{i}" for i in sequence_adapter]
    x3 = x.view(num_sequences, -1, x.shape[1])
    outs = [out.unflatten(0, (num_sequences, -1)) for out in columns(y, b)]
    layers = [
        {f"adapter{i}": (wa[i], wb[i]) for i in range(len(wa))} for wa, wb in zip(a, b, strict=True)
    ]

    def call() -> None:
        for out, layer in zip(outs, layers, strict=True):
            for name in set(names):
                if name == "__base__":
                    continue
                where = [i for i, other in enumerate(names) if other == name]
                weight_a, weight_b = layer[name]
                h = torch.nn.functional.linear(x3[where].to(weight_a.dtype), weight_a)
                delta = torch.nn.functional.linear(h, weight_b) * 1.0
                out[where] += delta.to(out.dtype)

    return call


def grouped_gemms(y, x, a, b, token_adapter: torch.Tensor):
    """Per adapter: select its rows, two GEMMs, add them back. The rows are found beforehand."""
    rows = {
        int(i): (token_adapter == i).nonzero().flatten() for i in token_adapter.unique() if i >= 0
    }
    outs = columns(y, b)

    def call() -> None:
        for adapter, where in rows.items():
            part = x.index_select(0, where)
            for out, wa, wb in zip(outs, a, b, strict=True):
                out.index_add_(0, where, (part @ wa[adapter].T) @ wb[adapter].T)

    return call


def masked_gemms(y, x, a, b, token_adapter: torch.Tensor):
    """All adapters at once: x against every A, zeros where the adapter is another token's, then
    one GEMM with every B. L times the arithmetic, and few calls: strong when tokens are few."""
    num_adapters, rank = a[0].shape[:2]
    a_all = [weight.flatten(0, 1).T for weight in a]  # (K, L * R)
    b_all = [weight.permute(0, 2, 1).flatten(0, 1).contiguous() for weight in b]  # (L * R, N)
    mine = token_adapter[:, None] == torch.arange(num_adapters, device=x.device)
    mask = mine.repeat_interleave(rank, dim=1).to(x.dtype)
    outs = columns(y, b)

    def call() -> None:
        for out, wa, wb in zip(outs, a_all, b_all, strict=True):
            out.addmm_((x @ wa).mul_(mask), wb)

    return call


def gathered_bmm(y, x, a, b, token_adapter: torch.Tensor):
    """Per token: a copy of its own adapter's weights, then batched products."""
    index = token_adapter.long()
    outs = columns(y, b)

    def call() -> None:
        for out, wa, wb in zip(outs, a, b, strict=True):
            h = torch.bmm(wa[index], x[:, :, None])
            out += torch.bmm(wb[index], h)[:, :, 0]

    return call
