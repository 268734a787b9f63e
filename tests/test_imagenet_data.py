"""ImageNet's data module: what is found in folders and shards, what is passed over, and that nothing but the data decides a batch."""

import csv
import io
import os
import re
import shutil
import signal
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import warm
from forked import launched
from image_tree import BAD, CLASSES, encoded, make_tree, oddities, photo
from PIL import Image
from runs import make_trainer
from torchvision.transforms import v2

from cifar_ipu.data import DataFileError, DataNotFoundError
from lightning_ipu.command.messages import keep_quiet
from lightning_ipu.data.tf_example import encode_example
from lightning_ipu.data.tfrecord import TFRecordError, write_tfrecord
from resnet_ipu import __main__ as command
from resnet_ipu.imagenet import index
from resnet_ipu.imagenet import module as data
from resnet_ipu.imagenet.folders import class_order
from resnet_ipu.imagenet.images import MEAN, STD, ImageError
from resnet_ipu.imagenet.module import ImageNetDataModule
from resnet_ipu.module import ResNetModule

GOOD = 4 * 10 + len(oddities())  # training images of the tree


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return make_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def bad_tree(tmp_path_factory):
    return make_tree(tmp_path_factory.mktemp("bad"), bad=True)


@pytest.fixture
def run(command_line):
    return partial(command_line, command.main)


def module(folder, **options) -> ImageNetDataModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are ignored
        made = ImageNetDataModule(data_dir=folder, **{"image_size": 24, **options})
        _ = made.num_train_samples, made.num_validation_samples
    return made


def write_shard(path, numbers, *, label=lambda number: number % 4 + 1) -> None:
    """A shard of PNGs, each one grey value: its image's number."""
    pixels = [encoded(photo(0).convert("L").point(lambda _, number=number: number), "PNG") for number in numbers]
    features = [{"image/encoded": pixel, "image/class/label": np.array([label(n)])} for pixel, n in zip(pixels, numbers, strict=True)]
    write_tfrecord(path, map(encode_example, features))


# -- what is found ------------------------------------------------------------------------------------------------------------


def test_hidden_and_system_names_are_no_classes_and_no_images_and_are_counted(tree):
    found = module(tree)
    assert found.classes == list(CLASSES) and found.num_classes == 4
    source = found.part("train").source
    assert source.ignored == {  # beside two hidden folders and four files of noise: `up` leads back, two links lead nowhere
        "hidden or of the system": 5,
        "no images (.txt)": 1,
        "links that lead back": 1,
        "links that lead nowhere": 2,
    }
    names = {os.path.relpath(source.name(number), source.root) for number in range(len(source))}
    assert len(names) == found.num_train_samples == GOOD and found.num_validation_samples == 12
    assert names >= {"dog/progressive.JPG", "ant/nested/deeper/adobe_cmyk.jpg", "ant/nested/deeper/größe\nneue zeile.jpg"}
    of_class = {name: [source.labels[n] for n in range(len(source)) if f"{os.sep}{name}{os.sep}" in source.name(n)] for name in CLASSES}
    assert [set(labels) for labels in of_class.values()] == [{0}, {1}, {2}, {3}]
    with pytest.warns(UserWarning, match=re.escape(f"{tree}/train: names that are ignored: hidden or of the system 5, links that lead")):
        _ = ImageNetDataModule(data_dir=tree).num_train_samples


def test_numeric_folders_go_by_number_all_others_by_their_characters(tmp_path):
    for name in map(str, range(12)):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "a.png").write_bytes(encoded(photo(1), "PNG"))
    found = module(tmp_path)
    assert found.classes == [str(number) for number in range(12)]
    assert found.class_summary == "12: 0 0, 1 1, 2 2, 3 3, 4 4, ..."
    assert class_order(["c10", "c2", "c1"]) == ["c1", "c10", "c2"] == sorted(["c10", "c2", "c1"])
    assert class_order(["007", "7", "10"]) == ["007", "7", "10"]


def test_links_to_classes_count_loops_end_and_strays_are_counted(tmp_path):
    train = tmp_path / "train"
    for name in ("a", "b/deep"):
        (train / name).mkdir(parents=True)
        (train / name / "x.png").write_bytes(encoded(photo(1), "PNG"))
    (train / "stray.png").write_bytes(encoded(photo(1), "PNG"))
    os.symlink("a", train / "c")  # a class as a link
    os.symlink("../b", train / "a" / "other")  # b's images inside a, once
    os.symlink("..", train / "b" / "deep" / "loop")
    os.symlink(".", train / "everything")
    found = module(tmp_path)
    assert found.classes == ["a", "b", "c"]
    source = found.part("train").source
    assert sorted((int(source.labels[n]), os.path.relpath(source.name(n), train)) for n in range(len(source))) == [
        (0, "a/other/deep/x.png"),
        (0, "a/x.png"),
        (1, "b/deep/x.png"),
        (2, "c/other/deep/x.png"),
        (2, "c/x.png"),
    ]
    with pytest.warns(UserWarning, match=r"images outside of the class folders 1, links that lead back 4"):
        _ = ImageNetDataModule(data_dir=tmp_path).num_train_samples


def test_a_second_start_reads_the_index_as_long_as_the_folders_are_the_same(tree, tmp_path, monkeypatch):
    shutil.copytree(tree, tmp_path / "data", symlinks=True)
    first = module(tmp_path / "data", index_dir=tmp_path / "out")
    monkeypatch.setattr(index, "list_images", lambda root: pytest.fail("it was listed again"))
    again = module(tmp_path / "data", index_dir=tmp_path / "out")
    assert [again.part("train").source.name(n) for n in range(GOOD)] == [first.part("train").source.name(n) for n in range(GOOD)]
    assert again.part("train").source.labels.tolist() == first.part("train").source.labels.tolist()
    monkeypatch.undo()
    (tmp_path / "data" / "train" / "cat" / "new.png").write_bytes(encoded(photo(1), "PNG"))
    assert module(tmp_path / "data", index_dir=tmp_path / "out").num_train_samples == GOOD + 1
    (tmp_path / "out" / "images-train.npz").write_bytes(b"damaged")
    assert module(tmp_path / "data", index_dir=tmp_path / "out").num_train_samples == GOOD + 1


@pytest.mark.parametrize("keeps", [True, False], ids=["index_dir", "no index_dir"])
def test_of_the_processes_of_a_run_one_looks_for_bad_images_and_the_others_know_what_it_found(tmp_path, keeps):
    folder = tmp_path / "data" / "train" / "ant"
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"{number:02}.png").write_bytes(b"no image" if number in (3, 7) else encoded(photo(number), "PNG"))
    looks = tmp_path / "looks"

    def start() -> tuple[int, list[int]]:
        decode = index.decode

        def noted(*arguments):
            with looks.open("a") as file:
                file.write("x")
            time.sleep(0.02)
            return decode(*arguments)

        index.decode = noted
        images = module(tmp_path / "data", on_bad_image="skip", index_dir=tmp_path / "out" if keeps else None)
        return images.num_train_samples, sorted(images.bad_images["train"])

    assert launched(3, start, temporary=tmp_path / "tmp") == 3 * [(18, [3, 7])] and looks.read_text() == 20 * "x"
    assert not list((tmp_path / "tmp").iterdir())  # nothing is left elsewhere


def test_validation_images_in_one_folder_get_their_labels_from_imagenets_own_files(tree, tmp_path):
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    shutil.copytree(tree / "train", root / "train", symlinks=True)
    (root / "val").mkdir()
    truth = ["dog", "ant", "cat", "dog", "bee"]
    for number, _ in enumerate(truth, start=1):
        (root / "val" / f"ILSVRC2012_val_{number:08}.JPEG").write_bytes(encoded(photo(number), "JPEG"))
    with pytest.raises(DataNotFoundError, match="LOC_val_solution.csv or the folder ILSVRC2012_devkit_t12"):
        module(tmp_path)
    kit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    kit.mkdir(parents=True)
    ids = {"cat": 1, "dog": 2, "ant": 3, "bee": 4}  # numbers of its own, not in alphabetical order
    synsets = np.array([(number, name) for name, number in ids.items()], dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    io.savemat(kit / "meta.mat", {"synsets": synsets.reshape(-1, 1)})
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{ids[name]}\n" for name in truth))
    expected = [CLASSES.index(name) for name in truth]
    assert module(tmp_path).part("validation").source.labels.tolist() == expected
    rows = [f"ILSVRC2012_val_{number:08},{name} 1 2 3 4 \n" for number, name in reversed(list(enumerate(truth, start=1)))]
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))
    shutil.rmtree(kit.parent)
    assert module(tmp_path).part("validation").source.labels.tolist() == expected
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows[:-1]))
    with pytest.raises(DataFileError, match="does not know the image .*ILSVRC2012_val_00000001.JPEG"):
        module(tmp_path)


def test_what_is_missing_or_does_not_fit_is_named(tree, tmp_path):
    with pytest.raises(DataNotFoundError, match=r"nothing is no folder: there should be train/ and val/"):
        ImageNetDataModule(data_dir=tmp_path / "nothing")
    with pytest.raises(ValueError, match="train_shards=8 means nothing here"):
        ImageNetDataModule(data_dir=tree, train_shards=8)
    with pytest.raises(ValueError, match="num_workers=-1 must be at least 0"):
        ImageNetDataModule(data_dir=tree, num_workers=-1)
    (tmp_path / "other").mkdir()
    os.symlink(tree / "val", tmp_path / "other" / "val")
    with pytest.raises(DataNotFoundError, match="has no train/, whose folders name the classes"):
        module(tmp_path / "other")
    with pytest.raises(DataFileError, match="val/cat: there is no class cat among the 2"):
        module(tmp_path / "other", classes=["ant", "bee"])
    for number in (0, 2, 3):
        write_shard(tmp_path / f"train-{number:05}-of-00005", range(2))
    with pytest.raises(DataFileError, match=r"2 of 5 train shards are missing: train-00001-of-00005, train-00004-of-00005$"):
        ImageNetDataModule(data_dir=tmp_path)
    with pytest.raises(DataFileError, match="3 train shards are there, 4 should be"):
        ImageNetDataModule(data_dir=tmp_path, train_shards=4)
    shrunk = module(tmp_path, train_shards=3)
    assert (shrunk.num_train_samples, shrunk.num_classes) == (6, 1000)
    found = module(tmp_path, train_shards=3, num_classes=1).part("train").seeded_batch(range(6), seed=0, epoch=0)
    assert (
        isinstance(found, TFRecordError)
        and "train-00000-of-00005: record 1 at byte" in str(found)
        and "label 2 must lie between" in str(found)
    )
    image = {"image/encoded": BAD["cut_off.jpg"], "image/class/label": np.array([1])}
    write_tfrecord(tmp_path / "train-00002-of-00005", [encode_example(image)])
    found = module(tmp_path, train_shards=3).part("train").seeded_batch(range(2, 5), seed=0, epoch=0)
    assert isinstance(found, ImageError) and re.search("train-00002-of-00005: record 0 at byte 0: the image cannot be decoded", str(found))


# -- batches ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "only noise", "bad"])
def test_a_class_that_nothing_would_train_is_refused_by_its_name(run, tmp_path, how):
    make_tree(tmp_path / "tree")
    (tmp_path / "tree/train/emu").mkdir()
    if how != "empty":
        (tmp_path / "tree/train/emu" / ("notes.txt" if how == "only noise" else "a.jpg")).write_bytes(b"no image")
    words = ["--dataset", "IMAGENET", "--data-dir", "tree", "--size", "8", "--image-size", "16", "--num-workers", "0"]
    status, _, errors = run(*words, "--on-bad-image", "skip")
    said = "all images of emu are bad" if how == "bad" else "1 of 5 classes have no images, so that nothing would train their outputs: emu"
    assert status == 2 and said in errors.splitlines()[-1] and "Traceback" not in errors
    assert run("convert", "tree", "shards")[0] == 2


def test_names_that_are_no_text_are_shown_and_never_end_a_run(tmp_path, monkeypatch):
    root = os.fsencode(tmp_path)
    for name in (b"train/a", b"train/b"):
        os.makedirs(os.path.join(root, name))
    (tmp_path / "train/a/good.jpg").write_bytes(encoded(photo(0), "JPEG"))
    with open(os.path.join(root, b"train/b/\xe9\n.jpg"), "wb") as file:
        file.write(b"nothing")
    (tmp_path / "train/b/good.jpg").write_bytes(encoded(photo(1), "JPEG"))
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict, as on most systems
    monkeypatch.setattr("sys.stdout", screen)
    with keep_quiet("test"):
        images = ImageNetDataModule(data_dir=tmp_path, on_bad_image="skip", image_size=16)
        assert images.num_train_samples == 2
        print(images.caveat, flush=True)
    assert f"  {tmp_path}/train/b/\\udce9 .jpg: no image of a known kind" in screen.buffer.getvalue().decode().splitlines()[1]
    os.rename(os.path.join(root, b"train/b"), os.path.join(root, b"train/\xe9"))
    with pytest.raises(DataFileError, match=r"the class folder b'\\xe9' has a name that is no text"):
        ImageNetDataModule(data_dir=tmp_path)


def test_pixels_are_normalised_by_imagenets_constants_on_the_host_or_on_the_device_alike(tree):
    on_device, on_host = module(tree), module(tree, eight_bit_transfer=False)
    assert (MEAN, STD) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    pixels, labels = on_device.part("train").seeded_batch([3, 1], seed=1, epoch=2)
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous(memory_format=torch.channels_last)
    images, _ = on_device.on_after_batch_transfer((pixels, labels), 0)
    mean, std = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64)
    expected = (pixels.double().permute(0, 2, 3, 1) / 255 - mean) / std
    assert (images.permute(0, 2, 3, 1) - expected).abs().max() < 1e-5 and images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    already, _ = on_host.on_after_batch_transfer(on_host.part("train").seeded_batch([3, 1], seed=1, epoch=2), 0)
    assert torch.equal(already, images)


def test_a_samples_crop_is_a_function_of_seed_epoch_and_index_and_evaluation_has_none(tree):
    train, validation = module(tree).part("train"), module(tree).part("validation")
    together, _ = train.seeded_batch([5, 6, 7], seed=1, epoch=2)
    alone, _ = train.seeded_batch([6], seed=1, epoch=2)
    assert torch.equal(together[1], alone[0])
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}):
        assert not torch.equal(train.seeded_batch([6], **other)[0], alone)
    assert torch.equal(validation.seeded_batch([6], seed=1, epoch=2)[0], validation.seeded_batch([6], seed=5, epoch=0)[0])
    middle = module(tree, augment=False).part("train")
    assert torch.equal(middle.seeded_batch([6], seed=1, epoch=2)[0], middle.seeded_batch([6], seed=2, epoch=0)[0])


def test_augmentation_is_drawn_like_crops_and_never_in_evaluation(tree):
    options = {"auto_augment": "trivialaugment", "color_jitter": 0.4, "random_erasing": 1.0}
    plain, augmented = module(tree), module(tree, **options)
    train = augmented.part("train")
    together, _ = train.seeded_batch([5, 6, 7], seed=1, epoch=2)
    assert torch.equal(together[1], train.seeded_batch([6], seed=1, epoch=2)[0][0])
    assert not torch.equal(together, plain.part("train").seeded_batch([5, 6, 7], seed=1, epoch=2)[0])
    ours, theirs = (made.part("validation").seeded_batch(range(12), seed=1, epoch=2)[0] for made in (augmented, plain))
    assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="random_erasing=1.0 means nothing with augment=False"):
        module(tree, augment=False, random_erasing=1.0)


def test_evaluation_may_have_a_size_of_its_own(tree):
    made = module(tree, image_size=16, eval_image_size=24, eval_resize=30)
    images, _ = made.part("validation").seeded_batch([0], seed=0, epoch=0)
    path = made.part("validation").source.name(0)
    theirs = v2.Compose([v2.Resize(30), v2.CenterCrop(24), v2.PILToTensor()])(Image.open(path))
    assert images.shape == (1, 3, 24, 24) and (images[0].int() - theirs.int()).abs().max() <= 1
    assert made.part("train").seeded_batch([0], seed=0, epoch=0)[0].shape == (1, 3, 16, 16)
    with pytest.raises(ValueError, match="eval_resize=20 must be at least the side of the middle that is taken, 24"):
        module(tree, image_size=24, eval_resize=20)


def test_torchvisions_weights_score_as_in_torchvisions_own_evaluation(tree, tmp_path):
    theirs = torchvision.models.resnet18(num_classes=4).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    steps = [v2.Resize(73), v2.CenterCrop(64), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    folder = torchvision.datasets.ImageFolder(tree / "val", v2.Compose(steps))
    with torch.no_grad():
        expected = theirs(torch.stack([image for image, _ in folder])).softmax(dim=1)
    network = ResNetModule(size="18", num_classes=4, image_size=64, stem="imagenet", pretrained=str(tmp_path / "weights.pth"))
    ours = torch.cat(make_trainer().predict(network, datamodule=module(tree, image_size=64, micro_batch_size=5)))
    assert (ours - expected).abs().max() < 0.01 and expected.std() > 0.01
    assert [label for _, label in folder] == module(tree).part("validation").source.labels.tolist()


def test_a_run_that_is_interrupted_in_mid_epoch_goes_on_as_if_it_had_not_been(tree, tmp_path):
    def fit(*, ckpt_path=None, **options):
        torch.manual_seed(0)
        network = ResNetModule(size="8", num_classes=4, image_size=16, schedule="const")
        trainer = make_trainer(**{"R": 2, "max_epochs": 2, **options})
        made = module(tree, num_workers=1, micro_batch_size=8, image_size=16, color_jitter=0.4)
        trainer.fit(network, datamodule=made, ckpt_path=ckpt_path)
        return trainer, network.state_dict()

    whole = fit()[1]
    trainer, _ = fit(max_steps=2)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    resumed = fit(ckpt_path=tmp_path / "middle.ckpt")[1]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_run_is_the_same_bit_for_bit_with_0_1_and_4_workers(tree):
    states = []
    for workers in (0, 1, 4):
        torch.manual_seed(0)
        network = ResNetModule(size="8", num_classes=4, image_size=16)
        trainer = make_trainer(R=2, max_epochs=2)
        trainer.fit(network, datamodule=module(tree, num_workers=workers, micro_batch_size=8, image_size=16))
        assert trainer.global_step == 2 * (GOOD // 16)
        states.append(network.state_dict())
    for other in states[1:]:
        assert all(torch.equal(other[name], value) for name, value in states[0].items())


class _Seen(ResNetModule):
    """Notes the grey value of every image, which is its number, and scores them by it."""

    def __init__(self) -> None:
        super().__init__(size="8", num_classes=4, image_size=8)
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(_numbers(batch))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated += _numbers(batch)


def _numbers(batch) -> list[int]:
    mean, std = MEAN[0], STD[0]
    return [round(float((image[0].mean() * std + mean) * 255)) for image in batch[0]]


@pytest.mark.parametrize(
    ("files", "workers", "trained"),
    [(7, 2, 12), (1, 4, 12)],
    ids=["7 files over 4 replicas and 2 workers", "1 file over 4 replicas and 4 workers"],
)
def test_files_need_not_divide_into_replicas_and_workers(tmp_path, monkeypatch, files, workers, trained):
    numbers = np.array_split(np.arange(14), files)
    for k, part in enumerate(numbers):
        write_shard(tmp_path / f"train-{k:05}-of-{files:05}", part.tolist())
        write_shard(tmp_path / f"validation-{k:05}-of-{files:05}", [k + 100])
    monkeypatch.setattr(data, "DataLoader", partial(data.DataLoader, timeout=60))  # a hang is a failure
    network, trainer = _Seen(), make_trainer(R=4, num_sanity_val_steps=0)
    loaded = module(tmp_path, num_classes=4, micro_batch_size=3, eval_batch_size=3, image_size=8, num_workers=workers)
    trainer.fit(network, datamodule=loaded)
    seen = sum(network.trained, [])
    assert len(seen) == len(set(seen)) == trained and set(seen) <= set(range(14))
    assert trainer.strategy.progress.samples_left_out == 14 - trained
    assert sorted(network.validated) == [100 + k for k in range(files)]


# -- the command --------------------------------------------------------------------------------------------------------------

TINY = "--dataset IMAGENET --size 8 --image-size 16 --batch-size 8 --precision 32.32 --num-workers 0 --epochs 1".split()


def test_the_command_trains_validates_and_predicts_on_a_tree_with_every_oddity(run, bad_tree, tmp_path):
    status, out, errors = run(*TINY, "--data-dir", bad_tree, "--on-bad-image", "skip")
    assert status == 0, errors
    assert f"{GOOD} to train on, 12 to validate on" in out and "4: 0 ant, 1 bee, 2 cat, 3 dog" in out
    assert "train: names that are ignored: hidden or of the system 5" in errors
    assert f"{len(BAD)} bad train images are left out, {GOOD} are good" in errors
    listed = out[out.index(f"{len(BAD)} bad train images were left out:") :].splitlines()[1:]
    assert [line.split(": ")[0].strip() for line in listed] == [f"{bad_tree}/train/dog/{name}" for name in sorted(BAD)]

    (tmp_path / "seen" / "val").mkdir(parents=True)
    for name in ("cat", "dog"):  # without training folders: the checkpoint knows what is what
        shutil.copytree(bad_tree / "val" / name, tmp_path / "seen" / "val" / name)
    status, out, errors = run("validate", "--ckpt_path", "results/checkpoints/last.ckpt", "--data.data_dir", tmp_path / "seen")
    assert status == 0 and "accuracy" in out, errors
    alone = module(tmp_path / "seen", classes=list(CLASSES))
    assert (alone.num_train_samples, alone.part("validation").source.labels.tolist()) == (0, [2, 2, 2, 3, 3, 3])
    status, out, errors = run("predict", "--config", "results/config.yaml", "--ckpt_path", "last")
    assert status == 0 and "12 x 4" in out, errors
    with open("results/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == sorted(str(path) for path in (bad_tree / "val").glob("*/*.JPEG"))
    best = torch.load("results/predictions.pt").max(dim=1)
    assert [row["class"] for row in rows] == [CLASSES[label] for label in best.indices]
    checkpoint = torch.load("results/checkpoints/last.ckpt")
    assert checkpoint["command_settings"]["data.classes"] == list(CLASSES)

    status, _, errors = run("validate", "--ckpt_path", "last", "--data.dataset", "CIFAR-10")
    assert status == 2 and "was trained on IMAGENET" in errors


def test_a_bad_image_ends_the_run_with_its_path_whoever_reads_it(run, bad_tree):
    for workers in ("0", "2"):
        status, out, errors = run(*TINY, "--data-dir", bad_tree, "--num-workers", workers)
        assert status == 1 and "Traceback" not in errors
        assert re.search(rf"^resnet_ipu: error: {bad_tree}/train/dog/(cut_off|web_page|empty|pointer)\.\w+: .", errors, re.M), errors


def test_a_signal_to_all_processes_leaves_the_loaders_workers_to_the_first(tree, tmp_path):
    words = ["-m", "resnet_ipu", *TINY, "--data-dir", str(tree), "--num-workers", "2", "--epochs", "10000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(command.__file__).parents[1])}
    options = {"cwd": tmp_path, "env": environment, "stdout": warm.PIPE, "stderr": warm.STDOUT}
    process = warm.start(words, start_new_session=True, **options)
    give_up = time.monotonic() + 120
    while not (tmp_path / "results" / "checkpoints" / "last.ckpt").exists() and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in out and "the state is saved in results/checkpoints/last.ckpt" in out, out


def test_the_data_benchmark_measures_and_trains_nothing(run, tree, tmp_path, monkeypatch):
    from resnet_ipu import throughput

    monkeypatch.setattr(throughput, "SECONDS", 0.1)
    monkeypatch.setattr(throughput.loader_rate, "__kwdefaults__", {"seconds": 0.1})
    monkeypatch.setattr(throughput.network_rate, "__kwdefaults__", {"seconds": 0.1})
    status, out, errors = run(*TINY, "--data-dir", tree, "--data-benchmark")
    assert status == 0, errors
    loader, network = (float(re.search(rf"^{name} +([\d,]+) images/s", out, re.M)[1].replace(",", "")) for name in ("loader", "network"))
    slower = "loader" if loader < network else "network"
    assert f"The {slower} is the bottleneck" in out and not (tmp_path / "results" / "checkpoints").exists()
    assert throughput.report(read=100.0, learned=250.0, workers=2)[-1].endswith("5 workers on as many free cores would keep up.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image-size 64", "--image-size means nothing for --dataset CIFAR-10: it belongs to --dataset IMAGENET"),
        ("--dataset imagenet --validation-split 0.1", "--validation-split means nothing for --dataset IMAGENET"),
        ("--dataset imagenet --on-bad-image ignore", "'ignore' is not known; known are raise, skip"),
        ("--dataset imagenet --fast-decode --no-augmentation", "exclude each other"),
        ("--dataset imagenet --data-dir nowhere", "nowhere is no folder: there should be train/ and val/"),
        ("convert", "give the folder to read and the one to write to"),
        ("convert a b --train-shards none", "--train-shards: 'none' must be a whole number above 0"),
    ],
)
def test_wrong_options_end_in_one_line(run, words, message):
    status, out, errors = run(*words.split())
    assert status == 2 and message in errors and len(errors.strip().splitlines()) == 1, errors
