# SPDX-License-Identifier: Apache-2.0
"""What a row has to reach: `must` is required, `aim` is wanted. Times in us, f = the floor.

A limit is `base + per_floor * f`, and `versus` adds: for every provider of that group in the same
run, the time must be at most the provider's divided by the factor. `over` names a group whose time
in the same run the formula is added to: a limit on what an op adds to a model. `work_base_us` and
`flops_per_s` give a second formula, work_base_us + FLOP / flops_per_s, for what arithmetic bounds:
the larger of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limit:
    base_us: float = math.inf
    per_floor: float = 0.0
    versus: Mapping[str, float] = field(default_factory=dict)
    over: str = ""
    work_base_us: float = 0.0
    flops_per_s: float = math.inf

    def us(self, floor_us: float, peers: Mapping[str, float], flops: int = 0) -> float:
        """The largest time that passes; `peers` has the best time of each group in this row."""
        start = peers.get(self.over, math.inf) if self.over else 0.0
        formula = self.base_us + self.per_floor * floor_us
        limits = [start + max(formula, self.work_base_us + 1e6 * flops / self.flops_per_s)]
        limits += [peers[group] / factor for group, factor in self.versus.items() if group in peers]
        return min(limits)


@dataclass(frozen=True)
class Target:
    must: Limit
    aim: Limit


#: Every kernel row has to beat what people use today.
_PEERS = {"cublas": 1.0, "vllm": 1.0, "torch": 1.0, "triton": 1.0, "library": 1.0}

#: Groups of other people's code: their warm-up has a budget. All others are yardsticks of a limit,
#: such as Mortar's own calls one by one or torch.mul, and always timed.
PEER_GROUPS = frozenset({*_PEERS, "peft"})


def _kernel(must: tuple[float, float], aim: tuple[float, float]) -> Target:
    return Target(Limit(*must, versus=_PEERS), Limit(*aim, versus=_PEERS))


def _wide(must: tuple[float, float], aim: tuple[float, float]) -> Target:
    """Ranks from 128 on: arithmetic at 500 TFLOP/s where that takes longer than the bytes."""
    work = {"work_base_us": 10.0, "flops_per_s": 500e12}
    return Target(Limit(*must, versus=_PEERS, **work), Limit(*aim, versus=_PEERS))


def _grid(base_us: float, per_floor: float) -> Target:
    limit = Limit(base_us, per_floor, {"cublas": 1 / 1.05, "vllm": 1.0})
    return Target(limit, limit)


def _versus(must: Mapping[str, float], aim: Mapping[str, float] | None = None) -> Target:
    return Target(Limit(versus=must), Limit(versus=must if aim is None else aim))


TARGETS: dict[str, Target] = {
    # GPU, CUDA-graph replay over cold buffers
    "lora_decode": _kernel((3.0, 1.5), (2.3, 1.15)),  # up to 256 tokens
    "lora_prefill": _kernel((4.0, 1.3), (3.0, 1.1)),  # 1,024 tokens and more
    # Random problems, by tokens, ranks and dtypes
    "lora_grid_decode": _grid(3.5, 1.5),  # up to 256 tokens
    "lora_grid_prefill": _grid(5.0, 1.4),
    "lora_grid_wide": _grid(6.0, 1.6),  # ranks over 64
    "lora_grid_decode_mixed": _grid(7.0, 3.0),  # fp32 adapters under bf16
    "lora_grid_prefill_mixed": _grid(10.0, 2.8),
    "lora_grid_wide_mixed": _grid(12.0, 3.2),
    # A decode step of a whole model with adapters on every linear layer, of 128 calls
    "lora_model_step": Target(
        Limit(128 * 5.0, 1.3, {"vllm": 1.0}, over="base"),  # up to 256 tokens
        Limit(128 * 3.5, 1.2, {"vllm": 1.0}, over="base"),
    ),
    "lora_model_prefill": _versus({"base": 0.93, "vllm": 1.0}, {"base": 0.95, "vllm": 1.0}),
    "lora_plan": _kernel((10.0, 0.0), (5.0, 0.0)),  # up to 8,192 tokens
    "lora_plan_large": _versus(_PEERS),
    "lora_compat": _versus({"native": 1 / 1.25}),  # the drop-in ops against the native ones
    "lora_linear": _versus({"mortar": 1 / 1.25}),  # that of one call against lora_apply
    "conv_forward": _kernel((2.0, 1.15), (2.0, 1.05)),
    "conv_backward": _kernel((2.0, 1.25), (2.0, 1.1)),
    "conv_step": _kernel((2.5, 1.3), (2.2, 1.1)),
    "conv_width": _kernel((2.0, 1.3), (2.0, 1.1)),  # W other than 4, forward and backward
    "conv_packed": _versus({"dense": 1 / 1.05}),  # against dense of the same size
    "norm_forward": _kernel((3.0, 1.45), (3.0, 1.15)),  # x fits on the chip, up to 33 MB
    "norm_forward_large": _kernel((3.0, 1.45), (3.0, 1.36)),  # it is read twice
    "norm_one_pass": _kernel((3.0, 1.25), (2.0, 1.1)),
    "norm_backward": _kernel((3.0, 1.25), (2.0, 1.08)),
    "norm_compat": _versus({"fast": 1 / 1.15, "triton": 1.0}),
    "train_forward": _kernel((4.0, 1.25), (3.0, 1.1)),
    "train_backward": _kernel((8.0, 1.6), (6.0, 1.2)),
    "train_wide_forward": _wide((4.0, 1.25), (3.0, 1.1)),
    "train_wide_backward": _wide((8.0, 1.6), (6.0, 1.2)),
    "train_dropout": _versus({"plain": 1 / 1.1}),
    "train_slices": _versus({"apart": 1 / 0.8}),  # q/k/v in one call
    "train_slices_backward": _versus({"apart": 1 / 0.6}),
    "train_adapters": _versus({"one": 1 / 1.15}),  # eight ragged ones, against one
    "train_step": _versus({"peft": 1.15}),  # 32 layers of a PEFT model
    "train_host": _versus({"peft": 1.0}),
    # Host cost of an eager call, against torch.mul into a given tensor, timed in turn with it
    "host_apply": _versus({"torch.mul": 1 / 2.0}),
    "host": _versus({"torch.mul": 1 / 1.6}),  # every other op
    "host_grad": _versus({"torch.mul": 1 / 4.0}),  # of a module, gradients wanted
    # CPU, interleaved with the yardsticks
    "cpu_lora_mixed": _versus({"peft": 1.5, "torch": 1.0}),
    "cpu_lora_one_fp32": _versus({"torch": 1.5}),
    "cpu_lora_one_bf16": _versus({"torch": 0.8}, aim={"torch": 1.0}),
    "cpu_conv": _versus({"torch": 1.5}),
    "cpu_norm": _versus({"torch": 1.5}),
    "cpu_train": _versus({"torch": 1.2}),
    "cpu_train_dropout": _versus({"torch": 1.5}),
    "cpu_train_bf16": _versus({"torch": 1.0}),
    "cpu_train_step": _versus({"peft": 1.0}),
}
