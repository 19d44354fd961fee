"""Bytes that an optimized HLO program moves, counted in its text; for compilers that tell none (GPU: 0 in cost analysis).

Counted: what each instruction of the entry and of the bodies of its loops (times their known trip count), calls and
branches (the dearest) reads and writes.  A fusion and a call of a kernel: their operands and results.  Of an operand
that is only sliced or looked up, what is taken; of one updated in place, what is written.  Not counted: a kernel's
operands and results of the pool's size (what is read of them depends on how long the rows are), workspace of cuBLAS,
arrays that never leave a core (TPU: a layout in memory space 1 or more), padding of tiles, what caches save.
"""

from __future__ import annotations

import collections
import functools
import re
from dataclasses import dataclass
from math import prod

BITS = {"pred": 8, "token": 0, "opaque": 0}
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency", "get-dimension-size",
}  # fmt: skip
TAKING = {"dynamic-slice", "slice", "gather"}
UPDATED = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode -> which operand is what is written."""
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
NAMES = re.compile(r"%[\w.-]+")


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    number: int | None
    """Of a parameter; the value of a constant that is one."""


@dataclass(frozen=True)
class Program:
    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    kept_elements: int
    """Of the pool."""
    every_memory: bool
    trips: bool

    @functools.cached_property
    def types(self) -> dict[str, str]:
        return {found.name: found.type for body in self.computations.values() for found in body}


def moved_bytes(text: str, kept_elements: int = 0, every_memory: bool = False, trips: bool = True) -> collections.Counter:
    """Kind of instruction, or a fusion's name without its number -> bytes.  To compare with cost analysis: `every_memory`, and `trips` False (loops once)."""
    computations, entry = parse(text)
    program = Program(computations, entry, kept_elements, every_memory, trips)
    return of_computation(program, entry)


def parse(text: str) -> tuple[dict[str, tuple[Instruction, ...]], str]:
    computations, entry = {}, ""
    for found in re.finditer(r"(?ms)^(ENTRY )?(%[\w.-]+) [^\n]*\{$\n(.*?)^\}", text):
        lines = (parse_line(line) for line in found[3].splitlines())
        computations[found[2]] = tuple(line for line in lines if line is not None)
        entry = found[2] if found[1] else entry
    return computations, entry


def parse_line(line: str) -> Instruction | None:
    found = re.match(r"\s*(ROOT )?(%[\w.-]+) = (.*)", line)
    if found is None:
        return None
    rest = found[3]
    type_end = closing(rest, " ")
    opened = rest.index("(", type_end)
    closed = opened + 1 + closing(rest[opened + 1 :], ")")
    opcode, inside = rest[type_end:opened].strip(), rest[opened + 1 : closed]
    number = int(inside) if opcode in ("parameter", "constant") and inside.isdigit() else None
    return Instruction(
        found[2], rest[:type_end], opcode, tuple(NAMES.findall(inside)), rest[closed + 1 :], bool(found[1]), number
    )


def closing(text: str, wanted: str) -> int:
    """Where `wanted` stands outside of all brackets."""
    depth = 0
    for index, character in enumerate(text):
        if depth == 0 and character == wanted:
            return index
        depth += (character in "([{") - (character in ")]}")
    return len(text)


def of_computation(program: Program, name: str) -> collections.Counter:
    total = collections.Counter()
    for instruction in program.computations[name]:
        total.update(of_instruction(program, instruction))
    return total


def of_instruction(program: Program, instruction: Instruction) -> collections.Counter:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode in FREE or opcode.endswith(("-done", "-update")) and opcode not in UPDATED:
        return collections.Counter()
    if opcode == "while":
        times = trip_count(program.computations, instruction) or 1 if program.trips else 1
        inside = of_computation(program, re.search(r"body=(%[\w.-]+)", attributes)[1])
        return collections.Counter({kind: count * times for kind, count in inside.items()})
    if opcode in ("call", "async-start"):
        return of_computation(program, re.search(r"(?:to_apply|calls)=(%[\w.-]+)", attributes)[1])
    if opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", attributes)
        names = NAMES.findall(branches[1]) if branches else re.findall(r"(?:true|false)_computation=(%[\w.-]+)", attributes)
        return max((of_computation(program, name) for name in names), key=lambda count: count.total())
    kind = opcode
    if opcode == "custom-call":
        kind = re.search(r'custom_call_target="([^"]*)"', attributes)[1]
    if opcode == "fusion":
        kind = re.sub(r"[.\d]*$", "", instruction.name[1:])
    return collections.Counter({kind: plain_bytes(program, instruction)})


def trip_count(computations: dict[str, tuple[Instruction, ...]], loop: Instruction) -> int | None:
    """As the compiler says, or else the constant that a condition of nothing else counts up to."""
    known = re.search(r'known_trip_count"?\W+n\W+(\d+)', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[re.search(r"condition=(%[\w.-]+)", loop.attributes)[1]]
    limits = [found.number for found in condition if found.opcode == "constant"]
    is_simple = {found.opcode for found in condition} <= {"parameter", "get-tuple-element", "constant", "compare", "fusion"}
    return limits[0] if is_simple and len(limits) == 1 else None


def loops_of_unknown_length(text: str) -> int:
    """They are counted as running once."""
    computations, _ = parse(text)
    loops = [found for body in computations.values() for found in body if found.opcode == "while"]
    return sum(trip_count(computations, loop) is None for loop in loops)


def plain_bytes(program: Program, instruction: Instruction) -> int:
    size = lambda type_: bytes_of(type_, program.every_memory)
    types = [program.types[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        return fusion_bytes(program, instruction)
    if instruction.opcode == "custom-call":
        result = ARRAY.search(instruction.type)[0] if "__cublas" in instruction.attributes else instruction.type
        arrays = [found for type_ in (*types, result) for found in ARRAY.finditer(type_)]
        return sum(size(found[0]) for found in arrays if not program.kept_elements or elements(found) != program.kept_elements)
    if instruction.opcode.endswith("-start"):  # its type names source and target, and what to wait for
        return sum(2 * size(type_) for type_ in types) if program.every_memory else copy_bytes(instruction.type)
    if instruction.opcode in TAKING:
        return 2 * size(instruction.type) + sum(map(size, types[1:]))
    if instruction.opcode in UPDATED:
        written = UPDATED[instruction.opcode]
        return 2 * size(types[written]) + sum(size(type_) for index, type_ in enumerate(types[1:], 1) if index != written)
    return size(instruction.type) + sum(map(size, types))


def copy_bytes(type_: str) -> int:
    return sum(bytes_of(found[0], False) for found in ARRAY.finditer(type_) if found[2])


def fusion_bytes(program: Program, fusion: Instruction) -> int:
    """Parameters as they are used within, and the result; both smaller where something is taken or updated in place."""
    size = lambda type_: bytes_of(type_, program.every_memory)
    body = fused(program, fusion)
    by_name = {found.name: found for found in body}

    def uses(name, body):
        for user in body:
            for index in (index for index, operand in enumerate(user.operands) if operand == name):
                if user.opcode in ("bitcast", "copy", "reshape") and not user.is_root:
                    yield from uses(user.name, body)
                elif user.opcode == "fusion":
                    inner = fused(program, user)
                    yield from uses(next(found.name for found in inner if is_parameter(found, index)), inner)
                else:
                    yield user, index

    total = 0
    for parameter in (found for found in body if found.opcode == "parameter"):
        operand = fusion.operands[parameter.number]
        if size(program.types[operand]) == 0:
            continue
        found = list(uses(parameter.name, body))
        if found and all(index == 0 and user.opcode in (*TAKING, *UPDATED) for user, index in found):
            total += sum(bytes_of(user.type, True) for user, _ in found if user.opcode in TAKING)
        else:
            total += size(program.types[operand])
    root = next(found for found in body if found.is_root)
    results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if size(fusion.type):
        for result in results:
            while result.opcode == "bitcast" and result.operands[0] in by_name:
                result = by_name[result.operands[0]]
            written = UPDATED.get(result.opcode)
            total += size(program.types[result.operands[written]] if written else result.type)
    return total


def fused(program: Program, fusion: Instruction) -> tuple[Instruction, ...]:
    return program.computations[re.search(r"calls=(%[\w.-]+)", fusion.attributes)[1]]


def is_parameter(instruction: Instruction, number: int) -> bool:
    return instruction.opcode == "parameter" and instruction.number == number


def elements(array: re.Match) -> int:
    return prod(map(int, filter(None, array[2].split(","))))


def bytes_of(type_: str, every_memory: bool) -> int:
    return sum(
        (elements(found) * bits_of(found[1]) + 7) // 8
        for found in ARRAY.finditer(type_)
        if every_memory or not re.search(r"S\([1-9]", found[3] or "")
    )


def bits_of(element: str) -> int:
    if element in BITS:
        return BITS[element]
    return int(re.search(r"\d+", element)[0])
