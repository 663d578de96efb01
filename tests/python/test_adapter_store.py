# SPDX-License-Identifier: Apache-2.0
"""AdapterStore on folders made here: views, life times, errors."""

import copy
import gc
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mortar
from adapter_store_cases import (
    CONFIG,
    DTYPES,
    random_module,
    raw_bytes,
    safetensors_bytes,
    write_adapter,
)

A = "base_model.model.m.lora_A.weight"


@pytest.fixture
def store(tmp_path):
    """A store with one adapter, which no failing call may change."""
    tensors = random_module("m", 4, 6, 10)
    opened = mortar.AdapterStore()
    assert opened.open("first", write_adapter(tmp_path / "first", tensors)) == 0
    before = opened.get("first").modules[0].a.clone()
    yield opened
    assert opened.names() == ["first"]
    assert opened.id("first") == 0
    assert torch.equal(opened.get("first").modules[0].a, before)


def run_python(program: str) -> subprocess.CompletedProcess:
    """Runs a program with what this process imports from."""
    package = str(Path(mortar.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([package, *sys.path])},
    )


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_hold_the_values_of_the_file(tmp_path, dtype):
    tensors = random_module("b.q", 4, 6, 10, dtype) | random_module("a.k", 4, 5, 3, dtype)
    tensors["base_model.model.a.k.lora_A.weight"][0, :3] = torch.tensor(
        [float("nan"), float("inf"), -0.0]
    )
    store = mortar.AdapterStore()
    store.open("x", write_adapter(tmp_path, tensors, base_model_name_or_path="some/model"))
    adapter = store.get("x")
    assert (adapter.name, adapter.path, adapter.base_model) == ("x", str(tmp_path), "some/model")
    assert adapter.fan_in_fan_out is False
    assert [m.name for m in adapter.modules] == ["a.k", "b.q"]
    assert adapter.find("b.q") is adapter.modules[1]
    assert adapter.find("c") is None
    for module in adapter.modules:
        assert (module.rank, module.scale) == (4, 2.0)
        for factor, tensor in (("A", module.a), ("B", module.b)):
            wanted = tensors[f"base_model.model.{module.name}.lora_{factor}.weight"]
            assert tensor.dtype == dtype and tensor.shape == wanted.shape
            assert tensor.is_contiguous() and tensor.device.type == "cpu"
            assert raw_bytes(tensor) == raw_bytes(wanted)


def test_names_ids_and_length(tmp_path):
    folder = write_adapter(tmp_path, random_module("m", 4, 6, 10))
    store = mortar.AdapterStore()
    assert len(store) == 0 and store.names() == [] and "z" not in store
    assert [store.open(name, folder) for name in ("z", "a", "ü 漢")] == [0, 1, 2]
    assert store.names() == list(store) == ["z", "a", "ü 漢"]
    assert len(store) == 3 and "ü 漢" in store and store.id("a") == 1
    store.close("a")
    assert "a" not in store and len(store) == 2
    assert store.open("a", str(folder)) == 3
    assert store.names() == ["z", "ü 漢", "a"]
    with pytest.raises(ValueError, match=r"AdapterStore\.open: name must be new, got 'a'"):
        store.open("a", folder)
    for call in (store.close, store.get, store.id):
        with pytest.raises(ValueError, match="must be that of an open adapter, got 'nobody'"):
            call("nobody")
    assert store.names() == ["z", "ü 漢", "a"]


def test_mapped_files_are_not_read(tmp_path):
    tensors = random_module("m", 4, 1 << 20, 1 << 20)  # 32 MiB
    write_adapter(tmp_path, tensors)
    file = tmp_path / "adapter_model.safetensors"
    store = mortar.AdapterStore()
    store.open("x", tmp_path, mapped=True)
    module = store.get("x").modules[0]
    assert module.a.shape == (4, 1 << 20)
    # Touching the header maps what lies around it in the page cache, up to one large page.
    assert _resident_kib(file) <= 4 * 1024
    assert torch.equal(module.a, tensors[A])
    assert _resident_kib(file) >= 16 * 1024


def _resident_kib(file: Path) -> int:
    smaps = Path("/proc/self/smaps").read_text()
    regions = re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps)
    assert regions, "the file is not mapped"
    return sum(map(int, regions))


def test_tensors_keep_the_mapping_alive(tmp_path):
    tensors = random_module("m", 4, 600, 10)
    file = write_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    store = mortar.AdapterStore()
    store.open("x", tmp_path, mapped=True)
    a = store.get("x").modules[0].a
    store.close("x")
    del store
    gc.collect()
    assert mapped(file)
    assert torch.equal(a, tensors[A])
    row = a[1]
    del a
    gc.collect()
    assert mapped(file)
    assert torch.equal(row, tensors[A][1])
    del row
    gc.collect()
    assert not mapped(file)


@pytest.mark.parametrize("how", [False, True], ids=["copied", "mapped"])
def test_writing_to_a_view_leaves_the_file_alone(tmp_path, how):
    file = write_adapter(tmp_path, random_module("m", 4, 6, 10)) / "adapter_model.safetensors"
    before = file.read_bytes()
    store = mortar.AdapterStore()
    store.open("x", tmp_path, mapped=how)
    store.get("x").modules[0].a.mul_(3)
    assert file.read_bytes() == before
    other = mortar.AdapterStore()
    other.open("x", tmp_path, mapped=how)
    assert not torch.equal(other.get("x").modules[0].a, store.get("x").modules[0].a)


def test_a_file_that_is_cut_or_changed_does_not_matter(tmp_path):
    """In a process of its own, which a mapped file would end."""
    tensors = random_module("m", 4, 600, 100)
    file = write_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    torch.save(tensors[A], tmp_path / "wanted.pt")
    program = f"""
import torch, mortar
store = mortar.AdapterStore()
store.open("x", {str(tmp_path)!r})
with open({str(file)!r}, "r+b") as file:
    file.truncate(100)
    file.seek(0)
    file.write(b"overwritten")
assert torch.equal(store.get("x").modules[0].a, torch.load({str(tmp_path / "wanted.pt")!r}))
print(store.get("x").modules[0].b.sum())
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert not mapped(file)


@pytest.mark.parametrize("how", [False, True], ids=["copied", "mapped"])
def test_a_replaced_file_does_not_change_an_open_adapter(tmp_path, how):
    tensors = random_module("m", 4, 6, 10)
    write_adapter(tmp_path, tensors)
    store = mortar.AdapterStore()
    store.open("x", tmp_path, mapped=how)
    new = tmp_path / "new"
    new.write_bytes(safetensors_bytes(random_module("m", 4, 6, 10)))
    os.replace(new, tmp_path / "adapter_model.safetensors")
    assert torch.equal(store.get("x").modules[0].a, tensors[A])


@pytest.mark.parametrize(
    ("replace", "error", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4, 24]}, TypeError, "must have dtype F32, F16 or BF16"),
        ({"dtype": "F3"}, TypeError, "must have a dtype of the safetensors format, got 'F3'"),
        ({"shape": [3, 8]}, ValueError, "must have shape (rank, K) with the rank of the config, 4"),
        ({"shape": [4, 7]}, ValueError, "must have as many bytes as its shape"),
        ({"shape": [-4, -6]}, ValueError, "whole numbers from 0 in shape"),
        ({"shape": [24]}, ValueError, "must have 2 dimensions"),
        ({"shape": [1 << 40, 1 << 40]}, ValueError, "fewer than 2^61 bytes"),
        ({"shape": "4, 6"}, ValueError, "must have a list as shape"),
        ({"data_offsets": [0, 1 << 50]}, ValueError, "in order and within the 256 bytes"),
        ({"data_offsets": [96, 0]}, ValueError, "in order and within the 256 bytes"),
        ({"data_offsets": [-96, 0]}, ValueError, "whole numbers from 0 in data_offsets"),
        ({"data_offsets": [4, 100]}, ValueError, "a gap"),
        ({"data_offsets": [160, 256]}, ValueError, "must start where the one before it ends"),
        ({"data_offsets": [0, 96, 96]}, ValueError, "must have two data_offsets, got more"),
        ({"more": 1}, ValueError, "shape and data_offsets only, got 'more'"),
        ({"dtype": None}, ValueError, "must have a dtype, got none"),
        ({"shape": None}, ValueError, "must have a shape, got none"),
        ({"data_offsets": None}, ValueError, "must have a data_offsets, got none"),
    ],
    ids=str,
)
def test_refuses_lying_headers(store, tmp_path, replace, error, message):
    whole = safetensors_bytes(random_module("m", 4, 6, 10))
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    fields = header[A] | replace
    header[A] = {key: value for key, value in fields.items() if value is not None}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder = write_adapter(tmp_path / "bad", struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(error, match=re.escape(message)) as raised:
        store.open("bad", folder)
    assert str(raised.value).startswith(f"AdapterStore.open: {folder}/adapter_model.safetensors: ")


def test_refuses_cut_files(store, tmp_path):
    whole = safetensors_bytes(random_module("m", 4, 6, 10))
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    edges = [0, 1, 7, 8, 9, header_end - 1, header_end, header_end + 95, header_end + 96]
    for size in [*edges, len(whole) - 1]:
        folder = write_adapter(tmp_path / "bad", whole[:size])
        with pytest.raises(ValueError, match="adapter_model.safetensors: "):
            store.open("bad", folder)
    with pytest.raises(ValueError, match="must cover all"):
        store.open("bad", write_adapter(tmp_path / "bad", whole + b"\0"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 5}, "with the rank of the config, 5, got (4, 6)"),
        ({"r": 0}, "r must be a whole number from 1 to 512, got 0"),
        ({"r": 513}, "r must be a whole number from 1 to 512, got 513"),
        ({"r": None}, "r must be a whole number from 1 to 512, got null"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0, got null"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number above 0, got '8'"),
        ({"lora_alpha": -8}, "lora_alpha must be a number above 0, got -8"),
        ({"lora_alpha": float("nan")}, "must be valid JSON in UTF-8"),
        ({"lora_alpha": float("inf")}, "must be valid JSON in UTF-8"),
        ({"rank_pattern": {"m": 3}}, "with the rank of the config, 3, got (4, 6)"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "DoRA rescales the whole output"),
    ],
    ids=str,
)
def test_refuses_wrong_configs(store, tmp_path, config, message):
    folder = write_adapter(tmp_path / "bad", random_module("m", 4, 6, 10), **config)
    with pytest.raises(ValueError, match=re.escape(message)):
        store.open("bad", folder)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_refuses_missing_files(store, tmp_path, missing):
    folder = write_adapter(tmp_path / "bad", random_module("m", 4, 6, 10))
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing}: must exist, got no such file"):
        store.open("bad", folder)
    (folder / missing).mkdir()
    with pytest.raises(ValueError, match=f"{missing}: must be a regular file, got a directory"):
        store.open("bad", folder)
    (folder / missing).rmdir()
    (folder / missing).symlink_to(missing)  # to itself
    with pytest.raises(RuntimeError, match=f"{missing}: cannot open it: "):
        store.open("bad", folder)
    for folder in (tmp_path / "absent", tmp_path / "first" / "adapter_config.json"):
        with pytest.raises(ValueError, match="folder must be an existing directory"):
            store.open("bad", folder)


@pytest.mark.parametrize("lacking", ["r", "lora_alpha", "peft_type"])
def test_refuses_configs_that_lack_a_field(store, tmp_path, lacking):

    folder = write_adapter(tmp_path / "bad", random_module("m", 4, 6, 10))
    config = {key: value for key, value in CONFIG.items() if key != lacking}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"must have a field {lacking}, got none"):
        store.open("bad", folder)


def test_works_without_torch(tmp_path):
    write_adapter(tmp_path, random_module("m", 4, 6, 10))
    program = f"""
import sys
sys.modules["torch"] = None  # importing it now raises ModuleNotFoundError
import numpy, mortar
store = mortar.AdapterStore()
store.open("x", {str(tmp_path)!r})
module = store.get("x").find("m")
a = numpy.from_dlpack(module.a)
assert a.shape == (4, 6) and a.dtype == numpy.float32
print(a.astype(float).sum(), module.rank, module.scale)
try:
    store.open("y", "nowhere")
except ValueError as error:
    print(error)
try:
    store.slices("m")
except RuntimeError as error:
    print(error)
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    store = mortar.AdapterStore()
    store.open("x", tmp_path)
    total, rank, scale = out[0].split()
    assert float(total) == pytest.approx(store.get("x").modules[0].a.double().sum().item())
    assert (rank, scale) == ("4", "2.0")
    assert out[1].startswith("AdapterStore.open: folder must be an existing directory")
    assert out[2] == "AdapterStore.slices: PyTorch must be installed, got an environment without it"


WRONG_TYPES = [
    (lambda s: s.open(3, "x"), "AdapterStore.open: name must be a str, got int"),
    (lambda s: s.open("x", None), "AdapterStore.open: folder must be a path, got NoneType"),
    (lambda s: s.open("x", ["x"]), "AdapterStore.open: folder must be a path, got list"),
    (lambda s: s.open("x", "x", mapped=1), "AdapterStore.open: mapped must be a bool, got int"),
    (lambda s: s.close(None), "AdapterStore.close: name must be a str, got NoneType"),
    (lambda s: s.get(["first"]), "AdapterStore.get: name must be a str, got list"),
    (lambda s: s.id(0), "AdapterStore.id: name must be a str, got int"),
    (lambda s: s.get("first").find(0), "Adapter.find: module must be a str, got int"),
    (lambda s: s.slices(None), "AdapterStore.slices: modules must be a list of str, got NoneType"),
    (lambda s: s.slices(["m", 3]), "AdapterStore.slices: modules[1] must be a str, got int"),
    (lambda s: s.slices("m", "first"), "AdapterStore.slices: adapters must be a list of str"),
    (lambda s: s.slices("m", dtype="half"), "AdapterStore.slices: dtype must be a torch.dtype"),
    (lambda s: s.slices("m", [0]), "AdapterStore.slices: adapters[0] must be a str, got int"),
    (pickle.dumps, "AdapterStore: a store cannot be copied or pickled, open its folders again"),
    (copy.deepcopy, "AdapterStore: a store cannot be copied or pickled, open its folders again"),
    (lambda s: pickle.dumps(s.get("first")), "Adapter: an adapter cannot be copied or pickled"),
    (lambda s: copy.copy(s.get("first").modules[0]), "AdapterModule: a module cannot be copied"),
]


@pytest.mark.parametrize("call, message", WRONG_TYPES, ids=[case[1] for case in WRONG_TYPES])
def test_wrong_types_are_named(store, call, message):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        call(store)
    assert 3 not in store and None not in store
