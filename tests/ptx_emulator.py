"""An emulator of the part of PTX that Triton generates for the kernels, instruction by instruction on the CPU.

All programs of a launch run at the same time, each with its own shared memory. A register is an array [T] over the
threads of all programs. The unfinished threads that are furthest behind execute the next instruction. Errors are:

- an access outside the buffers of `Memory`, or at an address that is not a multiple of the access's size;
- accesses of two warps to shared memory without a barrier between them, if one of them writes (except two atomics);
- a barrier, a shuffle or a vote that not all threads reach together; a failed device assertion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

# T threads of all programs

WARP: Final = 32
THREADS: Final = 128  # per program: four warps
_SHARED_BYTES: Final = 16_384  # per program; Triton's own allocation is at the end, from _DYNAMIC
_DYNAMIC: Final = 12_288

Array = np.ndarray[Any, Any]

_TYPES: Final = {
    kind + str(8 * size): np.dtype(code + str(size))
    for kind, code in (("u", "u"), ("b", "u"), ("s", "i"), ("f", "f"))
    for size in (1, 2, 4, 8)
    if kind + str(size) != "f1"
}


class PtxError(AssertionError):
    """The program does something that is an error on a GPU, or that the emulator does not support."""


class Instruction(NamedTuple):
    """One instruction.

    Args:
        guard: a predicate register and the value that it has in threads that execute the instruction; None: all do.
        name: the parts of the name: ("add", "f32").
    """

    guard: tuple[str, bool] | None
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


class Program(NamedTuple):
    """A parsed kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]  # branch tables, as labels
    parameter_names: tuple[str, ...]


@lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """Parse a PTX module with one kernel."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.S)
    assert entry is not None
    names = tuple(part.split()[-1] for part in entry.group(1).split(",") if part.strip())
    body = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.loc[^\n]*$", "", ptx[entry.end() :], flags=re.S | re.M)
    body = body[: _end_of_block(body)]
    tables = {
        name: tuple(re.findall(r"\$?\w+", targets))
        for name, targets in re.findall(r"(\$?\w+):\s*\.branchtargets([^;]*);", body)
    }
    body = re.sub(r"\$?\w+:\s*\.branchtargets[^;]*;", "", body)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        text = " ".join(statement.split())
        while label := re.match(r"(?:(\$?\w+):|[{}])\s*", text):  # a label or a brace
            if label.group(1):
                labels[label.group(1)] = len(instructions)
            text = text[label.end() :]
        if text and not text.startswith((".", "call_seq", "prototype")):
            instructions.append(_instruction(text))
    return Program(tuple(instructions), labels, tables, names)


def _end_of_block(text: str) -> int:
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    raise PtxError("a block without an end")


def _instruction(text: str) -> Instruction:
    guarded = re.match(r"@(!?)([%\w]+)\s+", text)
    guard = (guarded.group(2), guarded.group(1) != "!") if guarded else None
    name, _, rest = text[guarded.end() if guarded else 0 :].partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*", rest)
    return Instruction(guard, tuple(re.sub("::", ".", name).split(".")), tuple(o.strip() for o in operands), text)


class Memory:
    """Global memory: the buffers that a launch may access."""

    def __init__(self) -> None:
        self._buffers: dict[int, Array] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Let launches access the elements of a contiguous tensor."""
        if tensor.numel():
            flat = tensor.detach().reshape(-1)
            assert flat.data_ptr() == tensor.data_ptr()
            self._buffers[tensor.data_ptr()] = flat.view(torch.uint8).numpy()

    def load(self, addresses: Array, size: int, text: str) -> Array:
        """Return the bytes at each address: [T, size]."""
        found = np.empty((len(addresses), size), dtype=np.uint8)
        for buffer, mine, places in self._places(addresses, size, text):
            found[mine] = buffer[places[:, None] + np.arange(size)]
        return found

    def store(self, addresses: Array, values: Array, text: str) -> None:
        for buffer, mine, places in self._places(addresses, values.shape[1], text):
            buffer[places[:, None] + np.arange(values.shape[1])] = values[mine]

    def add_atomically(self, addresses: Array, values: Array, text: str) -> None:
        for buffer, mine, places in self._places(addresses, values.itemsize, text):
            end = len(buffer) // values.itemsize * values.itemsize
            np.add.at(buffer[:end].view(values.dtype), places // values.itemsize, values[mine])

    def _places(self, addresses: Array, size: int, text: str) -> list[tuple[Array, Array, Array]]:
        if (addresses % size).any():
            raise PtxError(f"misaligned: {text}")
        starts = np.array(sorted(self._buffers), dtype=np.int64)
        which = np.searchsorted(starts, addresses, side="right") - 1
        if (which < 0).any():
            raise PtxError(f"out of bounds: {text}")
        places = addresses - starts[which]
        accesses = []
        for number in np.unique(which):
            mine, buffer = which == number, self._buffers[int(starts[number])]
            if (places[mine] + size > len(buffer)).any():
                raise PtxError(f"out of bounds: {text}")
            accesses.append((buffer, mine, places[mine]))
        return accesses


class _Shared:
    """The shared memory of every program, and the warps that have used each word since the last barrier."""

    def __init__(self, num_programs: int) -> None:
        self.bytes = np.zeros((num_programs, _SHARED_BYTES), dtype=np.uint8)
        words = (num_programs, _SHARED_BYTES // 4)
        # The number of a warp; -1: none; -2: an atomic; -3: several warps
        self.writer, self.reader = np.full(words, -1), np.full(words, -1)

    def barrier(self, programs: Array) -> None:
        self.writer[programs] = self.reader[programs] = -1

    def words(self, programs: Array, places: Array, size: int, text: str) -> tuple[Array, Array]:
        if (places % size).any() or (places < 0).any() or (places + size > _SHARED_BYTES).any():
            raise PtxError(f"shared memory out of bounds or misaligned: {text}")
        words = places[:, None] // 4 + np.arange(max(size // 4, 1))
        return np.broadcast_to(programs[:, None], words.shape), words

    def read(self, programs: Array, places: Array, size: int, warps: Array, text: str) -> Array:
        at = self.words(programs, places, size, text)
        others = self.writer[at]
        if ((others != -1) & (others != warps[:, None])).any():
            raise PtxError(f"reads what another warp writes, without a barrier: {text}")
        readers = self.reader[at]
        self.reader[at] = np.where((readers == -1) | (readers == warps[:, None]), warps[:, None], -3)
        return self.bytes[programs[:, None], places[:, None] + np.arange(size)]

    def write(self, programs: Array, places: Array, values: Array, warps: Array, text: str) -> None:
        at = self.words(programs, places, values.shape[1], text)
        for others in (self.writer[at], self.reader[at]):
            if ((others != -1) & (others != warps[:, None])).any():
                raise PtxError(f"writes what another warp touches, without a barrier: {text}")
        self.writer[at] = warps[:, None]
        self.bytes[programs[:, None], places[:, None] + np.arange(values.shape[1])] = values

    def add_atomically(self, programs: Array, places: Array, values: Array, text: str) -> None:
        at = self.words(programs, places, values.itemsize, text)
        if (self.writer[at] >= 0).any() or (self.reader[at] != -1).any():
            raise PtxError(f"adds to what is read or written otherwise, without a barrier: {text}")
        self.writer[at] = -2
        np.add.at(self.bytes.view(values.dtype), (programs, places // values.itemsize), values)


class Launch:
    """A launch of a kernel; `run` executes it to its end.

    Args:
        ptx: the PTX of the kernel.
        num_programs: the number of programs, in a one-dimensional grid.
        arguments: the arguments of the kernel: numbers, and addresses in `memory`.
    """

    def __init__(self, ptx: str, num_programs: int, arguments: Sequence[int], memory: Memory) -> None:
        self._program, self._memory = parse(ptx), memory
        thread = np.arange(num_programs * THREADS)
        self._programs, self._threads = thread // THREADS, thread % THREADS
        self._registers: dict[str, Array] = {
            "%tid.x": self._threads.astype(np.uint32),
            "%ctaid.x": self._programs.astype(np.uint32),
            "%laneid": (self._threads % WARP).astype(np.uint32),
        }
        named = dict(
            zip(self._program.parameter_names, arguments, strict=False)
        )  # Triton may append parameters for scratch memory, which are not read
        self._arguments = {name: named.get(name, 0) for name in self._program.parameter_names}
        self._missing: dict[str, set[int]] = {}  # by register: packed parts that have no value yet
        self._shared = _Shared(num_programs)
        self._places = {"global_smem": _DYNAMIC, "gradwatch_cells": 0}
        self._at = np.zeros(len(thread), dtype=np.int64)
        self._alive = np.ones(len(thread), dtype=bool)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            while self._alive.any():
                self._step()

    def _step(self) -> None:
        here = int(self._at[self._alive].min())
        together = self._alive & (self._at == here)
        instruction = self._program.instructions[here]
        self._at[together] = here + 1
        active = together
        if instruction.guard is not None:
            predicate, wanted = instruction.guard
            active = together & (self._registers[predicate] == wanted)
        kind = instruction.name[0]
        if not active.any():
            return
        if kind == "bra":
            self._at[active] = self._program.labels[instruction.operands[0]]
        elif kind == "brx":
            targets = self._program.tables[instruction.operands[1]]
            index = self._read(instruction.operands[0], "u32", active)
            self._at[active] = np.array([self._program.labels[target] for target in targets])[index]
        elif kind in ("ret", "exit"):
            self._alive[active] = False
        elif kind in ("bar", "barrier"):
            self._barrier(active, instruction.text)
        elif kind in ("call", "trap"):
            raise PtxError(f"the device has failed an assertion: {instruction.text}")
        else:
            self._execute(instruction, active)

    def _barrier(self, active: Array, text: str) -> None:
        waiting = np.unique(self._programs[active])
        if (self._alive & ~active & np.isin(self._programs, waiting)).any():
            raise PtxError(f"not all threads of a program reach the barrier: {text}")
        self._shared.barrier(waiting)

    def _read(self, operand: str, kind: str, active: Array) -> Array:
        """Return an operand as this type: [active threads]."""
        number = int(active.sum())
        if self._missing.get(operand):
            raise PtxError(f"a part of {operand} is read before it is written")
        if operand in self._registers:
            values = self._registers[operand][active]
            if kind == "pred":
                return values
            dtype = _TYPES[kind]
            if values.itemsize != dtype.itemsize:
                values = values.astype(f"u{dtype.itemsize}")
            return np.ascontiguousarray(values).view(dtype)
        if kind == "pred":
            return np.full(number, bool(int(operand, 0)))
        dtype = _TYPES[kind]
        if operand in self._places:
            return np.full(number, self._places[operand], dtype=dtype)
        if operand.startswith(("0f", "0d")):
            bits = np.array([int(operand[2:], 16)], dtype="u4" if operand[1] == "f" else "u8")
            return np.full(number, bits.view(dtype)[0])
        if operand.startswith("%"):
            raise PtxError(f"{operand} is read before it is written")
        bits = np.array([int(operand.rstrip("U"), 0) & (2 ** (8 * dtype.itemsize) - 1)], dtype=f"u{dtype.itemsize}")
        return np.full(number, bits.view(dtype)[0])

    def _read_packed(self, operand: str, kind: str, active: Array) -> tuple[Array, set[int]]:
        """Return an operand and its unwritten parts, which may be copied but not read."""
        missing = self._missing.pop(operand, set())
        values = self._read(operand, kind, active)
        self._missing[operand] = missing
        return values, missing

    def _write(self, operand: str, values: Array, active: Array) -> None:
        if operand == "_":
            return
        if values.dtype != bool:
            values = np.ascontiguousarray(values).view(f"u{values.itemsize}")
        self._missing.pop(operand, None)
        register = self._registers.get(operand)
        if register is None or register.dtype != values.dtype:
            register = np.zeros(len(active), dtype=values.dtype)
            self._registers[operand] = register
        register[active] = values

    def _address(self, operand: str, active: Array) -> Array:
        base, _, offset = operand.strip("[] ").partition("+")
        base = base.strip()
        size = self._registers[base].itemsize if base in self._registers else 8
        return self._read(base, f"u{8 * size}", active).astype(np.int64) + int(offset or "0", 0)

    def _execute(self, instruction: Instruction, active: Array) -> None:
        _, name, operands, text = instruction
        kind = name[-1]
        if name[0] in ("ld", "st", "red", "atom", "mov", "shfl", "vote", "redux", "selp", "setp", "cvt", "prmt"):
            getattr(self, "_" + name[0])(name, operands, active, text)
            return
        operation = _OPERATIONS.get(name[0])
        if operation is None or {"hi", "ftz", "sat", "NaN"}.intersection(name):
            raise PtxError(f"unknown: {text}")
        if kind == "f32x2":  # Blackwell: two float32 at once
            found = [self._read_packed(operand, "b64", active) for operand in operands[1:]]
            pairs = [values.view(np.float32).reshape(-1, 2) for values, _ in found]
            self._write(operands[0], np.ascontiguousarray(operation(*pairs)).view(np.uint64)[:, 0], active)
            self._missing[operands[0]] = set().union(*(missing for _, missing in found))
            return
        result_kind, kinds = kind, [kind] * (len(operands) - 1)
        if name[0] in ("shl", "shr"):
            kinds[1] = "u32"
        if "wide" in name:
            result_kind = kind[0] + str(2 * int(kind[1:]))
            kinds[2:] = [result_kind] * len(kinds[2:])
        if name[0] in ("bfe", "bfi"):
            kinds[-2:] = ["u32", "u32"]
        values = [self._read(operand, of, active) for operand, of in zip(operands[1:], kinds, strict=True)]
        if "wide" in name:
            values = [value.astype(_TYPES[result_kind]) for value in values]
        result = operation(*values)
        if name[0] in ("popc",):
            result = result.astype(np.uint32)
        elif kind != "pred":
            result = result.astype(_TYPES[result_kind], copy=False)
        self._write(operands[0], result, active)

    def _ld(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        size = _TYPES[name[-1]].itemsize
        targets = [part.strip() for part in operands[0].strip("{}").split(",")]
        if name[1] == "param":
            value = int(self._arguments[operands[1].strip("[] ")]) & (2 ** (8 * size) - 1)
            self._write(targets[0], np.full(int(active.sum()), value, dtype=f"u{size}"), active)
            return
        addresses, whole = self._address(operands[1], active), size * len(targets)
        if "shared" in name:
            of, warps = self._programs[active], self._threads[active] // WARP
            found = self._shared.read(of, addresses, whole, warps, text)
        else:
            found = self._memory.load(addresses, whole, text)
        values = np.ascontiguousarray(found).view(f"u{size}")
        for place, target in enumerate(targets):
            self._write(target, values[:, place], active)

    def _st(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        sources = [part.strip() for part in operands[1].strip("{}").split(",")]
        values = np.stack([self._read(source, "b" + name[-1][1:], active) for source in sources], axis=1)
        addresses, found = self._address(operands[0], active), np.ascontiguousarray(values).view(np.uint8)
        if "shared" in name:
            of, warps = self._programs[active], self._threads[active] // WARP
            self._shared.write(of, addresses, found, warps, text)
        else:
            self._memory.store(addresses, found, text)

    def _red(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        if "add" not in name:
            raise PtxError(f"unknown: {text}")
        addresses, values = self._address(operands[0], active), self._read(operands[1], name[-1], active)
        if "shared" in name:
            self._shared.add_atomically(self._programs[active], addresses, values, text)
        else:
            self._memory.add_atomically(addresses, values, text)

    def _atom(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        self._red(name, operands[1:], active, text)  # does not return the previous value
        self._registers.pop(operands[0], None)

    def _mov(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        target, source = operands
        kind = name[-1]
        if target.startswith("{"):
            parts = [part.strip() for part in target.strip("{}").split(",")]
            size = _TYPES[kind].itemsize // len(parts)
            packed, missing = self._read_packed(source, kind, active)
            values = packed.view(f"u{size}").reshape(-1, len(parts))
            for place, part in enumerate(parts):
                self._write(part, values[:, place], active)
                if place in missing:
                    self._registers.pop(part, None)
        elif source.startswith("{"):
            parts = [part.strip() for part in source.strip("{}").split(",")]
            size = _TYPES[kind].itemsize // len(parts)
            missing = {place for place, part in enumerate(parts) if part[0] == "%" and part not in self._registers}
            columns = [
                np.zeros(int(active.sum()), f"u{size}")
                if place in missing
                else self._read(part, f"b{8 * size}", active)
                for place, part in enumerate(parts)
            ]
            self._write(target, np.stack(columns, axis=1).view(f"u{_TYPES[kind].itemsize}")[:, 0], active)
            self._missing[target] = missing
        else:
            self._write(target, self._read(source, kind, active), active)

    def _whole_warps(self, active: Array, text: str) -> None:
        sizes = active.reshape(-1, WARP).sum(axis=1)
        if not np.isin(sizes, (0, WARP)).all():
            raise PtxError(f"not all threads of a warp take part: {text}")

    def _shfl(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        self._whole_warps(active, text)
        values = self._read(operands[1], "b32", active).reshape(-1, WARP)
        if name[2] != "bfly":
            raise PtxError(f"unknown: {text}")
        self._write(operands[0].split("|")[0], values[:, np.arange(WARP) ^ int(operands[2], 0)].ravel(), active)

    def _vote(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        self._whole_warps(active, text)
        votes = self._read(operands[1].lstrip("!"), "pred", active) ^ operands[1].startswith("!")
        ballot = (votes.reshape(-1, WARP) << np.arange(WARP, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
        self._write(operands[0], np.repeat(ballot, WARP), active)

    def _redux(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        self._whole_warps(active, text)
        values = self._read(operands[1], name[-1], active).reshape(-1, WARP)
        merge: dict[str, Callable[..., Array]] = {
            "add": np.add.reduce,
            "min": np.minimum.reduce,
            "max": np.maximum.reduce,
            "or": np.bitwise_or.reduce,
        }
        self._write(operands[0], np.repeat(merge[name[2]](values, axis=1).astype(values.dtype), WARP), active)

    def _selp(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        yes, no = (self._read(operand, name[-1], active) for operand in operands[1:3])
        self._write(operands[0], np.where(self._read(operands[3], "pred", active), yes, no), active)

    def _setp(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        one, other = (self._read(operand, name[-1], active) for operand in operands[1:3])
        result = _compare(name[1], one, other)
        if len(operands) > 3:
            merge = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[name[2]]
            also = self._read(operands[3].lstrip("!"), "pred", active) ^ operands[3].startswith("!")
            result = merge(result, also)
        self._write(operands[0], result, active)

    def _cvt(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        if name[-1][0] == "f" and name[-2][0] != "f":
            raise PtxError(f"unknown: {text}")
        self._write(operands[0], self._read(operands[1], name[-1], active).astype(_TYPES[name[-2]]), active)

    def _prmt(self, name: Sequence[str], operands: Sequence[str], active: Array, text: str) -> None:
        low, high, choice = (self._read(operand, "u32", active) for operand in operands[1:4])
        pool = np.concatenate([part[:, None].view(np.uint8) for part in (low, high)], axis=1)
        result = np.zeros((len(low), 4), dtype=np.uint8)
        for byte in range(4):
            chosen = pool[np.arange(len(low)), (choice >> (4 * byte)) & 7]
            sign = np.where(chosen & 0x80, 0xFF, 0)
            result[:, byte] = np.where((choice >> (4 * byte)) & 8, sign, chosen)
        self._write(operands[0], result.view(np.uint32)[:, 0], active)


def _compare(how: str, one: Array, other: Array) -> Array:
    unordered = np.isnan(one) | np.isnan(other) if one.dtype.kind == "f" else np.zeros(len(one), dtype=bool)
    if how in ("num", "nan"):
        return ~unordered if how == "num" else unordered
    plain = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
    or_unordered = len(plain) == 3 and plain.endswith("u")
    relation = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[plain[:2]]
    result: Array = relation(one, other) & ~unordered
    return result | unordered if or_unordered else result


def _shift_left(value: Array, by: Array) -> Array:
    width = 8 * value.itemsize
    return np.where(by < width, value << np.minimum(by, width - 1).astype(value.dtype), 0).astype(value.dtype)


def _shift_right(value: Array, by: Array) -> Array:
    width = 8 * value.itemsize
    shifted = value >> np.minimum(by, width - 1).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(by < width, shifted, 0).astype(value.dtype)


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Multiply and add with one rounding: float32 in float64, float64 in the host's long double."""
    wider = {"f4": np.float64, "f8": np.longdouble}.get(a.dtype.str[1:])
    return a * b + c if wider is None else (a.astype(wider) * b + c).astype(a.dtype)


def _field(value: Array, begin: Array, length: Array) -> Array:
    if value.dtype.kind == "i":
        raise PtxError("unknown: a field with a sign")
    mask = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
    return ((value.astype(np.uint64) >> begin.astype(np.uint64)) & mask).astype(value.dtype)


def _insert(part: Array, into: Array, begin: Array, length: Array) -> Array:
    mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << begin.astype(np.uint64)
    shifted = (part.astype(np.uint64) << begin.astype(np.uint64)) & mask
    return ((into.astype(np.uint64) & ~mask) | shifted).astype(into.dtype)


def _extreme(of_floats: Callable[..., Array], of_integers: Callable[..., Array]) -> Callable[..., Array]:
    def extreme(*values: Array) -> Array:
        merge = of_floats if values[0].dtype.kind == "f" else of_integers
        result = values[0]
        for value in values[1:]:
            result = merge(result, value)
        return result

    return extreme


_OPERATIONS: Final[dict[str, Callable[..., Array]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: (a - np.fmod(a, b)) // b,  # of integers: towards zero
    "mad": _multiply_add,
    "fma": _multiply_add,
    "min": _extreme(np.fmin, np.minimum),
    "max": _extreme(np.fmax, np.maximum),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "shl": _shift_left,
    "shr": _shift_right,
    "bfe": _field,
    "bfi": _insert,
    "cvta": lambda a: a,
    "popc": lambda a: np.unpackbits(a.view(np.uint8).reshape(len(a), -1), axis=1).sum(axis=1),
}
