# SPDX-License-Identifier: Apache-2.0
"""mortar.lora.Weights: whose memory they use, how long it lives, copies, pickles and threads."""

import copy
import gc
import io
import pickle
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy
import pytest
import torch

from lora_cases import Problem, make
from mortar import lora

PROBLEM = Problem(tokens=20, hidden=40, widths=(24, 16), ranks=(8, (3, 0), 5))
FORMS = ["table", "stacked"]


def owned(*shape):
    """A tensor over memory whose end can be seen."""
    array = numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32)
    return torch.from_numpy(array), weakref.ref(array)


def other_memory(weights, form):
    """Gives every tensor of the weights other memory, as module.to and offloading hooks do."""
    for tensor in weights.tensors():
        tensor.data = torch.full_like(tensor, float("nan"))
    if form == "stacked":
        for tensor in weights.apply_args[2:]:
            tensor.data = torch.zeros_like(tensor)


@pytest.mark.parametrize("form", FORMS)
def test_memory_stays_when_a_tensor_gets_other_memory(device, form):
    t = make(PROBLEM, device)
    weights, plan = t.weights(form), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    other_memory(weights, form)
    gc.collect()
    # What was freed would be given to these.
    junk = [torch.full_like(m, float("nan")) for m in weights.tensors() for _ in range(8)]
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
    del junk


def test_memory_lives_as_long_as_the_weights():
    a, memory = owned(4, 40)
    weights = lora.Weights.from_adapters([(a, torch.zeros(24, 4))])
    a.data = torch.zeros(4, 40)
    gc.collect()
    assert memory() is not None
    del weights
    gc.collect()
    assert memory() is None


def test_a_call_keeps_what_it_was_given_through_an_update():
    a, memory = owned(4, 40)
    weights = lora.Weights.from_adapters([(a, torch.zeros(24, 4))])
    of_a_running_call = weights.handle
    del a
    weights.update(0, None)
    gc.collect()
    assert memory() is not None
    del of_a_running_call
    gc.collect()
    assert memory() is None


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda weights: pickle.loads(pickle.dumps(weights)),
    "torch.save": lambda weights: torch.load(saved(weights), weights_only=False),
}


def saved(weights):
    file = io.BytesIO()
    torch.save(weights, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("replaced", [False, True], ids=["as made", "other memory since"])
def test_copies_own_their_memory(device, form, way, replaced):
    t = make(PROBLEM, device)
    weights, plan = t.weights(form), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    if replaced:
        other_memory(weights, form)
    made = COPIES[way](weights)
    if not replaced:
        for tensor in weights.tensors():
            tensor.fill_(float("nan"))
    del weights
    t.adapters.clear()
    gc.collect()
    assert (made.num_adapters, made.max_rank, made.hidden) == (3, 8, 40)
    assert made.widths == [24, 16] and made.dtype == t.problem.w_dtype
    assert torch.equal(lora.apply(t.y.clone(), t.x, made, plan), want)
    if form == "table":
        made.update(0, None)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_shares_with_what_was_copied_beside_it(form):
    """As in a copied model: writes to its own parameters are seen by its own weights."""
    t = make(PROBLEM, "cpu")
    weights, plan = t.weights(form), t.plan()
    before = lora.apply(t.y.clone(), t.x, weights, plan)
    made, tensors = copy.deepcopy((weights, weights.tensors()))
    for tensor in tensors:
        tensor.zero_()
    assert torch.equal(lora.apply(t.y.clone(), t.x, made, plan), t.y)
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), before)


def test_a_shallow_copy_has_its_own_table():
    t = make(PROBLEM, "cpu")
    weights, plan = t.table(), t.plan()
    before = lora.apply(t.y.clone(), t.x, weights, plan)
    made = copy.copy(weights)
    assert all(m is w for m, w in zip(made.tensors(), weights.tensors(), strict=True))
    made.update(0, None)
    made.update(2, None)
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), before)


def test_emptied_weights_can_be_copied(device):
    weights = make(PROBLEM, device).table()
    for slot in range(3):
        weights.update(slot, None)
    made = copy.deepcopy(weights)
    assert made.num_adapters == 3 and made.max_rank == 8 and made.tensors() == []
    made.update(1, None)


def test_weights_made_in_inference_mode_may_change_outside_of_it(device):
    t = make(PROBLEM, device)
    with torch.inference_mode():
        weights = t.table()
    weights.update(0, None)
    with torch.inference_mode():
        weights.update(1, None)
    weights.update(1, None)
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, t.plan())[t.token_adapter < 2],
                       t.y[t.token_adapter < 2])  # fmt: skip


def test_updates_beside_running_calls():
    """Every call sees one adapter whole: the old one or the new one."""
    tokens, hidden, width = 16, 1024, 1024
    x = torch.randn(tokens, hidden)
    plan = lora.plan(torch.zeros(tokens, dtype=torch.int32), 1)

    def adapter(which):
        a = torch.full((8 + 8 * which, hidden), 0.5 + which)
        return (a, torch.full((width, len(a)), 1.0 + which)), 1.0 - 0.25 * which

    def result(weights):
        return lora.apply(torch.zeros(tokens, width), x, weights, plan)

    wanted = [result(lora.Weights.from_adapters([a], [s])) for a, s in map(adapter, (0, 1))]
    assert not torch.equal(*wanted)
    weights = lora.Weights.from_adapters([adapter(0)[0]], max_rank=16)
    running, torn = True, []

    def read():
        while running:
            got = result(weights)
            if not any(torch.equal(got, want) for want in wanted):
                torn.append(got)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(3000):
        weights.update(0, *adapter(i % 2))
    running = False
    for reader in readers:
        reader.join()
    assert not torn, f"{len(torn)} results of no whole adapter"


def test_updates_of_several_threads_all_count():
    slots = 16
    zeros = (torch.zeros(2, 8), torch.zeros(8, 2))
    weights = lora.Weights.from_adapters([zeros] * slots)
    ones = (torch.ones(2, 8), torch.ones(8, 2))

    def fill(first):
        for slot in range(first, slots, 4):
            weights.update(slot, ones)

    for _ in range(20):
        threads = [threading.Thread(target=fill, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = torch.arange(slots, dtype=torch.int32)
        y = lora.apply(torch.zeros(slots, 8), torch.ones(slots, 8), weights, lora.plan(ids, slots))
        assert torch.equal(y, torch.full((slots, 8), 16.0))
        for slot in range(slots):
            weights.update(slot, zeros)


@pytest.mark.parametrize("form", ["table", "stacked"])
def test_weights_that_are_sent_to_another_process_stay_in_use(form):
    """Sending moves tensors into shared memory, and would free what the weights point to."""
    t = make(PROBLEM, torch.device("cpu"))
    weights, plan = t.weights(form), t.plan()
    want = lora.apply(t.y.clone(), t.x, weights, plan)
    addresses = [tensor.data_ptr() for tensor in weights.tensors()]
    sent = ForkingPickler.dumps(weights)
    assert [tensor.data_ptr() for tensor in weights.tensors()] == addresses
    assert torch.equal(lora.apply(t.y.clone(), t.x, weights, plan), want)
    received = ForkingPickler.loads(sent)
    assert torch.equal(lora.apply(t.y.clone(), t.x, received, plan), want)
