"""The word for what a run is trained on changes with the training samples and with nothing else."""

import shutil
from pathlib import Path

import numpy as np
from image_tree import encoded, photo

from cifar_ipu.data import ImageDataModule
from cosmoflow_ipu.data import CosmoFlowDataModule
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.data.tf_example import encode_example
from lightning_ipu.data.tfrecord import write_tfrecord
from resnet_ipu.convert import convert
from resnet_ipu.data import ImageNetDataModule


def test_it_tells_parts_apart_and_is_the_same_in_every_process():
    assert fingerprint("ab", "c") != fingerprint("a", "bc") and fingerprint(["a"], []) != fingerprint([], ["a"])
    assert fingerprint(np.arange(4)) != fingerprint(np.arange(4).reshape(2, 2)) and fingerprint(1) != fingerprint("1") != fingerprint(None)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint("train", 3, np.arange(3, dtype=np.int64)) == "42dda376763b5745"


def test_folders_and_shards_of_images(tmp_path):
    tree = tmp_path / "tree"
    for split, number, name in [("train", 0, "ant"), ("train", 1, "ant"), ("train", 2, "bee"), ("val", 3, "bee")]:
        (tree / split / name).mkdir(parents=True, exist_ok=True)
        (tree / split / name / f"{number}.png").write_bytes(encoded(photo(number, height=3, width=4 + 9 * number), "PNG"))

    def word(folder=tree, **options) -> str:
        return ImageNetDataModule(data_dir=folder, **options).fingerprint()

    first = word()
    assert word(micro_batch_size=7, image_size=16, augment=False, index_dir=tmp_path / "index") == first
    shutil.copytree(tree, tmp_path / "moved")
    assert word(tmp_path / "moved") == first
    (tree / "val" / "bee" / "more.png").write_bytes(b"x")
    assert word() == first  # what is validated on is none of its business
    added = tree / "train" / "ant" / "more.png"
    added.write_bytes(b"no image")
    assert word() != first and word(on_bad_image="skip") != first  # a skipped image shifts the numbers of those behind it
    added.unlink()
    (tree / "train" / "ant" / "1.png").rename(tree / "train" / "bee" / "1.png")
    assert word() != first
    (tree / "train" / "bee" / "1.png").rename(tree / "train" / "ant" / "1.png")
    assert word() == first
    (tree / "train" / "cat").mkdir()
    (tree / "train" / "cat" / "4.png").write_bytes(b"x")
    assert word() != first

    (tree / "val" / "bee" / "more.png").unlink()
    shutil.rmtree(tree / "train" / "cat")
    for name, seed in (("shards", 0), ("again", 0), ("other", 1)):
        convert(tree, tmp_path / name, shards={"train": 2, "validation": 1}, seed=seed, workers=1)
    assert word(tmp_path / "shards") == word(tmp_path / "again") != word(tmp_path / "other")


def test_small_images_held_out_or_made_up():
    def word(**options) -> str:
        return ImageDataModule(**{"dataset": "SAMPLE", **options}).fingerprint()

    first = word(validation_split=100, seed=0)
    assert word(validation_split=100, micro_batch_size=5, augment=False, auto_augment=None) == first
    assert first != word(validation_split=101) and first != word(validation_split=100, seed=1) and first != word()
    made = word(synthetic="host", synthetic_samples=50)
    assert made == word(synthetic="ipu", synthetic_samples=50) != word(synthetic="host", synthetic_samples=51)
    assert made != word(synthetic="host", synthetic_samples=50, seed=1)


def test_cubes_in_files_and_of_simulated_universes(tmp_path):
    def write(name: str) -> None:
        cube = np.ones((4, 4, 4, 4), dtype="<i2")
        write_tfrecord(tmp_path / "files" / name, [encode_example({"x": cube.tobytes(), "y": np.zeros(4, np.float32)})])

    def word(**options) -> str:
        data = CosmoFlowDataModule(**options)
        data.prepare_data()
        return data.fingerprint()

    (tmp_path / "files").mkdir()
    for name in "abc":
        write(f"universe_{name}_000.tfrecord")
    files = {"dataset": "tfrecord", "data_dir": tmp_path / "files"}
    first = word(**files)
    assert word(**files, micro_batch_size=1, cache_gb=0) == first != word(**files, validation_split=0.6)
    write("universe_d_000.tfrecord")
    assert word(**files) != first
    (tmp_path / "files" / "universe_d_000.tfrecord").unlink()
    assert word(**files) == first

    made = {"dataset": "synthetic", "sample_size": 4, "n_train": 3, "n_valid": 1}
    first = word(**made, data_dir=tmp_path / "here")
    assert word(**made, data_dir=Path(tmp_path / "there"), pack=True) == first
    assert first != word(**made | {"n_train": 4}, data_dir=tmp_path / "here") and first != word(**made, seed=1, data_dir=tmp_path / "here")
    dummy = word(dataset="dummy", n_train=3)
    assert dummy == word(dataset="dummy", n_train=3) != word(dataset="dummy", n_train=4)
