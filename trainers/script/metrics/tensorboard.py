"""The reader of scalars in TensorBoard's event files, which are read as they grow, without TensorBoard or protobuf.

A file has records (tensorflow.org/tutorials/load_data/tfrecord): length (8 bytes), crc of the length (4), data, crc of
the data (4). The data is an ``Event`` of event.proto with values of summary.proto; the constants MESSAGE_FIELD are the
numbers of their fields. Only the crc of the length is checked, because the length decides where the next record begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER_BYTES, _CRC_BYTES = 12, 4
_LARGEST_BYTES = 16 << 20  # a larger record holds images or audio
_EVENT_WALL_TIME, _EVENT_STEP, _EVENT_SUMMARY, _SUMMARY_VALUE = 1, 2, 5, 1
_VALUE_TAG, _VALUE_SIMPLE_VALUE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_CONTENT = 1, 4
_TENSOR_FLOATS = {5: "f", 6: "d"}  # float_val, double_val → struct's letter
_TENSOR_INTS = (7, 10)  # int_val, int64_val, as varints
_SCALARS = {1: "f", 2: "d", 3: "i", 9: "q", 19: "e"}  # DataType of types.proto → struct's letter


@dataclass(frozen=True)
class Scalar:
    time_s: float
    step: int
    tag: str
    value: float


class EventFile:
    """One growing file. ``damage`` says why it isn't read further."""

    def __init__(self, path: Path) -> None:
        self.path, self.damage = path, ""
        self._offset = 0

    def scalars(self) -> Iterator[Scalar]:
        """Yield the values in complete records since the last call; nothing of a file that was removed."""
        if self.damage:
            return
        try:
            opened = self.path.open("rb")
        except OSError:
            return
        with opened as file:
            file.seek(self._offset)
            while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
                (size,), (crc,) = struct.unpack("<Q", header[:8]), struct.unpack("<I", header[8:])
                if masked_crc32c(header[:8]) != crc:
                    self.damage = f"its record at byte {self._offset} is damaged"
                    return
                if size > _LARGEST_BYTES:
                    data = b""
                    file.seek(size, 1)
                else:
                    data = file.read(size)
                    if len(data) < size:  # still being written: the next call reads the record again
                        return
                if len(file.read(_CRC_BYTES)) < _CRC_BYTES:
                    return
                self._offset += _HEADER_BYTES + size + _CRC_BYTES
                try:
                    yield from _scalars_of(data)
                except (ValueError, IndexError, struct.error, UnicodeDecodeError):
                    self.damage = f"its record before byte {self._offset} makes no sense"
                    return


def _scalars_of(event: bytes) -> Iterator[Scalar]:
    time_s, step, summaries = 0.0, 0, []
    for number, value in fields(event):
        if number == _EVENT_WALL_TIME and isinstance(value, bytes):
            (time_s,) = struct.unpack("<d", value)
        elif number == _EVENT_STEP and isinstance(value, int):
            step = _signed(value)
        elif number == _EVENT_SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in fields(summary):
            if number == _SUMMARY_VALUE and isinstance(value, bytes):
                tag_and_value = _value_of(value)
                if tag_and_value is not None:
                    yield Scalar(time_s, step, *tag_and_value)


def _value_of(message: bytes) -> tuple[str, float] | None:
    """Return (tag, number) of a summary's value; None if it is no scalar."""
    tag, scalar = "", None
    for number, value in fields(message):
        if isinstance(value, int):
            continue
        if number == _VALUE_TAG:
            tag = value.decode()
        elif number == _VALUE_SIMPLE_VALUE and len(value) == 4:
            (scalar,) = struct.unpack("<f", value)
        elif number == _VALUE_TENSOR:
            scalar = _element(value)
    return None if scalar is None or not tag else (tag, scalar)


def _element(tensor: bytes) -> float | None:
    """Return the only element of a TensorProto of numbers; None for any other tensor."""
    kind = 0
    values: list[float] = []
    for number, value in fields(tensor):
        if number == _TENSOR_DTYPE and isinstance(value, int):
            kind = value
        elif number in _TENSOR_INTS:
            values += map(_signed, [value] if isinstance(value, int) else _varints(value))
        elif isinstance(value, bytes):
            letter = _SCALARS.get(kind) if number == _TENSOR_CONTENT else _TENSOR_FLOATS.get(number)
            if letter is not None and len(value) == struct.calcsize("<" + letter):
                values += struct.unpack("<" + letter, value)
    if len(values) != 1 or kind not in _SCALARS:
        return None
    return float(values[0])


def _signed(varint64: int) -> int:
    """Return the number whose two's complement of 64 bits a varint holds."""
    return varint64 - (1 << 64) if varint64 >> 63 else varint64


def _varints(data: bytes) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a protobuf message's fields, by its encoding guide. Raises ValueError, IndexError."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:  # a varint
            value, at = varint(message, at)
            yield number, value
            continue
        if wire_type == 2:  # bytes behind their length
            size, at = varint(message, at)
        elif wire_type in (1, 5):  # 64 or 32 bits
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + size > len(message):
            raise ValueError("it breaks off")
        yield number, message[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position behind it. Raises IndexError."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def masked_crc32c(data: bytes) -> int:
    """Return Castagnoli's crc, rotated and shifted as in TFRecord; bit by bit, because 8 bytes need no table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
