# SPDX-License-Identifier: Apache-2.0
"""A serving engine's convolution states, in SGLang's layout, updated by Mortar's ops in place.

SGLang keeps one buffer [slots, D, W - 1] per layer; each running request owns a slot, and a batch
comes with the slot of each of its requests. A prefill packs prompts of different lengths into one
row; some of them continue an earlier one. A decode step has one token per request, and rows that
only pad the batch to a captured size carry slot -1.

    PYTHONPATH=python python examples/sglang_state_layout.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from mortar.dynamic_conv import dynamic_conv, dynamic_conv_step
from mortar.reference import dynamic_conv as reference


@dataclass
class ConvStates:
    """One layer's states [slots, D, W - 1], newest input last."""

    buffer: Tensor

    def prefill(
        self,
        x: Tensor,
        kernels: Tensor,
        query_start_loc: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """Convolves packed prompts and leaves their states in their slots.

        x: [tokens, D]; kernels: [tokens, D, W]; query_start_loc: int32 or int64 [N + 1];
        cache_indices: [N], slots of the prompts; has_initial_state: bool [N]: the prompt continues
        what its slot holds. Returns silu(convolution), [tokens, D]. Nothing is read back.
        """
        state = self.buffer[cache_indices] * has_initial_state[:, None, None]
        y, state = dynamic_conv(
            x.unsqueeze(0),
            kernels.unsqueeze(0),
            cu_seqlens=query_start_loc,
            initial_state=state,
            output_final_state=True,
            activation="silu",
        )
        self.buffer[cache_indices] = state
        return y.squeeze(0)

    def decode(self, x: Tensor, kernels: Tensor, cache_indices: Tensor) -> Tensor:
        """One token per request: x [N, D], kernels [N, D, W], cache_indices int32 [N], -1 skips."""
        return dynamic_conv_step(x, kernels, self.buffer, slots=cache_indices, activation="silu")


def serve(device: torch.device, channels: int, width: int, seed: int = 0) -> dict[str, float]:
    """Serves three requests: two prefills, the second of which continues one and adds one, then
    padded decode steps. Compares every request with one float64 pass over all its tokens.

    Returns the largest relative error of any request, and of any final state."""
    torch.manual_seed(seed)
    slots = {"a": 5, "b": 2, "c": 7}
    total = {"a": 23, "b": 9, "c": 12}
    x = {n: torch.randn(t, channels, device=device) for n, t in total.items()}
    kernels = {n: torch.randn(t, channels, width, device=device) for n, t in total.items()}
    done = dict.fromkeys(total, 0)
    outputs: dict[str, list[Tensor]] = {n: [] for n in total}
    states = ConvStates(torch.full((9, channels, width - 1), 3.0, device=device))

    def prefill(lengths: dict[str, int]) -> None:
        spans = {n: slice(done[n], done[n] + length) for n, length in lengths.items()}
        ends = torch.tensor([0, *lengths.values()], device=device).cumsum(0)
        y = states.prefill(
            torch.cat([x[n][span] for n, span in spans.items()]),
            torch.cat([kernels[n][span] for n, span in spans.items()]),
            ends,
            torch.tensor([slots[n] for n in lengths], device=device),
            torch.tensor([done[n] > 0 for n in lengths], device=device),
        )
        for n, part in zip(lengths, y.split(list(lengths.values())), strict=True):
            outputs[n].append(part)
            done[n] += lengths[n]

    prefill({"a": 11, "b": 1})
    prefill({"c": 4, "a": 2})
    while any(done[n] < total[n] for n in total):
        running = [n for n in total if done[n] < total[n]]
        batch = [*running, *["padding"] * (4 - len(running))]
        row = {n: done.get(n, 0) for n in batch}
        source = {**x, "padding": torch.zeros(1, channels, device=device)}
        taps = {**kernels, "padding": torch.zeros(1, channels, width, device=device)}
        y = states.decode(
            torch.stack([source[n][row[n]] for n in batch]),
            torch.stack([taps[n][row[n]] for n in batch]),
            torch.tensor([slots.get(n, -1) for n in batch], device=device, dtype=torch.int32),
        )
        for i, n in enumerate(running):
            outputs[n].append(y[i : i + 1])
            done[n] += 1

    errors = {"output": 0.0, "state": 0.0}
    for n in total:
        whole, final = reference.dynamic_conv(
            x[n].double().unsqueeze(0), kernels[n].double().unsqueeze(0),
            final_state_len=width - 1, activation="silu",
        )  # fmt: skip
        got = torch.cat(outputs[n]).double()
        errors["output"] = max(errors["output"], ((got - whole[0]).norm() / whole.norm()).item())
        difference = states.buffer[slots[n]].double() - final[0]
        errors["state"] = max(errors["state"], (difference.norm() / final.norm()).item())
    unused = [s for s in range(9) if s not in slots.values()]
    if not (states.buffer[unused] == 3).all():
        raise AssertionError("a slot that no request owns has changed")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels", type=int, default=3072)
    parser.add_argument("--width", type=int, default=4)
    arguments = parser.parse_args()
    errors = serve(torch.device(arguments.device), arguments.channels, arguments.width)
    console = Console()
    console.print(f"states [9, {arguments.channels}, {arguments.width - 1}] on {arguments.device}")
    for what, error in errors.items():
        console.print(f"relative error of every {what} against float64: {error:.1e}")


if __name__ == "__main__":
    main()
