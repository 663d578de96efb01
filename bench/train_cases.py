# SPDX-License-Identifier: Apache-2.0
"""The rows of the LoRA training benchmark: forward, backward, slices, adapters, layers of PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import mortar.compat.peft
import train_peers as peers
from harness import Case, Options, Provider, Traffic
from mortar._ffi import lib
from mortar.reference import lora_train as reference

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Largest ||out - ref|| / ||ref|| of a row: h or ds rounded once and the result once; the peers
#: round the scaled value and the sum as well.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
SCALE = 2.0


@dataclass(frozen=True)
class Problem:
    """Sizes of one call. Several `widths` are slices, several `ranks` adapters of equal segments
    (give or take a tenth)."""

    rows: int
    hidden: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    dtype: str = "bf16"
    weights: str = ""
    base: bool = False
    p: float = 0.0

    @property
    def weight_dtype(self) -> torch.dtype:
        return DTYPES[self.weights or self.dtype]

    def key(self) -> dict[str, object]:
        def joined(numbers):
            return "+".join(map(str, numbers))

        key = {"M": self.rows, "K": self.hidden, "N": joined(self.widths),
               "r": joined(self.ranks), "dtype": self.dtype}  # fmt: skip
        key |= {"weights": self.weights} if self.weights else {}
        key |= {"base": "yes"} if self.base else {}
        return key | ({"p": self.p} if self.p else {})

    def traffic(self, backward: bool) -> Traffic:
        """Bytes of one slice and one adapter are the library's own; x is counted once."""
        activation, mean = DTYPES[self.dtype], sum(self.ranks) // len(self.ranks)
        total = [0, 0]
        for s, width in enumerate(self.widths):
            counts = lib.lora_train_traffic(self.rows, self.hidden, width, mean, activation,
                                            self.weight_dtype, self.base)  # fmt: skip
            total[0] += counts[int(backward)]
            total[1] += counts[2 + int(backward)]
            if s:
                shared = self.rows * self.hidden * activation.itemsize
                total[0] -= shared * (2 if backward else 1)
        return Traffic(*total)


@dataclass
class Buffers:
    x: Tensor
    dy: list[Tensor]
    base: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # adapter after adapter
    y: list[Tensor]
    h: Tensor
    rng: Tensor
    offsets: Tensor | None
    dx: Tensor | None = None
    grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def segment_ends(rows: int, adapters: int) -> list[int]:
    step = rows // adapters
    return [0, *(step * i + (i % 3 - 1) * step // 10 for i in range(1, adapters)), rows]


def make_buffers(p: Problem, device: torch.device, seed: int, backward: bool) -> Buffers:
    generator = torch.Generator(device).manual_seed(seed)
    dtype, weight = DTYPES[p.dtype], p.weight_dtype

    def random(*shape: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(size).to(dtype)

    pairs = [
        (random(r, p.hidden, dtype=weight, size=p.hidden**-0.5),
         random(n, r, dtype=weight, size=r**-0.5))
        for r in p.ranks for n in p.widths
    ]  # fmt: skip
    columns = len(p.widths) * (-(-max(p.ranks) // 8) * 8)
    offsets = None
    if len(p.ranks) > 1:
        ends = segment_ends(p.rows, len(p.ranks))
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    buffers = Buffers(
        x=random(p.rows, p.hidden, dtype=dtype),
        dy=[random(p.rows, n, dtype=dtype) for n in p.widths] if backward else [],
        base=[random(p.rows, n, dtype=dtype) for n in p.widths] if p.base else [],
        pairs=pairs,
        y=[] if backward else [torch.empty(p.rows, n, dtype=dtype, device=device)
                               for n in p.widths],
        h=torch.zeros(p.rows, columns, dtype=weight, device=device),
        rng=torch.randint(2**62, (2,), generator=generator, device=device),
        offsets=offsets,
    )  # fmt: skip
    if backward:
        buffers.dx = torch.empty_like(buffers.x)
        buffers.grads = [tuple(torch.empty_like(w) for w in pair) for pair in pairs]
        if len(p.ranks) == 1 and len(p.widths) == 1:
            buffers.h.copy_(SCALE * (buffers.x.to(weight) @ pairs[0][0].t()))
    return buffers


class ForwardCase(Case):
    """y and h of one call. `against` names a smaller set of calls of Mortar's own that the row is
    measured by: "apart" (a call for each slice), "one" (an adapter of the mean rank) or "plain" (no
    dropout)."""

    table = "forward"
    backward = False

    def __init__(self, problem: Problem, target: str, against: str = ""):
        self.problem, self.against = problem, against
        kind = {"apart": "q/k/v ", "one": "ragged ", "plain": "dropout "}.get(against, "")
        self.table = kind + type(self).table
        self.key = problem.key()
        self.traffic = problem.traffic(self.backward)
        self.targets = {"mortar": target}
        self.tolerance = max(TOLERANCE[DTYPES[problem.dtype]], TOLERANCE[problem.weight_dtype])

    def make_buffers(self, device: torch.device, seed: int) -> Buffers:
        return make_buffers(self.problem, device, seed, self.backward)

    def outputs(self, s: Buffers) -> list[Tensor]:
        return s.y

    def _oracle(self, s: Buffers) -> reference.Problem:
        p, slices = self.problem, len(self.problem.widths)
        cut = range(0, len(s.pairs), slices)
        owner = torch.zeros(p.rows, dtype=torch.int64, device=s.x.device)
        if s.offsets is not None:
            lengths = s.offsets.long().diff()
            owner = torch.arange(len(p.ranks), device=s.x.device).repeat_interleave(lengths)
        return reference.Problem([s.pairs[i : i + slices] for i in cut],
                                 [[SCALE] * slices] * len(p.ranks), owner, p.widths,
                                 [p.p] * len(p.ranks), False, s.rng)  # fmt: skip

    def reference(self, s: Buffers) -> list[Tensor]:
        return reference.forward(self._oracle(s), s.x, s.base or None)

    # ---- Mortar ------------------------------------------------------------------------------
    def _arguments(self, p: Problem, s: Buffers, pairs, y, h, base, offsets) -> tuple:
        rest = [value for a, b in pairs for value in (a, b, SCALE)]
        return (len(p.widths), len(p.ranks), False, s.x, h, None, s.rng if p.p else None, offsets,
                None, *[p.p] * len(p.ranks), *y, *(base or [None] * len(y)), *rest)  # fmt: skip

    def _bound(self, name: str, arguments: tuple, place: int) -> Callable[[], None]:
        """A call with a workspace of its own, at `place` of its arguments."""
        size = getattr(lib, f"{name}_workspace")(*arguments)
        device = next(t for t in arguments if isinstance(t, Tensor)).device
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        given = (*arguments[:place], workspace, *arguments[place + 1 :])
        function = getattr(lib, name)
        return lambda: function(*given)

    def _one(self, p: Problem, s: Buffers, columns: slice = slice(None)) -> Callable[[], None]:
        base = s.base[columns] if s.base else []
        h = s.h if columns == slice(None) else s.h.new_empty(p.rows, -(-p.ranks[0] // 8) * 8)
        args = self._arguments(p, s, s.pairs[columns], s.y[columns], h, base, s.offsets)
        return self._bound("lora_train_forward", args, 5)

    def _mean(self, s: Buffers) -> tuple[Problem, Buffers]:
        p = self.problem
        single = replace(p, ranks=(sum(p.ranks) // len(p.ranks),))
        made = make_buffers(single, s.x.device, 0, self.backward)
        return single, replace(made, x=s.x, dy=s.dy, base=s.base, y=s.y, dx=s.dx)

    def _parts(self, s: Buffers) -> Callable[[], None]:
        p = self.problem
        calls = [self._one(replace(p, widths=(width,)), s, slice(i, i + 1))
                 for i, width in enumerate(p.widths)]  # fmt: skip

        def call() -> None:
            for each in calls:
                each()

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        p = self.problem
        yield Provider("mortar", lambda s: self._one(p, s))
        if self.against == "apart":
            # Apart, three calls write dx three times: the last one's is not the sum.
            yield Provider("apart", self._parts, compared=False)
        elif self.against == "one":
            yield Provider("one", lambda s: self._one(*self._mean(s)), compared=False)
        elif self.against == "plain":
            yield Provider("plain", lambda s: self._one(replace(p, p=0.0), s), compared=False)
        if self.against:
            return
        if not p.p:
            yield from self._peers(options)
        elif options.wants("torch"):  # another generator's masks: nothing to compare
            for name, wrap in (("eager", lambda f: f), ("compiled", peers.compiled)):
                yield Provider(name, lambda s, w=wrap: self._dropping(w, s), group="torch",
                               compared=False)  # fmt: skip

    # ---- peers -------------------------------------------------------------------------------
    def _dropping(self, wrap, s: Buffers) -> Callable[[], None]:
        (a, b), base = s.pairs[0], s.base[0] if s.base else None
        function, p = wrap(peers.peft_forward), self.problem.p
        return lambda: function(s.y[0], s.x, base, a, b, SCALE, p)

    def _call(self, expression, s: Buffers) -> Callable[[], None]:
        (a, b), base = s.pairs[0], s.base[0] if s.base else None
        return lambda: expression(s.y[0], s.x, base, a, b, SCALE)

    def _nemo(self, s: Buffers) -> Callable[[], None]:
        (a, b), dtype, forward = s.pairs[0], s.x.dtype, peers.nemo().lora_forward_wrapper

        def call() -> None:
            forward(s.x, a.t(), b.t(), res=s.y[0], scale=SCALE, dtype=dtype)
            if s.base:
                s.y[0].add_(s.base[0])

        return call

    expressions = {"products": peers.products_forward, "addmm": peers.addmm_forward}
    derived = peers.peft_forward

    def _peers(self, options: Options) -> Iterable[Provider]:
        one_dtype = self.problem.weight_dtype is DTYPES[self.problem.dtype]
        group = "cublas" if options.device.type == "cuda" else "torch"
        if options.wants("torch"):
            for name, function in self.expressions.items() if one_dtype else ():
                yield Provider(name, lambda s, f=function: self._call(f, s), group=group)
            plain = type(self).derived
            yield Provider("eager", lambda s: self._call(plain, s), group="torch")
            yield Provider("compiled", lambda s: self._call(peers.compiled(plain), s),
                           group="torch")  # fmt: skip
        if options.wants("nemo") and options.device.type == "cuda" and one_dtype:
            yield Provider("nemo", self._nemo, group="triton", foreign=True)


class BackwardCase(ForwardCase):
    """dx, dA and dB of one call, with h of the forward."""

    table = "backward"
    backward = True
    expressions = {"products": peers.products_backward}
    derived = peers.peft_backward

    def outputs(self, s: Buffers) -> list[Tensor]:
        return [s.dx, *(grad for pair in s.grads for grad in pair)]

    def reference(self, s: Buffers) -> list[Tensor]:
        dx, da, db = reference.backward(self._oracle(s), s.x, s.dy)
        pairs = zip(sum(da, []), sum(db, []), strict=True)
        return [dx, *(grad for pair in pairs for grad in pair)]

    def _one(self, p: Problem, s: Buffers, columns: slice = slice(None)) -> Callable[[], None]:
        pairs, grads = s.pairs[columns], s.grads[columns]
        rest = [value for a, b in pairs for value in (a, b, SCALE)]
        out = [value for da, db in grads for value in (da, db, False, False)]
        single = len(p.widths) == len(p.ranks) == 1 and p.p == 0 and columns == slice(None)
        h = s.h if single else self._forward_h(p, s, pairs, columns)
        args = (len(p.widths), len(p.ranks), False, False, s.x, h, s.dx, None,
                s.rng if p.p else None, s.offsets if len(p.ranks) > 1 else None, None,
                *[p.p] * len(p.ranks), *s.dy[columns], *rest, *out)  # fmt: skip
        return self._bound("lora_train_backward", args, 7)

    def _forward_h(self, p: Problem, s: Buffers, pairs, columns: slice) -> Tensor:
        width = len(p.widths) * (-(-max(p.ranks) // 8) * 8)
        h = s.x.new_empty(p.rows, width, dtype=p.weight_dtype)
        y = [torch.empty_like(t) for t in s.dy[columns]]
        offsets = s.offsets if len(p.ranks) > 1 else None
        lib.lora_train_forward(*self._arguments(p, s, pairs, y, h, [], offsets))
        return h

    def _dropping(self, wrap, s: Buffers) -> Callable[[], None]:
        (a, b), (da, db), p = s.pairs[0], s.grads[0], self.problem.p
        kept, mask = torch.native_dropout(s.x.to(a.dtype), p, True)
        function, h = wrap(peers.dropped_backward), kept @ a.t()
        return lambda: function(s.dx, da, db, kept, mask, h, s.dy[0], a, b, SCALE, p)

    def _call(self, expression, s: Buffers) -> Callable[[], None]:
        (a, b), (da, db) = s.pairs[0], s.grads[0]
        return lambda: expression(s.dx, da, db, s.x, s.h, s.dy[0], a, b, SCALE)

    def _nemo(self, s: Buffers) -> Callable[[], None]:
        (a, b), dtype, module = s.pairs[0], s.x.dtype, peers.nemo()

        def call() -> None:
            da, s.dx = module.lora_da_dx_update_wrapper(s.x.t(), s.dy[0], b, a, SCALE, dtype)
            db = module.lora_db_update_wrapper(a, s.x.t(), s.dy[0], SCALE, dtype)
            s.grads = [(da.t(), db)]

        return call


@dataclass
class LayerBuffers:
    x: Tensor
    dy: Tensor
    y: Tensor


class LayerCase(Case):
    """Forward and backward of PEFT's linear layers, frozen products included: a training step but
    for its optimizer. `host` measures what the calls cost the host."""

    def __init__(self, rows: int, width: int, layers: int, p: float, dtype: str, target: str,
                 rank: int = 16, host: bool = False):  # fmt: skip
        self.table = "host" if host else "step"
        self.host, self.memory = host, not host
        self.rows, self.width, self.layers, self.p = rows, width, layers, p
        self.dtype, self.rank = DTYPES[dtype], rank
        self.key = {"M": rows, "width": width, "layers": layers, "r": rank, "dtype": dtype, "p": p}
        self.traffic = Traffic(0, 4 * layers * rows * width * width)
        self.targets = {"mortar": target}
        self.tolerance = 5 * TOLERANCE[self.dtype]
        self._models: dict[tuple[str, torch.device], torch.nn.Module] = {}

    def _model(self, name: str, device: torch.device) -> torch.nn.Module:
        if (name, device) not in self._models:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            linears = [torch.nn.Linear(self.width, self.width, bias=False, device=device,
                                       dtype=self.dtype) for _ in range(self.layers)]  # fmt: skip
            config = LoraConfig(r=self.rank, lora_dropout=self.p, init_lora_weights=False,
                                target_modules=[str(i) for i in range(self.layers)])  # fmt: skip
            model = get_peft_model(torch.nn.Sequential(*linears), config).train()
            self._models["peft", device] = model
            accelerated = mortar.compat.peft.accelerate(copy.deepcopy(model))
            self._models["mortar", device] = accelerated
            compiled = copy.deepcopy(model)
            for layer in compiled.get_base_model():
                layer.compile()  # one by one: equal layers compile once, in seconds
            self._models["peft compiled", device] = compiled
        return self._models[name, device]

    def make_buffers(self, device: torch.device, seed: int) -> LayerBuffers:
        generator = torch.Generator(device).manual_seed(seed)

        def random() -> Tensor:
            out = torch.randn(self.rows, self.width, generator=generator, device=device)
            return out.to(self.dtype)

        return LayerBuffers(random(), random(), random())

    def outputs(self, s: LayerBuffers) -> list[Tensor]:
        return [s.y]

    def reference(self, s: LayerBuffers) -> list[Tensor]:
        if self.p:
            return [s.y]  # masks differ: nothing is compared
        model = copy.deepcopy(self._model("peft", s.x.device)).double()
        with torch.no_grad():
            return [model(s.x.double())]

    def _bind(self, name: str, s: LayerBuffers) -> Callable[[], None]:
        model, x = self._model(name, s.x.device), s.x.detach().requires_grad_()

        def call() -> None:
            y = model(x)
            y.backward(s.dy)
            s.y = y.detach()
            x.grad = None
            model.zero_grad()

        return call

    def providers(self, options: Options) -> Iterable[Provider]:
        fixed = self.p == 0
        yield Provider("mortar", lambda s: self._bind("mortar", s), synchronises=True,
                       compared=fixed)  # fmt: skip
        yield Provider("peft", lambda s: self._bind("peft", s), synchronises=True, compared=fixed)
        if options.wants("torch") and not self.host:
            yield Provider("peft compiled", lambda s: self._bind("peft compiled", s),
                           synchronises=True, compared=fixed)  # fmt: skip
