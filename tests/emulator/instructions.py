# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, copies, barriers and what whole warps do."""

from conversions import Conversions
from operands import C_TYPES, SPACES, Unsupported, is_float, u
from ptx import SIZES, operands

_POLLED = ("volatile", "acquire", "relaxed")
_ORDERED = (*_POLLED, "release")


def _space(parts):
    return next((p.split("::")[0] for p in parts if p.split("::")[0] in SPACES), "generic")


class Instructions(Conversions):
    """One C++ statement for every PTX instruction."""

    def _lanes(self, parts):
        return next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)

    def do_ld(self, parts, args, at):
        kind, space, count = parts[-1], _space(parts), self._lanes(parts)
        c, names = C_TYPES[kind], self.vector(args[0])
        if space == "param":
            local = self.scope.param(args[1])
            if local:
                return " ".join(
                    self.write(n, f"*(const {c}*)({local} + {i * SIZES[kind]})", kind)
                    for i, n in enumerate(names)
                )
        address = self.address(args[1], space)
        poll = f"emu_poll(t, {at}); " if any(p in _POLLED for p in parts) else ""
        way = 2 if any(p in _ORDERED for p in parts) else 0
        pointer = f"AT(const {c}, {SIZES[kind] * count}, {address}, {way}, {at})"
        if count == 1:
            return poll + self.write(names[0], f"*{pointer}", kind)
        stores = " ".join(self.write(n, f"p_[{i}]", kind) for i, n in enumerate(names) if n != "_")
        return f"{poll}{{ const {c}* p_ = {pointer}; {stores} }}"

    do_ldu = do_ld

    def do_st(self, parts, args, at):
        if parts[1] == "async":
            return self._st_async(parts, args, at)
        kind, space, count = parts[-1], _space(parts), self._lanes(parts)
        c, names = C_TYPES[kind], self.vector(args[1])
        values = [self.read(n, kind) for n in names]
        if space == "param":
            local = self.scope.param(args[0])
            if local is None:
                raise Unsupported("st.param to " + args[0])
            return " ".join(
                f"*({c}*)({local} + {i * SIZES[kind]}) = {v};" for i, v in enumerate(values)
            )
        way = 2 if any(p in _ORDERED for p in parts) else 1
        pointer = f"AT({c}, {SIZES[kind] * count}, {self.address(args[0], space)}, {way}, {at})"
        if count == 1:
            return f"*{pointer} = {values[0]};"
        stores = " ".join(f"p_[{i}] = {v};" for i, v in enumerate(values))
        return f"{{ {c}* p_ = {pointer}; {stores} }}"

    def _atomic(self, parts, address, values, result, at):
        kind, op, space = parts[-1], None, _space(parts)
        for p in parts[1:]:
            if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"):
                op = p
        c = C_TYPES[kind] if kind[0] != "b" or op in ("exch", "cas") else u(kind)
        if op is None or kind in ("f16", "bf16", "f16x2", "bf16x2") or self._lanes(parts) > 1:
            raise Unsupported(".".join(parts))
        a = [self.read(v, kind) for v in values]
        new = {
            "add": "old_ + {0}", "min": "old_ < {0} ? old_ : {0}", "max": "old_ > {0} ? old_ : {0}",
            "and": "old_ & {0}", "or": "old_ | {0}", "xor": "old_ ^ {0}", "exch": "{0}",
            "cas": "old_ == {0} ? {1} : old_", "inc": "old_ >= {0} ? 0 : old_ + 1",
            "dec": "old_ == 0 || old_ > {0} ? {0} : old_ - 1",
        }[op].format(*a)  # fmt: skip
        pointer = f"AT({c}, {SIZES[kind]}, {self.address(address, space)}, 2, {at})"
        store = self.write(result, "old_", kind) if result else ""
        poll = f"emu_poll(t, {at}); " if space != "shared" or op in ("cas", "exch") else ""
        return f"{poll}{{ {c}* p_ = {pointer}; const {c} old_ = *p_; *p_ = {new}; {store} }}"

    def do_atom(self, parts, args, at):
        return self._atomic(parts, args[1], args[2:], args[0], at)

    def do_red(self, parts, args, at):
        return self._atomic(parts, args[0], args[1:], None, at)

    def _nothing(self, parts, args, at):
        return ";"

    do_prefetch = do_prefetchu = do_fence = do_membar = do_griddepcontrol = _nothing
    do_setmaxnreg = do_discard = do_applypriority = do_createpolicy = do_nanosleep = _nothing

    def do_trap(self, parts, args, at):
        return f"emu_trap(t, {at});"

    def do_brkpt(self, parts, args, at):
        return self.do_trap(parts, args, at)

    def do_mapa(self, parts, args, at):
        rank = self.read(args[2], "u32")
        if any(p.startswith("shared") for p in parts):
            own = self.read(args[1], "u32")
            return self.write(args[0], f"(({own} & 0xffffffu) | {rank} << 24)", "u32")
        own = self.read(args[1], "u64")
        return self.write(
            args[0], f"(t->smem + ((({own} - t->smem) & 0xffffffu) | {rank} << 24))", "u64"
        )

    def do_getctarank(self, parts, args, at):
        own = self.read(args[1], "u64")
        base = "0" if parts[1].startswith("shared") else "t->smem"
        value = f"(u32)(({own} - {base}) >> 24)"
        return self.write(args[0], value, "u32")

    # Barriers.

    def do_bar(self, parts, args, at):
        rest = [p for p in parts[1:] if p not in ("cta", "aligned")]
        if rest[0] == "warp":
            return f"emu_bar_warp(t, {self.read(args[0], 'u32')}, {at});"
        if rest[0] == "cluster":
            return f"emu_cluster_{rest[1]}(t, {at});"
        if rest[0] == "red":
            op = {"popc": 0, "and": 1, "or": 2}[rest[1]]
            predicate = args[-1]
            count = self.read(args[2], "u32") if len(args) == 4 else "0"
            if predicate.startswith("!"):
                predicate = f"!{self.read(predicate[1:], 'pred')}"
            else:
                predicate = self.read(predicate, "pred")
            call = f"emu_bar_red(t, {op}, {self.read(args[1], 'u32')}, {count}, {predicate}, {at})"
            return self.write(args[0], call, "u32" if op == 0 else "pred")
        count = self.read(args[1], "u32") if len(args) > 1 else "0"
        wait = int(rest[0] == "sync")
        return f"emu_bar(t, {self.read(args[0], 'u32')}, {count}, {wait}, {at});"

    do_barrier = do_bar

    def do_mbarrier(self, parts, args, at):
        what = parts[1]
        if what == "init":
            count = self.read(args[1], "u32")
            return f"emu_mbarrier_init(t, {self.shared32(args[0])}, {count}, {at});"
        if what == "inval":
            return ";"
        if what == "expect_tx":
            expected = self.read(args[1], "u32")
            return f"emu_mbarrier_expect(t, {self.shared32(args[0])}, {expected}, {at});"
        if what == "arrive":
            barrier = self.shared32(args[1])
            expect = self.read(args[2], "u32") if "expect_tx" in parts else "0"
            count = self.read(args[2], "u32") if len(args) > 2 and "expect_tx" not in parts else "1"
            if "noComplete" in parts or args[0] != "_":
                raise Unsupported(".".join(parts))
            return f"emu_mbarrier_arrive(t, {barrier}, {count}, {expect}, {at});"
        if what in ("try_wait", "test_wait") and "parity" in parts:
            barrier, parity = self.shared32(args[1]), self.read(args[2], "u32")
            if what == "test_wait":
                return self.write(
                    args[0], f"emu_mbarrier_test(t, {barrier}, {parity}, {at})", "pred"
                )
            return f"emu_mbarrier_wait(t, {barrier}, {parity}, {at}); " + self.write(
                args[0], "1", "pred"
            )
        raise Unsupported(".".join(parts))

    # Copies that land later.

    def do_cp(self, parts, args, at):
        if parts[1] != "async":
            raise Unsupported(".".join(parts))
        if parts[2] == "commit_group":
            return f"emu_cp_async_commit(t, {at});"
        if parts[2] == "wait_group":
            return f"emu_cp_async_wait(t, {self.read(args[0], 'u32')}, 0, {at});"
        if parts[2] == "wait_all":
            return f"emu_cp_async_wait(t, 0, 1, {at});"
        if parts[2] == "mbarrier":
            noinc = int("noinc" in parts)
            return f"emu_cp_async_mbarrier(t, {self.shared32(args[0])}, {noinc}, {at});"
        if parts[2] == "bulk":
            return self._bulk(parts, args, at)
        if "L2::cache_hint" in parts:
            args = args[:-1]
        to, source = self.shared32(args[0]), self.address(args[1], "global")
        size = int(args[2], 0)
        given = self.read(args[3], "u32") if len(args) > 3 else str(size)
        return f"emu_cp_async(t, {to}, {source}, {size}, {given}, {at});"

    def _bulk(self, parts, args, at):
        # Stores have read shared memory and ended when they are asked for.
        if "prefetch" in parts or parts[3] in ("commit_group", "wait_group"):
            return ";"
        if parts[3] == "tensor" and parts[5:9] == ["global", "shared::cta", "tile", "bulk_group"]:
            sets, rank, address = self._box(parts, args[0])
            return f"{sets} emu_tensor_store(t, {rank}, {address}, {self.shared32(args[1])}, {at});"
        to_shared = parts[3].startswith("shared") or parts[4:6] and parts[5].startswith("shared")
        if not to_shared or "mbarrier::complete_tx::bytes" not in ".".join(parts):
            raise Unsupported(".".join(parts))
        multicast = "multicast::cluster" in parts
        if "tensor" in parts:
            sets, rank, address = self._box(parts, args[1])
            ctas = self.read(args[3], "u16") if multicast else "0"
            return (
                f"{sets} emu_tensor_copy(t, {rank}, {self.shared32(args[0])}, "
                f"{address}, {self.shared32(args[2])}, {ctas}, {at});"
            )
        if parts[4] == "shared::cta":
            to, source, barrier = (self.shared32(args[i]) for i in (0, 1, 3))
            return (
                f"emu_bulk_send(t, {to}, {source}, {self.read(args[2], 'u32')}, {barrier}, {at});"
            )
        ctas = self.read(args[4], "u16") if multicast else "0"
        return (
            f"emu_bulk_copy(t, {self.shared32(args[0])}, {self.address(args[1], 'global')}, "
            f"{self.read(args[2], 'u32')}, {self.shared32(args[3])}, {ctas}, {at});"
        )

    def _box(self, parts, arg):
        """A box of a tensor: where its first element is set, the rank, the map's address."""
        inner = operands(arg.strip()[1:-1])
        sets = " ".join(
            f"t->in[{i}] = {self.read(c, 'u32')};" for i, c in enumerate(self.vector(inner[1]))
        )
        return sets, int(parts[parts.index("tensor") + 1][0]), self.read(inner[0], "u64")

    def _st_async(self, parts, args, at):
        count, kind = self._lanes(parts), parts[-1]
        words = count * SIZES[kind] // 4
        if SIZES[kind] != 4:
            raise Unsupported(".".join(parts))
        names = self.vector(args[1])
        sets = " ".join(f"t->in[{i}] = {self.read(n, 'u32')};" for i, n in enumerate(names))
        to, barrier = self.shared32(args[0]), self.shared32(args[2])
        return f"{sets} emu_st_async(t, {to}, {words}, {barrier}, {at});"

    # Whole warps.

    def do_shfl(self, parts, args, at):
        mode = {"up": 0, "down": 1, "bfly": 2, "idx": 3}[parts[2]]
        a, b, c, mask = (self.read(x, "u32") for x in args[1:5])
        results = args[0].split("|")
        out = self.write(results[0], f"emu_shfl(t, {mode}, {a}, {b}, {c}, {mask}, {at})", "u32")
        if len(results) > 1:
            out += " " + self.write(results[1], "t->out[1]", "pred")
        return out

    def do_vote(self, parts, args, at):
        mode = {"ballot": 0, "all": 1, "any": 2, "uni": 3}[parts[2]]
        call = (
            f"emu_vote(t, {mode}, {self.read(args[1], 'pred')}, {self.read(args[2], 'u32')}, {at})"
        )
        return self.write(args[0], call, "u32" if mode == 0 else "pred")

    def do_match(self, parts, args, at):
        results = args[0].split("|")
        mask = self.read(args[2], "u32")
        call = (
            f"emu_match(t, {int(parts[1] == 'all')}, {self.read(args[1], parts[-1])}, {mask}, {at})"
        )
        out = self.write(results[0], call, "u32")
        if len(results) > 1:
            out += " " + self.write(results[1], "t->out[1]", "pred")
        return out

    def do_redux(self, parts, args, at):
        kind, name = parts[-1], parts[2]
        ops = {"add": 0, "min": 1, "max": 2, "and": 5, "or": 6, "xor": 7}
        if is_float(kind):
            raise Unsupported(".".join(parts))
        op = ops[name] + (2 if kind == "s32" and name in ("min", "max") else 0)
        call = f"emu_redux(t, {op}, {self.read(args[1], 'u32')}, {self.read(args[2], 'u32')}, {at})"
        return self.write(args[0], call, "u32")

    def do_activemask(self, parts, args, at):
        return self.write(args[0], "emu_activemask(t)", "u32")

    def do_elect(self, parts, args, at):
        leader, predicate = args[0].split("|")
        return (
            self.write(leader, f"emu_elect(t, {self.read(args[1], 'u32')}, {at})", "u32")
            + " "
            + self.write(predicate, "t->out[1]", "pred")
        )

    def do_ldmatrix(self, parts, args, at):
        if "m8n8" not in parts or parts[-1] != "b16":
            raise Unsupported(".".join(parts))
        names, trans = self.vector(args[0]), int("trans" in parts)
        out = [f"emu_ldmatrix(t, {len(names)}, {trans}, {self.shared32(args[1])}, {at});"]
        out += [self.write(n, f"t->out[{i}]", "u32") for i, n in enumerate(names)]
        return " ".join(out)

    def do_stmatrix(self, parts, args, at):
        if "m8n8" not in parts or parts[-1] != "b16":
            raise Unsupported(".".join(parts))
        names, trans = self.vector(args[1]), int("trans" in parts)
        out = [f"t->in[{4 + i}] = {self.read(n, 'u32')};" for i, n in enumerate(names)]
        out.append(f"emu_stmatrix(t, {len(names)}, {trans}, {self.shared32(args[0])}, {at});")
        return " ".join(out)

    def do_mma(self, parts, args, at):
        kind = {"bf16.bf16": 0, "f16.f16": 1}.get(".".join(parts[7:9]))
        if parts[3] != "m16n8k16" or kind is None or parts[6] != "f32" or parts[9] != "f32":
            raise Unsupported(".".join(parts))
        a, b, c = (self.vector(x) for x in args[1:4])
        values = [self.read(x, "u32") for x in a + b + c]
        out = [f"t->in[{1 + i}] = {v};" for i, v in enumerate(values)]
        out.append(f"emu_mma(t, {kind}, {at});")
        out += [
            self.write(x, f"BITS(f32, t->out[{i}])", "f32")
            for i, x in enumerate(self.vector(args[0]))
        ]
        return " ".join(out)

    def do_wgmma(self, parts, args, at):
        if parts[1] == "fence":
            return ";"
        if parts[1] == "commit_group":
            return f"emu_wgmma_commit(t, {at});"
        if parts[1] == "wait_group":
            return f"emu_wgmma_wait(t, {self.read(args[0], 'u32')}, {at});"
        shape = parts[4]
        kind = {"bf16.bf16": 0, "f16.f16": 1}.get(".".join(parts[6:8]))
        if (
            not shape.startswith("m64n")
            or not shape.endswith("k16")
            or kind is None
            or parts[5] != "f32"
        ):
            raise Unsupported(".".join(parts))
        n = int(shape[4:-3])
        registers = args[1].startswith("{")
        a, b, add, scale_a, scale_b, *majors = args[1:]
        if scale_a != "1" or scale_b != "1":
            raise Unsupported(" ".join([*parts, *args[1:]]))
        if registers:
            majors.insert(0, "0")
        flags = int(majors[0], 0) | int(majors[1], 0) << 1
        names = self.vector(args[0])
        out = [f"t->wide[{i}] = {self.read(x, 'f32')};" for i, x in enumerate(names)]
        rest = f"{self.read(b, 'u64')}, {self.read(add, 'pred')}, {flags}, {at});"
        if registers:
            words = ", ".join(self.read(x, "u32") for x in self.vector(a))
            out.append(f"{{ const u32 a[] = {{{words}}};")
            out.append(f"emu_wgmma_registers(t, {n}, {kind}, a, {rest} }}")
        else:
            out.append(f"emu_wgmma(t, {n}, {kind}, {self.read(a, 'u64')}, {rest}")
        out += [self.write(x, f"t->wide[{i}]", "f32") for i, x in enumerate(names)]
        return " ".join(out)
