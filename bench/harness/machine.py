# SPDX-License-Identifier: Apache-2.0
"""The machine a result belongs to: its name, caches, clocks, software and its memory's roof."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .timing import time_graphs

ROOT = Path(__file__).resolve().parents[2]


def keep_freed_memory() -> None:
    """Has glibc keep what is freed: every large output is mapped anew otherwise, and the kernel's
    work for its pages (15 ms for 12 MB on a virtual machine) falls to whichever provider the state
    of the heap picks."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # of <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


@dataclass(frozen=True)
class Ceiling:
    """What floors are computed with, bytes/s and FLOP/s."""

    bandwidth: float
    flops: float


#: Measured once per machine and then fixed, so that floors compare between runs: a device-to-device
#: copy of large tensors (bytes read + written) and an 8192^3 bf16 product through cuBLAS.
CEILINGS = {
    "NVIDIA H200": Ceiling(bandwidth=4.28e12, flops=790e12),
    "NVIDIA H100 80GB HBM3": Ceiling(bandwidth=3.03e12, flops=790e12),
}


def _output(*command: str) -> str:
    """The command's standard output, or '' where it cannot run."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache in bytes: what rotated buffers have to exceed."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20}[match[2]])
    return max(sizes, default=32 << 20)


def commit() -> str:
    """MORTAR_COMMIT if set (binaries carried to another machine), else the commit of the tree, '+'
    after it when tracked files differ."""
    if carried := os.environ.get("MORTAR_COMMIT"):
        return carried
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _output(
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "src",
        "include",
        "bindings",
        "python",
        "bench/*.py",
    )
    return head + ("+" if changed else "")


def describe(device: torch.device) -> dict[str, object]:
    """Name, clocks, driver, versions, date and commit."""
    info: dict[str, object] = {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cache_bytes": cache_bytes(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
    }
    if device.type == "cuda":
        fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
        query = f"--query-gpu={','.join(fields)}"
        index = device.index or 0
        answer = _output("nvidia-smi", query, "--format=csv,noheader", f"--id={index}").split(",")
        if len(answer) == len(fields):
            info |= {f.replace(".", "_"): a.strip() for f, a in zip(fields, answer, strict=True)}
        info["cuda"] = torch.version.cuda
        info["sms"] = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        info["threads"] = torch.get_num_threads()
        info["load_average"] = round(os.getloadavg()[0], 1)
        info["target"] = _cpu_target()
    return info


def _cpu_target() -> str:
    """The instruction set that Mortar's own kernels use here, as the library says."""
    from mortar._ffi import lib  # not above: tables and pages are made without the library

    return str(lib.cpu_target())


def slug(info: dict[str, object]) -> str:
    """Folder name of a machine's results: 'nvidia-h200', 'amd-epyc-2-threads'."""
    name = str(info["name"])
    if info["device"] == "cpu":
        name += f" {info['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def memory_roofs(device: torch.device, quick: bool = False) -> dict[str, float]:
    """Bytes per second by what moves them, far more than any cache holds. "copy" counts bytes read
    plus written. On the CPU also "read", and "streaming store", which writes past the caches: an
    ordinary store reads its line first, so a copy's own count leaves out a third of its bytes."""
    size = (64 << 20) if quick else (2 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.randn(size // 4, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        # A kernel: in a graph, copy_ is a memory copy node, which runs at two thirds of the speed.
        torch.neg(source, out=target)

    if device.type == "cuda":
        return {"copy": 2 * size / time_graphs({"copy": [copy]})["copy"].us * 1e6}
    threads = torch.get_num_threads()
    share = size // threads
    with ThreadPoolExecutor(threads) as pool:

        def store() -> None:
            # memset of so many bytes writes past the caches; ctypes lets go of the GIL for it.
            starts = [target.data_ptr() + i * share for i in range(threads)]
            list(pool.map(lambda start: ctypes.memset(start, 0, share), starts))

        samples = 3 if quick else 11
        return {
            "copy": 2 * size / _seconds(copy, samples),
            "read": size / _seconds(source.sum, samples),
            "streaming store": threads * share / _seconds(store, samples),
        }


def _seconds(call: Callable[[], object], samples: int) -> float:
    """Median time of a call, after one that is not counted."""
    taken = []
    for _ in range(samples + 1):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def ceiling(info: dict[str, object], roof: float) -> Ceiling:
    """The machine's fixed ceiling, or this run's roof where none is recorded."""
    return CEILINGS.get(str(info["name"]), Ceiling(bandwidth=roof, flops=float("inf")))
