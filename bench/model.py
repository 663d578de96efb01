# SPDX-License-Identifier: Apache-2.0
"""`./run bench model`: a decode or prefill step of a whole model with adapters on every linear.

The linear layers of an 8B Llama (32 layers; q/k/v, o, gate/up and down), `torch.mm` as the base
product, in one CUDA graph, all weights cold. What a step costs without adapters, with Mortar's,
with vLLM's Triton ops after each product, and with vLLM's shrink beside the product on a second
stream. The linears read fixed activations: nothing between them is timed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

import mortar.lora
import peers
from harness import Case, Options, Provider, Traffic, View, main
from lora_problem import DOWN, GATE_UP, QKV, Batch, Layer, LoraBuffers, LoraProblem

LAYERS = 32
LINEARS = (QKV, Layer("o", 4096, (4096,)), GATE_UP, DOWN)
#: tokens, adapters, rank
STEPS = [
    (1, 1, 16), (8, 8, 16), (32, 1, 16), (32, 32, 16), (64, 16, 16), (256, 64, 16),
    (2048, 4, 16), (2048, 1, 64),
]  # fmt: skip
VIEWS = [
    View("A step of an 8B model with adapters on every linear layer", "model", "mortar",
         ("base", "vllm in line", "vllm on two streams"), plot="share"),
]  # fmt: skip


@dataclass
class Linear:
    """One linear layer: its base weight, what the call reads and writes, and its adapters."""

    problem: LoraProblem
    base: torch.Tensor  #: (K, sum N_s)
    buffers: LoraBuffers
    batch: Batch


@dataclass
class Step:
    """All linear layers of a model, in their order. Activations are shared between layers."""

    linears: list[Linear]


def _base(linear: Linear) -> None:
    torch.mm(linear.buffers.x, linear.base, out=linear.buffers.y)


class ModelCase(Case):
    """Every linear layer of a step once. The floor is that of what the adapters add: their weights
    and x, but not y, which the base product has just written."""

    table = "model"
    tolerance = 2e-2  # y is rounded once more than in an op alone, and vLLM rounds h

    def __init__(
        self,
        tokens: int,
        adapters: int,
        rank: int,
        layers: int = LAYERS,
        linears: Sequence[Layer] = LINEARS,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.key = {"tokens": tokens, "adapters": adapters, "rank": rank}
        self.problems = [LoraProblem(layer, tokens, adapters, rank, dtype) for layer in linears]
        self.layers = layers
        total = [0, 0]
        for problem in self.problems:
            traffic = problem.traffic()
            y_bytes = 2 * tokens * sum(problem.layer.widths) * dtype.itemsize
            total[0] += layers * (traffic.bytes - y_bytes)
            total[1] += layers * traffic.flops
        self.traffic = Traffic(*total)
        step = "lora_model_step" if tokens <= 256 else "lora_model_prefill"
        self.targets = {"mortar": step}
        self._step: Callable[[], Step | None] = lambda: None  # weak: rows share one GPU's memory

    def make_buffers(self, device: torch.device, seed: int) -> Step:
        """The same model for every set of a row: its own weights exceed any cache."""
        step = self._step()
        if step is None:
            step = Step(list(self._make_linears(device)))
            self._step = weakref.ref(step)
        return step

    def _make_linears(self, device: torch.device) -> Iterator[Linear]:
        generator = torch.Generator(device).manual_seed(1)
        firsts: list[Linear] = []
        for layer in range(self.layers):
            for i, problem in enumerate(self.problems):
                buffers = problem.make_buffers(device, layer)
                if layer > 0:
                    buffers.x, buffers.y = firsts[i].buffers.x, firsts[i].buffers.y
                base = torch.empty(
                    problem.layer.hidden, sum(problem.layer.widths), dtype=problem.dtype,
                    device=device,
                ).normal_(std=problem.layer.hidden**-0.5, generator=generator)  # fmt: skip
                batch = firsts[i].batch if layer > 0 else problem.make_batch(buffers)
                linear = Linear(problem, base, buffers, batch)
                if layer == 0:
                    firsts.append(linear)
                yield linear

    def outputs(self, buffers: Step) -> list[torch.Tensor]:
        return [linear.buffers.y for linear in buffers.linears[-len(self.problems) :]]

    def reference(self, buffers: Step) -> list[torch.Tensor]:
        """The last layer's outputs with adapters, which overwrite those of all before it."""
        out = []
        for linear in buffers.linears[-len(self.problems) :]:
            linear.buffers.y.zero_()
            delta = linear.problem.reference(linear.buffers)[1]
            out.append(linear.buffers.x.double() @ linear.base.double() + delta)
        return out

    def providers(self, options: Options) -> Iterable[Provider]:
        yield Provider("mortar", functools.partial(_in_line, _mortar))
        yield Provider("base", functools.partial(_in_line, None), compared=False)
        if options.wants("vllm"):
            triton = peers.VllmTriton.shared()
            triton.forget_pointers()
            adapters = functools.partial(_vllm, triton)
            yield Provider("vllm in line", functools.partial(_in_line, adapters), group="vllm")
            yield Provider("vllm on two streams", functools.partial(_two_streams, triton),
                           group="vllm")  # fmt: skip


def _mortar(linear: Linear) -> Callable[[], None]:
    b = linear.buffers
    weights = mortar.lora.Weights.stacked(b.a, b.b)
    return lambda: mortar.lora.apply(
        b.y, b.x, weights, linear.batch.plan, workspace=linear.batch.workspace
    )


def _vllm_ops(triton: peers.VllmTriton, linear: Linear) -> tuple[Callable, Callable]:
    b, batch = linear.buffers, linear.batch
    tables = batch.tables.args()
    return (
        lambda: triton.shrink(b.x, b.a, batch.h, *tables, 1.0),
        lambda: triton.expand(batch.h, b.b, b.y, *tables, 0, True),
    )


def _vllm(triton: peers.VllmTriton, linear: Linear) -> Callable[[], None]:
    shrink, expand = _vllm_ops(triton, linear)

    def call() -> None:
        shrink()
        expand()

    return call


def _in_line(adapters, step: Step) -> Callable[[], None]:
    """Every base product, and behind it what adds the adapters, if anything does."""
    added = [None if adapters is None else adapters(linear) for linear in step.linears]

    def call() -> None:
        for linear, add in zip(step.linears, added, strict=True):
            _base(linear)
            if add is not None:
                add()

    return call


def _two_streams(triton: peers.VllmTriton, step: Step) -> Callable[[], None]:
    """vLLM's shrink beside the base product, its expand behind both."""
    side = torch.cuda.Stream()
    ops = [_vllm_ops(triton, linear) for linear in step.linears]

    def call() -> None:
        current = torch.cuda.current_stream()
        for linear, (shrink, expand) in zip(step.linears, ops, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                shrink()
            _base(linear)
            current.wait_stream(side)
            expand()

    return call


def cases(options: Options) -> Iterator[Case]:
    if options.wants("vllm"):
        peers.VllmTriton.shared()  # says at once what is missing
    if options.device.type == "cpu":  # its shape alone: a whole one takes minutes a call
        yield ModelCase(2, 2, 4, 2, [Layer("linear", 64, (48, 16))], torch.float32)
        return
    for tokens, adapters, rank in STEPS:
        yield ModelCase(tokens, adapters, rank)


if __name__ == "__main__":
    with torch.no_grad():  # as a server runs
        sys.exit(main("model", cases, VIEWS, peers=("vllm",), default_peers=()))
