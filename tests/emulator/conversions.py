# SPDX-License-Identifier: Apache-2.0
"""Moves and conversions of PTX."""

from logic import Logic
from operands import C_TYPES, SPACES, Unsupported, is_float, u
from ptx import SIZES


class Conversions(Logic):
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
            terms = [
                f"({u(kind)}){self.read(n, f'u{bits}')} << {bits * i}" for i, n in enumerate(names)
            ]
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
        rounding = next(
            (p for p in parts if p in ("rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp")), ""
        )
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
            limits = f"{least}, {most}, {low}, {high}"
            value = f"emu_saturate<{c}>(__builtin_{shape}((f64){source}), {limits})"
            return self.write(args[0], value, to)
        if "sat" in parts:
            raise Unsupported(whole)
        return self.write(args[0], f"({C_TYPES[to]})({source})", to)

    def _widened(self, text, kind):
        return f"emu_{'half' if kind == 'f16' else 'bfloat'}({self.read(text, 'u16')})"
