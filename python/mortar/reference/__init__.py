# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch references in float64, to test against. Slow and obvious on purpose."""

from . import dynamic_conv, fp8_rmsnorm, lora, lora_train

__all__ = ["dynamic_conv", "fp8_rmsnorm", "lora", "lora_train"]
