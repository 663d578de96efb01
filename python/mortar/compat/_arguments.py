# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins check of their arguments before they look into them."""

from torch import Tensor

from .._library import in_words, refuse_nested


def check_dimensions(function: str, **given: tuple) -> None:
    """One sentence for the first argument that is no tensor, or has another number of dimensions.
    Each is given as (value, dimensions, other dimensions that will do, ...)."""
    for name, (value, *dimensions) in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(value).__name__}")
        if value.ndim not in dimensions:
            refuse_nested(function, **{name: value})
            wanted, shape = " or ".join(map(str, dimensions)), tuple(value.shape)
            raise ValueError(f"{function}: {name} must have {wanted} dimensions, got shape {shape}")


def in_words_of(function: str, error: Exception, **given) -> Exception:
    """What to raise for an error of PyTorch's: one sentence where an argument of the drop-in holds
    no plain memory, and else the error as it is."""
    tensors = [(name, t) for name, t in given.items() if isinstance(t, Tensor)]
    return in_words(function, tensors, error)
