# SPDX-License-Identifier: Apache-2.0
"""Bases of LoRA training that change in place while a gradient is wanted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C import _autograd

_PLAIN_VIEW = _autograd.CreationMeta.DEFAULT


def check_changeable(op: str, base: Sequence[Tensor]) -> None:
    """Refuses what autograd would, after the call had written it."""
    for t in base:
        if t.requires_grad and t.is_leaf:
            raise RuntimeError(
                f"{op}: out must be no leaf that requires a gradient while one is wanted, got such "
                "a tensor; leave it away or call it under torch.no_grad()"
            )
        if t.is_inference():
            raise RuntimeError(
                f"{op}: out must be no tensor of inference mode while a gradient is wanted, got "
                "one; clone() it"
            )
        if not t._is_view():
            continue
        if t._base.requires_grad and t._base.is_leaf:
            raise RuntimeError(
                f"{op}: out must be no view of a leaf that requires a gradient while one is "
                "wanted, got such a view; leave it away or call it under torch.no_grad()"
            )
        if _autograd._get_creation_meta(t) != _PLAIN_VIEW:
            raise RuntimeError(
                f"{op}: out must be no view that torch.split and its like made, or torch.no_grad(),"
                " while a gradient is wanted, got one; slice the tensor instead, with gradients on"
            )


def overwrite(base: Sequence[Tensor], values: Sequence[Tensor], are_views: bool) -> list[Tensor]:
    """Copies values into the base, as autograd sees it."""
    done = []
    for old, new in zip(base, values, strict=True):
        if are_views:
            # PyTorch looks there, too, whether the view is a leaf, but does not ask for it: of two
            # views of a tensor without a gradient the first copy gives the second one a node.
            _ = old.grad_fn
        done.append(old.copy_(new))
    return done
