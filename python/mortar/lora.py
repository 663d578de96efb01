# SPDX-License-Identifier: Apache-2.0
"""Multi-LoRA: ``y[t] (+)= scale_a * (x[t] @ A_a.T) @ B_a.T``, where ``a`` is token t's adapter.

One batch mixes tokens of many adapters with tokens of the base model (id -1). Once per step
``plan`` groups the tokens by adapter, on the device; every layer of the step then calls ``apply``
(or ``shrink`` and ``expand``) with that plan::

    plan = mortar.lora.plan(token_adapter, num_adapters)          # int32 [M], -1 = base
    weights = mortar.lora.Weights.from_adapters([(A0, B0), (A1, B1)], scales=[2.0, 0.5])
    mortar.lora.apply(y, x, weights, plan)                        # y [M, N] += delta

Dimensions: M tokens, L adapters, S slices that share x (q/k/v, gate/up; 1 to 8), K hidden size
in, N_s hidden size out of slice s, R rank (1 to 512). x, y and the weights are float32, float16 or
bfloat16 in any mixture; products are summed in float32. Results are bitwise repeatable, and a
token's result does not depend on the rest of its batch.

The same ops are ``torch.ops.mortar.lora_plan``, ``lora_shrink``, ``lora_expand`` and
``lora_apply`` (the last three with an overload ``.table``). They take ``plan.data``, write into
their arguments and return nothing, work on CPU and CUDA on the current stream, never synchronise,
and may be captured into CUDA graphs or traced by ``torch.compile(fullgraph=True)``.

They are for inference: arguments that require gradients are refused (RuntimeError) while gradients
are enabled, when every call looks at all tensors of its weights, and so are those with tangents of
forward-mode AD. Inputs may be negative-bit views, outputs not (ValueError).

A plan also keeps the workspace that ``apply`` and ``shrink`` need between their kernels: a tensor
of PyTorch's allocator, taken by the first layer, shared by all, larger where a layer needs more.
A plan therefore belongs to one stream at a time. (Used on another, it takes a workspace anew;
threads that share a plan have one each.) A call that is captured into a CUDA graph takes its own,
from the graph's memory, so that what a plan keeps never enters a graph.

A wrong argument raises ValueError (shape, size, stride, alignment, overlap) or TypeError (dtype,
device) before anything is written. Ids outside [-1, L) count as -1; ``check`` reports them.

Training is ``linear`` and ``mixed_linear`` (lora_train.py), which have gradients.

The method is that of Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285).
"""

import os
from functools import cached_property
from typing import NamedTuple

import torch

from . import _lora_ops as ops
from ._ffi import WRITTEN, lib, torch_function
from ._library import increment_version, is_eager, negation, refuse_nested
from ._limits import LORA_MAX_ADAPTERS, LORA_MAX_TOKENS
from ._lora_memory import ANY_STREAM, Memory
from ._lora_weights import Weights
from .lora_train import linear, mixed_linear

__all__ = [
    "Plan",
    "PlanReport",
    "Weights",
    "apply",
    "check",
    "expand",
    "launch_plan",
    "linear",
    "mixed_linear",
    "plan",
    "shrink",
]

_CHECK_EVERY_PLAN = os.environ.get("MORTAR_DEBUG_CHECKS", "0") not in ("", "0")
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
# Eager calls go straight to these. They return 0 for what only the ops can take or refuse.
_plan_now, _shrink_now = torch_function("torch_lora_plan"), torch_function("torch_lora_shrink")
_expand_now, _apply_now = torch_function("torch_lora_expand"), torch_function("torch_lora_apply")


def _plan_bound() -> tuple[int, int, int]:
    """(per token, per adapter, constant) of a bound on the size of any plan: the slopes at the far
    end. It holds below because sizes grow by ever less, but for rounding up to tiles."""
    far = lib.lora_plan_size(2**20, 4096)
    tokens = far - lib.lora_plan_size(2**19, 4096)
    adapters = far - lib.lora_plan_size(2**20, 2**11)
    return -(-tokens // 2**19), -(-adapters // 2**11), far - 2 * (tokens + adapters) + 256


_BOUND = _plan_bound()


def _plan_size(num_tokens, num_adapters):
    """int32 elements of a plan; an upper bound where tracing brings sizes that are symbols."""
    if _is_compiling() or not isinstance(num_tokens, int):
        return _BOUND[0] * num_tokens + _BOUND[1] * num_adapters + _BOUND[2]
    try:
        return lib.lora_plan_size(num_tokens, num_adapters)
    except (TypeError, ValueError):  # in the words of another function
        pass
    if num_tokens > LORA_MAX_TOKENS:
        raise ValueError(
            f"lora_plan: token_adapter must have at most {LORA_MAX_TOKENS} tokens, got {num_tokens}"
        )
    raise ValueError(
        f"lora_plan: num_adapters must be 1 to {LORA_MAX_ADAPTERS}, got {num_adapters}"
    )


class _PlanFields(NamedTuple):
    data: torch.Tensor
    num_tokens: int
    num_adapters: int


class Plan(_PlanFields):
    """A batch's tokens grouped by adapter; made by ``plan``, used by every layer of a step.

    Attributes:
        data: int32, on the device of the tokens.
        num_tokens: M.
        num_adapters: L.
    """

    @cached_property
    def memory(self) -> Memory:
        """Where calls that are given no workspace find one."""
        return Memory()


class PlanReport(NamedTuple):
    """What ``plan`` saw."""

    num_tokens: int
    num_adapters: int
    num_active: int
    """Tokens that have an adapter."""
    num_groups: int
    """Distinct adapters among them."""
    num_out_of_range: int
    """Ids outside [-1, L), treated as -1."""
    first_out_of_range: int
    """The first such token, -1 if there is none."""


def plan(token_adapter: torch.Tensor, num_adapters: int, out: Plan | None = None) -> Plan:
    """Groups tokens by adapter, stably, in one launch and without waiting for the device.

    Args:
        token_adapter: int32 or int64 [M], contiguous, M up to 2^20: each token's adapter in
            [0, L), or -1 for a base token. Ids outside [-1, L) count as -1.
        num_adapters: L, 1 to 4096; the L of the weights that the plan is used with.
        out: a plan to overwrite, large enough for (M, L). A CUDA graph that was captured with it
            may be replayed after ``token_adapter`` has changed in place.

    Returns:
        The plan, on the device of ``token_adapter``.

    With the environment variable MORTAR_DEBUG_CHECKS=1 every plan is followed by ``check``, which
    waits for the device and so cannot be captured into a CUDA graph.
    """
    _check_arguments(token_adapter, num_adapters, out)
    num_tokens = token_adapter.shape[0]
    if out is None:
        size = _plan_size(num_tokens, num_adapters)
        data = torch.empty(size, dtype=torch.int32, device=token_adapter.device)
    else:
        data = out.data
    tensors = (token_adapter, data)
    if not (is_eager(token_adapter) and _plan_now(id(tensors), num_adapters)):
        ops.call_plan(token_adapter, num_adapters, data)
    else:
        ops.remember_sizes(data, num_tokens, num_adapters)
    same = out is not None and out[1:] == (num_tokens, num_adapters)
    made = out if same else Plan(data, num_tokens, num_adapters)
    if _CHECK_EVERY_PLAN and not _is_compiling():
        check(made)
    return made


def _check_arguments(token_adapter: torch.Tensor, num_adapters: int, out: Plan | None) -> None:
    if not isinstance(token_adapter, torch.Tensor):
        got = type(token_adapter).__name__
        raise TypeError(f"lora_plan: token_adapter must be a tensor, got {got}")
    if token_adapter.ndim != 1:
        refuse_nested("lora_plan", token_adapter=token_adapter)
        raise ValueError(
            "lora_plan: token_adapter must have 1 dimension, got shape "
            f"{tuple(token_adapter.shape)}"
        )
    if out is not None and not isinstance(out, Plan):
        raise TypeError(f"lora_plan: out must be a mortar.lora.Plan, got {type(out).__name__}")
    if type(num_adapters) is not int and not hasattr(num_adapters, "__index__"):
        got = type(num_adapters).__name__
        raise TypeError(f"lora_plan: num_adapters must be an integer, got {got}")


def check(plan: Plan) -> PlanReport:
    """Reports what a plan saw; waits for the device, so for debugging only.

    Raises:
        ValueError: ids outside [-1, L) were among the tokens.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"check: plan must be a mortar.lora.Plan, got {type(plan).__name__}")
    report = PlanReport(*lib.lora_plan_report(plan.data))
    if report.num_out_of_range:
        raise ValueError(
            f"lora_plan: token_adapter must hold ids in [-1, {report.num_adapters}), got "
            f"{report.num_out_of_range} others, the first at token {report.first_out_of_range}"
        )
    return report


def _check_plan(op: str, plan: Plan, rows: torch.Tensor, weights: Weights) -> None:
    """What the library checks in eager calls; the ops know the plan's tensor alone."""
    sizes = (rows.shape[0], weights.num_adapters) if rows.ndim else plan[1:]
    if plan[1:] != sizes:
        raise ValueError(
            f"{op}: plan must be made for {sizes[0]} tokens and {sizes[1]} adapters, got one for "
            f"{plan[1]} and {plan[2]}"
        )


def _check_types(
    op: str, weights: Weights, plan: Plan, written: str, **tensors: torch.Tensor | None
) -> None:
    """Names an argument of a wrong type, for calls that the quick way has not taken. The workspace
    and zero_rows may be None; the tensor that is ``written`` must hold its own values."""
    for name, value in tensors.items():
        left_out = value is None and name in ("workspace", "zero_rows")
        if not isinstance(value, torch.Tensor) and not left_out:
            got = "None" if value is None else type(value).__name__
            raise TypeError(f"{op}: {name} must be a tensor, got {got}")
    refuse_nested(op, **tensors)
    for name, value, kind in (("weights", weights, Weights), ("plan", plan, Plan)):
        if not isinstance(value, kind):
            got = "None" if value is None else type(value).__name__
            raise TypeError(f"{op}: {name} must be a mortar.lora.{kind.__name__}, got {got}")
    if not _is_compiling() and tensors[written].is_neg():
        raise negation(op, written)


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: Weights,
    plan: Plan,
    scale: float = 1.0,
    add_inputs: bool = True,
    offset: int = 0,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds every token's LoRA delta to its row of y.

    ``y[t, offset_s : offset_s + N_s] (+)= scale * scale_a * (x[t] @ A_{a,s}.T) @ B_{a,s}.T`` with
    ``offset_s = offset + N_0 + ... + N_{s-1}``. Rows of base tokens, columns outside the slices
    and slices that an adapter leaves alone are untouched.

    Args:
        y: [M, N >= offset + sum N_s], last dimension dense; written in place.
        x: [M, K], last dimension dense; must not overlap y.
        weights: the adapters of this layer. On CUDA they may be read while the kernel before this
            call still runs: what writes them must be queued before ``plan``, or before another
            kernel.
        plan: of these M tokens and L adapters.
        scale: multiplies every adapter's own scale.
        add_inputs: False overwrites instead of adding.
        offset: column of y where the first slice begins.
        workspace: uint8 [weights.workspace_size(x)], 16-byte aligned. Must not be shared by calls
            on different streams. None: the plan's own.

    Returns:
        y.
    """
    if is_eager(x):
        try:
            if y.is_neg():
                raise negation("lora_apply", "y")
            if _is_grad_enabled():
                ops.guard_autograd("lora_apply", (x, y, *weights.watched))
            memory, stream = plan.memory.get() if workspace is None else (workspace, ANY_STREAM)
            tensors = (x, y, memory, plan.data)
            done = _apply_now(id(tensors), stream, offset, scale, add_inputs, plan.num_tokens,
                              plan.num_adapters, weights.handle)  # fmt: skip
            if done == WRITTEN:
                increment_version((y,))
                return y
            if done and workspace is None:
                more = plan.memory.more(x, done)
                return apply(y, x, weights, plan, scale, add_inputs, offset, more)
        except AttributeError:
            pass  # of an argument of another type, which the next line names
    _check_types("lora_apply", weights, plan, "y", x=x, y=y, workspace=workspace)
    _check_plan("lora_apply", plan, x, weights)
    weights.call_apply(x, plan.data, *weights.apply_args, y, offset, scale, add_inputs, workspace)
    return y


def launch_plan(y: torch.Tensor, x: torch.Tensor, weights: Weights, offset: int = 0) -> str:
    """The kernels that ``apply`` would run for such arguments, with their shapes and the bytes of
    workspace that they use, as one line of text. Launches nothing.

    With ``MORTAR_LOG=launch`` in the environment every call on CUDA writes its own to stderr.
    """
    if not isinstance(weights, Weights):
        got = "None" if weights is None else type(weights).__name__
        raise TypeError(f"lora_launch_plan: weights must be a mortar.lora.Weights, got {got}")
    return str(lib.lora_launch_plan(x, y, offset, weights.handle))


def shrink(
    x: torch.Tensor,
    weights: Weights,
    plan: Plan,
    h: torch.Tensor | None = None,
    scale: float = 1.0,
    zero_rows: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first half of ``apply``: ``h[s, t, :rank] = scale * scale_a * (x[t] @ A_{a,s}.T)``.

    Args:
        x: [M, K], last dimension dense.
        weights, plan, scale: as for ``apply``.
        h: [S, M, R >= weights.max_rank], float32 or the dtype of x; a float32 one is made if None.
            Columns past an adapter's rank become 0.
        zero_rows: int32 or int64 [M] (the token -> adapter map): rows whose id lies outside
            [0, L) become 0. Without it rows of base tokens are untouched, and hold anything in an
            h made here.
        workspace: as for ``apply``.

    Returns:
        h.
    """
    if h is None:
        if not isinstance(x, torch.Tensor) or not isinstance(weights, Weights):
            _check_types("lora_shrink", weights, plan, "x", x=x)
        if x.ndim != 2:
            refuse_nested("lora_shrink", x=x)
            raise ValueError(f"lora_shrink: x must have 2 dimensions, got shape {tuple(x.shape)}")
        shape = (weights.num_slices, x.shape[0], weights.max_rank)
        h = torch.empty(shape, dtype=torch.float32, device=x.device)
    if is_eager(x):
        try:
            if h.is_neg():
                raise negation("lora_shrink", "h")
            if _is_grad_enabled():
                ops.guard_autograd("lora_shrink", (x, h, *weights.watched))
            memory, stream = plan.memory.get() if workspace is None else (workspace, ANY_STREAM)
            tensors = (x, h, memory, zero_rows, plan.data)
            done = _shrink_now(id(tensors), stream, scale, plan.num_tokens, plan.num_adapters,
                               weights.handle)  # fmt: skip
            if done == WRITTEN:
                increment_version((h,))
                return h
            if done and workspace is None:
                more = plan.memory.more(x, done)
                return shrink(x, weights, plan, h, scale, zero_rows, more)
        except AttributeError:
            pass
    _check_types(
        "lora_shrink", weights, plan, "h", x=x, h=h, zero_rows=zero_rows, workspace=workspace
    )
    _check_plan("lora_shrink", plan, x, weights)
    weights.call_shrink(x, plan.data, *weights.shrink_args, h, scale, zero_rows, workspace)
    return h


def expand(
    y: torch.Tensor,
    h: torch.Tensor,
    weights: Weights,
    plan: Plan,
    add_inputs: bool = True,
    offset: int = 0,
) -> torch.Tensor:
    """The second half of ``apply``: ``y[t, offset_s : offset_s + N_s] (+)= h[s, t] @ B_{a,s}.T``.

    Args:
        y, plan, add_inputs, offset: as for ``apply``.
        h: [S, M, R >= weights.max_rank], last dimension dense; the adapters' scales are already in
            it. Rounded to the dtype of B first where that is 16-bit and the dtype of y.

    Returns:
        y.
    """
    if is_eager(h):
        try:
            if y.is_neg():
                raise negation("lora_expand", "y")
            if _is_grad_enabled():
                ops.guard_autograd("lora_expand", (h, y, *weights.watched))
            sizes = (plan.num_tokens, plan.num_adapters)
            tensors = (h, y, plan.data)
            if _expand_now(id(tensors), offset, add_inputs, *sizes, weights.handle):
                increment_version((y,))
                return y
        except AttributeError:
            pass
    _check_types("lora_expand", weights, plan, "y", y=y, h=h)
    _check_plan("lora_expand", plan, y, weights)
    weights.call_expand(h, plan.data, *weights.expand_args, y, offset, add_inputs)
    return y
