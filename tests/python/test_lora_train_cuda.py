# SPDX-License-Identifier: Apache-2.0
"""LoRA training on a GPU: what a PEFT layer costs the host, and threads without a context."""

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model

import mortar.compat.peft
from mortar import lora_train
from test_lora_cuda import host_costs


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_layer_costs_the_host_less_than_pefts(dropout):
    """Forward and backward at 512 tokens, whose kernels the device runs as fast as they come."""
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    config = LoraConfig(r=16, lora_dropout=dropout, target_modules=["0"])
    theirs = get_peft_model(torch.nn.Sequential(linear), config).train()
    ours = mortar.compat.peft.accelerate(copy.deepcopy(theirs))
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(model):
        return lambda: model(x).backward(x.detach())

    cost, limit = host_costs(step(ours), step(theirs), bursts=50, calls=20)
    print(f"host cost of a layer: {cost:.1f} us, at most {limit:.1f}")
    assert cost <= limit


@pytest.mark.parametrize(
    "dtype, rank", [(torch.float32, 16), (torch.float32, 32), (torch.bfloat16, 64)], ids=str
)
def test_the_first_call_of_a_thread(dtype, rank):
    """A thread that has used no device yet, as one of autograd's, has no context, which the driver
    wants where a kernel copies boxes."""

    def tensor(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    x, a, b, y = tensor(2048, 1024), tensor(rank, 1024), tensor(768, rank), tensor(2048, 768)
    dx, da, db = (torch.zeros_like(t) for t in (x, a, b))

    def forward():
        lora_train.linear(x, a, b, out=y)

    def backward():
        lora_train.backward(y, a, b, x=x, dx=dx, da=da, db=db)

    errors = []
    for call in (forward, backward):

        def run(call=call):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

        call()  # the workspace is kept by PyTorch: to allocate it would make a context
        results = [t.clone() for t in (y, dx, da, db)]
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not errors
        for got, want in zip((y, dx, da, db), results, strict=True):
            assert torch.equal(got, want)
