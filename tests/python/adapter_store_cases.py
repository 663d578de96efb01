# SPDX-License-Identifier: Apache-2.0
"""Makes adapter folders: the files that PEFT would save, and wrong ones by changing a part."""

import json
import struct
from pathlib import Path

import torch

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}


def random_module(name: str, rank: int, hidden: int, width: int, dtype=torch.float32) -> dict:
    """The two tensors of a module, by the names that PEFT gives them."""
    prefix = f"base_model.model.{name}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, hidden).to(dtype),
        f"{prefix}.lora_B.weight": torch.randn(width, rank).to(dtype),
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def safetensors_bytes(tensors: dict, pad_to: int = 8) -> bytes:
    """A safetensors file; its data begins `pad_to` bytes aligned."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        fields = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = fields | {"data_offsets": offsets}
        data += raw_bytes(tensor)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % pad_to)
    return struct.pack("<Q", len(text)) + text + data


def write_adapter(folder: Path, tensors: dict | bytes, pad_to: int = 8, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    if isinstance(tensors, dict):
        tensors = safetensors_bytes(tensors, pad_to)
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    return folder
