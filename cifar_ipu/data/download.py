"""Downloads of a data set that is not on disk: by one process at a time, each file whole and right or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from filelock import FileLock
from jsonargparse import Namespace
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from cifar_ipu.data.facts import DATA_SETS, known_data_set
from cifar_ipu.data.files import DataNotFoundError, distributed_files, how_to_place, is_on_disk

NETWORK_TIMEOUT = 10.0  # seconds without an answer after which a server counts as not there


def fetch(name: str, *, data_dir: str | Path) -> None:
    """Download a data set that is not on disk: by one process at a time, each file whole and right or not at all.

    Raises `DataNotFoundError` when no server gives the right bytes or `data_dir` cannot be written to.
    """
    name, data_dir = known_data_set(name), Path(data_dir).expanduser()
    if is_on_disk(name, data_dir=data_dir):
        return
    layout = DATA_SETS[name].layouts[0]
    folder = data_dir if layout.archive else data_dir / layout.folder
    try:
        _answering(name, distributed_files(layout)[0])  # before anything is written: a run without a network leaves no empty folder behind
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):  # a second process waits here, and then finds the files
            if is_on_disk(name, data_dir=data_dir):
                return
            for file in distributed_files(layout):
                if not (folder / file).exists():
                    _download(name, file, folder)
    except OSError as error:
        raise DataNotFoundError(f"{name} is not in {data_dir} and was not downloaded ({error}); {how_to_place(name, folder)}") from error


def available_data_set(*, data_dir: str | Path, download: bool | None = None) -> str:
    """The data set to use where none is named: CIFAR-10, or the embedded SAMPLE, with a warning, where CIFAR-10 is not on disk and cannot be fetched.

    Args:
        data_dir: where CIFAR-10 is looked for.
        download: whether it is downloaded where it is missing; None is no, and says how to have it downloaded.
    """
    if is_on_disk("CIFAR-10", data_dir=data_dir):
        return "CIFAR-10"
    reason = "is downloaded only where it is named" if download is None else "must not be downloaded"
    if download:
        try:
            fetch("CIFAR-10", data_dir=data_dir)
            return "CIFAR-10"
        except DataNotFoundError:
            reason = "cannot be downloaded"
    rank_zero_warn(
        f"no data set is named, CIFAR-10 is not in {data_dir} and {reason}: this run uses a sample, 2,000 + 500 Fashion-MNIST images"
    )
    return "SAMPLE"


def settle_data_set(settings: Namespace) -> None:
    """Name the data set in an `ImageDataModule`'s settings where they leave it open: a command downloads CIFAR-10 where it can."""
    if settings.dataset is None and settings.synthetic is None:
        settings.dataset = available_data_set(data_dir=Path(settings.data_dir).expanduser(), download=settings.download)


def _answering(name: str, file: str) -> None:
    """Raise `OSError` with each server's reason if none of a data set's servers offers the file."""
    failures = []
    for base in DATA_SETS[name].urls:
        try:
            return _open_url(base + file).close()
        except (OSError, http.client.HTTPException) as error:
            failures.append(_failure(base, error))
    raise OSError("; ".join(failures))


def _failure(base: str, error: Exception) -> str:
    reason = error.reason if type(error) is urllib.error.URLError else error  # without the "<urlopen error ...>" around it
    return f"{urllib.parse.urlsplit(base).netloc}: {reason}"


def _download(name: str, file: str, folder: Path) -> None:
    """Fetch one file from the first server that gives the right bytes; `OSError` says what each of them did instead."""
    facts = DATA_SETS[name]
    size, expected = facts.published[file]
    partial_file = folder / f"{file}.part"  # in the same folder, so that the final rename is atomic; written under the lock
    failures = []
    for base in facts.urls:
        digest, received = hashlib.md5(usedforsecurity=False), 0
        try:
            with _open_url(base + file) as response, partial_file.open("wb") as out:
                rank_zero_info(f"Downloading {base + file} ({size / 1e6:.1f} MB) into {folder}")
                while block := response.read(1 << 18):
                    out.write(block)
                    digest.update(block)
                    received += len(block)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != expected:
                raise OSError(f"{received:,} bytes with md5 {digest.hexdigest()} came instead of {size:,} bytes with md5 {expected}")
            os.replace(partial_file, folder / file)
            return
        except (OSError, http.client.HTTPException) as error:
            failures.append(_failure(base, error))
        finally:
            partial_file.unlink(missing_ok=True)
    raise OSError("; ".join(failures))


def _open_url(url: str) -> Any:
    """Open a URL within the timeout, the look-up of the host's name included (which urllib's own timeout does not cover)."""
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"}), timeout=NETWORK_TIMEOUT))
        except Exception as error:  # handed over to the waiting thread
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=NETWORK_TIMEOUT)
    except queue.Empty:
        raise TimeoutError(f"no answer within {NETWORK_TIMEOUT:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
