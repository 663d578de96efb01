# SPDX-License-Identifier: Apache-2.0
"""The operators under PyTorch's own checks, and eager calls, which pass by the dispatcher."""

import pytest
import torch

import mortar
import mortar.fp8 as fp8
from fp8_rmsnorm_cases import (
    E4M3,
    SCALINGS,
    assert_same_bytes,
    assert_same_output,
    random_case,
    run,
)
from mortar.fp8 import Fp8Output


def outputs(shape, device, transpose=True):
    m, n = shape
    make = lambda *s, d=torch.float32: torch.zeros(s, dtype=d, device=device)  # noqa: E731
    return (make(m, n, d=E4M3), make(), make(n, m, d=E4M3) if transpose else None, None, make())


def test_opcheck(device):
    """Without its comparisons of values where outputs are 8-bit floats, which it cannot compare:
    the two tests below do that."""
    case = random_case(device, (6, 32))
    rstd, normed = torch.zeros(6, device=device), torch.zeros_like(case.x)
    q, scale, q_t, _, amax = outputs((6, 32), device)
    args = (case.x, None, case.weight, None, None, q, scale, q_t, None, amax, rstd, normed,
            1e-5, 0.0, 0, 128, False, False, 0)  # fmt: skip
    checks = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.mortar.fp8_rmsnorm_out.default, args, test_utils=checks)
    dy = torch.randn_like(case.x)
    rstd = torch.rand(6, device=device) + 0.5
    args = (dy, case.x, None, case.weight, rstd, None, torch.zeros_like(dy),
            torch.zeros_like(case.weight), 0.0, False)  # fmt: skip
    torch.library.opcheck(torch.ops.mortar.fp8_rmsnorm_backward_out.default, args)
    args = (case.x, None, *outputs((6, 32), device), 0, 128, False, False, 0)
    torch.library.opcheck(torch.ops.mortar.fp8_quantize_out.default, args, test_utils=checks)


def test_only_what_the_schema_names_is_written(device):
    case = random_case(device, (6, 64), E4M3)
    q, scale, q_t, _, amax = outputs((6, 64), device)
    rstd = torch.zeros(6, device=device)
    inputs = (case.x, case.x_scale, case.weight)
    before = [t.clone() for t in inputs]
    torch.ops.mortar.fp8_rmsnorm_out(
        case.x, case.x_scale, case.weight, None, None, q, scale, q_t, None, amax, rstd, None,
        1e-5, 0.0, 0, 128, False, False, 0,
    )  # fmt: skip
    for a, b in zip(inputs, before, strict=True):
        assert_same_bytes(a, b)
    assert scale > 0 and amax > 0 and (rstd > 0).all() and q_t.float().abs().max() == 448


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_functions_compile(device, scaling, backend):
    torch._dynamo.reset()
    case = random_case(device, (2, 5, 64), E4M3)
    compiled = torch.compile(mortar.fp8_rmsnorm, fullgraph=True, backend=backend)
    options = {"x_scale": case.x_scale, "scaling": scaling, "transpose": True, "normed": True}
    assert_same_output(compiled(case.x, case.weight, **options),
                       mortar.fp8_rmsnorm(case.x, case.weight, **options))  # fmt: skip


def test_compiled_residual_and_noise(device):
    torch._dynamo.reset()
    case = random_case(device, (6, 64), residual=torch.bfloat16)
    compiled = torch.compile(mortar.fp8_rmsnorm, fullgraph=True, backend="aot_eager")
    first, second = case.residual.clone(), case.residual.clone()
    got = compiled(case.x, case.weight, residual=first)
    want = mortar.fp8_rmsnorm(case.x, case.weight, residual=second)
    assert_same_bytes(first, second)
    assert_same_bytes(got.q, want.q)
    noisy = [compiled(case.x, case.weight, stochastic=True).q.view(torch.uint8) for _ in range(2)]
    assert (noisy[0] != noisy[1]).any()


FUNCTIONS = ("NORM", "BACKWARD", "QUANTIZE")


def replace_now(monkeypatch, name, now):
    """Another function in the place of the library's short one: 0 sends calls another way."""
    monkeypatch.setattr(fp8, name, getattr(fp8, name)._replace(now=now))


def test_the_ops_give_the_same(device, monkeypatch):
    """Every eager call takes the short way, and the way through the dispatcher agrees."""
    case = random_case(
        device, (2, 5, 96), E4M3, transpose=True, normed=True, residual=torch.float32
    )
    dy = torch.randn(2, 5, 96, device=device).bfloat16()
    done = []
    for name in FUNCTIONS:
        function = getattr(fp8, name).now
        replace_now(monkeypatch, name, lambda *a, f=function: done.append(f(*a)) or done[-1])

    def results():
        norm = run(case)
        dx, dw = mortar.fp8_rmsnorm_backward(dy, norm.residual, case.weight, norm.rstd)
        return norm, dx, dw, mortar.fp8_quantize(dy, transpose=True)

    want = results()
    assert done == [1, 1, 1]
    for name in FUNCTIONS:
        replace_now(monkeypatch, name, lambda *a: 0)
    for a, b in zip(results(), want, strict=True):
        if isinstance(a, Fp8Output):
            assert_same_output(a, b)
        else:
            assert_same_bytes(a, b)


OPTIONS = [
    {},
    {"transpose": True, "normed": True, "residual": torch.float32},
    {"transpose": "only", "fp8_dtype": torch.float8_e5m2},
    {"scaling": "row", "transpose": True},
    {"scaling": "group", "group": 32, "transpose": True, "scale_layout": "col"},
    {"scaling": "group", "group": 16, "pow2_scale": True},
    {"numerics": "compat", "transpose": True},
]


def poisoned(out: Fp8Output) -> Fp8Output:
    """New tensors of the same shapes and strides; scale_t stays the same tensor as scale."""
    new = {None: None}
    for t in out:
        if t is not None and id(t) not in new:
            room = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            new[id(t)] = room.fill_(7.0)
    return Fp8Output(*(None if t is None else new[id(t)] for t in out))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_into_a_given_record(device, monkeypatch, options, direct):
    """The same bytes in the caller's tensors, by both ways, and autograd knows of the writes."""
    case = random_case(device, (2, 5, 96), **options)
    want = run(case)
    out = poisoned(want)
    versions = [t._version for t in out if t is not None]
    if not direct:
        replace_now(monkeypatch, "NORM", lambda *a: 0)
        replace_now(monkeypatch, "QUANTIZE", lambda *a: 0)
    residual = None if case.residual is None else case.residual.clone()
    got = mortar.fp8_rmsnorm(case.x, case.weight, residual=residual, out=out, **case.options)
    assert_same_output(got, want)
    for name, t in got._asdict().items():
        assert t is (residual if name == "residual" else getattr(out, name)), name
    written = [t for t in out if t is not None and t is not out.residual]
    held = [v for v, t in zip(versions, (t for t in out if t is not None), strict=True)
            if t is not out.residual]  # fmt: skip
    assert all(t._version > v for t, v in zip(written, held, strict=True))
    kept = {k: v for k, v in case.options.items() if k != "normed"}
    want = mortar.fp8_quantize(case.x, **kept)
    assert_same_output(mortar.fp8_quantize(case.x, out=poisoned(want), **kept), want)


@pytest.mark.parametrize("rows", [0, 6])
def test_a_record_without_rstd_and_amax(device, rows):
    case = random_case(device, (rows, 64))
    want = run(case)
    room = poisoned(want)
    out = mortar.fp8_rmsnorm(case.x, case.weight, out=Fp8Output(q=room.q, scale=room.scale))
    assert out.rstd is None and out.amax is None
    assert_same_bytes(out.q, want.q)
    assert_same_bytes(out.scale, want.scale)


def test_given_scales_with_a_record(device):
    """They are read, the record's own are left alone."""
    case = random_case(device, (6, 64), transpose=True)
    scale = torch.tensor(0.5, device=device)
    want = mortar.fp8_rmsnorm(case.x, case.weight, transpose=True, scale=scale)
    room = poisoned(run(case))
    version = scale._version
    out = mortar.fp8_rmsnorm(case.x, case.weight, transpose=True, scale=scale, out=room)
    assert_same_output(out, want)
    assert out.scale is scale and out.scale_t is scale and scale._version == version
    assert room.scale == 7


def test_meta_and_fake_tensors(device):
    case = random_case(torch.device("meta"), (6, 64), transpose=True)
    out = run(case)
    assert out.q.is_meta and out.q.shape == (6, 64) and out.q_t.shape == (64, 6)
    dx, dw = mortar.fp8_rmsnorm_backward(case.x, case.x, case.weight, out.rstd)
    assert dx.is_meta and dw.is_meta


@pytest.mark.parametrize("direct", [True, False])
def test_an_updated_residual_is_noticed(device, monkeypatch, direct):
    """A backward that needs what it held before says so."""
    if not direct:
        replace_now(monkeypatch, "NORM", lambda *a: 0)
    case = random_case(device, (6, 64), torch.float32, residual=torch.float32)
    w = torch.ones(64, device=device, requires_grad=True)
    total = (case.residual * w).sum()
    mortar.fp8_rmsnorm(case.x, case.weight, residual=case.residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_the_record(device):
    out = run(random_case(device, (4, 32)))
    assert Fp8Output._fields == (
        "q",
        "scale",
        "q_t",
        "scale_t",
        "rstd",
        "amax",
        "residual",
        "normed",
    )
    assert out.q_t is None and out.scale_t is None and out.normed is None


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("module", [mortar.nn.Fp8RMSNorm, mortar.nn.Fp8RMSNormLinear])
def test_a_program_exported_for_any_number_of_rows(device, module, strict):
    """Nothing asks for a number of rows, which are a symbol there."""

    class Float(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (64,) if module is mortar.nn.Fp8RMSNorm else (64, 32)
            self.inner = module(*sizes, device=device)

        def forward(self, x):
            y = self.inner(x)
            return y.float() if isinstance(y, torch.Tensor) else (y.q.float(), y.q_t.float())

    model = Float()
    rows = {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("t", min=2)}
    # Products of a GPU ask whether 16 divides the rows that a gradient sums over.
    with torch.set_grad_enabled(device.type == "cpu"):
        program = torch.export.export(
            model, (torch.randn(3, 5, 64, device=device),), dynamic_shapes=(rows,), strict=strict
        )
        x = torch.randn(4, 7, 64, device=device)
        got, want = program.module()(x), model(x)
    for one, other in zip(as_tuple(got), as_tuple(want), strict=True):
        assert torch.equal(one, other)


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)
