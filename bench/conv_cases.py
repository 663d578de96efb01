# SPDX-License-Identifier: Apache-2.0
"""The rows of the convolution benchmark: forward, backward, decode step, and host cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import conv_peers as peers
import mortar.compat.jet
from harness import Case, Options, Provider, Traffic, relative_error
from mortar._ffi import lib
from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step, traffic
from mortar.reference import dynamic_conv as reference

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Largest ||out - ref|| / ||ref|| of a row: one rounding of the result, or of each product as the
#: Triton peer has it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Problem:
    """Sizes of one call; `sequences` packs that many, of random lengths, into B * T tokens."""

    batch: int
    time: int
    channels: int
    width: int = 4
    dtype: str = "bf16"
    sequences: int | None = None
    silu: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.time, self.channels

    def traffic(self, state_len: int = 0):
        size = DTYPES[self.dtype].itemsize
        return traffic(*self.shape, self.width, state_len, size, size)

    def key(self) -> dict[str, object]:
        packed = {} if self.sequences is None else {"sequences": self.sequences}
        return dict(zip("BTD", self.shape, strict=True)) | packed | {
            "W": self.width, "dtype": self.dtype, "silu": "yes" if self.silu else "no",
        }  # fmt: skip


@dataclass
class Buffers:
    """Peers that allocate their results put them here in place of the buffers they were given."""

    x: Tensor
    kernels: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor | None = None
    dk: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


def make_buffers(p: Problem, device: torch.device, seed: int, backward: bool = False) -> Buffers:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        out = torch.empty(shape, dtype=DTYPES[p.dtype], device=device)
        return out.normal_(generator=generator)

    cu_seqlens = None
    if p.sequences is not None:  # uniform cuts: lengths from 0 to a few times the mean
        cuts = torch.randint(p.time + 1, (p.sequences - 1,), generator=generator, device=device)
        ends = torch.tensor([0, p.time], device=device)
        cu_seqlens = torch.cat([cuts, ends]).sort().values.int()
    buffers = Buffers(random(*p.shape), random(*p.shape, p.width), random(*p.shape),
                      torch.empty(p.shape, dtype=DTYPES[p.dtype], device=device),
                      cu_seqlens=cu_seqlens)  # fmt: skip
    if backward:
        buffers.dx, buffers.dk = torch.empty_like(buffers.x), torch.empty_like(buffers.kernels)
    return buffers


class ForwardCase(Case):
    """y of a whole batch, dense or packed."""

    table = "forward"

    def __init__(self, problem: Problem, target: str):
        p = self.problem = problem
        if p.sequences is not None:
            self.table = f"packed {self.table}"
        self.key = p.key()
        self.traffic = Traffic(getattr(p.traffic(), type(self).table))
        self.targets = {"mortar": target}
        self.tolerance = TOLERANCE[DTYPES[p.dtype]]

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        return make_buffers(self.problem, device, seed)

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.y]

    def reference(self, s: Buffers) -> list[Tensor]:
        return self._reference(s, s.cu_seqlens)

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        if provider.name == "dense":  # the yardstick of a packed row computes another thing
            expected = self._reference(s, None)
        return super().error(s, expected, provider)

    def _reference(self, s: Buffers, cu_seqlens: Tensor | None) -> list[Tensor]:
        activation = "silu" if self.problem.silu else None
        y, _ = reference.dynamic_conv(s.x.double(), s.kernels.double(), cu_seqlens=cu_seqlens,
                                      activation=activation)  # fmt: skip
        return [y]

    def _mortar(self, s: Buffers, cu_seqlens: Tensor | None) -> Callable[[], None]:
        args = (s.x, s.kernels, cu_seqlens, None, s.y, None, self.problem.silu)
        op = torch.ops.mortar.dynamic_conv_out.default
        return lambda: op(*args)

    def _torch(self, expression, s: Buffers) -> Callable[[], None]:
        args = (s.y, s.x, s.kernels, self.problem.silu)
        function = peers.compiled(expression)
        return lambda: function(*args)

    def _jet(self, s: Buffers) -> Callable[[], None]:
        jet = peers.Jet.shared()

        def call() -> None:
            s.y = jet.forward(s.x, s.kernels, s.cu_seqlens)

        return call

    expressions = {"unfold": peers.unfold_forward, "shifts": peers.shifts_forward}

    def providers(self, options: Options) -> Iterable[Provider]:
        p = self.problem
        yield Provider("mortar", lambda s: self._mortar(s, s.cu_seqlens))
        if p.sequences is not None:
            yield Provider("dense", lambda s: self._mortar(s, None))
        elif options.wants("torch"):
            for name, expression in self.expressions.items():
                yield Provider(name, lambda s, e=expression: self._torch(e, s), group="torch")
        if options.wants("jet") and options.device.type == "cuda" and not p.silu:
            packed = p.sequences is not None  # its list of tokens is made on the host
            yield Provider("jet", self._jet, group="triton", synchronises=packed, foreign=True)


class BackwardCase(ForwardCase):
    """dx and dk of a whole batch in one call."""

    table = "backward"
    expressions = {"unfold": peers.unfold_backward}

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        return make_buffers(self.problem, device, seed, backward=True)

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.dx, s.dk]

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        """Over whole rows of channels: the W entries of one kernel are too few for a norm."""
        if provider.name == "dense":
            expected = self._reference(s, None)
        pairs = zip(self.outputs(s), expected, strict=True)
        return max(relative_error(out.flatten(2), ref.flatten(2)) for out, ref in pairs)

    def _reference(self, s: Buffers, cu_seqlens: Tensor | None) -> list[Tensor]:
        x, kernels = (t.double().requires_grad_() for t in (s.x, s.kernels))
        with torch.enable_grad():
            activation = "silu" if self.problem.silu else None
            y, _ = reference.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens, activation=activation)
        return list(torch.autograd.grad(y, (x, kernels), s.dy.double()))

    def _mortar(self, s: Buffers, cu_seqlens: Tensor | None) -> Callable[[], None]:
        args = (s.x, s.kernels, cu_seqlens, None, s.dy, None, s.dx, s.dk, None, self.problem.silu)
        function = lib.dynamic_conv_backward  # the torch op allocates its results
        return lambda: function(*args)

    def _torch(self, expression, s: Buffers) -> Callable[[], None]:
        args = (s.dx, s.dk, s.x, s.kernels, s.dy, self.problem.silu)
        function = peers.compiled(expression)
        return lambda: function(*args)

    def _jet(self, s: Buffers) -> Callable[[], None]:
        jet = peers.Jet.shared()

        def call() -> None:
            s.dx, s.dk = jet.backward(s.x, s.kernels, s.dy)

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        for provider in super().providers(options):
            # Its gradients of packed sequences are wrong, so there is nothing to time.
            if provider.name != "jet" or self.problem.sequences is None:
                yield provider


class StepCase(Case):
    """One token of each row. With `slots` the states lie scattered in twice as many slots, W - 1
    long, as serving engines keep them; else they are [rows, D, W] as Jet-Nemotron's are."""

    table = "step"

    def __init__(self, rows: int, channels: int, width: int, dtype: str, slots: bool, target: str):
        self.problem = Problem(rows, 1, channels, width, dtype)
        self.slots, self.state_len = slots, width - 1 if slots else width
        self.key = {"rows": rows, "D": channels, "W": width, "dtype": dtype,
                    "state": "slots, W - 1" if slots else "dense, W"}  # fmt: skip
        self.traffic = Traffic(self.problem.traffic(self.state_len).step)
        self.targets = {"mortar": target}
        self.tolerance = TOLERANCE[DTYPES[dtype]]

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        p = self.problem
        s = make_buffers(p, device, seed)
        s.x, s.kernels, s.y = s.x[:, 0], s.kernels[:, 0], s.y[:, 0]
        states = 2 * p.batch if self.slots else p.batch
        s.state = torch.randn(states, p.channels, self.state_len, device=device).to(s.x.dtype)
        if self.slots:
            s.cu_seqlens = torch.randperm(states, device=device)[: p.batch].int()
        return s

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.y, s.state]

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        pairs = zip(self.outputs(s), expected, strict=True)
        return max(relative_error(out.flatten(1), ref.flatten(1)) for out, ref in pairs)

    def reference(self, s: Buffers) -> list[Tensor]:
        wide = (t.double() for t in (s.x, s.kernels, s.state))
        return list(reference.dynamic_conv_step(*wide, slots=s.cu_seqlens))

    def providers(self, options: Options) -> Iterable[Provider]:
        def mortar_step(s: Buffers):
            args = (s.x, s.kernels, s.state, s.cu_seqlens, s.y, False)
            op = torch.ops.mortar.dynamic_conv_step.default
            return lambda: op(*args)

        def torch_step(s: Buffers):
            args = (s.y, s.x, s.kernels, s.state, False)
            function = peers.compiled(peers.step)
            return lambda: function(*args)

        def jet_step(s: Buffers):
            jet, x = peers.Jet.shared(), s.x.unsqueeze(1)

            def call() -> None:
                s.y = jet.step(x, s.state, s.kernels)

            return call

        yield Provider("mortar", mortar_step)
        if not self.slots and options.wants("torch"):
            yield Provider("cat", torch_step, group="torch")
        if not self.slots and options.wants("jet") and options.device.type == "cuda":
            yield Provider("jet", jet_step, group="triton", foreign=True)


class HostCase(Case):
    """What an eager call costs the host; so small that the device keeps up."""

    table = "host"
    host = True
    tolerance = TOLERANCE[torch.bfloat16]
    problem = Problem(1, 4, 256)
    OPS = (
        "dynamic_conv",
        "dynamic_conv, gradients wanted",
        "dynamic_conv_step",
        "compat.jet.dynamic_conv_triton_autograd",
        "compat.jet.causal_conv_step_triton",
    )

    def __init__(self, op: str):
        self.op = op
        self.is_step = "step" in op
        self.grad = not self.is_step  # decoding has none
        self.key = {"op": op}
        self.traffic = Traffic(0)
        self.targets = {"mortar": "host"}

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        s = make_buffers(self.problem, device, seed)
        s.state = torch.randn(4, 256, 4, device=device).to(s.x.dtype)
        if self.is_step:
            s.x, s.kernels, s.y = s.x[0], s.kernels[0], s.y[0]
        return s

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.y, s.state]

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        pairs = zip(self.outputs(s), expected, strict=True)
        return max(relative_error(out.flatten(1), ref.flatten(1)) for out, ref in pairs)

    def reference(self, s: Buffers) -> list[Tensor]:
        wide = [t.double() for t in (s.x, s.kernels, s.state)]
        if self.is_step:
            return list(reference.dynamic_conv_step(*wide))
        return [reference.dynamic_conv(*wide[:2])[0], wide[2]]

    def _bind(
        self, function: Callable[..., Tensor], s: Buffers, theirs: bool = False
    ) -> Callable[[], None]:
        """`function` takes x, kernels and, as a step, the state; as theirs, x [B, 1, D] and the
        state before the kernels."""
        x, kernels, state = s.x, s.kernels, s.state
        if "gradients" in self.op:
            x, kernels = x.detach().requires_grad_(), kernels.detach().requires_grad_()
        args = (x, kernels)
        if self.is_step:
            args = (x.unsqueeze(1), state, kernels) if theirs else (x, kernels, state)

        def call() -> None:
            s.y = function(*args)

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        compat = mortar.compat.jet
        functions = {
            "dynamic_conv_step": dynamic_conv_step,
            "compat.jet.dynamic_conv_triton_autograd": compat.dynamic_conv_triton_autograd,
            "compat.jet.causal_conv_step_triton": compat.causal_conv_step_triton,
        }
        function = functions.get(self.op, dynamic_conv)
        as_jet = self.op.startswith("compat")
        yield Provider("mortar", lambda s: self._bind(function, s, as_jet))
        if options.wants("jet") and options.device.type == "cuda":
            jet = peers.Jet.shared()
            theirs = jet.step if self.is_step else jet.forward
            yield Provider("jet", lambda s: self._bind(theirs, s, True), group="triton")
