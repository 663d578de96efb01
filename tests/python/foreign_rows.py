# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark with a peer that dies in one of them; found by name in another process."""

import multiprocessing
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import Case, Provider, Traffic

#: What the peer `wrong` writes, by the process that it runs in.
MAIN, SPAWNED = 20.0, 40.0


class Row(Case):
    """y = x + 1; the peer `bad` does not survive the row `deadly`."""

    table, targets, tolerance, traffic = "rows", {"own": "host"}, 1e-6, Traffic(8)

    def __init__(self, name):
        self.key = {"name": name}

    def make_buffers(self, device, seed):
        return {"x": torch.ones(4, device=device), "y": torch.zeros(4, device=device)}

    def outputs(self, buffers):
        return [buffers["y"]]

    def reference(self, buffers):
        return [buffers["x"].double() + 1]

    def providers(self, options):
        def add(s):
            return lambda: torch.add(s["x"], 1, out=s["y"])

        def wrong(s):
            spawned = multiprocessing.parent_process() is not None
            return lambda: s["y"].fill_(SPAWNED if spawned else MAIN)

        def die(s):
            return os.abort

        yield Provider("own", add)
        yield Provider("bad", die if self.key["name"] == "deadly" else add, foreign=True)
        yield Provider("wrong", wrong, foreign=True)


def cases(options):
    return [Row("harmless"), Row("deadly"), Row("last")]
