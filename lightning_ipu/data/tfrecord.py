"""TFRecord files read and written without TensorFlow, every checksum checked.

A record is its length (8 bytes, little endian), the length's checksum (4), the data, the data's checksum (4); checksums are masked CRC-32C.
A file is mapped into memory, so a record is a view of the page cache that all processes share; a file packed with gzip, known by its
bytes and not by its name, is unpacked as a whole. What is wrong with a file is said in one line: file, record, byte, cause.

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import gzip
import mmap
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write

_UNPACKING_FAILED: tuple[type[Exception], ...] = (EOFError, OSError, ValueError, zlib.error)
try:  # unpacks two to three times as fast
    from isal import igzip, isal_zlib

    _gunzip = igzip.decompress
    _UNPACKING_FAILED += (isal_zlib.error,)
except ImportError:
    _gunzip = gzip.decompress

__all__ = ["TFRecordError", "TFRecords", "masked_crc", "write_tfrecord"]

_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_FRAME = _HEADER.size + _FOOTER.size  # bytes around a record's data
_GZIP = b"\x1f\x8b"
_FOREIGN = {  # how files begin that are taken for TFRecords by mistake
    b"\x89HDF": "this is an HDF5 file",
    b"\x93NUMPY": "this is a NumPy file",
    b"PK\x03\x04": "this is a ZIP archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "this is packed with Zstandard; unpack it first",
    b"BZh": "this is packed with bzip2; unpack it first",
    b"\xfd7zXZ": "this is packed with xz; unpack it first",
    b"\x04\x22\x4d\x18": "this is packed with LZ4; unpack it first",
    b"version https://git-lfs": "this is a Git LFS pointer: the file itself was not fetched",
    b"<": "this looks like a web page, saved in place of the file",
}


class TFRecordError(UserError):
    """A file that is not, or not wholly, what it should be; the message is one line with file, record, byte and cause.

    Args:
        path: of the file.
        record: its number in the file, from 0; None where no record is concerned.
        offset: byte in the (unpacked) file at which the record begins.
        cause: what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], record: int | None, offset: int, cause: str) -> None:
        where = f"record {record} at byte {offset}" if record is not None else f"byte {offset}"
        super().__init__(f"{os.fspath(path)}: {where}: {cause}")
        self.path, self.record, self.offset, self.cause = path, record, offset, cause

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.path, self.record, self.offset, self.cause)  # it may come from another process


def masked_crc(data: bytes | np.ndarray) -> int:
    """CRC-32C of bytes or of a contiguous uint8 array, rotated and shifted as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# -- reading ------------------------------------------------------------------------------------------------------------------


class TFRecords:
    """The records of some files as one sequence, in the files' order; `records[i]` is a read-only uint8 array.

    Every file is opened once to find its records: lengths and their checksums are checked then, a record's data when it is read.
    Nothing stays open in between, so the number of files is not limited, and the object can be sent to another process. `packed` says
    whether one of them is packed: a packed file is unpacked again for a record unless it was the last one read.

    Args:
        paths: the files.
        check: compare the checksum of a record's data whenever it is read.
        tolerant: keep the records before the place where a file is damaged, and the damage in `damage`, instead of raising it.
        progress: called with 1 for each file that has been looked through.

    Raises:
        TFRecordError: a file that is empty, cut off, damaged, or no TFRecord file; from `records[i]` also for wrong data.
        OSError: a file that cannot be read.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        check: bool = True,
        tolerant: bool = False,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        self.paths, self.check, self.tolerant = [os.fspath(path) for path in paths], check, tolerant
        self.damage: list[TFRecordError] = []
        self.packed = False
        self._unpacked: tuple[int, np.ndarray] | None = None  # the packed file that was read last
        starts, lengths, first = [], [], [0]
        for number in range(len(self.paths)):
            found, damage = self._look_through(number)
            if damage is not None:
                if not tolerant:
                    raise damage
                self.damage.append(damage)
            starts += [start for start, _ in found]
            lengths += [length for _, length in found]
            first.append(len(starts))
            if progress is not None:
                progress(1)
        self._starts, self._lengths = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        self._first = first  # number of each file's first record

    def places(self) -> dict[str, np.ndarray]:
        """Where the records are, for `at`."""
        return {"starts": self._starts, "lengths": self._lengths, "first": np.array(self._first, dtype=np.int64)}

    def fingerprint(self) -> str:
        """Fingerprint of the files' names, without their folder, and of the positions of the records in them."""
        return fingerprint([os.path.basename(path) for path in self.paths], self.places())

    @classmethod
    def at(cls, paths: Iterable[str | os.PathLike[str]], *, starts: np.ndarray, lengths: np.ndarray, first: np.ndarray) -> TFRecords:
        """The records of files that were looked through before and have not changed since: `places` said where they are."""
        records = cls(())
        records.paths = [os.fspath(path) for path in paths]
        records._starts, records._lengths, records._first = starts, lengths, first.tolist()
        return records

    def __len__(self) -> int:
        return len(self._starts)

    def counts(self) -> list[int]:
        """Number of records in each file."""
        return np.diff(self._first).tolist()

    def where(self, index: int) -> tuple[str, int, int]:
        """File, number of the record in it, and the byte at which it begins."""
        file = self.file_of(index)
        return self.paths[file], index - self._first[file], int(self._starts[index])

    def file_of(self, index: int) -> int:
        """Number of the file that holds a record."""
        return bisect_right(self._first, index) - 1

    def error(self, index: int, cause: str) -> TFRecordError:
        """An error about what a record says, for those who know what it should say."""
        return TFRecordError(*self.where(index), cause)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        data = self._bytes(self.file_of(index))
        begin = int(self._starts[index]) + _HEADER.size
        end = begin + int(self._lengths[index])
        if end + _FOOTER.size > len(data):
            raise self.error(index, f"the file has shrunk to {len(data):,} bytes since it was opened")
        record = data[begin:end]
        if self.check:
            (stored,) = _FOOTER.unpack_from(data, end)
            if (found := masked_crc(record)) != stored:
                raise self.error(index, f"the data is damaged: its checksum is {found:08x}, {stored:08x} was written")
        return record

    def _look_through(self, number: int) -> tuple[list[tuple[int, int]], TFRecordError | None]:
        path = self.paths[number]
        data, damage = _map(path), None
        if len(data) == 0:
            return [], TFRecordError(path, None, 0, "the file is empty")
        if _is_packed(data):
            self.packed = True
            if only := _only_record(data):
                return [only], None
            data, damage = _unpack(path, data)
        found, fault = _find_records(path, data)
        return found, damage or fault

    def _bytes(self, number: int) -> np.ndarray:
        """A whole file, unpacked: a view of the page cache where it is not packed. It lives as long as the array."""
        if self._unpacked is not None and self._unpacked[0] == number:
            return self._unpacked[1]
        data = _map(self.paths[number])
        if _is_packed(data):
            data, damage = _unpack(self.paths[number], data)
            if damage is not None and not self.tolerant:
                raise damage
            self._unpacked = number, data
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unpacked": None}


def _map(path: str) -> np.ndarray:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _begins_a_record(data: np.ndarray, at: int) -> bool:
    return len(data) - at >= _HEADER.size and masked_crc(data[at : at + 8]) == _HEADER.unpack_from(data, at)[1]


def _is_packed(data: np.ndarray) -> bool:
    return data[:2].tobytes() == _GZIP and not _begins_a_record(data, 0)


def _unpack(path: str, data: np.ndarray) -> tuple[np.ndarray, TFRecordError | None]:
    """What a gzip stream holds, up to its fault if it has one."""
    try:
        return np.frombuffer(_gunzip(memoryview(data)), dtype=np.uint8), None
    except _UNPACKING_FAILED as error:
        unpacked, ends = _unpack_what_is_good(data)
        cause = "the gzip stream ends early: the file is cut off" if ends else f"the gzip stream is damaged ({error})"
        return unpacked, TFRecordError(path, None, len(unpacked), f"{cause} ({len(data):,} bytes on disk)")


def _unpack_what_is_good(data: np.ndarray) -> tuple[np.ndarray, bool]:
    """What a damaged gzip stream gives before its fault, and whether the fault is that it ends."""
    parts, unpacker = [], zlib.decompressobj(31)
    try:
        for start in range(0, len(data), 1 << 16):
            block = data[start : start + (1 << 16)].tobytes()
            while block:
                if unpacker.eof:  # another member follows
                    unpacker = zlib.decompressobj(31)
                parts.append(unpacker.decompress(block))
                block = unpacker.unused_data
        ends = not unpacker.eof
    except zlib.error:
        ends = False
    return np.frombuffer(b"".join(parts), dtype=np.uint8), ends


def _only_record(data: np.ndarray) -> tuple[int, int] | None:
    """The one record of a packed file, told by its first and last bytes without unpacking the rest; None where that cannot be told."""
    try:
        head = np.frombuffer(zlib.decompressobj(31).decompress(data[: 1 << 12].tobytes(), _HEADER.size), dtype=np.uint8)
    except zlib.error:
        return None
    if not _begins_a_record(head, 0):
        return None
    length = _HEADER.unpack_from(head)[0]
    (unpacked_size,) = _FOOTER.unpack_from(data, len(data) - 4)  # gzip ends with the size modulo 2^32
    return (0, length) if (length + _FRAME) % (1 << 32) == unpacked_size else None


def _find_records(path: str, data: np.ndarray) -> tuple[list[tuple[int, int]], TFRecordError | None]:
    """(first byte, length of the data) of every record, and what ends the file before its end."""
    found: list[tuple[int, int]] = []
    at, size = 0, len(data)
    while at < size:
        left = size - at
        if not _begins_a_record(data, at):
            return found, TFRecordError(path, len(found), at, _why_no_record(data, at))
        length = _HEADER.unpack_from(data, at)[0]
        if length + _FRAME > left:
            return found, TFRecordError(
                path, len(found), at, f"the file is cut off: the record needs {length + _FRAME:,} bytes, {left:,} are left"
            )
        found.append((at, length))
        at += length + _FRAME
    return found, None


def _why_no_record(data: np.ndarray, at: int) -> str:
    head = data[at : at + 64].tobytes()
    if at == 0:
        for beginning, what in _FOREIGN.items():
            if head.lstrip().startswith(beginning):
                return what
        if head[:1] == b"\x78" and (head[0] << 8 | head[1]) % 31 == 0:
            return "this is packed with zlib; unpack it, or pack it with gzip"
    if len(data) - at < _HEADER.size:
        return f"the file is cut off: {len(data) - at} bytes are left, a record's header has {_HEADER.size}"
    if not data[at:].any():
        return f"only zeros from here on ({len(data) - at:,} bytes)"
    return "the record's length is damaged, or this is no TFRecord file" if at == 0 else "the record's length is damaged"


# -- writing ------------------------------------------------------------------------------------------------------------------


def write_tfrecord(path: str | os.PathLike[str], records: Iterable[bytes], *, pack: bool = False) -> None:
    """Write a file that is there as a whole or not at all; the same records give the same bytes.

    Args:
        path: of the file; what was there is replaced.
        records: data of the records.
        pack: with gzip.
    """
    with atomic_write(Path(path)) as file:
        if not pack:
            _write(file, records)
            return
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
            _write(packed, records)


def _write(file: Any, records: Iterable[bytes]) -> None:
    for record in records:
        length = struct.pack("<Q", len(record))
        file.write(length + _FOOTER.pack(masked_crc(length)))
        file.write(record)
        file.write(_FOOTER.pack(masked_crc(record)))
