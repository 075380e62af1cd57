"""What a compiled program sends between devices, read from its HLO text.

Loops count as often as they run: the trip count stands in the text (GPU) or in the loop's condition (TPU). Of a
conditional the branch that sends least counts, which here is the one of requests that want nothing special. Loops whose
length depends on data count once: none of this project's sends anything.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
}  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_ENDS_OF_ASYNC = ("async-done", "async-update")


class _Instruction(NamedTuple):
    name: str
    type: str
    op: str
    rest: str


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of message of one program, all its runs in a step together.

    group: the devices that exchange, of one group; groups of one instruction are alike. bytes: of the larger side on
    one device; wire_bytes: what that device must send, around a ring. shape: of the result, as HLO writes it.
    """

    kind: str
    group: tuple[int, ...]
    count: int
    bytes: float
    wire_bytes: float
    shape: str


def collectives(hlo: str, num_devices: int) -> list[Collective]:
    """Every collective of a program's text, most bytes first; alike ones are added up."""
    computations, entry = _computations(hlo)
    found: dict[tuple, Collective] = {}
    for times, instruction in _executed(computations, entry):
        one = _collective(instruction, num_devices)
        key = (one.kind, one.group, one.shape)
        before = found.get(key)
        found[key] = Collective(
            kind=one.kind,
            group=one.group,
            count=times + (before.count if before else 0),
            bytes=times * one.bytes + (before.bytes if before else 0),
            wire_bytes=times * one.wire_bytes + (before.wire_bytes if before else 0),
            shape=one.shape,
        )
    return sorted(found.values(), key=lambda each: -each.wire_bytes)


def array_shapes(hlo_type: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, shape) of each array in an HLO type."""
    found = _ARRAY.findall(hlo_type)
    return [(kind, tuple(map(int, dims.split(","))) if dims else ()) for kind, dims in found if _bits(kind)]


def replica_groups(text: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of an instruction's `replica_groups=` in any of its spellings; all devices where it names none.

    {{0,1},{2,3}} lists them; [2,4]<=[8] and [4,2]<=[2,4]T(1,0) cut the (transposed) numbers in order;
    mesh['a'=2,'b'=4] {'b'} names axes of a mesh of devices in order. ValueError for any other.
    """
    if match := re.search(r"replica_groups=\{(\{[\d,{}\s]*\})?\}", text):
        groups = [tuple(map(int, ids.split(","))) for ids in re.findall(r"\{([\d,]+)\}", match[1] or "")]
        return groups or [tuple(range(num_devices))]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims = _numbers(match[1]), _numbers(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_numbers(match[3])) if match[3] else ids
        return [tuple(map(int, row)) for row in ids.reshape(shape)]
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        names = re.findall(r"'([^']+)'", match[2])
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        chosen = [list(sizes).index(name) for name in names]
        ids = np.moveaxis(ids, chosen, range(-len(chosen), 0))
        return [tuple(map(int, row)) for row in ids.reshape(-1, math.prod(sizes[name] for name in names))]
    if "replica_groups=" in text:
        raise ValueError(f"unknown spelling of replica_groups: {text[text.index('replica_groups=') :]:.80}")
    return [tuple(range(num_devices))]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _bits(kind: str) -> int:
    return _BITS.get(kind, 8 if kind.startswith("f8") else 0)


def _bytes(hlo_type: str) -> float:
    return sum((math.prod(shape) * _bits(kind) / 8 for kind, shape in array_shapes(hlo_type)), 0.0)


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if not line.startswith(" ") and (head := _HEAD.match(line)):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_Instruction(*match.groups()))
    if not entry:
        raise ValueError("the text names no ENTRY computation; it is no HLO module")
    return found, entry


def _executed(
    computations: Mapping[str, Sequence[_Instruction]], name: str, times: int = 1
) -> Iterator[tuple[int, _Instruction]]:
    """Every collective that runs, with how often."""
    for instruction in computations.get(name, ()):
        op, rest = instruction.op, instruction.rest
        if op.removesuffix("-start") in KINDS:
            yield times, instruction
        elif op == "conditional":
            branches = [list(_executed(computations, branch, times)) for branch in _branches(rest)]
            yield from min(branches, key=lambda branch: sum(n * _bytes(each.type) for n, each in branch), default=[])
        elif op == "while":
            body = re.search(r"body=%?([\w.\-]+)", rest)
            assert body is not None, f"a loop without a body: {rest:.100}"
            yield from _executed(computations, body[1], times * _trip_count(rest, computations))
        elif op not in _ENDS_OF_ASYNC and (callee := re.search(r"(?:calls|to_apply)=\{?%?([\w.\-]+)", rest)):
            yield from _executed(computations, callee[1], times)


def _branches(rest: str) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", rest)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)


def _trip_count(rest: str, computations: Mapping[str, Sequence[_Instruction]]) -> int:
    """As the text states it, else the constant that the loop's counter is compared with; 1 where there is none."""
    if stated := re.search(r'known_trip_count":?\s*\{"?n"?:"?(\d+)', rest):
        return int(stated[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    return max(_constants(condition[1], computations), default=1) if condition else 1


def _constants(name: str, computations: Mapping[str, Sequence[_Instruction]]) -> Iterator[int]:
    for instruction in computations.get(name, ()):
        if instruction.op == "constant" and (value := re.match(r"(\d+)\)", instruction.rest)):
            yield int(value[1])
        elif callee := re.search(r"calls=%?([\w.\-]+)", instruction.rest):
            yield from _constants(callee[1], computations)


def _collective(instruction: _Instruction, num_devices: int) -> Collective:
    """One run of a collective. A start's type names operands and results; its done is not counted."""
    kind = instruction.op.removesuffix("-start")
    group = replica_groups(instruction.rest, num_devices)[0]
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", instruction.rest)
        group = tuple(sorted({int(pairs[1]), int(pairs[2])})) if pairs else group
    result = _result_type(instruction)
    size, n = _bytes(result), len(group)
    moved = size * n if kind == "reduce-scatter" else size
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    shape = ", ".join(f"{element}[{','.join(map(str, dims))}]" for element, dims in array_shapes(result))
    return Collective(kind=kind, group=group, count=1, bytes=moved, wire_bytes=moved * factor, shape=shape)


def _result_type(instruction: _Instruction) -> str:
    """Of a start with (operands, results, ...) the results; an all-reduce's start has its results only."""
    is_pair = instruction.op.endswith("-start") and instruction.type.startswith("(")
    parts = _elements(instruction.type) if is_pair else []
    if len(parts) < 2 or (instruction.op == "all-reduce-start" and not parts[0].strip().startswith("(")):
        return instruction.type
    return parts[1]


def _elements(hlo_type: str) -> list[str]:
    """Top-level elements of a tuple type."""
    parts, depth = [""], 0
    for char in hlo_type[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
