# SPDX-License-Identifier: Apache-2.0
"""Modules of PyTorch built on Mortar's ops."""

from .dynamic_short_convolution import DynamicShortConvolution

__all__ = ["DynamicShortConvolution"]
