# SPDX-License-Identifier: Apache-2.0
"""``import mortar``: with PyTorch, without it, and without the library."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mortar
from mortar import _ffi, _limits

ROOT = Path(__file__).parents[2]


def run(script: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_torch():
    done = run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import mortar\n"
        "print(mortar.__version__, len(mortar.AdapterStore().names()))\n"
        "try:\n"
        "    mortar.lora\n"
        "except ModuleNotFoundError as missing:\n"
        "    print(missing.name)\n"
    )
    assert done.stdout.split() == [mortar.__version__, "0", "torch"], done.stderr


def test_a_broken_torch_is_not_hidden(tmp_path):
    (tmp_path / "torch.py").write_text("import no_such_module_of_torch")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("import mortar", PYTHONPATH=path)
    assert done.returncode != 0 and "no_such_module_of_torch" in done.stderr


def test_import_registers_the_ops():
    done = run(
        "import mortar, torch\n"
        "for name in ('lora_plan', 'lora_shrink', 'lora_expand', 'lora_apply'):\n"
        "    assert hasattr(torch.ops.mortar, name), name\n"
    )
    assert done.returncode == 0, done.stderr


def test_missing_library_is_named(tmp_path):
    done = run("import mortar", MORTAR_LIBRARY=str(tmp_path / "nothing.so"))
    assert done.returncode != 0
    assert "mortar: no binding library at" in done.stderr and "nothing.so" in done.stderr


def test_a_file_that_is_no_library_is_named(tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_text("no library")
    done = run("import mortar", MORTAR_LIBRARY=str(wrong))
    assert done.returncode != 0
    assert f"ImportError: mortar: cannot load {wrong}: " in done.stderr


def test_missing_binding_package_is_named():
    done = run("import sys\nsys.modules['tvm_ffi'] = None\nimport mortar")
    assert done.returncode != 0
    assert "mortar: needs the package apache-tvm-ffi" in done.stderr


def test_library_by_its_bare_name():
    folder, name = os.path.split(_ffi._library_path())
    done = run(f"import os\nos.chdir({folder!r})\nimport mortar", MORTAR_LIBRARY=name)
    assert done.returncode == 0, done.stderr


def test_openmp_is_shared_with_torch():
    """Two OpenMP runtimes in one process would fight over the cores."""
    done = run(
        "import mortar\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in lines if 'libgomp' in line}))\n"
    )
    assert done.stdout.strip() == "1", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["lora", "reference", "compat"])
def test_submodules_are_attributes(name):
    assert getattr(mortar, name).__name__ == f"mortar.{name}"
    assert name in dir(mortar)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="module 'mortar' has no attribute 'lore'"):
        _ = mortar.lore


def test_limits_are_those_of_the_headers():
    """Python reads them from the library, which was compiled with the headers."""
    constants = {}
    for header in (ROOT / "include" / "mortar").glob("*.h"):
        text = header.read_text()
        for name, value in re.findall(r"inline constexpr \S+ k(\w+) = ([\d <]+);", text):
            factor, _, shift = value.partition("<<")
            constants[name.lower()] = int(factor) << int(shift or 0)
    for name in (n for n in dir(_limits) if n.isupper()):
        assert getattr(_limits, name) == constants[name.lower().replace("_", "")], name
