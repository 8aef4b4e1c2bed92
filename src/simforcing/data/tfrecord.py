"""TFRecord files and `tf.train.Example` messages without TensorFlow.

A record is: length (uint64), masked CRC-32C of those 8 bytes, the data, masked CRC-32C of the data; all little-endian.
An Example maps names to lists of bytes, floats or integers; only what that needs of the protobuf wire format is here.

Shapes: K blocks of a record, M values of a feature.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

from simforcing.errors import SimForcingError

Feature = list[bytes] | np.ndarray
"""Values of one feature: byte strings, float32 [M] or int64 [M]."""

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_MASK = 0xA282EAD8
_BLOCK = 256  # bytes that are summed one after another; all blocks of a record are summed at once
_SHORT = 4096  # bytes of a string that `peek` still reads
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Record:
    """Where one record's data lie in its file. fault: why they cannot be read, where nothing but that is known."""

    path: Path
    number: int
    offset: int
    size: int
    fault: str = ""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"record {self.number} of {self.path}"

    def read(self) -> bytes:
        """The data. Raises SimForcingError if they end early or do not match their checksum."""
        if self.fault:
            raise SimForcingError(self.fault)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data, stored = file.read(self.size), file.read(4)
        if len(data) < self.size or len(stored) < 4:
            raise SimForcingError(f"{self.where}: the file is cut short; download or restore it")
        if struct.unpack("<I", stored)[0] != masked_crc(data):
            raise SimForcingError(f"{self.where}: data do not match their checksum; download or restore the file")
        return data

    def peek(self) -> dict[str, Feature]:
        """The features without the content of byte strings longer than `_SHORT` (empty instead), and unchecked.

        Touches little more of the file than names and numbers. Raises SimForcingError if it is no Example.
        """
        if self.fault:
            raise SimForcingError(self.fault)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed when nothing refers to it
        return parse_example(memoryview(mapped)[self.offset : self.offset + self.size], longest=_SHORT)


def records(path: Path) -> Iterator[Record]:
    """The records of a file in order; reads only their lengths.

    Raises SimForcingError, at the record where it is found, if the file is missing, cut short, or a length does not
    match its checksum.
    """
    try:
        total = path.stat().st_size
    except OSError:
        raise SimForcingError(f"{path}: file is missing; download or restore it") from None
    if total == 0:
        raise SimForcingError(f"{path}: file has zero bytes; download or restore it")
    with path.open("rb") as file:
        number, offset = 0, 0
        while offset < total:
            file.seek(offset)
            header = file.read(12)
            if header.startswith(b"version http"):
                raise SimForcingError(f"{path}: only a pointer, not the data; fetch the content (git lfs pull)")
            if len(header) < 12:
                raise SimForcingError(f"record {number} of {path}: the file is cut short; download or restore it")
            size, stored = struct.unpack("<QI", header)
            if stored != masked_crc(header[:8]):
                raise SimForcingError(
                    f"record {number} of {path}: its length does not match the checksum, so this is damaged or no "
                    "TFRecord file; download or restore it"
                )
            if offset + 16 + size > total:
                raise SimForcingError(f"record {number} of {path}: the file is cut short; download or restore it")
            yield Record(path, number, offset + 12, size)
            number, offset = number + 1, offset + 16 + size


def parse_example(data: bytes | memoryview, longest: int | None = None) -> dict[str, Feature]:
    """The features of a serialised `tf.train.Example`; byte strings of more than `longest` bytes come out empty.

    Raises SimForcingError if it is none.
    """
    view = memoryview(data)
    found: dict[str, Feature] = {}
    try:
        for number, features in _fields(view):
            if number != 1 or not isinstance(features, memoryview):
                continue
            for kind, entry in _fields(features):
                if kind == 1 and isinstance(entry, memoryview):
                    pair = dict(_fields(entry))
                    name, value = pair.get(1), pair.get(2)
                    if isinstance(name, memoryview):
                        found[str(name, "utf-8")] = _feature(value, longest) if isinstance(value, memoryview) else []
    except (IndexError, struct.error, ValueError) as error:
        raise SimForcingError(f"no tf.train.Example ({error}); the record is damaged, restore the file") from error
    return found


def _feature(view: memoryview, longest: int | None) -> Feature:
    """A Feature message: its one list, whose values may be packed into one field or given one by one."""
    for kind, values in _fields(view):
        if not isinstance(values, memoryview):
            continue
        if kind == 1:
            strings = [value for number, value in _fields(values) if number == 1 and isinstance(value, memoryview)]
            return [b"" if longest is not None and len(text) > longest else bytes(text) for text in strings]
        items = [value for number, value in _fields(values) if number == 1]
        if kind == 2:
            parts = [np.frombuffer(item, "<f4") for item in items if isinstance(item, memoryview)]
            return np.concatenate(parts) if parts else np.empty(0, np.float32)
        if kind == 3:
            flat = [number for item in items for number in (_varints(item) if isinstance(item, memoryview) else [item])]
            return np.array(flat, np.uint64).astype(np.int64)
    return []


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of a message's fields; fixed-size values as their bytes."""
    place = 0
    while place < len(view):
        key, place = _varint(view, place)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, place = _varint(view, place)
            yield number, value
            continue
        if wire == _BYTES:
            size, place = _varint(view, place)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if place + size > len(view):
            raise ValueError("a field ends beyond its message")
        yield number, view[place : place + size]
        place += size


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(view: memoryview) -> Iterator[int]:
    place = 0
    while place < len(view):
        value, place = _varint(view, place)
        yield value


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes.

    The sum is linear over GF(2) and zeros in front do not change it. So the data are cut into K blocks, a power of
    two, with zeros in front; numpy sums all blocks at once, and neighbours are joined in log2(K) steps. The initial
    value, all ones, is the same as inverting the first four bytes.
    """
    if len(data) < 4:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = (crc >> 8) ^ int(_table()[(crc ^ byte) & 0xFF])
        return crc ^ 0xFFFFFFFF
    count = 1 << (-(-len(data) // _BLOCK) - 1).bit_length()
    padded = np.zeros(count * _BLOCK, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    first = len(padded) - len(data)
    padded[first : first + 4] ^= 0xFF
    sums = _add_bytes(np.zeros(count, np.uint32), padded.reshape(count, _BLOCK).T)
    level = 0
    while len(sums) > 1:
        sums = _apply(_shift(level), sums[0::2]) ^ sums[1::2]
        level += 1
    return int(sums[0]) ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def _table() -> UInt32[np.ndarray, "256"]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def _add_bytes(sums: UInt32[np.ndarray, "K"], columns: np.ndarray) -> UInt32[np.ndarray, "K"]:
    """K running sums after a byte each from every row of `columns` [n, K]."""
    table = _table()
    for row in columns:
        sums = (sums >> 8) ^ table[(sums ^ row) & 0xFF]
    return sums


@lru_cache(maxsize=64)
def _shift(level: int) -> UInt32[np.ndarray, "32"]:
    """What 2^level blocks of zeros make of each single bit of a sum."""
    if level == 0:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return _add_bytes(bits, np.zeros((_BLOCK, 32), np.uint8))
    half = _shift(level - 1)
    return _apply(half, half)


def _apply(operator: UInt32[np.ndarray, "32"], sums: UInt32[np.ndarray, "K"]) -> UInt32[np.ndarray, "K"]:
    out = np.zeros_like(sums)
    for bit, image in enumerate(operator):
        out ^= np.where((sums >> np.uint32(bit)) & np.uint32(1), image, np.uint32(0))
    return out
