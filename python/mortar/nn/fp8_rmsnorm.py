# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that ends in FP8, with gradients, alone and followed by a product in FP8.

An FP8 tensor cannot carry a gradient: autograd would round it to FP8. What stands for it in the
graph is a *carrier*: a tensor of y's shape in y's wide dtype that has one element of memory (NaN,
so that reading it cannot go unnoticed) and whose gradient is that of y.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from .._fp8_ops import NUMERICS, SCALINGS, require_tensors
from .._fp8_outputs import Settings, record, require_fp8, settings
from .._library import differentiable_once, is_eager, refuse_transforms
from ..fp8 import Fp8Output, fp8_quantize, fp8_rmsnorm_backward, normalise
from ._fp8_carrier import carrier_of, check_carrier
from ._fp8_product import check_parts, check_product, multiply, quantize_gradient, rows_dense

_OPERANDS = (("x", False), ("x_scale", True), ("residual", True))
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_is_grad_enabled = torch.is_grad_enabled


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of a value of this dtype are."""
    return torch.bfloat16 if dtype in _FP8 else dtype


def _dense(gradient: Tensor) -> Tensor:
    """A gradient as the library reads it. Autograd may hand over an expanded one, such as that of
    `y.sum()`: only such a gradient, whose rows are not dense, is copied."""
    return gradient if gradient.is_contiguous() else gradient.contiguous()


class _Gradient(torch.autograd.Function):
    """Makes a carrier of y (or y itself) depend on `source`: x, or the carrier of `x` where that is
    given. Keeps x as it came, its scales, weight and rstd. What has no gradient comes in one tuple,
    as every argument costs the host time."""

    @staticmethod
    def forward(ctx, source, weight, residual, others):
        x, x_scale, rstd, updated, y, weight_offset = others
        ctx.options = source.dtype, weight_offset
        if updated is None:
            ctx.save_for_backward(x, x_scale, weight, rstd)
            return y
        ctx.save_for_backward(updated, None, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, updated

    @staticmethod
    @differentiable_once
    def backward(ctx, dy, dresidual=None):
        x, x_scale, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dresidual, None, dresidual, None
        wants, (dtype, weight_offset) = ctx.needs_input_grad, ctx.options
        # dx comes in the dtype of dy: no coarser one than x, the residual and its gradient have.
        if wants[0] and dy.dtype is not dtype:
            dy = dy.to(torch.promote_types(dy.dtype, dtype))
        if wants[2] or dresidual is not None:  # x is the residual then
            dy = dy.to(torch.promote_types(dy.dtype, x.dtype))
        dy = _dense(dy)
        if dresidual is not None:
            dresidual = _dense(dresidual.to(dy.dtype))
        dx, dw = fp8_rmsnorm_backward(dy, x, weight, rstd, x_scale=x_scale,
                                      weight_offset=weight_offset,
                                      residual_grad=dresidual)  # fmt: skip
        return (
            dx if wants[0] else None,
            dw if wants[1] else None,
            dx if wants[2] else None,
            None,
        )


# Function.apply but for its look for transforms of torch.func, which is_eager has done.
_make_differentiable = super(torch.autograd.Function, _Gradient).apply


class _Product(torch.autograd.Function):
    """y W^T in FP8 with y quantised before; sends the gradient of y to its carrier."""

    @staticmethod
    def forward(ctx, carrier, weight, q, scale, q_t, gradient_dtype, stochastic):
        ctx.save_for_backward(weight, scale, q_t)
        ctx.options = q.dtype, gradient_dtype, stochastic
        w = fp8_quantize(rows_dense(weight), q.dtype)
        flat = q.flatten(0, -2)
        out = multiply(flat, scale, w.q, w.scale, carrier.dtype)
        return out.view(*q.shape[:-1], weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, dy_out):
        weight, scale, q_t = ctx.saved_tensors
        fp8_dtype, gradient_dtype, stochastic = ctx.options
        dy_out = _dense(dy_out)
        flat = dy_out.flatten(0, -2)
        wants_y, wants_weight = ctx.needs_input_grad[:2]
        dtype = _wide(dy_out.dtype)
        sides = _sides(wants_y, wants_weight)
        g = quantize_gradient(flat, gradient_dtype, sides, stochastic)
        dy = dweight = None
        if wants_y:
            w = fp8_quantize(rows_dense(weight), fp8_dtype, transpose="only")
            dy = multiply(g.q, g.scale, w.q_t, w.scale, dtype)
            dy = dy.view(*dy_out.shape[:-1], weight.shape[1])
        if wants_weight:
            dweight = multiply(g.q_t, g.scale, q_t, scale, weight.dtype)
        return dy, dweight, None, None, None, None, None


def _sides(rows: bool, columns: bool) -> bool | str:
    """What `transpose` must be for q to be made if `rows`, and q_t if `columns`."""
    return (True if rows else "only") if columns else False


class Fp8RMSNorm(nn.Module):
    """RMSNorm whose result is FP8, with a gradient.

    Args:
        hidden_size: N.
        eps, weight_offset, fp8_dtype, scaling, group, pow2_scale, scale_layout, transpose, normed,
            stochastic, numerics: as in `mortar.fp8_rmsnorm`.
        device, dtype: of the weight, which starts as 1 - weight_offset.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        weight_offset: float = 0.0,
        fp8_dtype: torch.dtype | None = None,
        scaling: str = "tensor",
        group: int = 128,
        pow2_scale: bool = False,
        scale_layout: str = "row",
        transpose: bool | str = True,
        normed: bool = False,
        stochastic: bool = False,
        numerics: str = "fast",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.settings = settings("Fp8RMSNorm", fp8_dtype, scaling, group, False, pow2_scale,
                                 scale_layout, transpose, normed, stochastic, numerics, eps,
                                 weight_offset)  # fmt: skip
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def eps(self) -> float:
        """Part of `settings`, as weight_offset is: neither can be assigned."""
        return self.settings[1][0]

    @property
    def weight_offset(self) -> float:
        return self.settings[1][1]

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        _, _, scaling, *_, numerics = self.settings[1]
        return (
            f"{self.hidden_size}, eps={self.eps!r}, scaling={SCALINGS[scaling]!r}, "
            f"numerics={NUMERICS[numerics]!r}"
        )

    def forward(
        self,
        x: Tensor,
        x_scale: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        carrier: Tensor | None = None,
    ) -> Fp8Output:
        """Normalises x [M, N] or [B, T, N], as `mortar.fp8_rmsnorm` does.

        Args:
            x, x_scale, residual: as there. The residual is overwritten in eval mode alone, and
                where neither it nor x requires a gradient; else the updated one is a new tensor.
            carrier: stands for an FP8 x in autograd's graph: any tensor of x's shape, float32,
                float16 or bfloat16; its gradient is that of x * x_scale. It is not read.

        Returns:
            Fp8Output, whose `normed` is y in bfloat16 with normed=True and else the carrier of y
            (see above), in the dtype of x or its carrier, bfloat16 for an FP8 x without one; what
            consumes q must send the gradient of y there, as `mortar.nn.fp8_linear` does. `residual`
            has its gradient too. Gradients of float32 tensors are float32 all the way.
        """
        # The attribute itself goes through nn.Module's __getattr__, 0.4 us.
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        return _norm(x, x_scale, weight, residual, carrier, self.settings, self.training)


def _norm(x, x_scale, weight, residual, carrier, chosen: Settings, training: bool) -> Fp8Output:
    eager = is_eager(x)
    if not eager or x_scale is not None or residual is not None:
        require_tensors("Fp8RMSNorm", _OPERANDS, (x, x_scale, residual))
        refuse_transforms("Fp8RMSNorm")
    source = x
    if carrier is not None:
        check_carrier(carrier, x)
        source = carrier
    wanted = _is_grad_enabled()
    if wanted and x_scale is not None and x_scale.requires_grad:
        raise RuntimeError("Fp8RMSNorm: x_scale must not require a gradient, it has none")
    wide, wants_source = source.dtype, source.requires_grad
    if wide in _FP8:
        if wanted and wants_source:
            raise TypeError(
                "Fp8RMSNorm: carrier must be given with an 8-bit x that requires a gradient, "
                "got None"
            )
        wide = torch.bfloat16
    wants_residual = residual is not None and residual.requires_grad
    wanted = wanted and (wants_source or weight.requires_grad or wants_residual)
    updated = residual
    if residual is not None and (wanted or training or wants_source or wants_residual):
        # Reentrant checkpointing runs the forward without gradients, and again from the inputs that
        # it keeps: they must be what they were.
        updated = _copy(residual, weight)
    made = normalise(x, x_scale, weight, updated, chosen, eager)
    q, scale, q_t, scale_t, rstd, amax, _, y = made
    if y is None:
        y = carrier_of(x, wide, eager)
    if wanted:
        connect = _make_differentiable if eager else _Gradient.apply
        y = connect(source, weight, residual, (x, x_scale, rstd, updated, y, chosen[1][1]))
        if residual is not None:
            y, updated = y
    return record((q, scale, q_t, scale_t, rstd, amax, updated, y))


def _copy(residual: Tensor, weight: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # Inductor fails over a clone whose width is a symbol until a later product fixes it.
        torch._check(residual.shape[-1] == weight.shape[0])
    return residual.detach().clone()


def fp8_linear(
    activation: Fp8Output,
    weight: Tensor,
    *,
    gradient_dtype: torch.dtype = torch.float8_e5m2,
    stochastic: bool = False,
) -> Tensor:
    """y W^T in FP8, of an activation quantised by `Fp8RMSNorm`.

    The weight is quantised as a whole, in the forward and (transposed) in the backward. There the
    gradient of the result becomes FP8 as well, and q_t enters the gradient of the weight. Nothing
    is kept for the backward but q_t, its scale and the weight.

    Args:
        activation: q [..., N] with one scale for all ("tensor"), q_t, and its carrier in `normed`.
        weight: [O, N], bfloat16, float16 or float32, any O; copied where its rows are not dense.
        gradient_dtype: of the quantised gradient.
        stochastic: round that gradient stochastically.

    Returns:
        [..., O] in the dtype of the carrier (bfloat16 where there is none).

    Raises:
        TypeError: gradient_dtype is no FP8 dtype, or an argument has another type.
        ValueError: weight has another shape, activation has no q, more than one scale, or, where a
            gradient of the weight is wanted, no q_t.
    """
    require_fp8("fp8_linear", "gradient_dtype", gradient_dtype)
    check_product(activation, weight)
    q, scale, q_t, carrier = activation.q, activation.scale, activation.q_t, activation.normed
    if q is None or scale is None or scale.ndim != 0:
        raise ValueError(
            "fp8_linear: activation must have q and one scale (transpose=True, scaling='tensor'), "
            f"got {'no q' if q is None else 'a scale of shape ' + str(tuple(scale.shape))}"
        )
    wants_weight = torch.is_grad_enabled() and weight.requires_grad
    if wants_weight and q_t is None:
        raise ValueError("fp8_linear: activation must have q_t for the weight's gradient, got None")
    check_parts(q, q_t if wants_weight else None, carrier)
    if carrier is None:
        carrier = carrier_of(q, torch.bfloat16, is_eager(q))
    return _Product.apply(carrier, weight, q, scale, q_t, gradient_dtype, stochastic)


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module is more, or other, than Fp8RMSNorm's forward: as of a subclass,
    or where a library that loads weights when they are needed has put its own in that place."""
    return bool(
        type(module) is not Fp8RMSNorm
        or "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_global_hooks()
    )


class Fp8RMSNormLinear(nn.Module):
    """RMSNorm, then a linear layer without bias, in FP8 both ways.

    The product goes through torch._scaled_mm on GPUs that have it, and is computed in float32 from
    the same FP8 values elsewhere. Kept for the backward: x as it came, its scales, rstd, q_t
    and its scale.

    Args:
        in_features, out_features: N and O.
        eps, weight_offset, fp8_dtype, stochastic, numerics: as in `mortar.fp8_rmsnorm`.
        gradient_dtype, stochastic_gradient: the gradient of the result is quantised to this dtype,
            at random on request.
        device, dtype: of both weights.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        weight_offset: float = 0.0,
        fp8_dtype: torch.dtype | None = None,
        stochastic: bool = False,
        numerics: str = "fast",
        gradient_dtype: torch.dtype = torch.float8_e5m2,
        stochastic_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_fp8("Fp8RMSNormLinear", "gradient_dtype", gradient_dtype)
        self.in_features, self.out_features = in_features, out_features
        self.gradient_dtype, self.stochastic_gradient = gradient_dtype, stochastic_gradient
        self.norm = Fp8RMSNorm(
            in_features, eps, weight_offset=weight_offset, fp8_dtype=fp8_dtype,
            stochastic=stochastic, numerics=numerics, device=device, dtype=dtype,
        )  # fmt: skip
        self._without_q_t = settings("Fp8RMSNorm", fp8_dtype, "tensor", 128, False, False, "row",
                                     False, False, stochastic, numerics, eps,
                                     weight_offset)  # fmt: skip
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"

    def forward(
        self,
        x: Tensor,
        x_scale: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        carrier: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., O] of x [..., N] in the dtype of x or its carrier (bfloat16 for an FP8 x without
        one); with a residual the pair of that and the updated residual. Arguments are those of
        `Fp8RMSNorm`."""
        norm = self.norm
        wants = _is_grad_enabled() and self.weight.requires_grad
        if wants or _is_hooked(norm):
            out = norm(x, x_scale, residual=residual, carrier=carrier)
        else:
            out = _norm(
                x, x_scale, norm.weight, residual, carrier, self._without_q_t, norm.training
            )
        y = fp8_linear(out, self.weight, gradient_dtype=self.gradient_dtype,
                       stochastic=self.stochastic_gradient)  # fmt: skip
        return y if residual is None else (y, out.residual)
