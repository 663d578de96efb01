# SPDX-License-Identifier: Apache-2.0
"""A process of their own for kernels of other projects: one that reads where it must not takes all
of its process with it, and neither Mortar's timings nor the rows that follow may go that way."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from .cases import Case, Options, provider_results

#: Seconds that a provider may take for a row, what it compiles included.
PATIENCE_S = 120.0


class ForeignProcess:
    """Runs providers, row by row, in a process that is started when first needed, and again after
    it has died."""

    def __init__(self, cases: Callable[[Options], Iterable[Case]], options: Options):
        """`cases` is found again by its name, so it must be a function of a module."""
        self._arguments = (cases, options)
        self._process: multiprocessing.Process | None = None
        self._connection: Connection | None = None

    def results(self, label: str, provider: str) -> dict[str, Any]:
        """What `provider_results` gives for a row; where the process died, why it did."""
        if self._process is None:
            self._start()
        try:
            warm_ups = self._arguments[1].warm_ups
            self._connection.send((label, provider, warm_ups))
            if self._connection.poll(PATIENCE_S):
                found, theirs = self._connection.recv()
                warm_ups |= theirs
                return found
            reason = f"no result after {PATIENCE_S:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            reason = f"crashed, exit status {self._process.exitcode}"
        self.close()
        return {"providers": {}, "failed": {provider: reason}, "skipped": {}}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()


def _serve(
    connection: Connection, cases: Callable[[Options], Iterable[Case]], options: Options
) -> None:
    rows = {case.label: case for case in cases(options)}
    while True:
        label, name, options.warm_ups = connection.recv()
        case = rows[label]
        provider = next(p for p in case.providers(options) if p.name == name)
        found = provider_results(case, [provider], options)
        if options.device.type == "cuda":
            torch.cuda.synchronize()  # after an illegal access this raises: the process must go
            torch.cuda.empty_cache()
        connection.send((found, options.warm_ups))
