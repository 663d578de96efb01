# SPDX-License-Identifier: Apache-2.0
"""Inputs, the float64 oracle and its tolerances, shared by the tests of the dynamic convolution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mortar.dynamic_conv import dynamic_conv
from mortar.reference import dynamic_conv as reference

WIDTHS = range(1, 9)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """One problem; `lengths` makes it packed. Gradients flow in through dy and dfinal_state."""

    x: Tensor
    kernels: Tensor
    cu_seqlens: Tensor | None = None
    initial_state: Tensor | None = None
    final_state_len: int | None = None
    activation: str | None = None
    dy: Tensor | None = None
    dfinal_state: Tensor | None = None


def random_case(
    device: torch.device,
    batch: int = 2,
    time: int = 7,
    channels: int = 5,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    kernel_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    state_len: int | None = None,
    final_state: bool | None = None,
    activation: str | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> Case:
    """Normal inputs. `state_len` gives an initial state of that length and, unless `final_state`
    says otherwise, a final one."""
    if lengths is not None:
        batch, time = 1, sum(lengths)
    sequences = batch if lengths is None else len(lengths)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    wants_final = state_len is not None if final_state is None else final_state
    final_len = (width - 1 if state_len is None else state_len) if wants_final else None
    return Case(
        x=normal(batch, time, channels),
        kernels=normal(batch, time, channels, width, dtype=kernel_dtype or dtype),
        cu_seqlens=None if lengths is None else boundaries(lengths, device, index_dtype),
        initial_state=None if state_len is None else normal(sequences, channels, state_len),
        final_state_len=final_len,
        activation=activation,
        dy=normal(batch, time, channels),
        dfinal_state=None if final_len is None else normal(sequences, channels, final_len),
    )


def boundaries(
    lengths: list[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=dtype)


def run(case: Case) -> dict[str, Tensor]:
    """Mortar's results: y, final_state and the gradients, by name."""
    return _run(case, with_mortar)


def oracle(case: Case) -> dict[str, Tensor]:
    """The same in float64, on the CPU, from the very same (rounded) inputs."""
    return _run(_map(case, lambda t: t.cpu().double() if t.is_floating_point() else t.cpu()),
                with_reference)  # fmt: skip


def with_mortar(case: Case) -> tuple[Tensor, Tensor | None]:
    wants_final = case.final_state_len is not None
    result = dynamic_conv(
        case.x,
        case.kernels,
        cu_seqlens=case.cu_seqlens,
        initial_state=case.initial_state,
        output_final_state=wants_final,
        activation=case.activation,
        state_len=case.final_state_len,
    )
    return result if wants_final else (result, None)


def with_reference(case: Case) -> tuple[Tensor, Tensor | None]:
    return reference.dynamic_conv(
        case.x,
        case.kernels,
        cu_seqlens=case.cu_seqlens,
        initial_state=case.initial_state,
        final_state_len=case.final_state_len,
        activation=case.activation,
    )


def _map(case: Case, function) -> Case:
    return replace(case, **{k: function(v) for k, v in vars(case).items() if isinstance(v, Tensor)})


def _run(case: Case, forward) -> dict[str, Tensor]:
    inputs = {"x": case.x, "kernels": case.kernels, "initial_state": case.initial_state}
    leaves = {k: t.detach().requires_grad_() for k, t in inputs.items() if t is not None}
    y, final_state = forward(replace(case, **leaves))
    outputs, upstream = [y], [case.dy]
    if final_state is not None and final_state.requires_grad:
        outputs.append(final_state)
        upstream.append(case.dfinal_state)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    results = {"y": y.detach()}
    if final_state is not None:
        results["final_state"] = final_state.detach()
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def magnitudes(case: Case) -> dict[str, Tensor]:
    """Per element, the sum of the absolute values of what was summed: float32 sums of W terms are
    off by at most (W + 1) 2^-24 of it. With SiLU the derivative (at most 1.1, its own slope at most
    0.5) passes on the error of the sum, so an incoming gradient grows to |dy| (1.1 + sum)."""
    positive = _map(case, lambda t: t.cpu().double().abs() if t.is_floating_point() else t.cpu())
    positive.activation = None
    if case.activation is not None:
        sums, _ = with_reference(positive)
        positive.dy = positive.dy * (1.1 + sums)
    return _run(positive, with_reference)


def assert_matches_oracle(case: Case, results: dict[str, Tensor] | None = None) -> None:
    """Every result within one rounding of its dtype plus the float32 sums' own error."""
    results = run(case) if results is None else results
    expected, sums = oracle(case), magnitudes(case)
    width = case.kernels.shape[3]
    terms = width + 1 + (8 if case.activation else 0)  # exp and a quotient: a few ulps more
    assert results.keys() == expected.keys()
    for name, result in results.items():
        info = torch.finfo(result.dtype)
        want = expected[name]
        # eps / 2 rounds to nearest; half the smallest subnormal where the result underflows.
        allowed = (
            info.eps / 2 * want.abs() * (1 + 2**-8)
            + 2 * terms * 2**-24 * sums[name]
            + info.smallest_normal * info.eps / 2
        )
        error = (result.cpu().double() - want).abs()
        assert result.shape == want.shape, name
        worst = (error / allowed).max().item() if error.numel() else 0.0
        assert bool((error <= allowed).all()), f"{name}: error is {worst:.3g} times the tolerance"


def assert_bitwise(a: Tensor, b: Tensor, what: str = "") -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, what
    same = torch.equal(a, b) or torch.equal(a.view(_bits(a)), b.view(_bits(b)))
    assert same, f"{what}: not bitwise equal"


def _bits(t: Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[t.element_size()]


class Recorder(TorchDispatchMode):
    """Names of the operators that run under it, such as "aten.empty_like.default"."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
