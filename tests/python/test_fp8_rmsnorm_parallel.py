# SPDX-License-Identifier: Apache-2.0
"""Two processes, by DDP and by FSDP2, train as one does."""

import copy
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mortar.nn import Fp8RMSNormLinear

STEPS, ROWS, WIDTH = 3, 32, 48


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Fp8RMSNormLinear(WIDTH, WIDTH), Fp8RMSNormLinear(WIDTH, 16))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train_alone() -> dict[str, torch.Tensor]:
    """Both halves of every batch, one after the other: what two processes average."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(step, rank)).square().mean() / 2).backward()
        optimizer.step()
    return model.state_dict()


def worker(rank: int, kind: str, folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=120))  # fmt: skip
    model = build()
    if kind == "ddp":
        inner, model = model, nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        inner = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p
             for n, p in inner.state_dict().items()}  # fmt: skip
    if rank == 0:
        torch.save(state, os.path.join(folder, "state.pt"))
    # DDP must not be the group's last owner: it would wait, with Python's lock held, for gloo's
    # threads, which need the lock to end.
    del model, inner
    dist.destroy_process_group()
    # PyTorch's own threads are not taken down: now and then one that still ran ended the process
    # with "terminate called without an active exception".
    os._exit(0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one(kind):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (kind, folder), nprocs=2)
        together = torch.load(os.path.join(folder, "state.pt"))
    alone, start = train_alone(), copy.deepcopy(build().state_dict())
    assert together.keys() == alone.keys()
    for name, want in alone.items():
        moved = (want - start[name]).norm()
        # Halves of a sum may be added in another order: a float32 rounding of each gradient.
        assert moved > 0 and (together[name] - want).norm() <= 2**-18 * moved + 2**-22 * want.norm()
