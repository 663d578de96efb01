# SPDX-License-Identifier: Apache-2.0
"""The C++ text of a kernel and of the functions that it calls."""

import os
import re

from instructions import Instructions
from operands import Unsupported
from ptx import SIZES, Function, Module, Variable, declared, operands, statements

RESERVED_SMEM = 1024  # bytes that the system keeps below a block's own shared memory
DROPPED = os.environ.get("MORTAR_EMULATOR_DROP", "")


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
        main = (
            'extern "C" __attribute__((visibility("default"))) void kernel(Thread* t) '
            + self.body(self.entry, params)
        )
        texts, heads, done = [], [], set()
        while self.pending:
            name = self.pending.pop()
            if name in done:
                continue
            done.add(name)
            f = self.module.functions[name]
            names = [*f.returned, *f.params]
            head = (
                f"static void {self.functions[name]}("
                + ", ".join(["Thread* t", *(f"u8* a{i}" for i in range(len(names)))])
                + ")"
            )
            heads.append(head + ";")
            texts.append(head + self.body(f, {v.name: f"a{i}" for i, v in enumerate(names)}))
        end = self.smem
        constants = [
            f"constexpr u32 kDynamic{a} = {(end + max(a, 16) - 1) // max(a, 16) * max(a, 16)};"
            for a in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
        ]
        # ptxas pads a block's own shared memory to where the dynamic begins.
        self.static_smem = (
            end + self.dynamic_align - 1
        ) // self.dynamic_align * self.dynamic_align - RESERVED_SMEM
        return (
            "\n".join(
                ['#include "kernel.h"', '#include "convert.h"', *constants, *heads, main, *texts]
            )
            + "\n"
        )

    def body(self, function: Function, pointers) -> str:
        scope = Scope(self, function, pointers)
        emitter = Instructions(scope)
        out, where, depots = [], "", []
        every = self.without_dropped(list(statements(function.body)))
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
                except (
                    Unsupported,
                    KeyError,
                    TypeError,
                    IndexError,
                    ValueError,
                    AttributeError,
                ) as error:
                    raise SystemExit(
                        f"emulator: cannot translate `{text}` ({where}): {error!r}"
                    ) from error
        registers = "".join(
            f"{'f32' if k == 'f32' else 'f64' if k == 'f64' else c_type(k)} {n};\n"
            for n, k in scope.used.items()
        )
        return "{\n" + registers + "u32 cc = 0;\n" + "\n".join(depots + out) + "\n}\n"

    def without_dropped(self, every):
        """Leaves out the statement that MORTAR_EMULATOR_DROP="PATTERN NUMBER" names, to prove that
        a test would notice."""
        if not DROPPED:
            return every
        pattern, number = DROPPED.rsplit(" ", 1)
        found = [
            i for i, item in enumerate(every) if item[0] == "do" and re.search(pattern, item[1])
        ]
        if int(number) < len(found):
            at = found[int(number)]
            waited = re.match(r"mbarrier\.try_wait\S* (\w+),", every[at][1])
            # A wait that always ends at once, not a loop around nothing.
            every[at : at + 1] = [("do", f"mov.pred {waited[1]}, 1")] if waited else []
        return every

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
