"""``resnet_ipu convert``: every image once, bytes unchanged, and a conversion that goes on where it was interrupted."""

import json
import warnings

import numpy as np
import pytest
import torch
from image_tree import BAD, CLASSES, make_tree, oddities

from cifar_ipu.data import DataFileError
from lightning_ipu.data.tf_example import parse_example
from lightning_ipu.data.tfrecord import TFRecords, write_tfrecord
from resnet_ipu import __main__ as command
from resnet_ipu.convert import _shards_for, convert
from resnet_ipu.data import ImageNetDataModule

SHARDS = {"train": 8, "validation": 2}
WORDS = ["--train-shards", "8", "--validation-shards", "2", "--num-workers", "2"]
GOOD = 4 * 10 + len(oddities())


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = make_tree(tmp_path_factory.mktemp("tree"))
    (root / "LOC_synset_mapping.txt").write_text("ant emmet, pismire\nbee honey bee\n")
    return root


@pytest.fixture(scope="module")
def shards(tree, tmp_path_factory):
    target = tmp_path_factory.mktemp("shards")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(tree, target, shards=SHARDS, seed=3, workers=2)
    return target


def test_every_image_is_in_one_shard_with_its_label_from_1_and_its_bytes(tree, shards):
    names = [f"train-{k:05}-of-00008" for k in range(8)] + [f"validation-{k:05}-of-00002" for k in range(2)]
    assert sorted(path.name for path in shards.iterdir()) == ["shards.json", *names]
    records = TFRecords(sorted(shards.glob("train-*")))
    assert set(records.counts()) == {GOOD // 8, GOOD // 8 + 1}
    found = {}
    for number in range(len(records)):
        features = parse_example(records[number])
        name = bytes(features["image/filename"][0]).decode()
        found[name] = bytes(features["image/encoded"][0])
        path = next(
            path for path in (tree / "train").rglob("*") if path.name == name and ".ipynb" not in str(path) and "MACOSX" not in str(path)
        )
        label = CLASSES.index(path.relative_to(tree / "train").parts[0])
        assert features["image/class/label"].tolist() == [label + 1] and path.read_bytes() == found[name]
        assert bytes(features["image/class/synset"][0]).decode() == CLASSES[label]
        words = {0: "emmet, pismire", 1: "honey bee"}.get(label, CLASSES[label])
        assert bytes(features["image/class/text"][0]).decode() == words
    assert len(found) == GOOD
    kinds = {bytes(parse_example(records[n])["image/format"][0]) for n in range(GOOD)}
    assert {b"JPEG", b"PNG", b"WEBP", b"GIF", b"TIFF", b"BMP"} == kinds


def test_the_number_of_shards_follows_the_bytes_unless_it_is_given(tree, tmp_path, monkeypatch):
    assert command.main(["convert", str(tree), str(tmp_path / "small"), "--num-workers", "2"]) == 0  # far below 100 MB
    assert {path.name for path in (tmp_path / "small").glob("*-of-*")} == {"train-00000-of-00001", "validation-00000-of-00001"}
    total = sum(path.stat().st_size for path in (tree / "val").glob("*/*"))
    monkeypatch.setattr("resnet_ipu.convert.BYTES_PER_SHARD", total / 5)
    part = ImageNetDataModule(data_dir=tree).part("validation")
    assert _shards_for(part) == 5
    monkeypatch.setattr("resnet_ipu.convert.BYTES_PER_SHARD", 1)
    assert _shards_for(part) == len(part) == 12  # no file without an image
    monkeypatch.setattr("resnet_ipu.convert.MOST_SHARDS", 7)
    assert _shards_for(part) == 7


def test_shards_and_folders_give_the_same_tensors(tree, shards):
    in_folders, in_shards = (ImageNetDataModule(data_dir=place, image_size=24) for place in (tree, shards))
    assert in_shards.classes == in_folders.classes == list(CLASSES)
    for split in ("train", "validation"):
        ours, theirs = in_shards.part(split), in_folders.part(split)
        assert len(ours) == len(theirs)
        by_bytes = {theirs.source.read(n)[0].tobytes(): n for n in range(len(theirs))}
        for number in range(len(ours)):
            encoded, label = ours.source.read(number)
            other = by_bytes[encoded.tobytes()]
            uniforms = {"seed": 1, "epoch": 0, "index": 5}  # the same crop: a sample's place in the order is another
            assert torch.equal(ours._view(encoded, **uniforms), theirs._view(theirs.source.read(other)[0], **uniforms))
            assert label in {
                theirs.source.read(n)[1] for n in range(len(theirs)) if theirs.source.read(n)[0].tobytes() == encoded.tobytes()
            }


def test_an_interrupted_conversion_goes_on_and_mends_what_is_damaged(tree, shards, tmp_path):
    convert(tree, tmp_path, shards=SHARDS, seed=3, workers=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before == {path.name: path.read_bytes() for path in shards.iterdir()}  # workers decide nothing
    manifest = json.loads((tmp_path / "shards.json").read_text())
    (tmp_path / "shards.json").write_text(json.dumps({**manifest, "records": None}))  # as it is while it is being done
    (tmp_path / "train-00003-of-00008").unlink()
    (tmp_path / ".train-00003-of-00008.x1y2.part").write_bytes(b"of a process that was killed")
    damaged = bytearray((tmp_path / "train-00004-of-00008").read_bytes())
    damaged[-100] ^= 1
    (tmp_path / "train-00004-of-00008").write_bytes(damaged)
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-of-*")}
    with pytest.raises(DataFileError, match="convert was interrupted; the same command finishes them|shards are missing"):
        ImageNetDataModule(data_dir=tmp_path, train_shards=7)
    convert(tree, tmp_path, shards=SHARDS, seed=3, workers=2)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    rewritten = {path.name for path in tmp_path.glob("*-of-*") if path.stat().st_mtime_ns != stamps.get(path.name)}
    assert rewritten == {"train-00003-of-00008", "train-00004-of-00008"}


def test_shards_of_something_else_are_left_alone(tree, tmp_path):
    write_tfrecord(tmp_path / "train-00000-of-00008", [b"somebody's"])
    with pytest.raises(DataFileError, match="has shards of something else, such as train-00000-of-00008"):
        convert(tree, tmp_path, shards=SHARDS, seed=3, workers=1)
    assert TFRecords([tmp_path / "train-00000-of-00008"])[0].tobytes() == b"somebody's"
    assert not (tmp_path / "shards.json").exists()


def test_a_shard_with_too_few_records_is_named(shards, tmp_path):
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    records = TFRecords([tmp_path / "train-00005-of-00008"])
    kept = [records[number].tobytes() for number in range(len(records) - 2)]
    write_tfrecord(tmp_path / "train-00005-of-00008", kept)
    with pytest.raises(DataFileError, match=rf"train-00005-of-00008: {len(kept)} records are there, {len(kept) + 2} should be"):
        _ = ImageNetDataModule(data_dir=tmp_path).num_train_samples


def test_shards_of_other_classes_than_the_networks_are_refused(shards):
    with pytest.raises(DataFileError, match=r"shards.json: its 4 classes are not those that the network learns"):
        ImageNetDataModule(data_dir=shards, classes=["bee", "ant", "cat", "dog"])


def test_a_damaged_record_is_named_or_left_out(shards, tmp_path):
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = bytearray((tmp_path / "train-00002-of-00008").read_bytes())
    damaged[-40] ^= 1
    (tmp_path / "train-00002-of-00008").write_bytes(damaged)
    part = ImageNetDataModule(data_dir=tmp_path, image_size=16).part("train")
    fault = part.seeded_batch(range(len(part)), seed=0, epoch=0)
    last = TFRecords([tmp_path / "train-00002-of-00008"]).counts()[0] - 1
    assert f"train-00002-of-00008: record {last} at byte" in str(fault) and "the data is damaged" in str(fault)
    skipping = ImageNetDataModule(data_dir=tmp_path, image_size=16, on_bad_image="skip")
    assert skipping.num_train_samples == GOOD - 1
    assert "1 bad train images were left out:\n  " in skipping.caveat and "train-00002-of-00008: record" in skipping.caveat


def test_the_layout_of_imagenets_shards_passes_end_to_end(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_tree(tmp_path / "tree", bad=True)
    assert command.main(["convert", "tree", "shards", *WORDS]) == 2
    assert "dog/" in (error := capfd.readouterr().err) and "resnet_ipu convert: error:" in error
    assert command.main(["convert", "tree", "shards", *WORDS, "--on-bad-image", "skip"]) == 0
    out = capfd.readouterr().out
    assert f"shards: {GOOD + 12} images in 10 shards" in out and f"{len(BAD)} bad train images were left out" in out
    options = "--dataset IMAGENET --data-dir shards --size 8 --image-size 16 --batch-size 8 --epochs 1 --num-workers 1 --test".split()
    assert command.main(options) == 0
    out = capfd.readouterr().out
    assert f"{GOOD} to train on, 12 to validate on" in out and "8 train shards, 2 validation shards" in out and "test accuracy" in out
    assert command.main(["predict", "--ckpt_path", "results/checkpoints/last.ckpt"]) == 0
    assert "12 x 4" in capfd.readouterr().out
    assert (
        (tmp_path / "results" / "predictions.csv").read_text().splitlines()[1].startswith("shards/validation-00000-of-00002: record 0 at")
    )
    with np.load(tmp_path / "results" / "images-train.npz") as index:
        assert len(index["starts"]) == GOOD
