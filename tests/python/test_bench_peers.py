# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  bench/ is no package: its folder goes on the path first
"""What Mortar is compared with in the benchmarks: the peers compute the same."""

import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness
import peers
from lora_problem import Layer, LoraProblem

CPU = torch.device("cpu")


def lora_problem(adapters, sequence_adapter, length=3, dtype=torch.float32):
    token_adapter = torch.tensor(sequence_adapter, dtype=torch.int32).repeat_interleave(length)
    layer = Layer("toy", 33, (17, 5))
    return LoraProblem(layer, len(token_adapter), adapters, 4, dtype, token_adapter=token_adapter)


@pytest.mark.parametrize(
    ("expression", "sequences"),
    [
        (lambda p, s, m: peers.one_adapter_gemms(s.y, s.x, s.a, s.b), [0, 0, 0]),
        (lambda p, s, m: peers.peft_loop(s.y, s.x, s.a, s.b, m), [2, -1, 0, 2, 1]),
        (lambda p, s, m: peers.grouped_gemms(s.y, s.x, s.a, s.b, p.token_adapter), [2, -1, 0, 2]),
        (lambda p, s, m: peers.masked_gemms(s.y, s.x, s.a, s.b, p.token_adapter), [2, -1, 0, 2]),
        (lambda p, s, m: peers.gathered_bmm(s.y, s.x, s.a, s.b, p.token_adapter), [2, 1, 0, 2]),
    ],
    ids=["one_adapter_gemms", "peft_loop", "grouped_gemms", "masked_gemms", "gathered_bmm"],
)
def test_every_expression_adds_the_delta(expression, sequences):
    problem = lora_problem(max(sequences) + 1, sequences)
    buffers = problem.make_buffers(CPU, 0)
    reference = problem.reference(buffers)[1]
    expression(problem, buffers, sequences)()
    assert harness.relative_error(buffers.y, reference) < 1e-5


def test_reference_leaves_base_tokens_alone_and_pads_ragged_ranks():
    problem = LoraProblem(Layer("toy", 33, (17,)), 12, 3, [1, 4, 2], torch.float32, base_share=0.5)
    buffers = problem.make_buffers(CPU, 0)
    base = problem.token_adapter < 0
    assert base.sum() == 6
    h, y = problem.reference(buffers)
    assert torch.equal(y[base], buffers.y.double()[base]) and not h[:, base].any()
    assert (y[~base] != buffers.y.double()[~base]).all()
    assert not buffers.a[0][0, 1:].any() and not buffers.b[0][2, :, 2:].any()
    active = problem.token_adapter[~base]
    ranks = sum([1, 4, 2][i] for i in set(active.tolist()))
    assert problem.traffic().bytes == 4 * (ranks * (33 + 17) + 6 * (33 + 2 * 17))


def test_vllm_tables():
    t = peers.VllmTables.make(torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32), 4)
    assert t.lora_ids.tolist() == [-1, 0, 2, -1, -1]
    assert t.num_tokens_per_lora.tolist() == [2, 1, 2, 0, 0]
    assert t.lora_token_start_loc.tolist() == [0, 2, 3, 5, 0, 0]
    assert t.token_indices_sorted.tolist() == [1, 4, 2, 0, 3]
    assert t.num_active_loras.tolist() == [3] and t.no_lora_flag_cpu.tolist() == [False]
    assert {x.dtype for x in t.args()} == {torch.int32, torch.bool}


@pytest.fixture
def vllm_folder(tmp_path, monkeypatch):
    """A stand-in for the ignored folder: files that import what vLLM's import."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    monkeypatch.setattr(peers, "VLLM_FILES", folder)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    triton = types.ModuleType("triton")
    triton.language = types.ModuleType("triton.language")
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    return folder


def test_vllm_loader(vllm_folder):
    with pytest.raises(
        FileNotFoundError, match="vllm must hold lora_shrink_op.py, see bench/README"
    ):
        peers.VllmTriton()
    for op in ("shrink", "expand"):
        (vllm_folder / f"lora_{op}_op.py").write_text(
            "from vllm.lora.ops.triton_ops.kernel_utils import TWO\n"
            "from vllm.lora.ops.triton_ops.utils import SIZE\n"
            "from vllm.utils.torch_utils import direct_register_custom_op\n"
            f"def _lora_{op}(): return '{op}', TWO, SIZE\n"
            "try:\n    direct_register_custom_op(op_name='x', op_func=None)\n"
            f"    lora_{op} = None\nexcept AttributeError:\n    lora_{op} = _lora_{op}\n"
        )
    (vllm_folder / "kernel_utils.py").write_text(
        "from vllm.triton_utils import tl, triton\nTWO = 2\n"
    )
    (vllm_folder / "utils.py").write_text(
        "from vllm import envs\nfrom vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.utils.math_utils import next_power_of_2\n"
        "assert not envs.VLLM_BATCH_INVARIANT and current_platform.is_cuda()\n"
        "init_logger(__name__).warning_once('x')\n"
        "SIZE = next_power_of_2(5)\n_LORA_A_PTR_DICT = {1: 1}\n_LORA_B_PTR_DICT = {1: 1}\n"
    )
    (vllm_folder / "lora_kernel_metadata.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass LoRAKernelMeta:\n    x: int = 1\n"
    )
    loaded = peers.VllmTriton()
    assert loaded.shrink() == ("shrink", 2, 8) and loaded.expand() == ("expand", 2, 8)
    assert loaded.metadata().x == 1
    loaded.forget_pointers()
    assert not loaded._utils._LORA_A_PTR_DICT
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
