#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a kernel of a fat binary into a shared library that the emulator runs.

translate.py FATBIN CACHE KERNEL   prints the path of what describes the kernel (see record())
translate.py FATBIN CACHE          does so for every kernel that the fat binary has
"""

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_text import DROPPED, Kernel
from ptx import SIZES, Module, Variable

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing",
         "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-shared", "-fPIC",
         "-w"]  # fmt: skip


@contextlib.contextmanager
def locked(path: Path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ptx_of(fatbin: Path, cache: Path) -> Path:
    """The PTX of an uncompressed fat binary, by the hash of its bytes."""
    data = fatbin.read_bytes()
    out = cache / f"{hashlib.sha256(data).hexdigest()[:20]}.ptx"
    if out.exists():
        return out
    # One text per architecture: the newest is what a new device would compile.
    texts = re.findall(rb"\n(\.version [^\0]*\n\.target sm_(\d+)[^\0]*)\0", data)
    if not texts:
        raise SystemExit(
            "emulator: a fat binary without readable PTX"
            " (-DMORTAR_CUDA_ARCHS=90a-virtual -DMORTAR_COMPRESS=OFF)"
        )
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        new = Path(folder) / "code.ptx"
        new.write_bytes(max(texts, key=lambda text: int(text[1]))[0])
        os.replace(new, out)
    return out


def compile_kernel(code: str, cache: Path) -> Path:
    digest = hashlib.sha256(code.encode())
    for name in ("kernel.h", "convert.h"):
        digest.update((HERE / name).read_bytes())
    digest.update(" ".join(FLAGS).encode())
    key = digest.hexdigest()[:20]
    library = cache / f"{key}.so"
    if not library.exists():
        with locked(cache / f"{key}.lock"):
            if not library.exists():
                source = cache / f"{key}.cpp"
                source.write_text(code)
                made = cache / f"{key}.{os.getpid()}.so"
                subprocess.run(
                    ["g++", *FLAGS, f"-I{HERE}", str(source), "-o", str(made)], check=True
                )
                os.replace(made, library)
    return library


def sources():
    """What the translation depends on."""
    return [*sorted(HERE.glob("*.py")), HERE / "kernel.h", HERE / "convert.h"]


def record(module_path: Path, name: str, cache: Path, module: Module | None = None) -> Path:
    """Writes what the emulator has to know of a kernel, one fact a line, then its instructions."""
    tool = hashlib.sha256(b"".join(s.read_bytes() for s in sources())).hexdigest()[:12]
    key = hashlib.sha256((name + DROPPED).encode()).hexdigest()[:12]
    out = cache / f"{module_path.stem}.{key}.{tool}.kernel"
    if out.exists():
        return out
    module = module or Module(module_path.read_text())
    if name not in module.functions:
        raise SystemExit(f"emulator: no PTX of {name}")
    kernel = Kernel(module, module.functions[name])
    code = kernel.translate()
    library = compile_kernel(code, cache)
    lines = [
        f"library {library}",
        f"static_smem {kernel.static_smem}",
        f"param_bytes {kernel.param_bytes}",
        f"max_threads {kernel.entry.max_threads}",
    ]
    lines += [f"param {offset} {size}" for offset, size in kernel.params]
    for symbol in kernel.symbols:
        v = module.variables[symbol]
        lines.append(f"symbol {v.name} {v.align} {v.size} {initial_bytes(v).hex() or '-'}")
    lines += ["instructions", *kernel.lines]
    made = out.with_suffix(f".{os.getpid()}")
    made.write_text("\n".join(lines) + "\n")
    os.replace(made, out)
    return out


def initial_bytes(v: Variable) -> bytes:
    if v.initial is None:
        return b""
    values = re.findall(r"-?\w+", v.initial.strip("{} "))
    kind = re.search(r"\.(\w+)\s+[\w$%]+(\[\d*\])*$", v.kind)[1] if v.kind else "b8"
    size = SIZES[kind]
    return b"".join(
        (int(x.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for x in values
    )


def main():
    fatbin, cache = Path(sys.argv[1]), Path(sys.argv[2])
    cache.mkdir(parents=True, exist_ok=True)
    path = ptx_of(fatbin, cache)
    if len(sys.argv) > 3:
        print(record(path, sys.argv[3], cache))
        return
    module = Module(path.read_text())
    for f in module.functions.values():
        if f.is_entry:
            print(record(path, f.name, cache, module))


if __name__ == "__main__":
    main()
