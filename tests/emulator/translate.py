#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a kernel of a fat binary into a shared library that the emulator runs.

translate.py FATBIN CACHE KERNEL   prints the path of what describes the kernel (write_record)
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

from instructions import Unsupported
from memory_instructions import MemoryEmitter
from ptx import SIZES, Function, Module, Variable, declared, operands, statements

HERE = Path(__file__).resolve().parent
SOURCES = ("ptx.py", "instructions.py", "memory_instructions.py", "translate.py", "kernel.h", "convert.h")
FLAGS = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv",
         "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-shared", "-fPIC", "-w"]  # fmt: skip
RESERVED_SMEM = 1024


class Scope:
    """Names of one function: registers, labels, variables, params."""

    def __init__(self, kernel: "Kernel", function: Function, pointers: dict[str, str]):
        self.kernel, self.function, self.pointers = kernel, function, pointers
        self.stack = [{}]  # of declared registers' prefixes and names, innermost last
        self.suffixes = [""]
        self.arrays = [{}]
        self.used = {}
        self.scopes = 0
        self.locals = {}

    def push(self):
        self.scopes += 1
        self.stack.append({})
        self.suffixes.append(f"_s{self.scopes}")
        self.arrays.append({})

    def pop(self):
        for of in (self.stack, self.suffixes, self.arrays):
            of.pop()

    def register(self, text):
        """C++ name and type of a register, None if it is none."""
        found = re.match(r"^(%[A-Za-z_]+)(\d+)$", text)
        for names, suffix in zip(reversed(self.stack), reversed(self.suffixes), strict=True):
            kind = names.get(text) or (found and names.get(found[1] + "<>"))
            if kind:
                name = "v_" + re.sub(r"\W", "", text) + suffix
                self.used[name] = kind
                return name, kind
        return None

    def address(self, name):
        if name in self.locals:
            return f"(u64){self.locals[name].name}"
        if name in self.pointers:
            return f"(u64)({self.pointers[name]})"
        return self.kernel.address(name)

    def param(self, text):
        """Pointer to `[param+offset]` where that is known, None where it is an address."""
        found = re.match(r"^\[\s*([\w$%.]+)\s*(?:\+\s*(-?\w+))?\s*\]$", text)
        offset = int(found[2] or "0", 0)
        for arrays in reversed(self.arrays):
            if found[1] in arrays:
                return f"{arrays[found[1]]} + {offset}"
        if found[1] in self.pointers:
            return f"(u8*)({self.pointers[found[1]]}) + {offset}"
        return None

    def array(self, name):
        for arrays in reversed(self.arrays):
            if name in arrays:
                return arrays[name]
        return None


class Kernel:
    def __init__(self, module: Module, entry: Function):
        self.module, self.entry = module, entry
        self.shared: dict[str, int] = {}
        self.smem = RESERVED_SMEM
        self.dynamic_align = 1
        self.symbols: list[str] = []
        self.own_shared: dict[str, Variable] = {}
        self.lines: list[str] = []
        self.functions: dict[str, str] = {}
        self.pending: list[str] = []

    def address(self, name):
        v = self.own_shared.get(name) or self.module.variables.get(name)
        if v is None:
            return None
        if v.space == "shared":
            if v.size == 0:
                self.dynamic_align = max(self.dynamic_align, v.align)
                return f"(t->smem_base + kDynamic{v.align})"
            if name not in self.shared:
                self.smem = (self.smem + v.align - 1) // v.align * v.align
                self.shared[name] = self.smem
                self.smem += v.size
            return f"(t->smem_base + {self.shared[name]})"
        if name not in self.symbols:
            self.symbols.append(name)
        return f"t->symbols[{self.symbols.index(name)}]"

    def translate(self) -> str:
        params, offset = {}, 0
        self.params = []
        for p in self.entry.params:
            offset = (offset + p.align - 1) // p.align * p.align
            params[p.name] = f"t->params + {offset}"
            self.params.append((offset, p.size))
            offset += p.size
        self.param_bytes = offset
        main = 'extern "C" __attribute__((visibility("default"))) void kernel(Thread* t) ' + self.body(self.entry, params)
        texts, heads, done = [], [], set()
        while self.pending:
            name = self.pending.pop()
            if name in done:
                continue
            done.add(name)
            f = self.module.functions[name]
            names = [*f.returned, *f.params]
            head = f"static void {self.functions[name]}(" + ", ".join(
                ["Thread* t", *(f"u8* a{i}" for i in range(len(names)))]) + ")"
            heads.append(head + ";")
            texts.append(head + self.body(f, {v.name: f"a{i}" for i, v in enumerate(names)}))
        end = self.smem
        constants = [f"constexpr u32 kDynamic{a} = {(end + max(a, 16) - 1) // max(a, 16) * max(a, 16)};"
                     for a in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]
        # ptxas pads a block's own shared memory to where the dynamic begins.
        self.static_smem = (end + self.dynamic_align - 1) // self.dynamic_align * self.dynamic_align - RESERVED_SMEM
        return "\n".join(['#include "kernel.h"', '#include "convert.h"', *constants, *heads, main, *texts]) + "\n"

    def body(self, function: Function, pointers) -> str:
        scope = Scope(self, function, pointers)
        emitter = MemoryEmitter(scope)
        out, where, depots = [], "", []
        every = list(statements(function.body))
        labels = self.labels(every)
        for number, item in enumerate(every):
            if item[0] == "{":
                scope.push()
                out.append("{")
            elif item[0] == "}":
                scope.pop()
                out.append("}")
            elif item[0] == "label":
                out.append(f"{labels[number]}: ;")
            elif item[0] == "loc":
                where = self.place(item[1]) or where
            elif item[1].startswith("."):
                self.declare(item[1], scope, depots, out)
            else:
                text = item[1]
                at = len(self.lines)
                self.lines.append(f"{where} | {text}")
                try:
                    out.append(self.statement(text, emitter, scope, at, labels, number))
                except (Unsupported, KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
                    raise SystemExit(f"emulator: cannot translate `{text}` ({where}): {error!r}") from error
        registers = "".join(f"{'f32' if k == 'f32' else 'f64' if k == 'f64' else c_type(k)} {n};\n"
                            for n, k in scope.used.items())
        return "{\n" + registers + "u32 cc = 0;\n" + "\n".join(depots + out) + "\n}\n"

    def place(self, text):
        found = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if not found or found[2] == "0":
            return None
        name = self.module.files.get(int(found[1]), "?")
        place = f"{name.split('/src/')[-1]}:{found[2]}"
        inlined = re.search(r"inlined_at (\d+) (\d+)", text)
        if inlined:
            name = self.module.files.get(int(inlined[1]), "?")
            place += f" in {name.split('/src/')[-1]}:{inlined[2]}"
        return place

    def labels(self, every):
        """C++ names of labels by their number, and by (scope path, name) for branches."""
        path, scopes, named = [0], 0, {}
        self.paths = {}
        for number, item in enumerate(every):
            if item[0] == "{":
                scopes += 1
                path = [*path, scopes]
            elif item[0] == "}":
                path = path[:-1]
            elif item[0] == "label":
                name = f"L_{re.sub(r'[^A-Za-z0-9_]', '_', item[1])}_{path[-1]}"
                named[number] = name
                named[(tuple(path), item[1])] = name
            self.paths[number] = tuple(path)
        return named

    def target(self, labels, number, name):
        path = self.paths[number]
        while path:
            if (path, name) in labels:
                return labels[(path, name)]
            path = path[:-1]
        raise Unsupported(f"the label {name}")

    def declare(self, text, scope, depots, out):
        word, _, rest = text.partition(" ")
        if word == ".reg":
            kind, _, names = rest.strip().partition(" ")
            for name in names.split(","):
                name = name.strip()
                found = re.match(r"^(.*)<\d+>$", name)
                scope.stack[-1][found[1] + "<>" if found else name] = kind[1:]
        elif word == ".local":
            v = declared(rest, "local")
            name = f"depot{len(depots)}_"
            depots.append(f"alignas({max(v.align, 16)}) u8 {name}[{v.size}];")
            scope.locals[v.name] = Variable(name, "local", v.align, v.size)
        elif word == ".shared":
            v = declared(rest, "shared")
            self.own_shared[v.name] = v
        elif word == ".param":
            v = declared(rest, "param")
            name = "p_" + re.sub(r"\W", "", v.name) + scope.suffixes[-1]
            scope.arrays[-1][v.name] = name
            out.append(f"alignas(16) u8 {name}[{max(v.size, 1)}];")
        elif word != ".pragma":
            raise SystemExit(f"emulator: cannot translate `{text}`")

    def statement(self, text, emitter, scope, at, labels, number):
        guard = ""
        found = re.match(r"^@(!?)([\w%$]+)\s+(.*)$", text)
        if found:
            guard = f"if ({found[1]}{emitter.read(found[2], 'pred')}) "
            text = found[3]
        opcode, _, rest = text.partition(" ")
        base = opcode.split(".")[0]
        if base == "bra":
            return f"{guard}goto {self.target(labels, number, rest.strip())};"
        if base in ("ret", "exit"):
            if base == "exit" and not scope.function.is_entry:
                raise Unsupported(opcode)
            return f"{guard}return;"
        if base == "call":
            return f"{guard}{{ {self.call(rest, scope, at)} }}"
        return f"{guard}{{ {emitter.emit(opcode, operands(rest), at)} }}"

    def call(self, rest, scope, at):
        args = operands(rest)
        returned = operands(args.pop(0)[1:-1]) if args[0].startswith("(") else []
        name = args.pop(0)
        if name in ("__assertfail", "__trap"):
            return f"emu_trap(t, {at});"
        if name not in self.module.functions:
            raise Unsupported(f"a call of {name}")
        passed = operands(args[0][1:-1]) if args else []
        arrays = [scope.array(n.strip()) for n in [*returned, *passed]]
        if name not in self.functions:
            self.functions[name] = f"function{len(self.functions)}"
        self.pending.append(name)
        return f"{self.functions[name]}({', '.join(['t', *arrays])});"


def c_type(kind):
    return "u8" if kind == "pred" else f"u{8 * SIZES[kind]}"


@contextlib.contextmanager
def locked(path: Path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ptx_of(fatbin: Path, cache: Path) -> Path:
    """The PTX of a fat binary, by the hash of its bytes."""
    out = cache / f"{hashlib.sha256(fatbin.read_bytes()).hexdigest()[:20]}.ptx"
    if out.exists():
        return out
    with locked(out.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=cache) as folder:
        if not out.exists():
            copy = Path(folder) / "code.fatbin"
            copy.write_bytes(fatbin.read_bytes())
            subprocess.run(["cuobjdump", "-xptx", "all", copy.name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            # One text per architecture: the newest is what a new device would compile.
            texts = sorted(Path(folder).glob("*.ptx"), key=lambda p: int(re.search(r"sm_(\d+)", p.name)[1]))
            if not texts:
                raise SystemExit("emulator: a fat binary without PTX (-DMORTAR_CUDA_ARCHS=90a-virtual)")
            os.replace(texts[-1], out)
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
                subprocess.run(["g++", *FLAGS, f"-I{HERE}", str(source), "-o", str(made)], check=True)
                os.replace(made, library)
    return library


def record(module_path: Path, name: str, cache: Path, module: Module | None = None) -> Path:
    """Writes what the emulator has to know of a kernel, one fact a line, then its instructions."""
    tool = hashlib.sha256(b"".join((HERE / s).read_bytes() for s in SOURCES)).hexdigest()[:12]
    key = hashlib.sha256(name.encode()).hexdigest()[:12]
    out = cache / f"{module_path.stem}.{key}.{tool}.kernel"
    if out.exists():
        return out
    module = module or Module(module_path.read_text())
    if name not in module.functions:
        raise SystemExit(f"emulator: no PTX of {name}")
    kernel = Kernel(module, module.functions[name])
    code = kernel.translate()
    library = compile_kernel(code, cache)
    lines = [f"library {library}", f"static_smem {kernel.static_smem}", f"param_bytes {kernel.param_bytes}"]
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
    return b"".join((int(x.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for x in values)


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
