"""TFRecord files: the format byte for byte, every kind of damage in one line, records of many files as one sequence."""

import bz2
import gzip
import pickle
import struct
import zlib

import google_crc32c
import numpy as np
import pytest

from lightning_ipu.data import tfrecord
from lightning_ipu.data.tf_example import encode_example, only_bytes, only_floats, parse_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords, masked_crc, write_tfrecord

RECORDS = [b"first", b"", bytes(range(256)) * 5]


def contents(records: TFRecords) -> list[bytes]:
    return [records[k].tobytes() for k in range(len(records))]


def said(path, damaged: bytes, **options) -> str:
    """What is said of a file with such bytes, when it is opened or read."""
    path.write_bytes(damaged)
    with pytest.raises(TFRecordError) as caught:
        contents(TFRecords([path], **options))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.fixture
def plain(tmp_path):
    write_tfrecord(tmp_path / "plain.tfrecord", RECORDS)
    return (tmp_path / "plain.tfrecord").read_bytes()


def test_a_record_is_length_checksum_data_checksum_with_masked_crc32c(plain):
    assert google_crc32c.value(b"123456789") == 0xE3069283  # the check value of CRC-32C, RFC 3720
    rotated = (0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == (rotated + 0xA282EAD8) % 2**32
    length = struct.pack("<Q", 5)
    expected = length + struct.pack("<I", masked_crc(length)) + b"first" + struct.pack("<I", masked_crc(b"first"))
    assert plain.startswith(expected) and len(plain) == sum(16 + len(record) for record in RECORDS)


@pytest.mark.parametrize("pack", [False, True])
def test_what_is_written_is_read_back_from_several_files_in_their_order_and_in_another_process(tmp_path, pack):
    paths = [tmp_path / name for name in ("b.tfrecord", "a.tfrecord")]
    write_tfrecord(paths[0], RECORDS, pack=pack)
    write_tfrecord(paths[1], [b"last"], pack=pack)
    records = TFRecords(paths)
    assert contents(records) == [*RECORDS, b"last"] == contents(pickle.loads(pickle.dumps(records)))
    assert records.where(3) == (str(paths[1]), 0, 0) and records.where(2) == (str(paths[0]), 2, 37)
    assert not records[0].flags.writeable
    with pytest.raises(IndexError):
        records[4]


def test_a_file_is_known_as_packed_by_its_bytes_and_written_alike_each_time(tmp_path, plain):
    for name in ("one.tfrecord", "two.tfrecord"):
        write_tfrecord(tmp_path / name, RECORDS, pack=True)
    assert (tmp_path / "one.tfrecord").read_bytes() == (tmp_path / "two.tfrecord").read_bytes()
    half = len(plain) // 2
    (tmp_path / "members.tfrecord").write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    assert contents(TFRecords([tmp_path / "one.tfrecord", tmp_path / "members.tfrecord"])) == RECORDS * 2
    record = bytes(0x8B1F)  # a length that begins with gzip's magic bytes
    write_tfrecord(tmp_path / "plain.gz", [record])
    assert (tmp_path / "plain.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert contents(TFRecords([tmp_path / "plain.gz"])) == [record]


def test_every_flipped_byte_is_found(tmp_path, plain):
    for at in range(len(plain)):
        damaged = bytearray(plain)
        damaged[at] ^= 0x10
        message = said(tmp_path / "x", bytes(damaged))
        record = 0 if at < 21 else 1 if at < 37 else 2
        assert message.startswith(f"record {record} at byte {(0, 21, 37)[record]}: "), at


def test_a_file_cut_off_anywhere_is_found_unless_a_record_ends_there(tmp_path, plain):
    for size in set(range(1, len(plain))) - {21, 37}:
        assert "cut off" in said(tmp_path / "x", plain[:size])
    assert said(tmp_path / "x", plain[:40]) == "record 2 at byte 37: the file is cut off: 3 bytes are left, a record's header has 12"
    assert said(tmp_path / "x", plain[:50]).endswith("the record needs 1,296 bytes, 13 are left")
    assert said(tmp_path / "x", b"") == "byte 0: the file is empty"
    packed = gzip.compress(plain)
    for size in (5, 30, len(packed) - 1):
        assert "the gzip stream ends early: the file is cut off" in said(tmp_path / "x", packed[:size])


@pytest.mark.parametrize(
    ("damaged", "cause"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "this is an HDF5 file"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "this is a NumPy file"),
        (b"PK\x03\x04" + bytes(100), "ZIP archive; unpack it first"),
        (bz2.compress(bytes(100)), "packed with bzip2; unpack it first"),
        (zlib.compress(bytes(100)), "packed with zlib; unpack it, or pack it with gzip"),
        (b"\n<!DOCTYPE html><html>404</html>", "a web page, saved in place of the file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"Omega_m,sigma_8\n0.3,0.8\n", "or this is no TFRecord file"),
        (bytes(5000), "only zeros from here on (5,000 bytes)"),
        (
            gzip.compress(b"something else, packed", mtime=0),
            "record 0 at byte 0: the record's length is damaged, or this is no TFRecord file",
        ),
    ],
)
def test_a_foreign_file_is_called_by_its_name(tmp_path, damaged, cause):
    assert cause in said(tmp_path / "x", damaged)


@pytest.mark.parametrize("unpack", ["isal", "python"])
def test_damage_inside_a_gzip_stream_is_found_with_and_without_isal(tmp_path, plain, unpack, monkeypatch):
    if unpack == "python":
        monkeypatch.setattr(tfrecord, "_gunzip", gzip.decompress)
    else:
        pytest.importorskip("isal")
    (tmp_path / "whole").write_bytes(gzip.compress(plain))
    assert contents(TFRecords([tmp_path / "whole"])) == RECORDS
    assert "the gzip stream ends early" in said(tmp_path / "x", gzip.compress(plain)[:-3])
    packed = bytearray(gzip.compress(plain))
    packed[len(packed) // 2] ^= 0xFF
    assert "gzip stream" in said(tmp_path / "x", bytes(packed))
    (tmp_path / "one").write_bytes(b"")
    write_tfrecord(tmp_path / "one", [bytes(9000)], pack=True)  # a single record, which is not unpacked before it is read
    packed = bytearray((tmp_path / "one").read_bytes())
    packed[-8] ^= 1  # the stream's own checksum
    (tmp_path / "one").write_bytes(packed)
    records = TFRecords([tmp_path / "one"])
    with pytest.raises(TFRecordError, match="the gzip stream is damaged"):
        records[0]


def test_a_missing_file_is_an_error_of_the_system_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.tfrecord"):
        TFRecords([tmp_path / "nowhere.tfrecord"])


def test_tolerant_reading_keeps_all_that_is_good_and_lists_the_damage(tmp_path, plain):
    good, cut, packed, foreign = (tmp_path / name for name in ("good", "cut", "packed", "foreign"))
    good.write_bytes(plain)
    cut.write_bytes(plain[:100])
    packed.write_bytes(gzip.compress(plain, 0)[:100])
    foreign.write_bytes(b"<html>")
    records = TFRecords([cut, foreign, packed, good], tolerant=True)
    assert contents(records) == RECORDS[:2] * 2 + RECORDS
    assert [error.path for error in records.damage] == [str(path) for path in (cut, foreign, packed)]


def test_without_check_the_data_is_taken_as_it_is_but_lengths_never_are(tmp_path, plain):
    damaged = bytearray(plain)
    damaged[13] ^= 1
    (tmp_path / "x").write_bytes(damaged)
    assert contents(TFRecords([tmp_path / "x"], check=False))[0] == b"fhrst"
    damaged[1] ^= 1
    assert "length is damaged" in said(tmp_path / "x", bytes(damaged), check=False)


def test_a_file_that_shrinks_after_it_was_opened_is_said_to(tmp_path, plain):
    (tmp_path / "x").write_bytes(plain)
    records = TFRecords([tmp_path / "x"])
    (tmp_path / "x").write_bytes(plain[:100])
    with pytest.raises(TFRecordError, match=r"record 2 at byte 37: the file has shrunk to 100 bytes"):
        records[2]


# -- tf.train.Example ---------------------------------------------------------------------------------------------------------


def test_an_example_is_parsed_byte_by_byte_after_the_schema():
    feature_x = b"\x0a\x01x" + b"\x12\x06" + b"\x0a\x04" + b"\x0a\x02ab"
    feature_y = b"\x0a\x01y" + b"\x12\x0c" + b"\x12\x0a" + b"\x0a\x08" + struct.pack("<2f", 1.0, -2.0)
    feature_n = b"\x0a\x01n" + b"\x12\x06" + b"\x1a\x04" + b"\x0a\x02\xac\x02"  # 300, packed
    entries = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (feature_x, feature_y, feature_n))
    example = b"\x0a" + bytes([len(entries)]) + entries
    assert encode_example({"x": b"ab", "y": np.array([1.0, -2.0]), "n": np.array([300])}) == example
    parsed = parse_example(example)
    assert bytes(parsed["x"][0]) == b"ab" and parsed["y"].tolist() == [1.0, -2.0] and parsed["n"].tolist() == [300]

    one_by_one = b"\x0a\x01y" + b"\x12\x0c" + b"\x12\x0a" + b"".join(b"\x0d" + struct.pack("<f", value) for value in (1.0, -2.0))
    one_by_one = b"\x0a" + bytes([len(one_by_one)]) + one_by_one
    assert parse_example(b"\x0a" + bytes([len(one_by_one)]) + one_by_one)["y"].tolist() == [1.0, -2.0]


def test_examples_survive_a_round_trip_without_copies_of_what_is_long(tmp_path):
    counts = np.arange(4000, dtype="<i2")
    features = {"x": counts.tobytes(), "y": np.array([0.5, -1, 0, 0.25], np.float32), "k": np.array([-1, 2**62, 0]), "none": np.empty(0)}
    write_tfrecord(tmp_path / "x", [encode_example(features)])
    record = TFRecords([tmp_path / "x"])[0]
    parsed = parse_example(record)
    assert np.shares_memory(np.frombuffer(parsed["x"][0], np.uint8), record)
    assert np.array_equal(np.frombuffer(parsed["x"][0], "<i2"), counts)
    assert parsed["y"].tolist() == [0.5, -1, 0, 0.25] and parsed["k"].tolist() == [-1, 2**62, 0] and len(parsed["none"]) == 0


def test_bytes_that_are_no_example_are_refused_and_never_hang():
    example = encode_example({"x": b"abcdef", "y": np.array([1.0, 2.0])})
    generator = np.random.default_rng(0)
    for size in range(len(example)):
        try:
            parse_example(example[:size])
        except ValueError:
            pass
    for _ in range(300):
        damaged = bytearray(example)
        damaged[generator.integers(len(example))] = generator.integers(256)
        try:
            parse_example(bytes(damaged))
        except ValueError:
            pass
    with pytest.raises(ValueError, match="runs past the end"):
        parse_example(example[:-1])
    with pytest.raises(ValueError, match="a number is cut off"):
        parse_example(b"\xff" * 3)
    with pytest.raises(ValueError, match="wire type 3"):
        parse_example(b"\x0b")


def test_a_feature_that_is_not_what_it_should_be_is_named():
    features = parse_example(encode_example({"x": b"abc", "y": np.array([1.0, np.nan]), "n": np.array([1, 2])}))
    assert bytes(only_bytes(features, "x", length=3)) == b"abc"
    for call, reason in (
        (lambda: only_bytes(features, "z", length=3), "feature 'z' is missing; there are n, x, y"),
        (lambda: only_bytes(features, "x", length=4), "feature 'x' has 3 bytes, not 4"),
        (lambda: only_bytes(features, "y", length=4), "feature 'y' must be one string of bytes"),
        (lambda: only_floats(features, "x", count=2), "feature 'x' must be 2 floats, not bytes"),
        (lambda: only_floats(features, "n", count=2), "feature 'n' must be 2 floats, not 2 values of int64"),
        (lambda: only_floats(features, "y", count=4), "feature 'y' must be 4 floats, not 2 values of float32"),
        (lambda: only_floats(features, "y", count=2), "feature 'y' has values that are not finite"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).startswith(reason)
