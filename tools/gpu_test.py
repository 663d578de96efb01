# SPDX-License-Identifier: Apache-2.0
"""Runs all tests on this machine's GPU, then compute-sanitizer's four tools on the small cases.

Needs no CMake: the test programs of the tree are run as they are, so that a tree built elsewhere
can be carried here (MORTAR_BUILD_DIR).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from suite import ROOT, Counts, Suite, console, read_junit
from test_all import python_tests

_SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Small cases on the GPU: by their name, and LoRA's comparisons with the oracle as a whole.
_SMALL = "*Small*:*/LoraOp.*:*/LoraTrain.*:*/LoraTrainParts.*-*/cpu*:*_cpu*"
_MOST_BARRIERS = 16384
# A test program keeps one core busy and little of the GPU: shares of it run side by side.
_SHARES = 8
_PARALLEL = max(1, min(14, (os.cpu_count() or 1) - 2))
_PYTESTS = max(1, min(10, _PARALLEL))


def find_gpu() -> str | None:
    """The name of PyTorch's current GPU, or None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run_share(command: list[object], share: int, shares: int, environment: dict[str, str]):
    """One share of a GoogleTest program's cases, with what it printed."""
    sharded = {"GTEST_TOTAL_SHARDS": str(shares), "GTEST_SHARD_INDEX": str(share)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | sharded | environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def cpp_tests(programs: list[Path], reports: Path) -> Counts:
    """All cases of the programs, in shares side by side; those over 2^31 elements alone."""

    def one(job: tuple[Path, int, int]) -> tuple[Counts, str]:
        program, share, shares = job
        report = reports / f"{program.name}-{share}.xml"
        # The threads of one program's references would take the others' cores.
        environment = {"OMP_NUM_THREADS": "2"} if shares > 1 else {}
        command = [program, "--gtest_brief=1", f"--gtest_output=xml:{report}"]
        done = run_share(command, share, shares, environment)
        counts = read_junit(report) if report.is_file() else Counts()
        if done.returncode != 0 and counts.failed == 0:  # it died before it could report
            counts.failed = 1
        return counts, done.stdout

    def jobs(program: Path) -> list[tuple[Path, int, int]]:
        shares = 1 if "large" in program.name else _SHARES
        return [(program, share, shares) for share in range(shares)]

    total = Counts()
    large = [program for program in programs if "large" in program.name]
    others = [program for program in programs if program not in large]
    others.sort(key=lambda program: -num_cases(program, "*"))  # the longest last would run alone
    for group, workers in ((others, _PARALLEL), (large, 1)):
        with ThreadPoolExecutor(workers) as pool:
            runs = {p: [pool.submit(one, job) for job in jobs(p)] for p in group}
            for program, shares in runs.items():
                counts = Counts()
                for share in shares:
                    share_counts, said = share.result()
                    counts += share_counts
                    if share_counts.failed > 0:
                        console.print(said[-8000:], markup=False)
                console.print(f"{program.name}: {counts.passed} passed, {counts.failed} failed")
                total += counts
    return total


def num_cases(program: Path, pattern: str) -> int:
    """Cases of a program that a GoogleTest filter leaves."""
    command = [str(program), "--gtest_list_tests", f"--gtest_filter={pattern}"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return sum(line.startswith("  ") for line in listed.splitlines())


def sanitize(tool: str, programs: list[Path], reports: Path, pattern: str) -> Counts:
    """Small cases of every program under one tool; any finding of the tool fails the program."""
    counts = Counts()

    def one(job: tuple[Path, int]) -> tuple[Path, subprocess.CompletedProcess, float]:
        program, share = job
        start = time.monotonic()
        report = reports / f"{tool}-{program.name}-{share}.xml"
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
        command += ["--require-cuda-init", "no"]  # some programs test the host alone
        # Prefill kernels have more barriers than synccheck tracks unless asked to. It has no memory
        # for so many in every node of a graph.
        if tool == "synccheck" and program.name != "lora_gpu_test":
            command += ["--num-cuda-barriers", str(_MOST_BARRIERS)]
        command += [program, f"--gtest_filter={pattern}", f"--gtest_output=xml:{report}"]
        done = run_share(command, share, shares_of(program), {})
        return report, done, time.monotonic() - start

    def shares_of(program: Path) -> int:
        return min(cases_of[program], _PARALLEL)

    # The longest first, or the last of them would run alone.
    cases_of = {program: num_cases(program, pattern) for program in programs}
    programs = sorted((p for p in programs if cases_of[p] > 0), key=lambda p: -cases_of[p])
    jobs = [(program, share) for program in programs for share in range(shares_of(program))]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        results = pool.map(one, jobs)
        for (program, share), (report, done, seconds) in zip(jobs, results, strict=True):
            cases = read_junit(report) if report.is_file() else Counts()
            ok = done.returncode == 0
            console.print(
                f"{tool}: {program.name}, share {share + 1} of {shares_of(program)}: "
                f"{cases.passed} cases in {seconds:.0f} s: {'clean' if ok else 'FOUND'}"
            )
            if not ok:
                console.print(done.stdout[-8000:], markup=False)
            counts += cases if ok else Counts(failed=max(cases.failed, 1))
    if counts.passed + counts.failed == 0:
        raise RuntimeError(f"no case matches {pattern}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="the tree that is built")
    parser.add_argument("--small", default=_SMALL, help="GoogleTest filter of the small cases")
    parser.add_argument(
        "--only",
        choices=("cpp", "python", "sanitizers"),
        action="append",
        help="leave out the rest",
    )
    arguments = parser.parse_args()
    stages = arguments.only or ["cpp", "python", "sanitizers"]
    gpu = find_gpu()
    if gpu is None:
        print("gpu-test: PyTorch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    programs = sorted(p for p in arguments.build.glob("*_test") if os.access(p, os.X_OK))
    if not programs:
        print(f"gpu-test: {arguments.build} holds no *_test program", file=sys.stderr)
        return 2
    console.print(f"GPU: {gpu}")
    suite = Suite()
    reports = Path(tempfile.mkdtemp(prefix="reports-"))
    try:
        if "cpp" in stages:
            suite.stage("C++ tests", lambda: cpp_tests(programs, reports))
        if "python" in stages:
            suite.stage(
                "Python tests",
                lambda: python_tests(reports, ["-m", "not alone", f"-n{_PYTESTS}"]),
            )
            suite.stage("Python tests, alone", lambda: python_tests(reports, ["-m", "alone"]))
        if "sanitizers" in stages:
            for tool in _SANITIZERS:
                suite.stage(
                    f"compute-sanitizer {tool}",
                    lambda tool=tool: sanitize(tool, programs, reports, arguments.small),
                )
    finally:
        shutil.rmtree(reports)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
