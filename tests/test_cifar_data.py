"""The small-image data sets: every distributed form is read and checked, downloads are whole, augmentation is a function of names."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional

import cifar_ipu
from cifar_ipu import data
from cifar_ipu.data import DataFileError, DataNotFoundError, ImageDataModule, ImageDataset, load_images, random_words

NOBODY = "http://127.0.0.1:9/"  # the discard port: a server that is not there


# --- Small data sets in the published forms ------------------------------------------------------


class Python2Pickler(pickle._Pickler):
    """Writes `bytes` as Python 2 wrote its strings, as in the published CIFAR batches."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        value = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_string


def python2_pickle(path, content):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    path.write_bytes(buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))  # its name until numpy 2


def write_pickles(folder, name, images, labels):
    planes, key = images.transpose(0, 3, 1, 2).reshape(len(images), -1), b"labels" if name == "CIFAR-10" else b"fine_labels"
    for file, rows in batches(name, len(images)):
        python2_pickle(folder / file, {b"data": planes[rows], key: labels[rows].tolist(), b"coarse_labels": [0] * len(labels[rows])})


def write_records(folder, name, images, labels):
    columns = [labels[:, None].astype(np.uint8), images.transpose(0, 3, 1, 2).reshape(len(images), -1)]
    records = np.concatenate(columns if name == "CIFAR-10" else [np.zeros((len(labels), 1), np.uint8), *columns], axis=1)
    for file, rows in batches(name, len(images)):
        (folder / f"{file}.bin").write_bytes(records[rows].tobytes())


def batches(name, count):
    """File names of the training part and the rows in each; the test part is told by its smaller size."""
    test = count == 10 or (name == "CIFAR-100" and count == 100)
    if name == "CIFAR-100":
        return [("test" if test else "train", slice(None))]
    return [("test_batch", slice(None))] if test else [(f"data_batch_{i + 1}", slice(i * 4, i * 4 + 4)) for i in range(5)]


def write_idx(folder, name, images, labels):
    prefix = "t10k" if len(images) == 10 else "train"
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, *images.shape[:3]) + images.tobytes())
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, len(labels)) + labels.astype(np.uint8).tobytes())


WRITERS = {
    "cifar-10-batches-py": write_pickles,
    "cifar-100-python": write_pickles,
    "cifar-10-batches-bin": write_records,
    "cifar-100-binary": write_records,
    "MNIST/raw": write_idx,
    "FashionMNIST/raw": write_idx,
}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Builds a few random images of a data set in one published form under `tmp_path`, and puts their digests into the table."""

    def build(name, form, *, packed=False, root=tmp_path):
        real = data.DATA_SETS[name]
        rng = np.random.default_rng(len(form))
        parts = {}
        for split, each in (("train", 2), ("test", 1)):
            labels = rng.permutation(np.repeat(np.arange(real.num_classes), each))
            parts[split] = (rng.integers(0, 256, (len(labels), real.image_size, real.image_size, real.channels), dtype=np.uint8), labels)
        folder = root / form
        folder.mkdir(parents=True)
        for images, labels in parts.values():
            WRITERS[form](folder, name, images, labels)
        contents = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.suffix != ".bin"}
        published = dict(real.published)
        layout = next(layout for layout in real.layouts if layout.folder == form)
        if packed and layout.archive:
            with tarfile.open(root / layout.archive, "w:gz") as archive:
                archive.add(folder, arcname=form)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            raw = (root / layout.archive).read_bytes()
            published[layout.archive] = (len(raw), hashlib.md5(raw).hexdigest())
        elif packed:
            for path in list(folder.iterdir()):
                raw = gzip.compress(path.read_bytes())
                path.with_name(f"{path.name}.gz").write_bytes(raw)
                published[f"{path.name}.gz"] = (len(raw), hashlib.md5(raw).hexdigest())
                path.unlink()
        facts = dataclasses.replace(
            real,
            train_counts=(2,) * real.num_classes,
            test_counts=(1,) * real.num_classes,
            contents=contents,
            published=published,
            urls=(NOBODY,),
        )
        monkeypatch.setitem(data.DATA_SETS, name, facts)
        return parts

    return build


@pytest.fixture
def no_servers(monkeypatch):
    """Every published address leads nowhere, as on a machine without a network."""
    for name, facts in list(data.DATA_SETS.items()):
        monkeypatch.setitem(data.DATA_SETS, name, dataclasses.replace(facts, urls=(NOBODY,) if facts.urls else ()))


@pytest.fixture
def server(tmp_path_factory):
    """A web server on this machine: `files` maps a path to its bytes; `asked` lists what was asked for; other paths are forbidden."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            if self.path not in self.server.files:
                return self.send_error(403)
            body, length = self.server.files[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked, running.url = {}, [], f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def serve(monkeypatch, server, name, source, *, mirrors=("/",), cut=None):
    """Offer the files in `source` under the last of `mirrors`, cut off after `cut` bytes if given."""
    for path in source.iterdir():
        raw = path.read_bytes()
        server.files[mirrors[-1] + path.name] = (raw[:cut], len(raw))
    urls = tuple(server.url + mirror for mirror in mirrors)
    monkeypatch.setitem(data.DATA_SETS, name, dataclasses.replace(data.DATA_SETS[name], urls=urls))


# --- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("CIFAR-10", "cifar-10-batches-py"),
        ("CIFAR-10", "cifar-10-batches-bin"),
        ("CIFAR-100", "cifar-100-python"),
        ("CIFAR-100", "cifar-100-binary"),
        ("MNIST", "MNIST/raw"),
        ("FASHION-MNIST", "FashionMNIST/raw"),
    ],
)
def test_every_published_form_gives_the_images_that_were_written(small, tmp_path, name, form, packed):
    expected = small(name, form, packed=packed)
    folders = [tmp_path] + ([tmp_path / form] if (tmp_path / form).exists() else [])  # the folder above the files, and their own
    for folder in folders:
        for split, (images, labels) in load_images(name.lower(), data_dir=folder).items():
            assert images.dtype == torch.uint8 and labels.dtype == torch.int64
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), expected[split][0])
            assert labels.tolist() == expected[split][1].tolist()
            assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_cut_off_archive_is_named_with_its_digest_and_the_way_to_replace_it(small, tmp_path):
    small("CIFAR-10", "cifar-10-batches-py", packed=True)
    archive = tmp_path / "cifar-10-python.tar.gz"
    size, digest = data.DATA_SETS["CIFAR-10"].published[archive.name]
    os.truncate(archive, 1000)
    module = ImageDataModule(data_dir=tmp_path)  # it is CIFAR-10 that lies there: no quiet change to another data set
    module.prepare_data()
    with pytest.raises(DataFileError) as caught:
        module.setup("fit")
    for part in (str(archive), "1,000 bytes", "cut off", f"{size:,}", digest, f"into {tmp_path}"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert archive.stat().st_size == 1000  # the user's file is left as it was

    archive.write_bytes(bytes(size))
    with pytest.raises(DataFileError, match=f"{archive}: md5 .* not {digest}"):
        load_images("CIFAR-10", data_dir=tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_off_idx_file_is_named(small, tmp_path, packed):
    small("FASHION-MNIST", "FashionMNIST/raw", packed=packed)
    images = tmp_path / "FashionMNIST" / "raw" / ("train-images-idx3-ubyte" + (".gz" if packed else ""))
    os.truncate(images, 600)
    with pytest.raises(DataFileError, match=str(images)):
        load_images("FASHION-MNIST", data_dir=tmp_path)


def test_files_of_another_data_set_are_refused_by_name(small, tmp_path):
    small("FASHION-MNIST", "FashionMNIST/raw")
    with pytest.raises(DataFileError, match="train-images-idx3-ubyte: this is FASHION-MNIST's file"):
        load_images("MNIST", data_dir=tmp_path / "FashionMNIST" / "raw")


def test_files_without_a_published_digest_are_checked_by_their_records(small, tmp_path):
    small("CIFAR-10", "cifar-10-batches-bin")
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    good = batch.read_bytes()
    for bad, what in (
        (good[:-1], "data_batch_3.bin"),
        (good[:-3073], "train images of shape"),
        (bytes([good[0] ^ 1]) + good[1:], "images per class"),
    ):
        batch.write_bytes(bad)
        with pytest.raises(DataFileError, match=what):
            load_images("CIFAR-10", data_dir=tmp_path)


def test_a_pickle_that_would_run_code_is_refused(small, tmp_path, monkeypatch):
    small("CIFAR-100", "cifar-100-python")

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    python2_pickle(tmp_path / "cifar-100-python" / "train", {b"data": Attack()})
    monkeypatch.setitem(data.DATA_SETS, "CIFAR-100", dataclasses.replace(data.DATA_SETS["CIFAR-100"], contents={}))
    with pytest.raises(DataFileError, match="mkdir"):
        load_images("CIFAR-100", data_dir=tmp_path)
    assert not (tmp_path / "attacked").exists()


# --- Missing files -------------------------------------------------------------------------------


def test_without_a_network_a_named_data_set_is_an_error_that_says_what_to_put_where(no_servers, tmp_path):
    module = ImageDataModule(dataset="CIFAR-10", data_dir=tmp_path / "here")
    with pytest.raises(DataNotFoundError) as caught:
        module.prepare_data()
    for part in ("cifar-10-python.tar.gz", "170,498,071 bytes", "c58f30108f718f92721af3b95e74349a", f"into {tmp_path / 'here'}"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataNotFoundError, match="MNIST/raw"):
        ImageDataModule(dataset="MNIST", data_dir=tmp_path).prepare_data()
    with pytest.raises(DataNotFoundError, match="train-images-idx3-ubyte.gz"):
        ImageDataModule(dataset="MNIST", data_dir=tmp_path, download=False).setup("fit")


@pytest.mark.parametrize(
    ("download", "reason"),
    [(None, "is downloaded only where it is named"), (True, "cannot be downloaded"), (False, "must not be downloaded")],
)
def test_a_data_set_that_is_not_here_is_looked_for_only_when_asked_to(no_servers, tmp_path, download, reason):
    with pytest.warns(UserWarning, match=f"CIFAR-10 is not in .*here and {reason}: this run uses a sample"):
        assert data.available_data_set(data_dir=tmp_path / "here", download=download) == "SAMPLE"
    assert not (tmp_path / "here").exists()


def test_without_a_name_the_sample_is_used_and_said_once(tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = ImageDataModule(data_dir=tmp_path / "here")
        module.prepare_data()
        module.setup("fit")
    assert ["sample" in str(warning.message) and "CIFAR-10" in str(warning.message) for warning in said] == [True]
    assert module.used_sample and module.dataset_name == "SAMPLE"
    assert (module.num_classes, module.in_channels, module.image_size) == (10, 1, 28)
    assert (len(module.train_dataloader().dataset), len(module.val_dataloader().dataset)) == (2000, 500)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(("name", "form"), [("CIFAR-10", "cifar-10-batches-py"), ("FASHION-MNIST", "FashionMNIST/raw")])
def test_a_missing_data_set_is_downloaded_once_by_one_of_many_and_the_next_mirror_is_tried(
    small, server, monkeypatch, tmp_path, name, form
):
    expected = small(name, form, packed=True, root=tmp_path / "origin")
    source = tmp_path / "origin" / ("" if name == "CIFAR-10" else form)
    serve(monkeypatch, server, name, source, mirrors=("/forbidden/", "/mirror/"))
    with ThreadPoolExecutor(3) as pool:
        modules = list(pool.map(lambda _: ImageDataModule(dataset=name, data_dir=tmp_path / "here"), range(3)))
        list(pool.map(ImageDataModule.prepare_data, modules))
    files = len(list(source.iterdir()))
    assert len([path for path in server.asked if path.startswith("/mirror/")]) <= files + 3  # each of three asks once whether it is there
    assert torch.equal(load_images(name, data_dir=tmp_path / "here")["train"][1], torch.from_numpy(expected["train"][1]))
    asked = len(server.asked)
    ImageDataModule(dataset=name, data_dir=tmp_path / "here").prepare_data()
    assert len(server.asked) == asked


def test_an_interrupted_or_forbidden_download_leaves_no_file_and_gives_each_servers_reason(small, server, monkeypatch, tmp_path):
    small("CIFAR-10", "cifar-10-batches-py", packed=True, root=tmp_path / "origin")
    serve(monkeypatch, server, "CIFAR-10", tmp_path / "origin", mirrors=("/forbidden/", "/mirror/"), cut=2000)
    with pytest.raises(DataNotFoundError, match="403.*2,000 bytes with md5"):
        ImageDataModule(dataset="CIFAR-10", data_dir=tmp_path / "here").prepare_data()
    assert not [path for path in (tmp_path / "here").iterdir() if not path.name.endswith(".lock")]


def test_a_read_only_folder_works_with_the_files_in_it_and_is_named_without(small, server, monkeypatch, tmp_path):
    small("CIFAR-10", "cifar-10-batches-py", packed=True, root=tmp_path / "origin")
    (tmp_path / "origin").chmod(0o555)
    before = os.listdir(tmp_path / "origin")
    module = ImageDataModule(dataset="CIFAR-10", data_dir=tmp_path / "origin", validation_split=0)
    module.prepare_data()
    module.setup("fit")
    assert os.listdir(tmp_path / "origin") == before
    (tmp_path / "origin").chmod(0o755)

    serve(monkeypatch, server, "CIFAR-10", tmp_path / "origin")
    (tmp_path / "file").touch()
    with pytest.raises(DataNotFoundError, match="Not a directory.*put cifar-10-python.tar.gz"):  # no folder can be made here, by anyone
        ImageDataModule(dataset="CIFAR-10", data_dir=tmp_path / "file" / "here").prepare_data()


# --- Constants -----------------------------------------------------------------------------------


def test_constants_are_those_of_all_pixels_and_normalise_the_sample():
    assert {name: (facts.mean, facts.std) for name, facts in data.DATA_SETS.items()} == {
        "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "CIFAR-100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        "MNIST": ((0.1307,), (0.3081,)),
        "FASHION-MNIST": ((0.2860,), (0.3530,)),
        "SAMPLE": ((0.2860,), (0.3530,)),
    }
    module = ImageDataModule(dataset="SAMPLE")
    images, labels = load_images("SAMPLE", data_dir="unused")["train"]
    normalised, _ = module.on_after_batch_transfer((images, labels), 0)
    assert normalised.dtype == torch.float32 and normalised.is_contiguous(memory_format=torch.channels_last)
    assert abs(normalised.mean()) < 0.01 and abs(normalised.std() - 1) < 0.01
    assert torch.allclose(normalised[:5], (images[:5] / 255 - 0.2860) / 0.3530, atol=1e-6)


def test_scaling_border_and_shown_images_are_those_that_were_asked_for():
    images, _ = load_images("SAMPLE", data_dir="unused")["train"]
    plain = ImageDataModule(dataset="SAMPLE", validation_split=0, augment=False, scaling="unit")
    shown = plain.sample_images(7)
    torch.testing.assert_close(shown, images[:7] / 255)
    assert len(plain.sample_images(9_999)) == 2_000 and plain.mirrors
    for padding in (0, 1):
        module = ImageDataModule(dataset="SAMPLE", validation_split=0, scaling="unit", crop_padding=padding)
        for seen, image in zip(module.sample_images(7), shown, strict=True):
            around = torch.nn.functional.pad(image, (padding,) * 4)
            places = [around[:, y : y + 28, x : x + 28] for y in range(2 * padding + 1) for x in range(2 * padding + 1)]
            assert any(torch.equal(seen, crop) or torch.equal(seen, crop.flip(2)) for crop in places)
    assert not ImageDataModule(dataset="MNIST").mirrors and not ImageDataModule(dataset="CIFAR-10", synthetic="host").mirrors
    for options, message in (({"crop_padding": -1}, "crop_padding: -1"), ({"scaling": "z"}, "scaling: 'z' is unknown; legal are")):
        with pytest.raises(ValueError, match=message):
            ImageDataModule(dataset="SAMPLE", **options)


def test_the_sample_is_balanced_and_its_parts_share_no_image():
    splits = load_images("SAMPLE", data_dir="unused")
    train, test = ({image.numpy().tobytes() for image in splits[split][0]} for split in ("train", "test"))
    assert (len(train), len(test), len(train & test)) == (2000, 500, 0)
    assert [splits[split][1].bincount().tolist() for split in ("train", "test")] == [[200] * 10, [50] * 10]
    folder = Path(cifar_ipu.__file__).parent / "sample"
    assert "Zalando" in (folder / "LICENSE").read_text() and sum(path.stat().st_size for path in folder.iterdir()) < 1.2e6


# --- Augmentation --------------------------------------------------------------------------------


def dataset(count=64, *, channels=3, size=32, augment=True, flip=True):
    images = torch.randint(1, 256, (count, size, size, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageDataset(
        images=images.permute(0, 3, 1, 2), labels=torch.arange(count) % 10, rows=np.arange(count), augment=augment, flip=flip
    )


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28)])
def test_crops_and_flips_equal_a_slow_image_by_image_reference(channels, size):
    samples = dataset(channels=channels, size=size)
    images, labels = samples.seeded_batch(range(64), seed=3, epoch=5)
    assert torch.equal(labels, samples.labels) and images.is_contiguous(memory_format=torch.channels_last)
    for index, word in enumerate(random_words(3, 5, indices=np.arange(64)).tolist()):
        row, column = (word % 2**24) * 9 // 2**24, (word // 2**24 % 2**24) * 9 // 2**24
        expected = functional.pad(samples.images[index], (4, 4, 4, 4))[:, row : row + size, column : column + size]
        assert torch.equal(images[index], expected.flip(2) if word >> 63 else expected)


def test_an_images_augmentation_depends_on_seed_epoch_and_index_alone():
    samples = dataset()
    whole, _ = samples.seeded_batch(range(64), seed=1, epoch=2)
    torch.manual_seed(99)
    stream = torch.get_rng_state()
    for indices in ([7, 3, 60], [60], list(range(63, -1, -1))):
        assert torch.equal(samples.seeded_batch(indices, seed=1, epoch=2)[0], whole[indices])
    assert torch.equal(torch.get_rng_state(), stream)  # the global random stream is not touched
    for seed, epoch in ((1, 3), (2, 2), (2, 1), (-1, 2)):
        other, _ = samples.seeded_batch(range(64), seed=seed, epoch=epoch)
        assert (other != whole).flatten(1).any(1).sum() > 55


def test_every_offset_and_both_mirrors_come_equally_often_and_digits_are_never_mirrored():
    image = torch.arange(1, 82, dtype=torch.uint8).view(1, 1, 9, 9)
    draws = 16200
    for flip in (True, False):
        samples = ImageDataset(
            images=image.expand(draws, 1, 9, 9), labels=torch.zeros(draws).long(), rows=np.arange(draws), augment=True, flip=flip
        )
        images, _ = samples.seeded_batch(range(draws), seed=0, epoch=0)
        kinds, counts = images.flatten(1).unique(dim=0, return_counts=True)
        assert len(kinds) == (162 if flip else 81)
        mean = draws / len(kinds)
        assert ((counts - mean) ** 2 / mean).sum() < 1.5 * len(kinds)  # chi-squared: its mean is the number of kinds less one
    assert not data.DATA_SETS["MNIST"].flip and all(facts.flip for name, facts in data.DATA_SETS.items() if name != "MNIST")


def test_single_items_follow_the_global_random_stream():
    samples = dataset()
    torch.manual_seed(5)
    first = [samples[0][0] for _ in range(8)]
    torch.manual_seed(5)
    again = [samples[0][0] for _ in range(8)]
    assert all(map(torch.equal, first, again)) and any(not torch.equal(first[0], other) for other in first)


# --- The data module -----------------------------------------------------------------------------


def rows_of(loader):
    return loader.dataset.rows.tolist()


def test_validation_is_held_out_class_by_class_from_the_training_images():
    module = ImageDataModule(dataset="SAMPLE", validation_split=0.1, seed=4)
    module.setup("fit")
    train, held_out = module.train_dataloader(), module.val_dataloader()
    assert sorted(rows_of(train) + rows_of(held_out)) == list(range(2000))
    assert (len(train.dataset), len(held_out.dataset)) == (module.num_train_samples, module.num_validation_samples) == (1800, 200)
    assert held_out.dataset.labels[held_out.dataset.rows].bincount().tolist() == [20] * 10
    others = {}
    for seed in (4, 5):
        other = ImageDataModule(dataset="SAMPLE", validation_split=200, seed=seed)
        other.setup("fit")
        others[seed] = rows_of(other.val_dataloader())
    assert others[4] == rows_of(held_out) != others[5]


def test_the_test_set_is_the_validation_set_only_when_asked(small, tmp_path):
    small("FASHION-MNIST", "FashionMNIST/raw")

    def built(**options):
        module = ImageDataModule(dataset="FASHION-MNIST", data_dir=tmp_path, **options)
        module.setup("fit")
        return module

    default = built()
    assert (default.num_train_samples, default.num_validation_samples, default.num_test_samples) == (18, 2, 10)
    assert default.val_dataloader().dataset.images is default.train_dataloader().dataset.images
    on_test = built(validation_on_test=True)
    assert on_test.val_dataloader().dataset is on_test.test_dataloader().dataset and on_test.num_train_samples == 20
    assert built(validation_split=0).val_dataloader() == []


def test_evaluation_gives_every_image_once_and_as_it_is():
    module = ImageDataModule(dataset="SAMPLE", eval_batch_size=64)
    module.setup("fit")
    expected, labels = load_images("SAMPLE", data_dir="unused")["test"]
    for loader in (module.val_dataloader(), module.test_dataloader(), module.predict_dataloader()):
        batches = list(loader)
        assert torch.equal(torch.cat([images for images, _ in batches]), expected)
        assert torch.equal(torch.cat([labels for _, labels in batches]), labels)
        assert torch.equal(loader.dataset.seeded_batch([3, 499], seed=1, epoch=1)[0], expected[[3, 499]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "CIFAR-11"}, "dataset: 'CIFAR-11'.*CIFAR-10, CIFAR-100, MNIST, FASHION-MNIST, SAMPLE"),
        ({"validation_split": 1.0}, "validation_split: 1.0"),
        ({"validation_split": -1}, "validation_split: -1"),
        ({"validation_split": 2000}, "validation_split: 2000.*1,999"),
        ({"validation_split": True}, "validation_split: True"),
        ({"validation_split": 0.1, "validation_on_test": True}, "validation_split: 0.1.*validation_on_test"),
        ({"micro_batch_size": 0}, "micro_batch_size: 0"),
        ({"num_workers": -1}, "num_workers: -1"),
        ({"synthetic": "gpu"}, "synthetic: 'gpu'.*'host' and 'ipu'"),
        ({"synthetic_classes": 5}, "synthetic_classes: 5"),
        ({"synthetic_kind": "noise"}, "synthetic_kind: 'noise'"),
        ({"synthetic": "ipu", "augment": True}, "augment"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        ImageDataModule(**{"dataset": "SAMPLE", **options})
    assert "\n" not in str(caught.value)


def synthetic_images(part="train", count=2000, **options):
    """Normalised images and labels of a synthetic data set, as a model sees them."""
    module = ImageDataModule(**{"dataset": "CIFAR-10", "synthetic_samples": 5000, **options})
    module.setup("fit")
    samples = {"train": module.train_dataloader, "test": module.test_dataloader}[part]().dataset
    batch = samples.seeded_batch(range(min(count, len(samples))), seed=0, epoch=0)
    return *module.on_after_batch_transfer(batch, 0), batch[0]


def test_synthetic_images_are_the_same_from_host_and_device():
    on_host, labels, sent = synthetic_images(synthetic="host", count=50)
    on_device, device_labels, sent_to_device = synthetic_images(synthetic="ipu", count=50)
    assert torch.equal(on_host, on_device) and torch.equal(labels, device_labels)
    assert sent.shape == (50, 3, 32, 32) and sent.dtype == torch.uint8 and sent_to_device.shape == (50,)
    assert not torch.equal(on_host, synthetic_images(synthetic="host", count=50, seed=1)[0])


@pytest.mark.parametrize(("kind", "lowest", "highest"), [("pattern", 0.95, 1.0), ("noise", 0.0, 0.2)])
def test_synthetic_patterns_can_be_learnt_and_noise_cannot(kind, lowest, highest):
    images, labels, _ = synthetic_images(synthetic="host", synthetic_kind=kind)
    tests, test_labels, _ = synthetic_images("test", synthetic="host", synthetic_kind=kind)
    assert abs(images.std() - 1) < 0.05 and len(labels.unique()) == 10
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(tests.flatten(1), means.flatten(1)).argmin(1)
    assert lowest <= (nearest == test_labels).float().mean() <= highest


def test_synthetic_images_take_any_size_and_number_of_classes():
    images, labels, _ = synthetic_images(synthetic="ipu", synthetic_classes=1000, synthetic_image_size=224, count=8)
    assert images.shape == (8, 3, 224, 224) and labels.max() < 1000


class Linear(pl.LightningModule):
    """One linear layer on the images."""

    def __init__(self, inputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 10)
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append(images.shape)
        return functional.cross_entropy(self.layer(images.flatten(1)), labels)

    validation_step = test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"synthetic": "host"}, {"synthetic": "ipu"}])
def test_it_trains_under_an_ordinary_trainer(tmp_path, options):
    module = ImageDataModule(dataset="SAMPLE", micro_batch_size=16, **options)
    network = Linear(28 * 28)
    trainer = pl.Trainer(
        max_steps=2, limit_val_batches=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    before = network.layer.weight.clone()
    trainer.fit(network, module)
    assert trainer.global_step == 2 and not torch.equal(before, network.layer.weight)
    assert set(network.seen) == {(16, 1, 28, 28)}
