# SPDX-License-Identifier: Apache-2.0
"""Where the LoRA demo finds its text, and what it does where there is none."""

import dataclasses
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import corpus

    return corpus


def source(corpus, root: Path, name: str = "a"):
    return dataclasses.replace(corpus.PYTHON, name=name, roots=(str(root),), patterns=("*.py",))


def test_four_different_corpora_here(corpus):
    found = corpus.load_corpora()
    assert len({c.name for c in found}) == 4
    for c in found:
        assert len(c.train) + len(c.test) >= corpus.MIN_BYTES
        assert len(c.train) == pytest.approx(9 * len(c.test), rel=1e-3)
    assert [c.digest() for c in corpus.load_corpora()] == [c.digest() for c in found]


def test_stand_in_takes_the_place_of_a_missing_source(corpus, monkeypatch, tmp_path):
    (tmp_path / "text.py").write_bytes(b"x = 1\n" * corpus.MIN_BYTES)
    missing, present = source(corpus, tmp_path / "no"), source(corpus, tmp_path, "b")
    monkeypatch.setattr(corpus, "WANTED", ((missing, present),))
    assert [c.name for c in corpus.load_corpora(8 * corpus.MIN_BYTES)] == ["b"]


def test_says_what_to_install(corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "WANTED", ((source(corpus, tmp_path),),))
    with pytest.raises(RuntimeError, match=f"Python sources under {tmp_path}; install python3"):
        corpus.load_corpora()


def test_skips_binaries_links_and_the_wrong_beginning(corpus, tmp_path):
    (tmp_path / "real.py").write_bytes(b"#!/bin/sh\ntrue\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real.py")
    (tmp_path / "binary.py").write_bytes(b"#!/bin/\0")
    (tmp_path / "other.py").write_bytes(b"nothing")
    wanted = dataclasses.replace(source(corpus, tmp_path), starts_with=b"#!/bin/")
    assert corpus.read_source(wanted, 1000) == b"#!/bin/sh\ntrue\n"
