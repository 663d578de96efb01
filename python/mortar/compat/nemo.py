# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the LoRA kernels of NeMo Automodel (`nemo_automodel.components._peft`).

    import mortar.compat.nemo
    mortar.compat.nemo.install()        # after importing nemo_automodel, before or after the model

The three functions have the originals' arguments, shapes and meaning. Unlike the originals they
take float32 as float32 (no TF32), any mixture of dtypes, any rank to 512 and CPU tensors, sum in
float32 in a fixed order, and are neither compiled nor tuned at run time.

`install()` puts them wherever they were imported to, and takes over `LoRATritonFunction` with
either value of its flag `use_triton_kernel`, so that the default memory-efficient path runs on
Mortar and adds the residual in the same pass. As before it saves x and the weights alone, and its
result is 2-D, no view, and may be changed in place. What does not come to these functions, the MLPs
that NeMo runs as one function (`lora_mlp`) among others, stays NeMo's: docs/training.md lists it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from .. import _lora_train_ops as ops
from .._library import differentiable_once, increment_version, is_eager
from .._lora_train_arguments import as_number, check_shape, check_written
from .._lora_train_calls import NO_ROWS, known_layer
from ._arguments import check_dimensions
from ._install import Replacements, found

__all__ = [
    "install",
    "lora_da_dx_update_wrapper",
    "lora_db_update_wrapper",
    "lora_forward_wrapper",
    "uninstall",
]


def _layer(width: int, scale: float) -> ops.Layer:
    return known_layer((width,), (0,), (float(scale),), (0.0,), False)


def _one_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights in one dtype, the wider, with their own values: they are small."""
    a, b = a.resolve_neg(), b.resolve_neg()
    if a.dtype is b.dtype:
        return a, b
    for name, t in (("lora_A", a), ("lora_B", b)):
        if not t.is_floating_point() or t.is_quantized:
            raise TypeError(f"LoRA: {name} must be of a float type, got {t.dtype}")
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _read(function: str, scale: float, **matrices: Tensor) -> list[Tensor]:
    """The matrices, checked, with their own values."""
    as_number(function, "scale", scale)
    check_dimensions(function, **{name: (value, 2) for name, value in matrices.items()})
    return [t.resolve_neg() for t in matrices.values()]


def lora_forward_wrapper(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    res: Tensor | None,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``scale * (x @ lora_A) @ lora_B``, [M, L].

    x: [M, K]; lora_A: [K, N]; lora_B: [N, L], any strides; res: [M, L], overwritten and returned,
    None for a new tensor of `dtype`.
    """
    given, op = res is not None, "lora_forward_wrapper"
    x, lora_A, lora_B = _read(op, scale, x=x, lora_A=lora_A, lora_B=lora_B)
    a, b = _one_dtype(lora_A.t(), lora_B.t())
    if not given:
        res = x.new_empty(x.shape[0], b.shape[0], dtype=dtype)
    else:
        check_dimensions(op, res=(res, 2))
        check_shape(op, "res", res, (x.shape[0], b.shape[0]))
        check_written(op, res, "res")
    layer = _layer(b.shape[0], scale)
    ops.run_forward(layer, NO_ROWS, x, None, [res], [], [a], [b], is_eager(x))
    if given:
        increment_version((res,))
    return res


def lora_da_dx_update_wrapper(
    xt: Tensor,
    dy: Tensor,
    lora_B: Tensor,
    lora_A: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """With ds = scale * dy @ lora_B: (dlora_A [S, N] = xt @ ds, dx [M, L] = ds @ lora_A).

    xt: [S, M]; dy: [M, K]; lora_B: [K, N]; lora_A: [N, L] with L = S, any strides. Both results
    have `dtype`.
    """
    xt, dy, lora_B, lora_A = _read(
        "lora_da_dx_update_wrapper", scale, xt=xt, dy=dy, lora_B=lora_B, lora_A=lora_A
    )
    a, b = _one_dtype(lora_A, lora_B)
    da = dy.new_empty(xt.shape[0], a.shape[0], dtype=dtype)
    dx = dy.new_empty(dy.shape[0], a.shape[1], dtype=dtype)
    layer = _layer(b.shape[0], scale)
    ops.run_backward(layer, NO_ROWS, [dy], xt.t(), None, dx, False, [a], [b], [da.t()], [None],
                     layer.no_adds, is_eager(dy))  # fmt: skip
    return da, dx


def lora_db_update_wrapper(
    lora_A: Tensor, xt: Tensor, dy: Tensor, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``scale * dy.T @ (xt.T @ lora_A.T)``, [S, M].

    lora_A: [M, K]; xt: [K, N]; dy: [N, S], any strides. The result has `dtype`.
    """
    lora_A, xt, dy = _read("lora_db_update_wrapper", scale, lora_A=lora_A, xt=xt, dy=dy)
    db = dy.new_empty(dy.shape[1], lora_A.shape[0], dtype=dtype)
    # dB does not read B: one zero stands for every element.
    b = lora_A.new_zeros(1, 1).expand(db.shape)
    layer = _layer(db.shape[0], scale)
    ops.run_backward(layer, NO_ROWS, [dy], xt.t(), None, None, False, [lora_A], [b], [None], [db],
                     layer.no_adds, is_eager(dy))  # fmt: skip
    return db


# ---- LoRATritonFunction --------------------------------------------------------------------------


def _forward(x, lora_A, lora_B, scale, dtype, use_triton_kernel=True, res=None):
    """[M, out], with the residual added where there is one."""
    x = ops.as_rows(x).resolve_neg()
    kind = x.device.type
    if not use_triton_kernel and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # as the products that stood here
    a, b = _one_dtype(lora_A.detach(), lora_B.detach())
    base = [] if res is None else [ops.as_rows(res).resolve_neg().to(dtype)]
    call = ops.Call(_layer(b.shape[0], scale), NO_ROWS, len(base), dtype, False, False)
    (y,), _ = ops.forward_outputs(call, x, base, [a], [b], False)
    return y


def _setup_context(ctx, inputs, output):
    x, lora_A, lora_B, ctx.scale, *rest = inputs
    res = rest[2] if len(rest) > 2 else None
    ctx.num_inputs = len(inputs)
    ctx.res = None if res is None else (res.shape, res.dtype)
    ctx.save_for_backward(x, lora_A, lora_B)


@differentiable_once
def _backward(ctx, d_y):
    x, lora_A, lora_B = ctx.saved_tensors
    a, b = _one_dtype(lora_A, lora_B)
    wants = list(ctx.needs_input_grad[:3])
    layer = _layer(b.shape[0], ctx.scale)
    dx, da, db = ops.found_gradients(
        layer, NO_ROWS, [d_y], ops.as_rows(x).resolve_neg(), None, [a], [b], wants, x.dtype
    )
    dx = None if dx is None else dx.view(x.shape)
    da = None if da is None else da.to(lora_A.dtype)
    db = None if db is None else db.to(lora_B.dtype)
    dres = None
    if ctx.res is not None and ctx.needs_input_grad[6]:
        shape, dtype = ctx.res
        dres = d_y.reshape(shape).to(dtype)
    return (dx, da, db, None, None, None, dres)[: ctx.num_inputs]


# ---- install -------------------------------------------------------------------------------------

_FUNCTIONS = (lora_forward_wrapper, lora_da_dx_update_wrapper, lora_db_update_wrapper)

_replacements = Replacements()


def _packages() -> Iterator[tuple[str, ModuleType, ModuleType]]:
    """(name, kernels, layers) of the imported packages that hold NeMo's two modules."""
    for name, layers in list(sys.modules.items()):
        package, _, stem = name.rpartition(".")
        kernels = sys.modules.get(f"{package}.lora_kernel")
        if stem == "lora" and hasattr(layers, "LoRATritonFunction") and kernels is not None:
            yield package, kernels, layers


def _keeping_triton(original: Callable, layers: ModuleType) -> Callable:
    """`patch_linear_module` without what Transformer Engine does to plain linears: where it is
    installed, it makes the original leave out `use_triton` without a word."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patch_linear_module(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        linear = given.arguments["orig_linear"]
        kind = type(linear)
        patched = original(*args, **kwargs)
        wanted = given.arguments["use_triton"] and not given.arguments.get("use_dora")
        plain = not kind.__module__.startswith("transformer_engine")
        if wanted and plain and not isinstance(patched, layers.TritonLinearLoRA):
            patched.__class__ = type("PatchedLinearLoRA", (layers.TritonLinearLoRA, kind), {})
        return patched

    return patch_linear_module


def install() -> list[str]:
    """Puts Mortar under every imported NeMo Automodel; models made before or after run on it.

    Replaces the three functions and `patch_linear_module` in whichever module has taken hold of
    them, and the passes of `LoRATritonFunction`. Calling it again changes nothing. `uninstall`
    takes it back.

    Returns:
        The packages that were found, such as ["nemo_automodel.components._peft"].

    Raises:
        RuntimeError: no nemo_automodel has been imported.
    """
    packages = found(
        list(_packages()),
        "mortar.compat.nemo.install",
        "import nemo_automodel.components._peft.lora",
    )
    for _, kernels, layers in packages:
        for ours in _FUNCTIONS:
            _replacements.replace_everywhere(getattr(kernels, ours.__name__), ours)
        function = layers.LoRATritonFunction
        if vars(function)["forward"].__func__ is _forward:
            continue
        for name, ours in (
            ("forward", _forward), ("setup_context", _setup_context), ("backward", _backward)
        ):  # fmt: skip
            _replacements.replace(function, name, staticmethod(ours))
        if hasattr(layers, "patch_linear_module"):
            original = layers.patch_linear_module
            _replacements.replace_everywhere(original, _keeping_triton(original, layers))
    return [name for name, _, _ in packages]


def uninstall() -> None:
    """Restores all that install() replaced; nothing if it has not run."""
    _replacements.undo()
