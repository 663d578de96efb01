# SPDX-License-Identifier: Apache-2.0
"""The project's own checks find what they are there for."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """The modules of tools/, looking at an empty repository in tmp_path."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import suite
    from checks import documents, includes, text

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for module in (suite, documents, includes, text):
        monkeypatch.setattr(module, "ROOT", tmp_path)

    def write(name: str, content: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        subprocess.run(["git", "add", name], cwd=tmp_path, check=True)

    suite.write = write
    yield suite
    del suite.write


@pytest.mark.parametrize(
    ("file", "include", "wrong"),
    [
        ("src/lora/lora.cpp", '"lora/problem.h"', False),
        ("src/lora/lora.cpp", '"mortar/lora.h"', False),
        ("src/lora/lora.cpp", '"dynamic_conv/problem.h"', True),
        ("src/core/check.cpp", '"lora/problem.h"', True),
        ("src/device/mma.cuh", '"core/int_math.h"', False),
        ("include/mortar/lora.h", '"core/check.h"', True),
        ("include/mortar/lora.h", "<cuda_runtime.h>", True),
        ("src/lora/lora.cpp", "<tvm/ffi/tensor.h>", True),
        ("bindings/tvm_ffi/lora.cpp", "<tvm/ffi/tensor.h>", False),
        ("bindings/tvm_ffi/lora.cpp", '"lora/problem.h"', True),
    ],
)
def test_include_direction(tools, file, include, wrong):
    from checks import includes

    tools.write(file, f"#include {include}\n")
    assert bool(list(includes.include_direction())) == wrong


def test_documents_name_only_what_exists(tools):
    from checks import documents

    tools.write("src/lora/a.h", "")
    tools.write("src/lora/b.cpp", "")
    tools.write(
        "README.md", "`src/lora/{a.h,b.cpp}` [b](src/lora/b.cpp) `src/<family>/a.h` `a.h`\n"
    )
    assert list(documents.paths_exist()) == []
    tools.write("README.md", "`src/lora/c.h` [c](docs/c.md) `no_such.cpp`\n")
    assert len(list(documents.paths_exist())) == 3


def test_commands_in_documents(tools, monkeypatch):
    from checks import documents

    usage = (ROOT / "run").read_text()
    tools.write("run", usage)
    tools.write("README.md", "`./run demo conv`, `./run gpu-test`\n")
    assert list(documents.commands_exist()) == []
    tools.write("README.md", "./run everything\n")
    assert list(documents.commands_exist()) == ["README.md: there is no `./run everything`"]


def test_banned_text(tools):
    from checks import text

    tools.write("good.py", "# SPDX-License-Identifier: Apache-2.0\nratio = work/total\n")
    assert list(text.banned_text()) == []
    skip = "pytest." + "skip"
    tools.write("bad.py", f"open('{'/'}home/me/x')\n{skip}('later')\n")
    found = list(text.banned_text())
    assert [line.partition(": ")[0] for line in found] == ["bad.py:1", "bad.py:2"]
    assert list(text.source_form()) == ["bad.py: the SPDX line is missing"]


_PTXAS = """\
ptxas info    : Compiling entry function '_ZN6mortar4lora5applyIfEEv6Params' for '{arch}'
ptxas info    : Function properties for _ZN6mortar4lora5applyIfEEv6Params
    {spill} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {spill} bytes cumulative stack, 256 bytes smem
"""


@pytest.mark.parametrize("spill", [0, 8])
def test_spills_fail(tools, tmp_path, monkeypatch, spill):
    import kernel_report

    monkeypatch.setattr(kernel_report, "ROOT", tmp_path)
    tools.write("src/lora/cuda/apply.cu", "")
    tools.write("tools/allowed_spills.toml", "")
    log = tmp_path / "build/CMakeFiles/mortar_objects.dir/src/lora/cuda/apply.cu.o.stderr"
    log.parent.mkdir(parents=True)
    log.write_text(_PTXAS.format(arch="sm_80", spill=0) + _PTXAS.format(arch="sm_90a", spill=spill))
    kernels = kernel_report.read_kernels(tmp_path / "build")
    assert [(k.function, k.arch, k.registers, k.shared) for k in kernels] == [
        ("apply", "sm_80", 40, 256),
        ("apply", "sm_90a", 40, 256),
    ]
    counts = kernel_report.check_kernels(tmp_path / "build")
    assert (counts.passed, counts.failed) == ((2, 0) if spill == 0 else (1, 1))
    allowed = '[[allow]]\nkernel = "lora::apply"\narch = "sm_90"\nbytes = 16\nreason = "a test"\n'
    tools.write("tools/allowed_spills.toml", allowed)
    counts = kernel_report.check_kernels(tmp_path / "build")
    assert (counts.passed, counts.failed) == ((2, 1) if spill == 0 else (2, 0))


def test_skipped_tests_are_not_passed(tools, tmp_path):
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>'
        '<testcase name="c"><failure/></testcase><testcase name="d" status="notrun"/>'
        "</testsuite></testsuites>"
    )
    assert tools.read_junit(tmp_path / "report.xml") == tools.Counts(passed=1, failed=1, skipped=2)
    suite = tools.Suite()
    suite.stage("tests", lambda: tools.read_junit(tmp_path / "report.xml"))
    assert suite.finish() == 1


def test_commands_beside_end_at_the_first_failure(tools):
    said = [["echo", "one"], ["sh", "-c", "echo two >&2; exit 3"], ["echo", "three"]]
    assert tools.run_quietly(said) == (False, "one\ntwo\n")
    assert tools.run_quietly([["echo", "one"], ["echo", 2]]) == (True, "one\n2\n")


def test_run_lists_its_commands():
    done = subprocess.run([ROOT / "run"], text=True, capture_output=True, check=True)
    for command in ["setup", "build", "demo", "test", "bench", "gpu-test", "wheel", "format"]:
        assert f"\n  {command} " in done.stdout
    wrong = subprocess.run([ROOT / "run", "absent"], text=True, capture_output=True)
    assert wrong.returncode == 1 and "no command 'absent'" in wrong.stderr


@pytest.mark.parametrize("name", ["peers", "render"])
def test_run_takes_no_helper_of_the_benchmarks_for_one(name):
    wrong = subprocess.run([ROOT / "run", "bench", name], text=True, capture_output=True)
    assert wrong.returncode == 1
    assert f"there is no benchmark '{name}'" in wrong.stderr
    assert wrong.stderr.splitlines()[-1].split() == ["conv", "lora", "model", "norm", "train"]


@pytest.mark.parametrize("command", ["setup", "build", "test", "wheel", "format"])
def test_run_refuses_arguments_before_it_works(command):
    wrong = subprocess.run([ROOT / "run", command, "lora"], text=True, capture_output=True)
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert wrong.stderr == f"[mortar] {command} takes no arguments, got 'lora'\n"
    asked = subprocess.run([ROOT / "run", command, "--help"], text=True, capture_output=True)
    assert asked.returncode == 0 and asked.stdout.startswith("usage: ./run COMMAND")


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "1.5"])
def test_run_refuses_wrong_seconds_before_it_works(seconds):
    environment = os.environ | {"MORTAR_FUZZ_SECONDS": seconds}
    wrong = subprocess.run([ROOT / "run", "test"], env=environment, text=True, capture_output=True)
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert f"must be a whole number of seconds, got '{seconds}'" in wrong.stderr


def test_run_names_its_demos():
    wrong = subprocess.run([ROOT / "run", "demo", "cnov"], text=True, capture_output=True)
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert "there is no demo 'cnov', but these: conv norm train" in wrong.stderr


if shutil.which("cmake") and shutil.which("ninja"):  # not on a machine that runs tests alone

    @pytest.mark.parametrize("family", ["lora", "dynamic_conv"])
    def test_a_build_of_one_family_has_the_tests_of_that_family(tmp_path, family):
        options = [f"-DMORTAR_FAMILIES={family}", "-DMORTAR_CUDA=OFF", "-DMORTAR_FFI=OFF"]
        build = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *options]
        subprocess.run(build, check=True, capture_output=True)
        listed = subprocess.run(["ctest", "-N"], cwd=tmp_path, check=True, capture_output=True)
        names = re.findall(r"Test +#\d+: (\w+)", listed.stdout.decode())
        assert f"{family}_check_test" in names or f"{family}_op_test" in names
        examples = {"installed_example", "readme_example"} if family == "lora" else set()
        common = {"dtype_visitor_test", "float8_test"} | examples
        assert {n for n in names if not n.startswith(family)} == common
