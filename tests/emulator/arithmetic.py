# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of PTX."""

from operands import C_TYPES, Operands, Unsupported, is_float, u
from ptx import SIZES


class Arithmetic(Operands):
    def emit(self, opcode: str, args: list[str], at: int) -> str:
        parts = opcode.split(".")
        handler = getattr(self, "do_" + parts[0], None)
        if handler is None:
            raise Unsupported(opcode)
        return handler(parts, args, at)

    def _binary(self, args, kind, form):
        a, b = self.read(args[1], kind), self.read(args[2], kind)
        return self.write(args[0], form.format(a=a, b=b), kind)

    def _arithmetic(self, parts, args, sign, word):
        kind = parts[-1]
        if kind in ("f32", "f64"):
            form = f"({{a}} {sign} {{b}})"
            if "rz" in parts or "rm" in parts or "rp" in parts:
                raise Unsupported(".".join(parts))
            if "ftz" in parts:
                form = f"emu_flush(emu_flush({{a}}) {sign} emu_flush({{b}}))"
            if "sat" in parts:
                form = f"emu_min(emu_max({form}, 0.0f), 1.0f)"
            return self._binary(args, kind, self._one_nan(kind, form))
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self._halves(args, kind, f"({{0}} {sign} {{1}})")
        if "cc" in parts or parts[0] in ("addc", "subc"):
            return self._carry(parts, args, sign)
        if "sat" in parts:
            raise Unsupported(".".join(parts))
        return self._binary(args, u(kind).replace("u", "b"), f"({{a}} {sign} {{b}})")

    @staticmethod
    def _one_nan(kind, value):
        return f"emu_one_nan({value})" if kind == "f32" else value

    def _carry(self, parts, args, sign):
        kind = parts[-1]
        a, b = self.read(args[1], u(kind)), self.read(args[2], u(kind))
        wide = "unsigned __int128" if SIZES[kind] == 8 else "u64"
        carry = "cc" if parts[0] in ("addc", "subc") else "0"
        keep = f"cc = sum_ >> {8 * SIZES[kind]} & 1; " if "cc" in parts else ""
        store = self.write(args[0], f"({u(kind)})sum_", u(kind))
        return f"{{ {wide} sum_ = ({wide}){a} {sign} {b} {sign} {carry}; {keep}{store} }}"

    def _halves(self, args, kind, form):
        """float16 or bfloat16, one or two: computed in float32 and rounded once."""
        widen = "emu_bfloat" if kind.startswith("b") else "emu_half"
        narrow = "emu_to_bfloat" if kind.startswith("b") else "emu_to_half"
        if not kind.endswith("x2"):
            values = [f"{widen}({self.read(a, 'u16')})" for a in args[1:]]
            return self.write(args[0], f"{narrow}({form.format(*values)})", "u16")
        names = [f"x{i}_" for i in range(len(args) - 1)]
        take = " ".join(
            f"const u32 {n} = {self.read(a, 'u32')};" for n, a in zip(names, args[1:], strict=True)
        )
        low = form.format(*[f"{widen}((u16){n})" for n in names])
        high = form.format(*[f"{widen}((u16)({n} >> 16))" for n in names])
        value = f"({narrow}({low}) | (u32){narrow}({high}) << 16)"
        return f"{{ {take} {self.write(args[0], value, 'u32')} }}"

    def do_add(self, parts, args, at):
        return self._arithmetic(parts, args, "+", "add")

    def do_sub(self, parts, args, at):
        return self._arithmetic(parts, args, "-", "sub")

    do_addc, do_subc = do_add, do_sub

    def do_mul(self, parts, args, at):
        kind = parts[-1]
        if parts[1] in ("lo", "hi", "wide"):
            return self._product(parts[1], args, kind, None)
        return self._arithmetic(parts, args, "*", "mul")

    def do_mad(self, parts, args, at):
        if parts[1] not in ("lo", "hi", "wide"):
            return self.do_fma(parts, args, at)
        return self._product(parts[1], args, parts[-1], args[3])

    def _product(self, part, args, kind, added):
        signed = kind.startswith("s")
        bits = 8 * SIZES[kind]
        a, b = self.read(args[1], kind), self.read(args[2], kind)
        if part == "lo":
            to, value = u(kind), f"({u(kind)})({u(kind)})({a}) * ({u(kind)})({b})"
        else:
            wide = (
                ("__int128" if signed else "unsigned __int128")
                if bits == 64
                else (f"{'s' if signed else 'u'}{2 * bits}")
            )
            value = f"({wide})({a}) * ({wide})({b})"
            to = u(kind) if part == "hi" else f"u{2 * bits}"
            value = f"({to})(({value}) >> {bits})" if part == "hi" else f"({to})({value})"
        if added is not None:
            value = f"{value} + {self.read(added, to)}"
        return self.write(args[0], value, to)

    do_mul24 = do_mad24 = None

    def do_fma(self, parts, args, at):
        kind = parts[-1]
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            # Exact in float64, so rounded once to float32 and again: see emu_fma_half.
            return self._halves(args, kind, "emu_fma_odd({0}, {1}, {2})")
        a, b, c = (self.read(x, kind) for x in args[1:4])
        call = "__builtin_fmaf" if kind == "f32" else "__builtin_fma"
        if "rn" not in parts:
            raise Unsupported(".".join(parts))
        value = f"{call}({a}, {b}, {c})"
        if "ftz" in parts:
            value = f"emu_flush({call}(emu_flush({a}), emu_flush({b}), emu_flush({c})))"
        return self.write(args[0], self._one_nan(kind, value), kind)

    def do_div(self, parts, args, at):
        kind = parts[-1]
        if is_float(kind):
            return self._arithmetic(parts, args, "/", "div")
        a, b = self.read(args[1], kind), self.read(args[2], kind)
        value = f"({b} == 0 ? ({C_TYPES[kind]})-1 : {a} / {b})"
        if kind.startswith("s"):
            value = f"({b} == -1 ? ({kind})-({u(kind)}){a} : {value})"
        return self.write(args[0], value, kind)

    def do_rem(self, parts, args, at):
        kind = parts[-1]
        a, b = self.read(args[1], kind), self.read(args[2], kind)
        value = f"({b} == 0 ? {a} : {a} % {b})"
        if kind.startswith("s"):
            value = f"({b} == -1 ? 0 : {value})"
        return self.write(args[0], value, kind)

    def _extreme(self, parts, args, word, sign):
        kind = parts[-1]
        name = f"emu_{word}_nan" if "NaN" in parts else f"emu_{word}"
        if kind == "f32":
            values = [self.read(x, kind) for x in args[1:]]
            if "ftz" in parts:
                values = [f"emu_flush({v})" for v in values]
            value = f"{name}({values[0]}, {values[1]})"
            if "xorsign" in parts or len(values) > 2:
                raise Unsupported(".".join(parts))
            return self.write(args[0], value, kind)
        if kind == "f64":
            return self._binary(args, kind, f"__builtin_f{word}({{a}}, {{b}})")
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self._halves(args, kind, f"{name}({{0}}, {{1}})")
        return self._binary(args, kind, f"({{a}} {sign} {{b}} ? {{a}} : {{b}})")

    def do_max(self, parts, args, at):
        return self._extreme(parts, args, "max", ">")

    def do_min(self, parts, args, at):
        return self._extreme(parts, args, "min", "<")

    def _sign(self, args, kind, sign):
        """The sign bits of float operands flipped (`^`) or, by the others' mask, cleared (`&`)."""
        held, masks = {
            "f16": ("u16", ("0x8000", "0x7fff")),
            "f16x2": ("u32", ("0x80008000u", "0x7fff7fffu")),
            "f32": ("u32", ("0x80000000u", "0x7fffffffu")),
            "f64": ("u64", ("(1ull << 63)", "(~0ull >> 1)")),
        }[kind.removeprefix("b")]
        return self.write(args[0], f"{self.read(args[1], held)} {sign} {masks[sign == '&']}", held)

    def do_neg(self, parts, args, at):
        kind = parts[-1]
        if "f" in kind:
            return self._sign(args, kind, "^")
        return self.write(args[0], f"({u(kind)})0 - {self.read(args[1], u(kind))}", u(kind))

    def do_abs(self, parts, args, at):
        kind = parts[-1]
        if "f" in kind:
            return self._sign(args, kind, "&")
        a = self.read(args[1], kind)
        return self.write(
            args[0], f"({a} < 0 ? ({u(kind)})0 - ({u(kind)}){a} : ({u(kind)}){a})", u(kind)
        )

    def do_copysign(self, parts, args, at):
        a, b = self.read(args[1], "u32"), self.read(args[2], "u32")
        return self.write(args[0], f"(({a} & 0x80000000u) | ({b} & 0x7fffffffu))", "u32")

    def _function(self, parts, args, form):
        kind = parts[-1]
        a = self.read(args[1], kind)
        value = form.format(a)
        if "ftz" in parts:
            value = f"emu_flush({form.format(f'emu_flush({a})')})"
        return self.write(args[0], self._one_nan(kind, value), kind)

    def do_sqrt(self, parts, args, at):
        return self._function(
            parts, args, "__builtin_sqrtf({})" if parts[-1] == "f32" else "__builtin_sqrt({})"
        )

    def do_rsqrt(self, parts, args, at):
        return self._function(parts, args, "(f32)(1.0 / __builtin_sqrt((f64){}))")

    def do_rcp(self, parts, args, at):
        return self._function(parts, args, "(1.0f / {})" if parts[-1] == "f32" else "(1.0 / {})")

    def do_ex2(self, parts, args, at):
        return self._function(parts, args, "emu_ex2({})")

    def do_lg2(self, parts, args, at):
        return self._function(parts, args, "emu_lg2({})")

    def do_sin(self, parts, args, at):
        return self._function(parts, args, "emu_sin({})")

    def do_cos(self, parts, args, at):
        return self._function(parts, args, "emu_cos({})")

    def do_tanh(self, parts, args, at):
        return self._function(parts, args, "emu_tanh({})")
