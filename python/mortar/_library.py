# SPDX-License-Identifier: Apache-2.0
"""Registers operators as ``torch.ops.mortar.*``.

Ops are defined on ``torch.library.Library`` directly: the ``custom_op`` decorator costs 19 us a
call, this route 2.4 us.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C import _is_tracing as _is_jit_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C._functorch import maybe_current_level as _functorch_level
from torch.compiler import is_compiling, is_dynamo_compiling

#: What torch.autograd.graph.increment_version comes to for a tuple or list of tensors.
increment_version = torch._C._increment_version
_library = torch.library.Library("mortar", "FRAGMENT")
_Tensor = torch.Tensor


def note_writes(tensors: Iterable[torch.Tensor | None]) -> None:
    """Tells autograd, as PyTorch's own in-place ops do: a backward that needs what they held before
    then says so."""
    increment_version([t for t in tensors if t is not None])


def _writes_in_place(*args, **kwargs) -> None:
    """The fake of an op that only writes into its arguments: nothing to infer."""


def define(
    schema: str,
    impl: Callable,
    fake: Callable | None = None,
    autograd: Callable | None = None,
) -> torch._ops.OpOverload:
    """Defines ``mortar::<schema>`` with one Python implementation for CPU and CUDA.

    Args:
        schema: name and signature, e.g. ``"scale(Tensor x, Tensor(a!) y) -> ()"``; a name may have
            an overload (``"scale.table(...)"``).
        impl: called with positional arguments; the dispatcher leaves out trailing ones that equal
            their default, so the defaults of the schema must be repeated here.
        fake: shape inference for fake tensors; needed only for ops that return tensors.
        autograd: called first, with gradients on or off; redispatches below autograd. A
            torch.autograd.Function in it costs half of what register_autograd does.

    Returns:
        The operator, to be called directly: going through ``torch.ops`` resolves names each time.
    """
    name = schema.partition("(")[0].strip()
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.mortar, packet), overload or "default")
    worded_impl = in_words_of(op, impl)
    _library.impl(name, worded_impl, "CPU")
    _library.impl(name, worded_impl, "CUDA")
    if autograd is not None:
        _library.impl(name, autograd, "Autograd")
    fake = _that_writes(op, fake or _writes_in_place)
    torch.library.register_fake(f"mortar::{name}", fake, lib=_library)
    return op


def _named_tensors(op: torch._ops.OpOverload, args) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of an op: what its schema calls them, or name[i]."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        yield from named(argument.name, value)


def named(name: str, value) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one argument, which is a tensor, a list of them, or something else."""
    if isinstance(value, _Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            if isinstance(entry, _Tensor):
                yield f"{name}[{i}]", entry


def in_words(op: str, tensors: Iterable[tuple[str, torch.Tensor]], error: Exception) -> Exception:
    """What to raise for the error of a call: where an argument holds no memory that the library
    can read, one sentence instead of PyTorch's page; any other error as it is."""
    for name, tensor in tensors:
        if tensor.is_nested:
            got = "a nested tensor"
        elif tensor.layout is not torch.strided:
            got = f"one of layout {tensor.layout}"
        elif tensor.is_quantized:
            got = f"a quantized one of {tensor.dtype}"
        elif tensor.is_meta:
            got = "a meta tensor"
        else:
            continue
        return TypeError(f"{op}: {name} must be a dense tensor in memory, got {got}")
    return error


def refuse_nested(op: str, **tensors) -> None:
    """Raises for a nested tensor, of which even the sizes are an error of PyTorch's to read."""
    for name, tensor in tensors.items():
        if isinstance(tensor, _Tensor) and tensor.is_nested:
            raise in_words(op, [(name, tensor)], RuntimeError())


def in_words_of(op: torch._ops.OpOverload, function: Callable) -> Callable:
    """The function, which takes the arguments of the op, with its errors in words."""
    name = op._schema.name.removeprefix("mortar::")

    def call(*args):
        try:
            return function(*args)
        except RuntimeError as error:
            raise in_words(name, _named_tensors(op, args), error) from None

    return call


def _that_writes(op: torch._ops.OpOverload, fake: Callable) -> Callable:
    """The fake of an op, which the dispatcher also calls where one of the arguments is a meta
    tensor: without this check nothing would be written into the others, and nobody would know."""
    name = op._schema.name.removeprefix("mortar::")
    written = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    if not written:
        return fake

    def call(*args, **kwargs):
        if not is_compiling():
            tensors = list(_named_tensors(op, args))
            meta = next((n for n, t in tensors if t.device.type == "meta"), None)
            for argument, t in tensors:
                if meta and argument.partition("[")[0] in written and t.device.type != "meta":
                    raise TypeError(f"{name}: {meta} must be on {t.device}, got meta")
        return fake(*args, **kwargs)

    return call


def is_eager(first) -> bool:
    """True where nothing traces or intercepts a call with this first argument, which is no
    negative-bit view, and outside the dual levels of forward-mode AD. A torch_function (_ffi.py)
    that may be called then still returns 0 for arguments without plain memory; that none of them is
    a negative-bit view, whose memory holds other values, has to be asked (any_negation).

    Of tracers only Dynamo, which reads this code instead of running it, needs asking: the others
    (torch.export, make_fx) run it in a dispatch mode."""
    return (
        not is_dynamo_compiling()
        and type(first) is _Tensor
        and not num_dispatch_modes()
        and _functorch_level() is None
        and not _is_jit_tracing()
        and forward_ad._current_level < 0
        and not first.is_neg()
    )


def is_transformed() -> bool:
    """Whether the call is inside a transform of torch.func."""
    return _functorch_level() is not None and not is_compiling()


def refuse_transforms(op: str) -> None:
    """Raises inside torch.func, where PyTorch would speak of its own rules for batching."""
    if is_transformed():
        raise RuntimeError(f"{op}: cannot run inside transforms of torch.func")


def refuse_tangents(op: str, tensors) -> None:
    """Raises where forward-mode AD would lose a tangent in an op without a derivative."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, _Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{op}: arguments must not have tangents of forward-mode AD, got a dual tensor"
            )


def differentiable_once(backward: Callable) -> Callable:
    """A backward whose results have no gradient, and raise where one is wanted of them.

    As torch.autograd.function.once_differentiable, which asks the incoming gradients alone: what
    depends on a saved tensor, as in the penalty of a gradient's norm, it leaves out without a word.
    Nor does its refusal lead back to what the results depend on, so that ``grad(dx, x,
    allow_unused=True)`` is None there.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        inputs = (*gradients, *ctx.saved_tensors)
        sources = [t for t in inputs if isinstance(t, _Tensor) and t.requires_grad]
        return _NoGradient.apply(found, *sources) if sources else found

    return call


class _NoGradient(torch.autograd.Function):
    """Tensors as results of `sources`, and raises where a gradient of them is wanted."""

    @staticmethod
    def forward(ctx, tensors, *sources):
        return tuple(tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "trying to differentiate twice a function that is once_differentiable: gradients of "
            "Mortar's functions have no gradient"
        )


def any_negation(tensors) -> bool:
    """Whether one of them, some of which may be None, is a negative-bit view."""
    for t in tensors:  # noqa: SIM110  a third faster than any()
        if t is not None and t.is_neg():
            return True
    return False


def negation(op: str, name: str) -> ValueError:
    """What to raise for a negative-bit view that would be written."""
    return ValueError(f"{op}: {name} must hold its own values (resolve_neg() it), got a negation")


def _has_negative_bit(args) -> bool:
    tensors = (t for arg in args for t in (arg if isinstance(arg, list) else (arg,)))
    return any_negation(t for t in tensors if isinstance(t, _Tensor))


def shortcut(op: Callable, impl: Callable) -> Callable:
    """``op`` without its dispatch, which costs 1.2 us and another 0.2 us per argument.

    The returned function calls ``impl`` itself where nothing traces or intercepts the call, and
    ``op`` elsewhere: under torch.compile or torch.jit.trace, in a dispatch mode (make_fx,
    FakeTensorMode, a counter of flops), with a subclass or a meta tensor as its first argument, or
    with a negative-bit view, which the dispatcher resolves.
    Inside torch.func, and for dual tensors of forward-mode AD, it raises: gradients or tangents
    would be lost in an op without a derivative. Only for such ops.
    """
    name = op._schema.name.removeprefix("mortar::")

    def call(first, *args):
        real = type(first) is torch.Tensor and not first.is_meta
        if is_compiling() or num_dispatch_modes() or _is_jit_tracing() or not real:
            return op(first, *args)
        refuse_transforms(name)
        if forward_ad._current_level >= 0:
            refuse_tangents(name, (first, *args))
        if _has_negative_bit((first, *args)):
            return op(first, *args)
        try:
            return impl(first, *args)
        except RuntimeError as error:
            raise in_words(name, _named_tensors(op, (first, *args)), error) from None

    return call
