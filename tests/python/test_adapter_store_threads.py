# SPDX-License-Identifier: Apache-2.0
"""AdapterStore in several threads: adapters swapped under a name while others read it."""

import contextlib
import sys
import threading

import pytest

import mortar
from adapter_store_cases import random_module, write_adapter
from mortar import adapter_store


@pytest.fixture
def quick_switches():
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_hot_swaps_are_seen_at_once(tmp_path, quick_switches):
    """10,000 swaps of one name beside readers: after each the new adapter is the one that is got,
    and no reader sees an older one than it has seen before."""
    for i in range(2):
        write_adapter(tmp_path / str(i), random_module("m", 1, 1, 1), r=1, lora_alpha=i + 1)
    store = mortar.AdapterStore()
    store.open("x", tmp_path / "0")
    swaps, running, wrong = 10_000, True, []

    def read():
        while running:
            with contextlib.suppress(ValueError):  # between close and open
                store.get("x")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(1, swaps + 1):
        store.close("x")
        store.open("x", tmp_path / str(i % 2))
        adapter = store.get("x")
        if adapter.path != str(tmp_path / str(i % 2)):
            wrong.append(i)
    running = False
    for reader in readers:
        reader.join()
    assert not wrong, f"{len(wrong)} of {swaps} swaps served the old adapter"


def test_a_swap_in_the_midst_of_get(tmp_path, monkeypatch):
    """What `get` keeps for later is not an adapter that was closed before it was kept."""
    for i in range(2):
        write_adapter(tmp_path / str(i), random_module("m", 1, 1, 1), r=1)
    store = mortar.AdapterStore()
    store.open("x", tmp_path / "0")

    def swap():
        store.close("x")
        store.open("x", tmp_path / "1")

    swapping = threading.Thread(target=swap)
    made = adapter_store.Adapter

    def make_slowly(*args):
        if swapping.ident is None:
            swapping.start()
            swapping.join(timeout=0.3)  # in vain, as long as `get` keeps `close` out
        return made(*args)

    monkeypatch.setattr(adapter_store, "Adapter", make_slowly)
    store.get("x")
    swapping.join()
    assert store.get("x").path == str(tmp_path / "1")


def test_slices_of_all_adapters_beside_swaps(tmp_path, quick_switches):
    """An adapter that is closed meanwhile is in the answer or not; it is no error."""
    folder = write_adapter(tmp_path, random_module("m", 1, 1, 1), r=1)
    store = mortar.AdapterStore()
    store.open("kept", folder)
    failed, running = [], True

    def read():
        while running:
            try:
                pairs, _ = store.slices("m")
                assert len(pairs) in (1, 2)
            except Exception as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        store.open("swapped", folder)
        store.close("swapped")
    running = False
    reader.join()
    assert not failed, failed[0]
