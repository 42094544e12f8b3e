"""The records of a `.wandb` file, read on from where the last reading ended.

The file is LevelDB's log: after a header of 7 bytes, blocks of 32 KiB hold records, each cut into parts that carry a
checksum, their length, and whether they begin or end a record. A record is a protocol buffer of wandb's own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from .history import flat

_HEADER: Final = b":W&B\xe1\xbe\x00"
_BLOCK: Final = 32 * 1024
_PART: Final = struct.Struct("<IHB")  # checksum of all that follows it, length of the data, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Fields of wandb's Record. What is wanted; summaries, half of the bytes, are left out without a look.
_WANTED: Final = {2: "history", 5: "config", 10: "alert", 17: "run", 18: "exit"}
_BESIDE: Final = (1, 16, 19, 200)  # the record's number and the like, which may stand before it
_BYTES: Final = 2  # wire type of what begins with its length


class UnreadableRunError(ValueError):
    """The path holds no run that can be read; the message tells a user what to do."""


class WandbFile:
    """One file, and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_damaged = 0  # blocks with bytes that do not fit their checksum
        self._place = 0  # behind the last whole record

    def new_records(self) -> Iterator[tuple[str, Any]]:
        """Yield (type, record) of the wanted records that have been written since the last call.

        What is still being written, or was cut off, is left for the next call.

        Raises:
            UnreadableRunError: the file does not begin as a `.wandb` file does.

        Cost: one block, and one record, in memory.
        """
        from wandb.proto import wandb_internal_pb2

        parse: Callable[[bytes], Any] = wandb_internal_pb2.Record.FromString  # type: ignore[attr-defined]  # generated
        with self.path.open("rb") as file:
            if not self._place and not self._begins(file):
                return
            for data in self._new_data(file):
                kind = _kind_of(data)
                if kind is not None:
                    yield kind, parse(data)

    def _begins(self, file: BinaryIO) -> bool:
        header = file.read(len(_HEADER))
        if not _HEADER.startswith(header):
            raise UnreadableRunError(f"{self.path} cannot be read as a W&B run: its header is another one")
        if len(header) == len(_HEADER):
            self._place = len(_HEADER)
        return header == _HEADER

    def _new_data(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the data of whole records; of those that are not wanted only the first part."""
        parts: list[bytes] | None = None  # of the record that has begun; None outside of one
        block_start = self._place - self._place % _BLOCK
        at = self._place - block_start
        file.seek(block_start)
        while block := file.read(_BLOCK):
            while at + _PART.size <= len(block):
                checksum, length, kind = _PART.unpack_from(block, at)
                end = at + _PART.size + length
                if end > len(block) or zlib.crc32(block[at + 6 : end]) != checksum:
                    if len(block) < _BLOCK:
                        return  # it is still being written
                    self.num_damaged += 1
                    parts = None
                    break
                if kind in (_WHOLE, _FIRST):
                    parts = []
                if parts is not None:
                    if not parts or _kind_of(parts[0]) is not None:
                        parts.append(block[at + _PART.size : end])
                    if kind in (_WHOLE, _LAST):
                        self._place = block_start + end
                        yield b"".join(parts)
                        parts = None
                at = end
            block_start, at = block_start + len(block), 0


def _kind_of(data: bytes) -> str | None:
    """The type of a record that is wanted, from its first bytes; None of any other."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        if (field := tag >> 3) not in _BESIDE:
            return _WANTED.get(field)
        size, place = _varint(data, place)
        place += size if tag & 7 == _BYTES else 0
    return None


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits to a byte, and the place behind it."""
    value = shift = 0
    while place < len(data):
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if data[place - 1] < 0x80:
            break
    return value, place


def scalars_of(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a row with their values, numbers as float; nested keys are joined by dots."""
    for item in record.history.item:
        nested, text = item.nested_key, item.value_json
        key = item.key or (nested[0] if len(nested) == 1 else ".".join(nested))
        first = text[:1]
        if first and first in "-0123456789NI":  # W&B writes NaN and Infinity
            yield key, float(text)
        elif first == "{":
            yield from flat(json.loads(text), f"{key}.")
        elif first:
            yield key, json.loads(text)


def settings_of(config: Any) -> dict[str, Any]:
    """What a record sets in the run's configuration, but for W&B's own."""
    items = ((item.key or ".".join(item.nested_key), item.value_json) for item in config.update)
    return {key: json.loads(text) for key, text in items if text and not key.startswith("_")}
