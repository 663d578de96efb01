# SPDX-License-Identifier: Apache-2.0
"""PTX as nvcc writes it, taken apart: functions, their statements, variables of the module."""

import dataclasses
import re

_HEAD = re.compile(r"^((?:\.\w+\s+)*)\.(entry|func)\b", re.M)
_VARIABLE = re.compile(
    r"^(?:\.(?:visible|weak|extern)\s+)*\.(global|const|shared)\s+(.*?)\s*(?:=\s*(.*?))?;",
    re.M | re.S,
)
_DECLARED = re.compile(
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?\.(v[24]\s+\.)?(\w+)\s+([\w$%]+)((?:\[\d*\])*)$"
)
SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8,
    "f64": 8, "b128": 16,
}  # fmt: skip


@dataclasses.dataclass
class Variable:
    name: str
    space: str
    align: int
    size: int
    initial: str | None = None
    kind: str = ""


@dataclasses.dataclass
class Function:
    name: str
    is_entry: bool
    returned: list[Variable]
    params: list[Variable]
    body: str
    max_threads: int  # by its launch bounds


def declared(text: str, space: str, initial: str | None = None) -> Variable:
    """A declaration such as `.align 16 .b8 name[1024]`."""
    found = _DECLARED.match(text.strip())
    if not found:
        raise ValueError(f"PTX: cannot read the declaration {text!r}")
    align, vector, kind, name, extents = found.groups()
    size = SIZES[kind] * (int(vector[1]) if vector else 1)
    natural = size
    for extent in re.findall(r"\[(\d*)\]", extents):
        size *= int(extent or 0)
    return Variable(name, space, int(align or natural), size, initial, text.strip())


def _closing(text: str, at: int, pair: str) -> int:
    depth = 0
    for found in re.finditer("[" + re.escape(pair) + "]", text[at:]):
        depth += 1 if found[0] == pair[0] else -1
        if depth == 0:
            return at + found.end()
    raise ValueError("PTX: a bracket that nothing closes")


def _params(text: str) -> list[Variable]:
    text = re.sub(r"\.ptr\s*(\.\w+)?\s*(\.align\s+\d+)?", "", text)
    parts = [p.strip() for p in text.split(",") if p.strip()]
    return [declared(re.sub(r"^\.param\s+", "", p), "param") for p in parts]


class Module:
    def __init__(self, text: str):
        self.text = re.sub(r"//[^\n]*", "", text.replace("\0", ""))
        self.files = {
            int(number): name
            for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', self.text, re.M)
        }
        self.functions: dict[str, Function] = {}
        outside = []
        at = 0
        while found := _HEAD.search(self.text, at):
            outside.append(self.text[at : found.start()])
            at = self._function(found)
        outside.append(self.text[at:].split(".section")[0])
        self.variables = {}
        for found in _VARIABLE.finditer("\n".join(outside)):
            v = declared(found[2], found[1], found[3])
            self.variables[v.name] = v

    def _params_at(self, at: int) -> tuple[list, int]:
        """What a parenthesis at this place declares, if there is one, and the place after it."""
        rest = self.text[at:]
        if not rest.lstrip().startswith("("):
            return [], at
        begin = at + rest.index("(")
        end = _closing(self.text, begin, "()")
        return _params(self.text[begin + 1 : end - 1]), end

    def _function(self, head: re.Match) -> int:
        at = head.end()
        returned, at = self._params_at(at)
        name = re.match(r"\s*([\w$%]+)", self.text[at:])
        at += name.end()
        params, at = self._params_at(at)
        stop = re.search(r"[;{]", self.text[at:])
        if stop[0] == ";":
            return at + stop.end()
        begin = at + stop.start()
        bounds = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", self.text[at:begin])
        threads = 1024
        if bounds:
            threads = int(bounds[1]) * int(bounds[2] or 1) * int(bounds[3] or 1)
        end = _closing(self.text, begin, "{}")
        self.functions[name[1]] = Function(
            name[1], head[2] == "entry", returned, params, self.text[begin + 1 : end - 1], threads
        )
        return end


def statements(body: str):
    """Yields ("{",), ("}",), ("label", name), ("loc", text) and ("do", text) in order."""
    pending = ""
    for line in body.split("\n"):
        stripped = line.strip()
        if not pending.strip() and re.match(r"\.(loc|file)\b", stripped):
            pending = ""
            yield ("loc", stripped)
            continue
        at = 0
        while at < len(line):
            if not pending.strip():
                rest = line[at:]
                found = re.match(r"\s*([$\w%]+)\s*:(?!:)", rest)
                if found:
                    pending = ""
                    at += found.end()
                    yield ("label", found[1])
                    continue
                found = re.match(r"\s*([{}])", rest)
                if found:
                    pending = ""
                    at += found.end()
                    yield (found[1],)
                    continue
            end = line.find(";", at)
            if end < 0:
                pending += line[at:] + " "
                break
            pending += line[at:end]
            at = end + 1
            text = " ".join(pending.split())
            pending = ""
            if text:
                yield ("do", text)


def operands(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    out, depth, current = [], 0, ""
    for c in text:
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        if c == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += c
    if current.strip():
        out.append(current.strip())
    return out
