# SPDX-License-Identifier: Apache-2.0
"""How a drop-in takes the place of another library's functions, and gives it back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

_Package = TypeVar("_Package")


class Replacements:
    """What one drop-in has put in the place of other things."""

    def __init__(self) -> None:
        # (owner, attribute, what its __dict__ held)
        self._before: list[tuple[Any, str, Any]] = []
        # (original, ours) of functions, whoever holds them
        self._functions: list[tuple[Any, Any]] = []

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        self._before.append((owner, attribute, vars(owner)[attribute]))
        setattr(owner, attribute, value)

    def replace_everywhere(self, original: Any, ours: Any) -> None:
        """In every module that has taken hold of the original, under whatever name; what was
        replaced so before is looked for again, as modules may have been imported since."""
        if original is not ours:
            self._functions.append((original, ours))
        wanted = {id(original): ours for original, ours in self._functions}
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for attribute, value in list(vars(module).items()):
                    if id(value) in wanted:
                        self.replace(module, attribute, wanted[id(value)])

    def undo(self) -> None:
        """Restores all; nothing if there is nothing."""
        self._functions.clear()
        while self._before:
            owner, attribute, original = self._before.pop()
            setattr(owner, attribute, original)


def found(packages: Sequence[_Package], function: str, import_first: str) -> Sequence[_Package]:
    """The packages to install into; RuntimeError if none has been imported."""
    if not packages:
        raise RuntimeError(f"{function}: {import_first} first, got no imported module of that name")
    return packages
