"""Serialised tf.train.Example messages, read and written without TensorFlow: features by name.

Format: Example{1: Features{1: entry{1: name, 2: Feature{1: BytesList | 2: FloatList | 3: Int64List}}}}, each list {1: value, ...}
(tensorflow/core/example/{example,feature}.proto).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_BYTES, _FLOATS, _INTEGERS = 1, 2, 3

Feature = list[memoryview] | np.ndarray


def parse_example(record: np.ndarray | bytes) -> dict[str, Feature]:
    """Features of a serialised tf.train.Example by name: a list of byte views, a float32 array or an int64 array.

    Nothing long is copied. Raises ValueError for bytes that are no Example.
    """
    features: dict[str, Feature] = {}
    for number, message in _fields(memoryview(record)):
        if number != 1:
            continue
        for entry_number, entry in _fields(_nested(message)):
            if entry_number != 1:
                continue
            parts = dict(_fields(_nested(entry)))
            try:
                name = bytes(_nested(parts.get(1, memoryview(b"")))).decode()
            except UnicodeDecodeError:
                raise ValueError("a feature's name is no text") from None
            features[name] = _parse_feature(_nested(parts.get(2, memoryview(b""))))
    return features


def _parse_feature(message: memoryview) -> Feature:
    for kind, content in _fields(message):
        values = [value for number, value in _fields(_nested(content)) if number == 1]
        if kind == _BYTES:
            return [_nested(value) for value in values]
        if kind == _FLOATS:  # packed into one field, or one by one
            if any(isinstance(value, int) or len(value) % 4 for value in values):
                raise ValueError("a list of floats does not hold whole floats")
            return np.concatenate([np.frombuffer(value, dtype="<f4") for value in values] or [np.empty(0, np.float32)])
        if kind == _INTEGERS:
            numbers = []
            for value in values:
                numbers += [value] if isinstance(value, int) else list(_varints(value))
            return np.array(numbers, dtype=np.uint64).astype(np.int64)
    return []


def encode_example(features: Mapping[str, bytes | np.ndarray]) -> bytes:
    """Serialise a tf.train.Example: bytes become a BytesList, float arrays a FloatList, arrays of integers an Int64List."""
    entries = []
    for name, value in features.items():
        if isinstance(value, (bytes, bytearray, memoryview)):
            feature = _message(_BYTES, _message(1, value))
        elif np.issubdtype(np.asarray(value).dtype, np.floating):
            feature = _message(_FLOATS, _message(1, np.asarray(value, dtype="<f4").tobytes()))
        elif np.issubdtype(np.asarray(value).dtype, np.integer):
            packed = b"".join(_varint(int(number) & 0xFFFFFFFFFFFFFFFF) for number in np.ravel(value))
            feature = _message(_INTEGERS, _message(1, packed))
        else:
            raise ValueError(f"feature {name!r} is a {type(value).__name__}; bytes, floats and integers can be written")
        entries.append(_message(1, _message(1, name.encode()) + _message(2, feature)))
    return _message(1, b"".join(entries))


def _message(number: int, content: bytes) -> bytes:
    return b"".join((_varint(number << 3 | 2), _varint(len(content)), content))


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number is cut off")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of a protobuf message's fields: whole numbers as they are, all else as views of the bytes."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _read_varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field {number} has the unknown wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"field {number} of {length:,} bytes runs past the end")
        yield number, data[at : at + length]
        at += length


def _nested(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where a message should")
    return value


def only_bytes(features: Mapping[str, Feature], name: str, *, length: int | None = None) -> memoryview:
    """The feature `name`, which must be one value, of `length` bytes if given; raises ValueError with the reason where it is not."""
    value = _present(features, name)
    if not isinstance(value, list) or len(value) != 1:
        raise ValueError(f"feature {name!r} must be one string of bytes")
    if length is not None and len(value[0]) != length:
        raise ValueError(f"feature {name!r} has {len(value[0]):,} bytes, not {length:,}")
    return value[0]


def only_floats(features: Mapping[str, Feature], name: str, *, count: int) -> np.ndarray:
    """The feature `name`, which must be `count` finite floats; raises ValueError with the reason where it is not."""
    value = _present(features, name)
    if isinstance(value, list) or value.dtype != np.float32 or len(value) != count:
        what = "bytes" if isinstance(value, list) else f"{len(value)} values of {value.dtype}"
        raise ValueError(f"feature {name!r} must be {count} floats, not {what}")
    if not np.isfinite(value).all():
        raise ValueError(f"feature {name!r} has values that are not finite: {value.tolist()}")
    return value


def _present(features: Mapping[str, Feature], name: str) -> Feature:
    if name not in features:
        known: Sequence[str] = sorted(features)
        raise ValueError(f"feature {name!r} is missing; there {'are ' + ', '.join(known) if known else 'are none'}")
    return features[name]
