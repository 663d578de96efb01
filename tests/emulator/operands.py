# SPDX-License-Identifier: Apache-2.0
"""Operands of PTX as C++ expressions."""

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


class Operands:
    """Reads and writes the operands of one function; `scope` looks names up."""

    def __init__(self, scope):
        self.scope = scope

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
