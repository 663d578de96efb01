# SPDX-License-Identifier: Apache-2.0
"""The part of NeMo Automodel that mortar.compat.nemo takes over, in plain PyTorch: modules of the
same names that hold classes and functions of the same names, arguments and contracts."""

import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

PACKAGE = "nemo_automodel.components._peft"


def lora_forward_wrapper(x, lora_A, lora_B, res, scale, dtype=torch.float32):
    raise NotImplementedError("Triton")


def lora_da_dx_update_wrapper(xt, dy, lora_B, lora_A, scale, dtype=torch.float32):
    raise NotImplementedError("Triton")


def lora_db_update_wrapper(lora_A, xt, dy, scale, dtype=torch.float32):
    raise NotImplementedError("Triton")


class LoRATritonFunction(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        raise NotImplementedError("replaced by install")

    @staticmethod
    def forward(x, lora_A, lora_B, scale, dtype, use_triton_kernel=True, res=None):
        raise NotImplementedError("replaced by install")

    @staticmethod
    def backward(ctx, d_y):
        raise NotImplementedError("replaced by install")


class LinearLoRA(nn.Linear):
    flag = False

    @staticmethod
    def _init_adapter(layer, dim, alpha):
        layer.lora_A = nn.Linear(layer.in_features, dim, bias=False)
        layer.lora_B = nn.Linear(dim, layer.out_features, bias=False)
        layer.scale = alpha / dim

    def forward(self, x):
        res = F.linear(x, self.weight, self.bias)
        y = LoRATritonFunction.apply(
            x, self.lora_A.weight, self.lora_B.weight, self.scale, x.dtype, self.flag, res
        )
        return y.reshape(*x.shape[:-1], -1)


class TritonLinearLoRA(LinearLoRA):
    flag = True


def patch_linear_module(orig_linear, dim=8, alpha=32, use_dora=False, use_triton=True):
    """As with Transformer Engine installed: use_triton is left out."""
    LinearLoRA._init_adapter(orig_linear, dim, alpha)
    orig_linear.__class__ = type("PatchedLinearLoRA", (LinearLoRA, type(orig_linear)), {})
    return orig_linear


def load(monkeypatch) -> tuple[types.ModuleType, types.ModuleType]:
    """Puts the modules `lora_kernel` and `lora` where NeMo's would be."""
    kernels, layers = (types.ModuleType(f"{PACKAGE}.{n}") for n in ("lora_kernel", "lora"))
    names = [lora_forward_wrapper, lora_da_dx_update_wrapper, lora_db_update_wrapper]
    for function in names:
        setattr(kernels, function.__name__, function)
        setattr(layers, function.__name__, function)
    for thing in (LoRATritonFunction, LinearLoRA, TritonLinearLoRA, patch_linear_module):
        setattr(layers, thing.__name__, thing)
    for module in (kernels, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernels, layers
