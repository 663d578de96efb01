# SPDX-License-Identifier: Apache-2.0
"""One C++ statement for every PTX instruction."""

import re

from ptx import SIZES, operands

C_TYPES = {
    "pred": "u8", "b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "u16": "u16", "s16": "s16",
    "f16": "u16", "bf16": "u16", "b32": "u32", "u32": "u32", "s32": "s32", "f32": "f32",
    "f16x2": "u32", "bf16x2": "u32", "b64": "u64", "u64": "u64", "s64": "s64", "f64": "f64",
}  # fmt: skip
SPACES = ("param", "global", "shared", "local", "const")
_SPECIAL = {
    "tid": "kTid", "ntid": "kNtid", "ctaid": "kCtaid", "nctaid": "kNctaid",
    "clusterid": "kClusterid", "nclusterid": "kNclusterid", "cluster_ctaid": "kClusterCtaid",
    "cluster_nctaid": "kClusterNctaid",
}  # fmt: skip
_PLAIN_SPECIAL = {
    "%laneid": "kLaneid", "%warpid": "kWarpid", "%nwarpid": "kNwarpid", "%smid": "kSmid",
    "%nsmid": "kNsmid", "%cluster_ctarank": "kClusterCtarank",
    "%cluster_nctarank": "kClusterNctarank", "%dynamic_smem_size": "kDynamicSmem",
    "%total_smem_size": "kTotalSmem",
}  # fmt: skip


class Unsupported(Exception):
    pass


def u(kind: str) -> str:
    """The unsigned integer type of that size."""
    return f"u{8 * SIZES[kind]}"


def is_float(kind: str) -> bool:
    return kind in ("f32", "f64")


class Emitter:
    """Translates the instructions of one function; `scope` looks names up."""

    def __init__(self, scope):
        self.scope = scope

    # Operands.

    def read(self, text: str, kind: str) -> str:
        """An operand as a C++ expression of kind's type."""
        text = text.strip()
        to = C_TYPES[kind]
        if re.match(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
            value = int(text.rstrip("U"), 0)
            if is_float(kind):
                raise Unsupported(f"the integer {text} as {kind}")
            if kind == "pred":
                return str(int(value != 0))
            bits = 8 * SIZES[kind]
            return f"({to}){value & ((1 << bits) - 1):#x}ull"
        if text[:2].lower() == "0f" and kind != "f64":
            return f"BITS({to}, 0x{text[2:]}u)" if kind == "f32" else f"({to})0x{text[2:]}u"
        if text[:2].lower() == "0d":
            return f"BITS(f64, 0x{text[2:]}ull)"
        special = self.special(text)
        if special:
            return f"({to}){special}"
        if text.startswith("!"):
            return f"!{self.read(text[1:], kind)}"
        found = self.scope.register(text)
        if found is None:
            address = self.scope.address(text)
            if address is None:
                raise Unsupported(f"the operand {text}")
            return f"({to}){address}"
        name, held = found
        held_kind = C_TYPES[held]
        if held_kind == to:
            return name
        if is_float(kind) or is_float(held):
            if SIZES[kind] == SIZES[held]:
                return f"BITS({to}, {name})"
            if is_float(held):
                return f"({to})BITS({u(held)}, {name})"
            return f"BITS({to}, ({u(kind)}){name})"
        return f"({to}){name}"

    def special(self, text: str) -> str | None:
        if text in _PLAIN_SPECIAL:
            return f"t->special[{_PLAIN_SPECIAL[text]}]"
        found = re.match(r"^%(\w+)\.([xyz])$", text)
        if found and found[1] in _SPECIAL:
            return f"t->special[{_SPECIAL[found[1]]}{found[2].upper()}]"
        if text == "WARP_SZ":
            return "32"
        if re.match(r"^%(clock|clock64|globaltimer|globaltimer_lo|clock_hi)$", text):
            return "emu_clock()"
        if text in ("%envreg1", "%envreg2"):
            return f"emu_envreg({text[-1]})"
        if text.startswith("%lanemask_"):
            lane = "t->special[kLaneid]"
            return {
                "lt": f"((1u << {lane}) - 1)", "le": f"((2u << {lane}) - 1)",
                "eq": f"(1u << {lane})", "gt": f"~((2u << {lane}) - 1)",
                "ge": f"~((1u << {lane}) - 1)",
            }[text[10:]]  # fmt: skip
        return None

    def write(self, text: str, value: str, kind: str) -> str:
        """Stores an expression of kind's type."""
        text = text.strip()
        if text == "_":
            return f"(void)({value});"
        found = self.scope.register(text)
        if found is None:
            raise Unsupported(f"the result {text}")
        name, held = found
        to, of = C_TYPES[held], C_TYPES[kind]
        if to == of:
            return f"{name} = {value};"
        if held == "pred":
            return f"{name} = ({value}) != 0;"
        if is_float(held) or is_float(kind):
            if SIZES[held] == SIZES[kind]:
                return f"{name} = BITS({to}, ({of})({value}));"
            if is_float(kind):
                return f"{name} = BITS({u(kind)}, ({of})({value}));"
            return f"{name} = BITS({to}, ({u(held)})({value}));"
        return f"{name} = ({to})({of})({value});"

    def vector(self, text: str) -> list[str]:
        text = text.strip()
        return operands(text[1:-1]) if text.startswith("{") else [text]

    def address(self, text: str, space: str) -> str:
        """A C++ expression of the 64-bit address of `[...]` in a state space."""
        inner = text.strip()[1:-1].strip()
        found = re.match(r"^(.*?)\s*\+\s*(-?\w+)$", inner)
        base, offset = (found[1], int(found[2], 0)) if found else (inner, 0)
        if self.scope.register(base) is not None:
            if space == "shared":
                return f"t->smem + (u32)({self.read(base, 'u32')} + (u32){offset})"
            return f"{self.read(base, 'u64')} + (u64){offset}ll"
        if re.match(r"^-?\d", base):
            return f"(u64){base}" if space != "shared" else f"t->smem + {base}u"
        where = self.scope.address(base)
        if where is None:
            raise Unsupported(f"the address {text}")
        if space == "shared":
            return f"t->smem + (u32)({where} + (u32){offset})"
        return f"(u64)({where}) + (u64){offset}ll"

    def shared32(self, text: str) -> str:
        """The 32-bit shared address of `[...]`."""
        return f"(u32)({self.address(text, 'shared')} - t->smem)"

    # Instructions.

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
            return self._binary(args, kind, form)
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self._halves(args, kind, f"({{0}} {sign} {{1}})")
        if "cc" in parts or parts[0] in ("addc", "subc"):
            return self._carry(parts, args, sign)
        if "sat" in parts:
            raise Unsupported(".".join(parts))
        return self._binary(args, u(kind).replace("u", "b"), f"({{a}} {sign} {{b}})")

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
            wide = ("__int128" if signed else "unsigned __int128") if bits == 64 else (
                f"{'s' if signed else 'u'}{2 * bits}")
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
        return self.write(args[0], value, kind)

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

    def do_neg(self, parts, args, at):
        kind = parts[-1]
        if is_float(kind):
            bits, sign = ("u32", "0x80000000u") if kind == "f32" else ("u64", "(1ull << 63)")
            return self.write(args[0], f"{self.read(args[1], bits)} ^ {sign}", bits)
        if kind in ("f16", "bf16"):
            return self.write(args[0], f"{self.read(args[1], 'u16')} ^ 0x8000", "u16")
        if kind in ("f16x2", "bf16x2"):
            return self.write(args[0], f"{self.read(args[1], 'u32')} ^ 0x80008000u", "u32")
        return self.write(args[0], f"({u(kind)})0 - {self.read(args[1], u(kind))}", u(kind))

    def do_abs(self, parts, args, at):
        kind = parts[-1]
        if is_float(kind):
            bits, mask = ("u32", "0x7fffffffu") if kind == "f32" else ("u64", "(~0ull >> 1)")
            return self.write(args[0], f"{self.read(args[1], bits)} & {mask}", bits)
        if kind in ("f16", "bf16"):
            return self.write(args[0], f"{self.read(args[1], 'u16')} & 0x7fff", "u16")
        if kind in ("f16x2", "bf16x2"):
            return self.write(args[0], f"{self.read(args[1], 'u32')} & 0x7fff7fffu", "u32")
        a = self.read(args[1], kind)
        return self.write(args[0], f"({a} < 0 ? ({u(kind)})0 - ({u(kind)}){a} : ({u(kind)}){a})", u(kind))

    def do_copysign(self, parts, args, at):
        a, b = self.read(args[1], "u32"), self.read(args[2], "u32")
        return self.write(args[0], f"(({a} & 0x80000000u) | ({b} & 0x7fffffffu))", "u32")

    def _function(self, parts, args, form):
        kind = parts[-1]
        a = self.read(args[1], kind)
        if "ftz" in parts:
            return self.write(args[0], f"emu_flush({form.format(f'emu_flush({a})')})", kind)
        return self.write(args[0], form.format(a), kind)

    def do_sqrt(self, parts, args, at):
        return self._function(parts, args, "__builtin_sqrtf({})" if parts[-1] == "f32" else "__builtin_sqrt({})")

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
        value = f"({n} >= {8 * SIZES[kind]} ? ({kind})0 : ({kind})({self.read(args[1], kind)} << {n}))"
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
        value = f"(u32)({both} << {amount} >> 32)" if parts[1] == "l" else f"(u32)({both} >> {amount})"
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
        return self.write(args[0], f"(u32)__builtin_popcountll({self.read(args[1], u(parts[-1]))})", "u32")

    def do_clz(self, parts, args, at):
        kind = u(parts[-1])
        a = self.read(args[1], kind)
        value = f"({a} == 0 ? {8 * SIZES[kind]}u : (u32)__builtin_clzll({a}) - {64 - 8 * SIZES[kind]})"
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
        return (f"{{ const u8 {name} = {value}; "
                + self.write(results[0], first.replace(value, name), "pred")
                + self.write(results[1], second.replace(value, name), "pred") + " }")

    def do_mov(self, parts, args, at):
        kind = parts[-1]
        if args[0].startswith("{"):
            names = self.vector(args[0])
            bits = 8 * SIZES[kind] // len(names)
            out = [f"const {u(kind)} whole_ = {self.read(args[1], u(kind))};"]
            for i, name in enumerate(names):
                out.append(self.write(name, f"(u{bits})(whole_ >> {bits * i})", f"u{bits}"))
            return "{ " + " ".join(out) + " }"
        if args[1].startswith("{"):
            names = self.vector(args[1])
            bits = 8 * SIZES[kind] // len(names)
            terms = [f"({u(kind)}){self.read(n, f'u{bits}')} << {bits * i}" for i, n in enumerate(names)]
            return self.write(args[0], "(" + " | ".join(terms) + ")", u(kind))
        return self.write(args[0], self.read(args[1], kind), kind)

    def do_cvta(self, parts, args, at):
        space = next((p for p in parts if p.split("::")[0] in SPACES), None)
        if space is None:
            raise Unsupported(".".join(parts))
        if space.startswith("shared"):
            if "to" in parts:
                value = f"(u64)(u32)({self.read(args[1], 'u64')} - t->smem)"
            else:
                value = f"(t->smem + (u32){self.read(args[1], 'u64')})"
        else:
            value = self.read(args[1], "u64")
        return self.write(args[0], value, "u64")

    def do_cvt(self, parts, args, at):
        to, of = parts[-2], parts[-1]
        whole = ".".join(parts)
        ftz = "ftz" in parts
        if to in ("f16x2", "bf16x2") and of == "f32" and "rn" in parts and "relu" not in parts:
            high, low = self.read(args[1], "f32"), self.read(args[2], "f32")
            return self.write(args[0], f"emu_{to}({high}, {low})", "u32")
        if to in ("e4m3x2", "e5m2x2") and of == "f32" and "satfinite" in parts:
            high, low = self.read(args[1], "f32"), self.read(args[2], "f32")
            name = f"emu_to_{to[:-2]}"
            return self.write(args[0], f"(u16)({name}({low}) | {name}({high}) << 8)", "u16")
        if to == "f16x2" and of in ("e4m3x2", "e5m2x2"):
            name = f"emu_{of[:-2]}"
            a = self.read(args[1], "u16")
            return self.write(args[0], f"emu_f16x2({name}((u8)({a} >> 8)), {name}((u8){a}))", "u32")
        if to in ("f16", "bf16"):
            if of in ("f16", "bf16"):
                value = self._widened(args[1], of)
            elif of == "f32":
                value = self.read(args[1], "f32")
            elif of[0] in "su":
                value = f"(f32){self.read(args[1], of)}"
            else:
                raise Unsupported(whole)
            if to == "bf16" and "rz" in parts:
                return self.write(args[0], f"emu_to_bfloat_rz({value})", "u16")
            if "rn" not in parts or "relu" in parts or "satfinite" in parts:
                raise Unsupported(whole)
            name = "emu_to_half" if to == "f16" else "emu_to_bfloat"
            return self.write(args[0], f"{name}({value})", "u16")
        if of in ("f16", "bf16"):
            source, of = self._widened(args[1], of), "f32"
        elif of in C_TYPES:
            source = self.read(args[1], of)
        else:
            raise Unsupported(whole)
        if to not in C_TYPES:
            raise Unsupported(whole)
        rounding = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp")), "")
        if is_float(to):
            if is_float(of):
                if ftz:
                    source = f"emu_flush({source})"
                shape = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}.get(rounding)
                if shape:
                    source = f"__builtin_{shape}{'f' if of == 'f32' else ''}({source})"
                elif rounding not in ("", "rn"):
                    raise Unsupported(whole)
                value = f"({to})({source})"
                if "sat" in parts:
                    value = f"emu_min(emu_max({value}, 0.0f), 1.0f)"
                return self.write(args[0], value, to)
            if rounding not in ("", "rn"):
                raise Unsupported(whole)
            return self.write(args[0], f"({to})({source})", to)
        if is_float(of):
            shape = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
            bits, c = 8 * SIZES[to], C_TYPES[to]
            signed = to.startswith("s")
            least = f"-0x1p{bits - 1}" if signed else "0.0"
            most = f"0x1p{bits - 1 if signed else bits}"
            low = f"({c})(1ull << {bits - 1})" if signed else "0"
            high = f"({c})((1ull << {bits - 1}) - 1)" if signed else f"({c})~0ull"
            value = f"emu_saturate<{c}>(__builtin_{shape}((f64){source}), {least}, {most}, {low}, {high})"
            return self.write(args[0], value, to)
        if "sat" in parts:
            raise Unsupported(whole)
        return self.write(args[0], f"({C_TYPES[to]})({source})", to)

    def _widened(self, text, kind):
        return f"emu_{'half' if kind == 'f16' else 'bfloat'}({self.read(text, 'u16')})"
