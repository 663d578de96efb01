# SPDX-License-Identifier: Apache-2.0
"""The rows of the norm benchmark: forward, backward, the quantisation alone, drop-in, host cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import mortar
import norm_peers as peers
from harness import Case, Options, Provider, Traffic, relative_error
from mortar.compat import coat
from mortar.fp8 import traffic
from mortar.nn import Fp8RMSNorm
from mortar.reference import fp8_rmsnorm as reference

X_GROUP, GROUP = 16, 128
DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
#: ||q scale - y|| / ||y|| of a row: float8_e4m3fn is off by 2^-4 of a value at most, 2.6 % in the
#: mean square; bfloat16 gradients by one rounding, or a few in peers.
QUANTISED, GRADIENTS = 2**-4, 0.02
#: x that fits on the chip of an H200 is read once.
ON_CHIP_BYTES = 33e6


@dataclass(frozen=True)
class Problem:
    """One call. `transpose`: q_t is made beside q."""

    rows: int
    hidden: int
    x: str = "e4m3"
    scaling: str = "tensor"
    transpose: bool = True
    residual: bool = False
    given: bool = False

    @property
    def size(self) -> int:
        return self.rows * self.hidden

    def forward_bytes(self) -> int:
        own = traffic(*self._sizes(), 1 + self.transpose, 2).forward
        scales = 4 * self.size // GROUP * (1 + self.transpose) if self.scaling == "group" else 0
        return own + scales + (4 * self.size if self.residual else 0)

    def backward_bytes(self) -> int:
        return traffic(*self._sizes(), 0, 2).backward

    def _sizes(self) -> tuple[int, int, int, int, int]:
        x = DTYPES[self.x].itemsize
        return (self.rows, self.hidden, x, X_GROUP if x == 1 else 0, 2 if x == 1 else 0)

    def key(self) -> dict[str, object]:
        what = [self.x, self.scaling]
        what += [name for name in ("residual", "given") if getattr(self, name)]
        what += [] if self.transpose else ["no transpose"]
        return {"M": self.rows, "N": self.hidden, "what": ", ".join(what)}

    def target(self) -> str:
        if self.given or (self.scaling != "tensor" and not self.transpose):
            return "norm_one_pass"
        x_bytes = self.size * DTYPES[self.x].itemsize
        return "norm_forward" if x_bytes <= ON_CHIP_BYTES else "norm_forward_large"


@dataclass
class Buffers:
    """Peers that allocate their results put them here in place of the buffers they were given."""

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    rstd: Tensor
    scaling: str
    given: bool
    residual: Tensor | None = None
    q: Tensor | None = None
    scale: Tensor | None = None
    q_t: Tensor | None = None
    scale_t: Tensor | None = None
    amax: Tensor | None = None
    dy: Tensor | None = None
    dx: Tensor | None = None
    dw: Tensor | None = None


def make_buffers(p: Problem, device: torch.device, seed: int) -> Buffers:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

    x_scale = None
    x = random(p.rows, p.hidden)
    if p.x == "e4m3":
        x_scale = random(p.rows, p.hidden // X_GROUP).abs() / 64 + 2**-7
        x = (x * 64).to(DTYPES["e4m3"])
    x = x.to(DTYPES[p.x])
    weight = random(p.hidden).float() / 4 + 1
    return Buffers(x, x_scale, weight, torch.empty(p.rows, device=device), p.scaling, p.given)


def add_outputs(s: Buffers, p: Problem) -> Buffers:
    device, fp8 = s.x.device, DTYPES["e4m3"]
    s.q = torch.empty(p.rows, p.hidden, dtype=fp8, device=device)
    if p.transpose:
        s.q_t = torch.empty(p.hidden, p.rows, dtype=fp8, device=device)
    shapes = [(p.rows, p.hidden), (p.hidden, p.rows)]
    if p.scaling == "tensor":
        s.scale, s.amax = (torch.empty((), device=device) for _ in range(2))
    else:
        sizes = [(m, -(-n // GROUP)) if p.scaling == "group" else (m,) for m, n in shapes]
        s.scale = torch.empty(sizes[0], device=device)
        s.scale_t = torch.empty(sizes[1], device=device) if p.transpose else None
    if p.given:
        s.scale.fill_(2.0**-4)
    if p.residual:
        s.residual = torch.zeros(p.rows, p.hidden, dtype=torch.bfloat16, device=device)
    return s


class ForwardCase(Case):
    """q, its transpose and scales of one norm."""

    table = "forward"
    tolerance = QUANTISED

    def __init__(self, problem: Problem, target: str | None = None, table: str | None = None):
        self.problem, self.table = problem, table or self.table
        self.key = problem.key()
        self.traffic = Traffic(problem.forward_bytes())
        self.targets = {"mortar": target or problem.target()}

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        return add_outputs(make_buffers(self.problem, device, seed), self.problem)

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [t for t in (s.q, s.scale, s.q_t, s.scale_t, s.residual) if t is not None]

    def reference(self, s: Buffers) -> list[Tensor]:
        y, _, _ = reference.rmsnorm(s.x, s.weight, x_scale=s.x_scale, residual=s.residual)
        return [y]

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        """Of the values that q and q_t stand for. The rows of q_t are long enough for a norm."""
        y = expected[0]
        got = s.q.double() * reference.spread(s.scale, y.shape, GROUP)
        worst = relative_error(got, y)
        if s.q_t is not None:
            scale_t = s.scale if s.scale_t is None else s.scale_t
            got = s.q_t.double() * reference.spread(scale_t, y.t().shape, GROUP)
            worst = max(worst, relative_error(got, y.t()))
        return worst

    def _mortar(self, s: Buffers, numerics: int = 0) -> Callable[[], None]:
        scaling = ("tensor", "row", "group").index(s.scaling)
        args = (s.x, s.x_scale, s.weight, s.residual, None, s.q, s.scale, s.q_t, s.scale_t, s.amax,
                s.rstd, None, peers.EPS, 0.0, scaling, GROUP, False, s.given, numerics)  # fmt: skip
        op = torch.ops.mortar.fp8_rmsnorm_out.default
        return lambda: op(*args)

    expression = staticmethod(peers.forward)

    def _torch(self, options: Options) -> Iterable[Provider]:
        if not options.wants("torch"):
            return
        for name, wrap in (("eager", lambda f: f), ("compiled", peers.compiled)):

            def bind(s: Buffers, function=None, wrap=wrap):
                function = wrap(self.expression)
                return lambda: function(s)

            yield Provider(name, bind, group="torch")

    def _coat(self, s: Buffers, copy: str) -> Callable[[], None]:
        theirs = peers.Coat.shared(copy)

        def call() -> None:
            s.q, s.scale, s.q_t, _ = theirs.forward(s.x, s.x_scale, s.weight, X_GROUP, peers.EPS)

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        p, cuda = self.problem, options.device.type == "cuda"
        yield Provider("mortar", self._mortar)
        yield from self._torch(options)
        plain = p.scaling == "tensor" and p.transpose and not (p.given or p.residual)
        if options.wants("coat") and cuda and plain and p.x == "e4m3":
            for copy in peers.COAT_COPIES:
                name = "coat" if copy == "original" else copy
                yield Provider(name, lambda s, c=copy: self._coat(s, c), group="triton",
                               foreign=True)  # fmt: skip
        if options.wants("libraries") and cuda and not p.residual:
            for name in peers.installed_norms():
                bind = lambda s, n=name: peers.then_cast(n, s)  # noqa: E731
                yield Provider(name, bind, group="library")


class CompatCase(ForwardCase):
    """COAT's chain of roundings against numerics "fast" of the same size."""

    table = "compat"

    def __init__(self, problem: Problem):
        super().__init__(problem, "norm_compat")

    def providers(self, options: Options) -> Iterable[Provider]:
        yield Provider("mortar", lambda s: self._mortar(s, numerics=1))
        yield Provider("fast", self._mortar)
        yield Provider("drop-in", self._drop_in)
        yield from (p for p in super().providers(options) if p.name in ("coat", "vila"))

    def _drop_in(self, s: Buffers) -> Callable[[], None]:
        def call() -> None:
            s.q, s.scale, s.q_t, _ = coat.fp8_rmsnorm_forward(s.x, s.x_scale, s.weight, X_GROUP,
                                                              peers.EPS)  # fmt: skip

        return call


class QuantiseCase(ForwardCase):
    """The second half alone, of bfloat16 y."""

    table = "quantise"
    expression = staticmethod(peers.quantise_alone)

    def __init__(self, problem: Problem, target: str | None = None):
        super().__init__(replace(problem, x="bf16"), target)

    def reference(self, s: Buffers) -> list[Tensor]:
        return [s.x.double()]

    def _mortar(self, s: Buffers, numerics: int = 0) -> Callable[[], None]:
        scaling = ("tensor", "row", "group").index(s.scaling)
        args = (s.x, None, s.q, s.scale, s.q_t, s.scale_t, s.amax, scaling, GROUP, False, s.given,
                numerics)  # fmt: skip
        op = torch.ops.mortar.fp8_quantize_out.default
        return lambda: op(*args)

    def _coat(self, s: Buffers, copy: str) -> Callable[[], None]:
        theirs = peers.Coat.shared(copy)

        def call() -> None:
            s.q, s.scale, s.q_t = theirs.division(s.x, X_GROUP, s.q.dtype)

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        yield Provider("mortar", self._mortar)
        yield from self._torch(options)
        if options.wants("coat") and options.device.type == "cuda":
            for copy in peers.COAT_COPIES:
                name = "coat" if copy == "original" else copy
                yield Provider(name, lambda s, c=copy: self._coat(s, c), group="triton",
                               foreign=True)  # fmt: skip


class BackwardCase(ForwardCase):
    """dx and dw in one call."""

    table = "backward"
    tolerance = GRADIENTS
    expression = staticmethod(peers.backward)

    def __init__(self, problem: Problem, target: str = "norm_backward", table: str | None = None):
        super().__init__(problem, target, table)
        self.traffic = Traffic(problem.backward_bytes())

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        s = make_buffers(self.problem, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 10_000)
        s.dy = torch.empty(s.x.shape, dtype=torch.bfloat16, device=device)
        s.dy.normal_(generator=generator)
        s.dx, s.dw = torch.empty_like(s.dy), torch.empty_like(s.weight)
        z = peers.dequantise(s.x, s.x_scale)
        s.rstd = (z.square().mean(-1) + peers.EPS).rsqrt()
        return s

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.dx, s.dw]

    def reference(self, s: Buffers) -> list[Tensor]:
        return list(reference.backward(s.dy, s.x, s.weight, s.rstd, x_scale=s.x_scale))

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        return max(relative_error(a, b) for a, b in zip((s.dx, s.dw), expected, strict=True))

    def _mortar(self, s: Buffers, numerics: int = 0) -> Callable[[], None]:
        args = (s.dy, s.x, s.x_scale, s.weight, s.rstd, None, s.dx, s.dw, 0.0, False)
        op = torch.ops.mortar.fp8_rmsnorm_backward_out.default
        return lambda: op(*args)

    def _coat(self, s: Buffers, copy: str) -> Callable[[], None]:
        theirs = peers.Coat.shared(copy)

        def call() -> None:
            s.dx, s.dw = theirs.backward(s.x, s.x_scale, s.dy, s.weight, s.rstd, X_GROUP, 8)

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        return (p for p in super().providers(options) if p.group != "library")


class HostCase(ForwardCase):
    """What an eager call costs the host; so small that the device keeps up."""

    table = "host"
    host = True
    OPS = {"fp8_rmsnorm, new outputs": "host", "fp8_rmsnorm into given outputs": "host",
           "fp8_rmsnorm_backward into given outputs": "host",
           "fp8_quantize, new outputs": "host", "fp8_quantize into given outputs": "host",
           "Fp8RMSNorm, gradients wanted": "host_grad",
           "compat.coat.fp8_rmsnorm_forward": "host"}  # fmt: skip

    def __init__(self, op: str):
        super().__init__(Problem(1, 256), self.OPS[op])
        self.op, self.key, self.traffic = op, {"op": op}, Traffic(0)
        self.grad = self.OPS[op] == "host_grad"  # the others are called within a Function

    def error(self, s: Buffers, expected: list[Tensor], provider: Provider) -> float:
        return 0.0  # the rows above compare the values

    def providers(self, options: Options) -> Iterable[Provider]:
        yield Provider("mortar", lambda s: self._bind(s, options.device))

    def _bind(self, s: Buffers, device: torch.device) -> Callable[[], object]:
        wide = peers.dequantise(s.x, s.x_scale).bfloat16()
        if self.op.startswith("Fp8RMSNorm"):
            module = Fp8RMSNorm(self.problem.hidden).to(device)
            leaf = wide.requires_grad_()
            return lambda: module(leaf)
        if self.op.startswith("compat"):
            return lambda: coat.fp8_rmsnorm_forward(s.x, s.x_scale, s.weight, X_GROUP, peers.EPS)
        if self.op.startswith("fp8_quantize"):
            out = mortar.fp8_quantize(wide, transpose=True) if "given" in self.op else None
            return lambda: mortar.fp8_quantize(wide, transpose=True, out=out)
        if "backward" in self.op:
            dy, dx, dw = wide, torch.empty_like(wide), torch.empty_like(s.weight)
            return lambda: mortar.fp8_rmsnorm_backward(dy, s.x, s.weight, s.rstd, dx=dx, dw=dw,
                                                       x_scale=s.x_scale)  # fmt: skip
        if "given" in self.op:
            out = mortar.fp8_rmsnorm(s.x, s.weight, x_scale=s.x_scale, transpose=True)
            return lambda: mortar.fp8_rmsnorm(s.x, s.weight, x_scale=s.x_scale, transpose=True,
                                              out=out)  # fmt: skip
        return lambda: mortar.fp8_rmsnorm(s.x, s.weight, x_scale=s.x_scale, transpose=True)
