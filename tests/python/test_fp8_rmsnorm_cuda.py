# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: graphs, streams, no waiting, and the bytes of the CPU."""

import torch

import mortar
from fp8_rmsnorm_cases import (
    E4M3,
    E5M2,
    FP8,
    assert_same_bytes,
    assert_same_output,
    random_case,
    run,
)
from mortar.nn import Fp8RMSNormLinear

CUDA = torch.device("cuda")


def test_nothing_waits_for_the_device():
    case = random_case(CUDA, (64, 256), E4M3, transpose=True, stochastic=True)
    layer = Fp8RMSNormLinear(256, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 256, device="cuda").bfloat16().requires_grad_()

    def everything():
        run(case)
        layer(x).sum().backward()

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs():
    """A captured norm reads what its input holds when it is replayed."""
    case = random_case(CUDA, (64, 256), transpose=True)
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    for _ in range(3):
        case.x.copy_(torch.randn_like(case.x))
        graph.replay()
        assert_same_output(captured, run(case))


def test_graphs_draw_new_noise():
    case = random_case(CUDA, (64, 256), stochastic=True)
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    graph.replay()
    first = captured.q.view(torch.uint8).clone()
    graph.replay()
    assert (captured.q.view(torch.uint8) != first).any()


def test_training_in_a_graph():
    layer = Fp8RMSNormLinear(256, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 256, device="cuda").bfloat16().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    eager = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    for a, b in zip(captured, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_current_stream_is_used():
    case = random_case(CUDA, (512, 1024), transpose=True)
    expected = run(case)
    torch.cuda.synchronize()
    results = []
    for _ in range(2):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(case.x)
            torch.cuda._sleep(20_000_000)
            late.copy_(case.x)
            results.append(mortar.fp8_rmsnorm(late, case.weight, transpose=True))
    torch.cuda.synchronize()
    for result in results:
        assert_same_output(result, expected)


def test_compat_bytes_are_those_of_the_cpu():
    """Of values whose squares add up exactly, so that both have one rstd."""
    for dtype in FP8:
        codes = torch.randint(-8, 9, (70, 256)).float()
        weight = torch.randn(256)
        scales = torch.full((70, 16), 0.25)
        here = mortar.fp8_rmsnorm(codes.to(dtype), weight, x_scale=scales, transpose=True,
                                  numerics="compat")  # fmt: skip
        there = mortar.fp8_rmsnorm(codes.to(dtype).cuda(), weight.cuda(), x_scale=scales.cuda(),
                                   transpose=True, numerics="compat")  # fmt: skip
        same = here.rstd == there.rstd.cpu()
        assert same.double().mean() > 0.5
        assert here.scale == there.scale.cpu()
        assert_same_bytes(here.q[same], there.q.cpu()[same], "q")


def test_given_scale_bytes_are_those_of_the_cpu():
    y = torch.randn(70, 272)
    for dtype in (E4M3, E5M2):
        for stochastic in (False, True):
            outputs = []
            for device in ("cpu", "cuda"):
                rng = torch.tensor([3, 4], device=device)
                q = torch.empty(70, 272, dtype=dtype, device=device)
                one = torch.ones((), device=device)
                torch.ops.mortar.fp8_quantize_out(
                    y.to(device), rng if stochastic else None, q, one, None, None, None, 0, 128,
                    False, True, 0,
                )  # fmt: skip
                outputs.append(q.cpu())
            assert_same_bytes(*outputs)
