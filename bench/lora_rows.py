# SPDX-License-Identifier: Apache-2.0
"""The rows of the LoRA benchmark: apply, the planner, and what a call costs the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

import mortar.lora
import peers
from harness import Case, Options, Provider, Traffic
from lora_problem import (
    DTYPES,
    QKV,
    TOLERANCE,
    Batch,
    Layer,
    LoraBuffers,
    LoraProblem,
    balanced_map,
)

#: Where a plan's sorted tokens begin (src/lora/plan_layout.h).
SORTED = 8


def _apply(problem: LoraProblem, batch: Batch, s: LoraBuffers):
    weights = mortar.lora.Weights.stacked(s.a, s.b, ranks=batch.ranks)

    def call() -> None:
        mortar.lora.apply(s.y, s.x, weights, batch.plan, workspace=batch.workspace)

    return call


def _shrink(problem: LoraProblem, batch: Batch, s: LoraBuffers):
    weights = mortar.lora.Weights.stacked(s.a, s.b, ranks=batch.ranks)

    def call() -> None:
        mortar.lora.shrink(s.x, weights, batch.plan, batch.h, workspace=batch.workspace)

    return call


def _expand(problem: LoraProblem, batch: Batch, s: LoraBuffers):
    weights = mortar.lora.Weights.stacked(s.a, s.b, ranks=batch.ranks)

    def call() -> None:
        mortar.lora.expand(s.y, batch.h, weights, batch.plan)

    return call


def _vllm_shrink(op, batch: Batch, s: LoraBuffers):
    args = (s.x, s.a, batch.h, *batch.tables.args(), 1.0)
    return lambda: op(*args)


def _vllm_expand(op, batch: Batch, s: LoraBuffers):
    args = (batch.h, s.b, s.y, *batch.tables.args(), 0, True)
    return lambda: op(*args)


def _vllm_linear(op, batch: Batch, s: LoraBuffers):
    args = (s.x, s.a, s.b, s.y, *batch.tables.args(), 1.0)
    return lambda: op(*args)


def _both(first, second):
    def call() -> None:
        first()
        second()

    return call


class ApplyCase(Case):
    """y += delta of a mixed batch, by one call, by two, and by the peers."""

    def __init__(
        self, problem: LoraProblem, target: str, table: str = "apply", key: dict | None = None
    ):
        p = self.problem = problem
        self.table = table
        self.key = key or {
            "layer": p.layer.name,
            "tokens": p.tokens,
            "adapters": p.adapters,
            "rank": p.ranks if isinstance(p.ranks, int) else f"{min(p.ranks)}-{p.max_rank}",
        }
        self.traffic = p.traffic()
        self.targets = {"mortar": target, "compat": "lora_compat", "compat linear": "lora_linear"}
        self.tolerance = TOLERANCE[p.dtype]

    def make_buffers(self, device: torch.device, seed: int) -> LoraBuffers:
        return self.problem.make_buffers(device, seed)

    def outputs(self, buffers: LoraBuffers) -> list[torch.Tensor]:
        return [buffers.y]

    def reference(self, buffers: LoraBuffers) -> list[torch.Tensor]:
        return [self.problem.reference(buffers)[1]]

    def providers(self, options: Options) -> Iterable[Provider]:
        p = self.problem
        batch = p.make_batch(p.make_buffers(options.device, 0))
        sixteen_bit = p.dtype == p.weight_dtype != torch.float32
        yield Provider("mortar", lambda s: _apply(p, batch, s))
        yield Provider(
            "two calls",
            lambda s: _both(_shrink(p, batch, s), _expand(p, batch, s)),
            group="native",
        )
        if sixteen_bit:
            from mortar.compat import vllm

            yield Provider(
                "compat",
                lambda s: _both(
                    _vllm_shrink(vllm.lora_shrink, batch, s),
                    _vllm_expand(vllm.lora_expand, batch, s),
                ),
            )
            yield Provider("compat linear", lambda s: _vllm_linear(vllm.lora_linear, batch, s))
        if p.adapters == 1 and sixteen_bit and not p.base_share and options.wants("cublas"):
            yield Provider("cublas", lambda s: peers.one_adapter_gemms(s.y, s.x, s.a, s.b))
        if sixteen_bit and options.wants("vllm"):
            triton = peers.VllmTriton.shared()
            triton.forget_pointers()
            yield Provider(
                "vllm",
                lambda s: _both(
                    _vllm_shrink(triton.shrink, batch, s), _vllm_expand(triton.expand, batch, s)
                ),
            )


class CpuCase(ApplyCase):
    """One linear layer on the CPU: sequences with an adapter each, against PEFT's loop and the
    PyTorch expressions that can compete at this size."""

    def __init__(self, hidden: int, width: int, sequences: int, length: int, adapters: int,
                 rank: int, dtype: str):  # fmt: skip
        self.sequence_adapter = balanced_map(sequences, adapters).tolist()
        token_adapter = torch.tensor(self.sequence_adapter, dtype=torch.int32)
        problem = LoraProblem(
            Layer(f"{hidden} -> {width}", hidden, (width,)), sequences * length, adapters, rank,
            DTYPES[dtype], token_adapter=token_adapter.repeat_interleave(length),
        )  # fmt: skip
        key = {
            "batch": "decode" if length == 1 else "prefill",
            "layer": problem.layer.name,
            "tokens": f"{sequences} x {length}",
            "adapters": adapters,
            "rank": rank,
            "dtype": dtype,
        }
        target = "cpu_lora_mixed" if adapters > 1 else f"cpu_lora_one_{dtype}"
        super().__init__(problem, target, "cpu", key)
        self.targets = {"mortar": target}

    def providers(self, options: Options) -> Iterable[Provider]:
        p = self.problem
        batch = p.make_batch(p.make_buffers(options.device, 0))
        token_adapter = batch.token_adapter
        yield Provider("mortar", lambda s: _apply(p, batch, s))
        if options.wants("peft"):
            yield Provider(
                "peft", lambda s: peers.peft_loop(s.y, s.x, s.a, s.b, self.sequence_adapter)
            )
        if not options.wants("torch"):
            return

        def torch_provider(name: str, expression, *args) -> Provider:
            return Provider(name, lambda s: expression(s.y, s.x, s.a, s.b, *args), group="torch")

        if p.adapters == 1:
            yield torch_provider("addmm", peers.one_adapter_gemms)
            return
        yield torch_provider("grouped", peers.grouped_gemms, token_adapter)
        # The other two multiply the arithmetic or the bytes: contenders for few tokens only.
        if p.tokens <= 64:
            yield torch_provider("masked", peers.masked_gemms, token_adapter)
            yield torch_provider("gathered", peers.gathered_bmm, token_adapter)


@dataclass
class PlanBuffers:
    token_adapter: torch.Tensor
    plan: mortar.lora.Plan | None
    sorted_tokens: torch.Tensor  #: where peers leave their order


class PlanCase(Case):
    """Grouping a step's tokens by adapter."""

    table = "plan"
    tolerance = 0.0

    def __init__(self, tokens: int, adapters: int):
        self.tokens, self.adapters = tokens, adapters
        self.key = {"tokens": tokens, "adapters": adapters}
        # The map read and the order written; the tile lists are small beside them.
        self.traffic = Traffic(8 * tokens)
        self.targets = {"mortar": "lora_plan"} if tokens <= 8192 else {"mortar": "lora_plan_large"}

    def make_buffers(self, device: torch.device, seed: int) -> PlanBuffers:
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.randint(-1, self.adapters, (self.tokens,), generator=generator, device=device,
                            dtype=torch.int32)  # fmt: skip
        plan = mortar.lora.plan(ids, self.adapters)
        return PlanBuffers(ids, plan, torch.full_like(ids, -1))

    def outputs(self, buffers: PlanBuffers) -> list[torch.Tensor]:
        return [buffers.plan.data, buffers.sorted_tokens]

    def reference(self, buffers: PlanBuffers) -> list[torch.Tensor]:
        return [torch.argsort(buffers.token_adapter, stable=True)]

    def error(self, buffers: PlanBuffers, reference, provider: Provider) -> float:
        """0 if right, else infinite. Mortar puts base tokens last, the peers put them first."""
        if provider.name == "mortar":
            active = (buffers.token_adapter >= 0).sum()
            expected = torch.roll(reference[0], int(active))
            report = mortar.lora.check(buffers.plan)
            order = buffers.plan.data[SORTED : SORTED + self.tokens]
            right = report.num_active == active and torch.equal(order.double(), expected)
        else:
            right = torch.equal(buffers.sorted_tokens.double(), reference[0])
        return 0.0 if right else float("inf")

    def providers(self, options: Options) -> Iterable[Provider]:
        def plan(s: PlanBuffers):
            s.plan.data.fill_(-1)
            return lambda: mortar.lora.plan(s.token_adapter, self.adapters, out=s.plan)

        def sort(s: PlanBuffers):
            ids = torch.arange(self.adapters, dtype=torch.int32, device=s.token_adapter.device)

            def call() -> None:
                values, order = torch.sort(s.token_adapter, stable=True)
                s.sorted_tokens.copy_(order)
                torch.searchsorted(values, ids)

            return call

        yield Provider("mortar", plan)
        if options.wants("torch"):
            yield Provider("torch.sort", sort, group="torch")
        if options.wants("vllm") and options.device.type == "cuda":
            metadata = peers.VllmTriton.shared().metadata

            def prepare(s: PlanBuffers):
                meta = metadata.make(self.adapters, self.tokens, s.token_adapter.device)
                s.sorted_tokens = meta.token_indices_sorted_by_lora_ids
                return lambda: meta.prepare_tensors(s.token_adapter)

            yield Provider("vllm", prepare, synchronises=True)


class HostCase(Case):
    """What an eager call costs the host; one token, so that the device keeps up."""

    table = "host"
    host = True
    OPS = ("apply", "shrink", "expand", "plan", "compat.vllm.lora_shrink",
           "compat.vllm.lora_expand", "compat.vllm.lora_linear")  # fmt: skip

    def __init__(self, op: str, layer: Layer = QKV):
        self.op = op
        self.problem = LoraProblem(layer, 1, 1, 16)
        self.key = {"op": op, "layer": layer.name}
        self.traffic = self.problem.traffic()
        whole = op in ("apply", "compat.vllm.lora_linear")
        self.targets = {"mortar": "host_apply" if whole else "host"}
        self.tolerance = TOLERANCE[torch.bfloat16]

        self._batches: dict[str, Batch] = {}  # by the type of device

    def batch(self, device: torch.device) -> Batch:
        """What all sets of buffers share, with h as the first of them gives it."""
        if device.type not in self._batches:
            first = self.problem.make_buffers(device, 0)
            batch = self._batches[device.type] = self.problem.make_batch(first)
            batch.h.copy_(self.problem.reference(first)[0])
        return self._batches[device.type]

    def make_buffers(self, device: torch.device, seed: int) -> LoraBuffers:
        return self.problem.make_buffers(device, seed)

    def outputs(self, buffers: LoraBuffers) -> list[torch.Tensor]:
        return [self.batch(buffers.y.device).h, buffers.y]

    def reference(self, buffers: LoraBuffers) -> list[torch.Tensor]:
        h, y = self.problem.reference(buffers)
        untouched = self.op.rpartition(".")[2] in ("lora_shrink", "shrink", "plan")
        return [h, buffers.y.double() if untouched else y]

    def providers(self, options: Options) -> Iterable[Provider]:
        from mortar.compat import vllm

        p, batch = self.problem, self.batch(options.device)

        def plan(s: LoraBuffers):
            return lambda: mortar.lora.plan(batch.token_adapter, p.adapters, out=batch.plan)

        binds = {
            "apply": lambda s: _apply(p, batch, s),
            "shrink": lambda s: _shrink(p, batch, s),
            "expand": lambda s: _expand(p, batch, s),
            "plan": plan,
            "compat.vllm.lora_shrink": lambda s: _vllm_shrink(vllm.lora_shrink, batch, s),
            "compat.vllm.lora_expand": lambda s: _vllm_expand(vllm.lora_expand, batch, s),
            "compat.vllm.lora_linear": lambda s: _vllm_linear(vllm.lora_linear, batch, s),
        }
        yield Provider("mortar", binds[self.op])
        if options.wants("vllm") and options.device.type == "cuda" and "vllm" in self.op:
            triton = peers.VllmTriton.shared()
            triton.forget_pointers()
            if self.op.endswith("shrink"):
                yield Provider("vllm", lambda s: _vllm_shrink(triton.shrink, batch, s))
            elif self.op.endswith("expand"):
                yield Provider("vllm", lambda s: _vllm_expand(triton.expand, batch, s))
