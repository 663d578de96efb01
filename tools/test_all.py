# SPDX-License-Identifier: Apache-2.0
"""Runs every test and check of the project on a tree that is built: what `./run test` does."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import kernel_report
from checks import documents, includes, text
from suite import ROOT, Counts, Suite, console, read_junit, run, run_quietly


def pre_commit() -> Counts:
    """Formatters and linters on all files, those of this Python's environment before others."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--show-diff-on-failure"]
    return Counts.of(run(command, os.environ | {"PATH": path}))


def cpp_tests(build: Path, reports: Path) -> Counts:
    """ctest; a GoogleTest program counts case by case, any other test as one."""
    cases = reports / "cpp"
    junit = reports / "ctest.xml"
    environment = os.environ | {"GTEST_OUTPUT": f"xml:{cases}/", "GTEST_BRIEF": "1"}
    command = ["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error", "-j2"]
    succeeded = run([*command, "--output-junit", junit], environment)
    programs = Counts()
    counts = Counts()
    for report in cases.glob("*.xml"):
        counts += read_junit(report)
    programs += read_junit(junit)
    counts.passed += programs.passed - len(list(cases.glob("*.xml")))
    if not succeeded and counts.failed == 0:  # a program that died before it could report
        counts.failed += max(programs.failed, 1)
    return counts


def python_tests(reports: Path, options: Sequence[str] = ()) -> Counts:
    """pytest with `options`."""
    junit = reports / "pytest.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", "--durations=8", *options]
    succeeded = run(command)
    counts = read_junit(junit)
    if not succeeded and counts.failed == 0:
        counts.failed = 1
    return counts


def wheel() -> Counts:
    """Builds the wheel and imports it in a fresh environment with its declared needs only."""
    succeeded, said = run_quietly(
        [[ROOT / "run", "wheel"], [sys.executable, "tools/check_wheel.py"]]
    )
    console.print(said, markup=False)
    return Counts.of(succeeded)


def fuzzing() -> Counts:
    """Mutated adapter files against the reader, under ASan and UBSan (MORTAR_FUZZ_SECONDS or 60):
    what `./run test` has started first of all and left in two files."""
    status, said = ROOT / "build" / "fuzz.status", ROOT / "build" / "fuzz.log"
    deadline = time.monotonic() + MOST_FUZZ_WAIT
    while not status.exists():
        if time.monotonic() > deadline:
            console.print("tests/fuzz/run.sh, which ./run test starts, has left no status")
            return Counts(failed=1)
        time.sleep(1)
    console.print(said.read_text(errors="replace"), markup=False)
    return Counts.of(status.read_text().strip() == "0")


#: Seconds after all other tests within which the fuzzing must have come to its end.
MOST_FUZZ_WAIT = 300 + int(os.environ.get("MORTAR_FUZZ_SECONDS", "60"))
#: Processes of pytest: each loads PyTorch, and has threads of its own.
MOST_PYTESTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="the tree that is built")
    build = parser.parse_args().build
    suite = Suite()

    suite.check("include direction", includes.include_direction)
    suite.check("Python imports", includes.python_imports)
    suite.check("paths in documents", documents.paths_exist)
    suite.check("commands in documents", documents.commands_exist)
    suite.check("banned text", text.banned_text)
    suite.check("source form", text.source_form)
    suite.stage("pre-commit hooks", pre_commit)
    if any(build.glob("CMakeFiles/mortar_objects.dir/**/*.cu.o")):
        suite.stage("CUDA kernels", lambda: kernel_report.check_kernels(build))
    else:
        console.print("no nvcc: the CUDA code was not compiled")
    # Threads that wait for each other must give their core away.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    reports = Path(tempfile.mkdtemp(prefix="reports-", dir=build))
    try:
        suite.stage("C++ tests", lambda: cpp_tests(build, reports))
        cores = min(len(os.sched_getaffinity(0)), MOST_PYTESTS)
        suite.stage(
            "Python tests", lambda: python_tests(reports, ["-m", "not alone", f"-n{cores}"])
        )
        suite.stage("Python tests, alone", lambda: python_tests(reports, ["-m", "alone"]))
    finally:
        shutil.rmtree(reports)
    suite.stage("wheel", wheel)
    suite.stage("adapter reader fuzzing", fuzzing)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
