# SPDX-License-Identifier: Apache-2.0
"""Limits of the library, as its public headers define them: read from the library, not repeated."""

from ._ffi import lib

_limits = {str(name): int(value) for name, value in lib.limits().items()}

MEMORY_ALIGNMENT = _limits["memory_alignment"]
"""Bytes: what vector loads of the kernels need."""

LORA_MAX_SLICES = _limits["lora_max_slices"]
LORA_MAX_RANK = _limits["lora_max_rank"]
LORA_MAX_ADAPTERS = _limits["lora_max_adapters"]
LORA_MAX_TOKENS = _limits["lora_max_tokens"]
DYNAMIC_CONV_MAX_WIDTH = _limits["dynamic_conv_max_width"]
FP8_RMSNORM_MAX_HIDDEN = _limits["fp8_rmsnorm_max_hidden"]
