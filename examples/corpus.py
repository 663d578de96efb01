# SPDX-License-Identifier: Apache-2.0
"""Local text in clearly different languages, found on any Debian or Ubuntu machine.

Nothing is downloaded: Python sources come from the running interpreter's standard library, C
headers, licence texts and Perl modules from the system. Where a place is missing, the next source
of the same list stands in (and the corpus takes its name); fewer than four corpora are an error
that says what to install.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_BYTES = 100_000  # less text than this cannot train an adapter
TEST_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """One kind of text, split into a part to train on and a part to be judged on."""

    name: str
    title: str
    source: str
    prompt: str
    train: bytes
    test: bytes

    def digest(self) -> str:
        """A fingerprint of the text, so that a cache knows when it changed."""
        return hashlib.sha256(self.train + self.test).hexdigest()[:16]


@dataclass(frozen=True)
class Source:
    name: str
    title: str
    roots: tuple[str, ...]
    patterns: tuple[str, ...]
    prompt: str
    starts_with: bytes = b""  # what a file of this kind begins with, where its name does not tell
    install: str = ""


PYTHON = Source(
    "python", "Python sources", (sysconfig.get_path("stdlib"),),
    ("*.py", "asyncio/*.py", "email/*.py", "json/*.py", "logging/*.py", "unittest/*.py"),
    "    def __init__(self, name):\n        ", install="python3",
)  # fmt: skip
C_HEADERS = Source(
    "c", "C headers", ("/usr/include", sysconfig.get_path("include")),
    ("*.h", "linux/*.h", "*-linux-gnu/sys/*.h", "cpython/*.h", "internal/*.h"),
    "/* Return the ", install="libc6-dev",
)  # fmt: skip
LICENCES = Source(
    "licence", "Licence texts", ("/usr/share/common-licenses",), ("*",),
    "  The licensor grants you ", install="base-files",
)  # fmt: skip
PERL = Source(
    "perl", "Perl modules", ("/usr/share/perl", "/usr/lib"),
    ("5*/*.pm", "5*/*/*.pm", "*-linux-gnu/perl-base/*.pm", "*-linux-gnu/perl-base/*/*.pm"),
    "sub new {\n    my ($", install="perl",
)  # fmt: skip
SHELL = Source(
    "shell", "Shell scripts", ("/usr/bin", "/usr/sbin", "/etc/init.d", "/usr/share/debconf"),
    ("*",), "if [ -n ", starts_with=b"#!/bin/", install="dpkg-dev",
)  # fmt: skip
COPYRIGHTS = Source(
    "copyright", "Copyright notices", ("/usr/share/doc", sysconfig.get_path("purelib")),
    ("*/copyright", "*.dist-info/licenses/*"), "License: ", install="base-files",
)  # fmt: skip
CONFIG = Source(
    "config", "Build descriptions", ("/usr/share/pkgconfig", "/usr/lib", "/usr/share/cmake"),
    ("*.pc", "*/pkgconfig/*.pc", "*/cmake/*/*.cmake"), "set(", install="pkg-config",
)  # fmt: skip

# Each entry is one corpus: the first source with enough text on this machine.
WANTED = ((PYTHON,), (C_HEADERS, CONFIG), (LICENCES, COPYRIGHTS), (PERL, SHELL))


def read_source(source: Source, limit: int) -> bytes:
    """Up to `limit` bytes of a source's files in a fixed, shuffled order; b"" if it has none."""
    files = sorted(_files(source))
    random.Random(source.name).shuffle(files)
    parts: list[bytes] = []
    total = 0
    for path in files:
        if total >= limit:
            break
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if not data.startswith(source.starts_with) or b"\0" in data:
            continue
        # One large generated table must not be the whole corpus.
        data = data[: limit // 8]
        parts.append(data)
        total += len(data)
    return b"\n".join(parts)[:limit]


def _files(source: Source) -> Iterator[Path]:
    seen = set()
    for root in source.roots:
        for pattern in source.patterns:
            for path in Path(root).glob(pattern):
                real = path.resolve()  # licences and Perl folders are linked under several names
                if real not in seen and real.is_file():
                    seen.add(real)
                    yield real


def load_corpora(limit: int = 2_000_000) -> list[Corpus]:
    """The corpora of this machine, at most `limit` bytes each.

    Raises:
        RuntimeError: a kind of text and all its stand-ins are missing, with what to install.
    """
    corpora = []
    for candidates in WANTED:
        for source in candidates:
            text = read_source(source, limit)
            if len(text) >= MIN_BYTES:
                corpora.append(_split(source, text))
                break
        else:
            places = ", ".join(place for source in candidates for place in source.roots)
            packages = " or ".join(source.install for source in candidates)
            raise RuntimeError(
                f"corpus: found less than {MIN_BYTES} bytes of {candidates[0].title} under "
                f"{places}; install {packages}"
            )
    return corpora


def _split(source: Source, text: bytes) -> Corpus:
    cut = int(len(text) * (1 - TEST_FRACTION))
    return Corpus(source.name, source.title, source.roots[0], source.prompt, text[:cut], text[cut:])
