# SPDX-License-Identifier: Apache-2.0
"""Bits, comparisons and choices of PTX."""

from arithmetic import Arithmetic
from operands import C_TYPES, Unsupported, u
from ptx import SIZES


class Logic(Arithmetic):
    def _logic(self, parts, args, form):
        kind = parts[-1]
        values = [self.read(x, kind) for x in args[1:]]
        return self.write(args[0], form.format(*values), kind)

    def do_and(self, parts, args, at):
        return self._logic(parts, args, "({} & {})")

    def do_or(self, parts, args, at):
        return self._logic(parts, args, "({} | {})")

    def do_xor(self, parts, args, at):
        return self._logic(parts, args, "({} ^ {})")

    def do_not(self, parts, args, at):
        return self._logic(parts, args, "!{}" if parts[-1] == "pred" else "~{}")

    def do_cnot(self, parts, args, at):
        return self._logic(parts, args, "({} == 0)")

    def do_shl(self, parts, args, at):
        kind = u(parts[-1])
        n = self.read(args[2], "u32")
        value = (
            f"({n} >= {8 * SIZES[kind]} ? ({kind})0 : ({kind})({self.read(args[1], kind)} << {n}))"
        )
        return self.write(args[0], value, kind)

    def do_shr(self, parts, args, at):
        kind = parts[-1] if parts[-1].startswith("s") else u(parts[-1])
        a, n, bits = self.read(args[1], kind), self.read(args[2], "u32"), 8 * SIZES[kind]
        past = f"({a} >> {bits - 1})" if kind.startswith("s") else f"({kind})0"
        return self.write(args[0], f"({n} >= {bits} ? {past} : ({a} >> {n}))", kind)

    def do_shf(self, parts, args, at):
        a, b, n = (self.read(x, "u32") for x in args[1:4])
        amount = f"({n} & 31)" if "wrap" in parts else f"({n} > 32 ? 32 : {n})"
        both = f"((u64){b} << 32 | {a})"
        value = (
            f"(u32)({both} << {amount} >> 32)" if parts[1] == "l" else f"(u32)({both} >> {amount})"
        )
        return self.write(args[0], value, "u32")

    def do_bfi(self, parts, args, at):
        kind = u(parts[-1])
        a, b = self.read(args[1], kind), self.read(args[2], kind)
        p, n = self.read(args[3], "u32"), self.read(args[4], "u32")
        return self.write(args[0], f"emu_bfi<{kind}>({a}, {b}, {p}, {n})", kind)

    def do_bfe(self, parts, args, at):
        kind = parts[-1]
        a, p, n = self.read(args[1], kind), self.read(args[2], "u32"), self.read(args[3], "u32")
        return self.write(args[0], f"emu_bfe<{u(kind)}, {C_TYPES[kind]}>({a}, {p}, {n})", u(kind))

    def do_bfind(self, parts, args, at):
        kind = parts[-1]
        amount = int("shiftamt" in parts)
        value = f"emu_bfind<{u(kind)}, {C_TYPES[kind]}>({self.read(args[1], kind)}, {amount})"
        return self.write(args[0], value, "u32")

    def do_brev(self, parts, args, at):
        kind = u(parts[-1])
        return self.write(args[0], f"emu_brev({self.read(args[1], kind)})", kind)

    def do_popc(self, parts, args, at):
        return self.write(
            args[0], f"(u32)__builtin_popcountll({self.read(args[1], u(parts[-1]))})", "u32"
        )

    def do_clz(self, parts, args, at):
        kind = u(parts[-1])
        a = self.read(args[1], kind)
        value = (
            f"({a} == 0 ? {8 * SIZES[kind]}u : (u32)__builtin_clzll({a}) - {64 - 8 * SIZES[kind]})"
        )
        return self.write(args[0], value, "u32")

    def do_prmt(self, parts, args, at):
        if parts[-1] != "b32" or len(parts) > 2:
            raise Unsupported(".".join(parts))
        a, b, s = (self.read(x, "u32") for x in args[1:4])
        return self.write(args[0], f"emu_prmt({a}, {b}, {s})", "u32")

    def do_dp4a(self, parts, args, at):
        a, b, c = (self.read(x, "u32") for x in args[1:4])
        signs = ", ".join(str(int(p == "s32")) for p in parts[1:3])
        return self.write(args[0], f"emu_dp4a({a}, {b}, {c}, {signs})", "u32")

    def do_lop3(self, parts, args, at):
        a, b, c = (self.read(x, "u32") for x in args[1:4])
        table = int(args[4], 0)
        terms = []
        for i in range(8):
            if table >> i & 1:
                pick = [("" if i & bit else "~") + x for x, bit in ((a, 4), (b, 2), (c, 1))]
                terms.append("(" + " & ".join(pick) + ")")
        return self.write(args[0], "(" + (" | ".join(terms) or "0u") + ")", "u32")

    def do_sad(self, parts, args, at):
        kind = parts[-1]
        a, b, c = (self.read(x, kind) for x in args[1:4])
        return self.write(args[0], f"({c} + ({a} < {b} ? {b} - {a} : {a} - {b}))", kind)

    def do_selp(self, parts, args, at):
        kind = parts[-1]
        a, b, p = self.read(args[1], kind), self.read(args[2], kind), self.read(args[3], "pred")
        return self.write(args[0], f"({p} ? {a} : {b})", kind)

    def do_setp(self, parts, args, at):
        kind, compare = parts[-1], parts[1]
        combine = next((p for p in parts[2:-1] if p in ("and", "or", "xor")), None)
        if kind in ("f16", "bf16"):
            widen = "emu_bfloat" if kind == "bf16" else "emu_half"
            a, b = (f"{widen}({self.read(x, 'u16')})" for x in args[1:3])
        elif kind in ("f16x2", "bf16x2"):
            raise Unsupported(".".join(parts))
        else:
            a, b = self.read(args[1], kind), self.read(args[2], kind)
        signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<",
                 "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
        unordered = f"({a} != {a} || {b} != {b})"
        if kind in ("f32", "f64", "f16", "bf16"):
            if compare == "num":
                value = f"!{unordered}"
            elif compare == "nan":
                value = unordered
            elif compare == "ne":
                value = f"({a} != {b} && !{unordered})"
            elif compare.endswith("u") and compare[:-1] in signs:
                value = f"({a} {signs[compare[:-1]]} {b} || {unordered})"
            else:
                value = f"({a} {signs[compare]} {b})"
        else:
            value = f"({a} {signs[compare]} {b})"
        results = args[0].split("|")
        if combine:
            c = self.read(args[3], "pred")
            sign = {"and": "&", "or": "|", "xor": "^"}[combine]
            first, second = f"({value} {sign} {c})", f"(!{value} {sign} {c})"
        else:
            first, second = value, f"!{value}"
        if len(results) == 1:
            return self.write(results[0], first, "pred")
        name = "c_"
        return (
            f"{{ const u8 {name} = {value}; "
            + self.write(results[0], first.replace(value, name), "pred")
            + self.write(results[1], second.replace(value, name), "pred")
            + " }"
        )
