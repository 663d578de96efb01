# SPDX-License-Identifier: Apache-2.0
"""`./run demo norm`: a small language model trained in FP8, next to itself in bfloat16.

Trains a byte-level model of two blocks three times from one seed on local text: in bfloat16, with
every norm and the product behind it in FP8, and the same with the gradients rounded
stochastically. Prints losses, their largest distance from bfloat16, bytes kept for the backward and
time per step; draws the curves and which FP8 codes the activations use, in build/demo_norm/.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import mortar
from corpus import Corpus
from demo_main import Spoken, demo
from mortar.nn import Fp8RMSNormLinear

#: FP8 rounds every activation to 2^-4 of it: curves may part by that much of a loss, averaged over
#: the last tenth of the steps, and still be the same training.
MAX_LOSS_DISTANCE = 2**-4
VOCAB = 256


@dataclass(frozen=True)
class Recipe:
    """One training; the defaults take one to two minutes for all three on two cores."""

    steps: int = 50
    rows: int = 8
    length: int = 128
    hidden: int = 128
    heads: int = 4
    lr: float = 3e-3
    warmup: int = 10
    seed: int = 3


class Bf16RMSNormLinear(nn.Module):
    """What Fp8RMSNormLinear replaces."""

    def __init__(self, inputs: int, outputs: int, **_):
        super().__init__()
        self.norm = nn.RMSNorm(inputs, eps=1e-5)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Block(nn.Module):
    """Attention and an MLP, both behind a norm and one product."""

    def __init__(self, recipe: Recipe, layer, **options):
        super().__init__()
        d, self.heads = recipe.hidden, recipe.heads
        self.qkv, self.up = layer(d, 3 * d, **options), layer(d, 4 * d, **options)
        self.out, self.down = nn.Linear(d, d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recipe: Recipe, layer, **options):
        super().__init__()
        self.bytes = nn.Embedding(VOCAB, recipe.hidden)
        self.places = nn.Embedding(recipe.length, recipe.hidden)
        self.blocks = nn.ModuleList(Block(recipe, layer, **options) for _ in range(2))
        self.head = layer(recipe.hidden, VOCAB, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


#: Name of a run, the layer it is built of, and its options.
RUNS = {
    "bf16": (Bf16RMSNormLinear, {}),
    "fp8": (Fp8RMSNormLinear, {}),
    "fp8, stochastic gradients": (Fp8RMSNormLinear, {"stochastic_gradient": True}),
}


def make_model(recipe: Recipe, name: str) -> Model:
    """The same weights for every run: each is drawn from its own place in one seed's stream."""
    layer, options = RUNS[name]
    torch.manual_seed(recipe.seed)
    model = Model(recipe, layer, **options)
    generator = torch.Generator().manual_seed(recipe.seed)
    for key, parameter in sorted(model.named_parameters()):
        if "norm" not in key:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return model.bfloat16()


def batches(text: bytes, recipe: Recipe) -> list[Tensor]:
    """int64 [rows, length + 1] a step, from random places."""
    generator = torch.Generator().manual_seed(recipe.seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - recipe.length - 1, (recipe.steps, recipe.rows),
                           generator=generator)  # fmt: skip
    return list(data[starts.unsqueeze(-1) + torch.arange(recipe.length + 1)])


def loss_of(model: Model, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def kept_bytes(model: Model, batch: Tensor) -> int:
    """Bytes of activations that the norms and their products keep for the backward."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    inside = 0

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if inside and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(t)  # so that no address comes twice
        return t

    def enter(*_) -> None:
        nonlocal inside
        inside += 1

    def leave(*_) -> None:
        nonlocal inside
        inside -= 1

    held: list[Tensor] = []
    layers = [m for m in model.modules() if isinstance(m, Bf16RMSNormLinear | Fp8RMSNormLinear)]
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(enter),
                                         m.register_forward_hook(leave))]  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss_of(model, batch)
    for hook in hooks:
        hook.remove()
    return sum(kept.values())


def train(recipe: Recipe, name: str, text: bytes, advance) -> tuple[Model, dict[str, object]]:
    model = make_model(recipe, name)
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, eps=1e-6)

    def rate(step: int) -> float:
        progress = min(step / max(recipe.steps, 1), 1.0)
        return min((step + 1) / recipe.warmup, 0.55 + 0.45 * math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, begin = [], time.perf_counter()
    for batch in batches(text, recipe):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        advance(name, losses[-1])
    seconds = time.perf_counter() - begin
    kept = kept_bytes(model, batches(text, recipe)[0])
    return model, {"losses": losses, "step_ms": 1e3 * seconds / recipe.steps, "kept_bytes": kept}


@torch.no_grad()
def codes_used(model: Model, batch: Tensor) -> list[int]:
    """How often each of the 256 codes of float8_e4m3fn occurs in the normed activations."""
    counts = torch.zeros(256, dtype=torch.int64)

    def count(module: Fp8RMSNormLinear, args: tuple) -> None:
        q = mortar.fp8_rmsnorm(args[0], module.norm.weight).q
        counts.add_(torch.bincount(q.view(torch.uint8).flatten(), minlength=256))

    hooks = [m.register_forward_pre_hook(count) for m in model.modules()
             if isinstance(m, Fp8RMSNormLinear)]  # fmt: skip
    model(batch[:, :-1])
    for hook in hooks:
        hook.remove()
    return counts.tolist()


def tail(losses: Sequence[float]) -> float:
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


# ---- on a GPU ------------------------------------------------------------------------------------


def gpu_times() -> list[dict[str, object]]:
    """us of forward (q and q_t) and backward by CUDA graphs, for bfloat16 x."""
    rows = []
    for m, n in ((2048, 4096), (8192, 4096), (8192, 8192)):
        x, dy = (torch.randn(m, n, device="cuda").bfloat16() for _ in range(2))
        weight = torch.ones(n, device="cuda")
        rstd = mortar.fp8_rmsnorm(x, weight).rstd
        rows.append({
            "M": m, "N": n,
            "forward_us": graph_us(lambda x=x, w=weight: mortar.fp8_rmsnorm(x, w, transpose=True)),
            "backward_us": graph_us(
                lambda dy=dy, x=x, w=weight, r=rstd: mortar.fp8_rmsnorm_backward(dy, x, w, r)),
        })  # fmt: skip
    return rows


def graph_us(call, repeats: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


# ---- report --------------------------------------------------------------------------------------


def plot(report: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["losses", "codes"], ["apart", "codes"]], height_ratios=(3, 1.3))
    losses, apart, used = axes["losses"], axes["apart"], axes["codes"]
    base = report["runs"]["bf16"]["losses"]
    for name, style in zip(RUNS, ("-", "--", ":"), strict=True):
        curve = report["runs"][name]["losses"]
        losses.plot(curve, style, label=name, linewidth=1.4)
        apart.plot([a - b for a, b in zip(curve, base, strict=True)], style, linewidth=1.4)
    losses.set(ylabel="loss (nats per byte)", title="Training in FP8 follows bfloat16")
    losses.legend()
    losses.sharex(apart)
    losses.tick_params(labelbottom=False)
    apart.set(xlabel="step", ylabel="minus bf16")
    for axis in (losses, apart):
        axis.grid(alpha=0.3)
    codes = report["codes"]
    order = [*range(255, 127, -1), *range(128)]  # from the most negative to the largest code
    used.bar(range(256), [codes[c] for c in order], width=1.0)
    marks = {"0.25": 0x28, "2": 0x40, "16": 0x58, "448": 0x7E}  # code of a value
    ticks = {127 - c: f"-{v}" for v, c in marks.items()} | {128: "0"}
    ticks |= {128 + c: v for v, c in marks.items()}
    used.set_xticks(list(ticks), list(ticks.values()))
    used.set(xlabel="q in float8_e4m3fn", ylabel="times used",
             yscale="symlog", title="Codes used by the normed activations")  # fmt: skip
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(recipe: Recipe, corpus: Corpus, out: Path, console: Console) -> dict[str, object]:
    """The whole demo; returns the report."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    runs, models = {}, {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(RUNS) * recipe.steps)
        speak = Spoken(console)

        def advance(name: str, loss: float) -> None:
            progress.update(task, advance=1, description=f"{name}, loss {loss:.2f}")
            done = progress.tasks[0].completed
            speak(f"step {done:.0f} of {len(RUNS) * recipe.steps}: {name}, loss {loss:.2f}")

        for name in RUNS:
            models[name], runs[name] = train(recipe, name, corpus.train, advance)
    base = runs["bf16"]["losses"]
    for result in runs.values():
        result["last_loss"] = tail(result["losses"])
        result["largest_distance"] = max(
            abs(a - b) for a, b in zip(result["losses"], base, strict=True)
        )
    report = {
        "corpus": corpus.name,
        "parameters": sum(p.numel() for p in models["fp8"].parameters()),
        "recipe": asdict(recipe),
        "runs": runs,
        "codes": codes_used(models["fp8"], batches(corpus.test, recipe)[0]),
        "gpu": gpu_times() if torch.cuda.is_available() else [],
    }
    out.mkdir(parents=True, exist_ok=True)
    plot(report, out / "report.png")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    for table in tables(report):
        console.print(table)
    return report


def checks(report: dict[str, object]) -> dict[str, bool]:
    """What the demo claims."""
    runs = report["runs"]
    base = runs["bf16"]["last_loss"]
    near = {n: abs(r["last_loss"] - base) <= MAX_LOSS_DISTANCE * base for n, r in runs.items()}
    return {
        "FP8 ends where bfloat16 does": near["fp8"],
        "with stochastic gradients as well": near["fp8, stochastic gradients"],
        "norms and products keep fewer bytes":
            runs["fp8"]["kept_bytes"] < runs["bf16"]["kept_bytes"],
        "all have learnt": all(r["last_loss"] < r["losses"][0] for r in runs.values()),
    }  # fmt: skip


def tables(report: dict[str, object]) -> list[Table]:
    table = Table(title=f"{report['parameters']:,} parameters on {report['corpus']}")
    headers = ("", "first loss", "last loss", "largest distance", "kept, KB", "ms a step")
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    for name, r in report["runs"].items():
        numbers = (r["losses"][0], r["last_loss"], r["largest_distance"], r["kept_bytes"] / 1e3,
                   r["step_ms"])  # fmt: skip
        table.add_row(name, *(f"{v:,.{d}f}" for v, d in zip(numbers, (3, 3, 3, 0, 1), strict=True)))
    if not report["gpu"]:
        return [table]
    gpu = Table("M", "N", "forward, us", "backward, us", title="One norm on this GPU, warm caches")
    for row in report["gpu"]:
        gpu.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
    return [table, gpu]


if __name__ == "__main__":
    title = "FP8 RMSNorm: a small model trained in FP8"
    sys.exit(demo("norm", title, __doc__, Recipe, run, checks))
