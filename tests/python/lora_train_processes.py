# SPDX-License-Identifier: Apache-2.0
"""One of the two processes of test_lora_train_distributed.py: trains on its half of the rows and
leaves its gradients in a file."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mortar import lora

ROWS, HIDDEN = 16, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, HIDDEN))
        self.b = nn.Parameter(torch.randn(HIDDEN, 4))

    def forward(self, x):
        return lora.linear(x, self.a, self.b, 0.25, base=self.linear(x))


def make(device="cpu") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer())
    return model.to(device), torch.randn(ROWS, HIDDEN).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters() if p.requires_grad]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).cpu() for g in found]


def main(kind: str, rank: int, rendezvous: str, result: str, device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{rendezvous}", rank=rank, world_size=2)
    model, x = make(device)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh(device, (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    half = x[rank * ROWS // 2 : (rank + 1) * ROWS // 2]
    model(half).square().mean().backward()
    torch.save(gradients(model), result)
    # DDP must not be the group's last owner: it would wait, with Python's lock held, for gloo's
    # threads, which need the lock to end.
    del model
    dist.destroy_process_group()
    # PyTorch's own threads are not taken down: now and then one that still ran ended the process
    # with "terminate called without an active exception".
    os._exit(0)


if __name__ == "__main__":
    kind, rank, *paths = sys.argv[1:]
    main(kind, int(rank), *paths)
