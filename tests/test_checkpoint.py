"""A checkpoint file is written whole or not at all, and holds nothing but plain names."""

import multiprocessing
import os
import resource
import signal
import time

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from runs import Net, blocks, classes, fit, loader, make_trainer

from lightning_ipu.files import atomic_write
from lightning_ipu.loop.checkpoint_io import AtomicCheckpointIO


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_previous_file_and_names_it(tmp_path):
    target, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"weights": torch.zeros(3)}, target)
    before = target.read_bytes()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # a disk that is full after a megabyte
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            io.save_checkpoint({"weights": torch.ones(1 << 20)}, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(target) in str(raised.value)
    assert files(tmp_path) == ["last.ckpt"] and target.read_bytes() == before


def test_a_kill_in_the_middle_of_a_write_leaves_the_previous_file(tmp_path):
    target = tmp_path / "last.ckpt"
    with atomic_write(target) as file:
        file.write(b"whole")

    def write_slowly(begun) -> None:
        with atomic_write(target) as file:
            file.write(b"half")
            file.flush()
            begun.set()
            time.sleep(60)

    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    process = fork.Process(target=write_slowly, args=(begun,))
    process.start()
    assert begun.wait(30)
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL and target.read_bytes() == b"whole"
    left = [name for name in files(tmp_path) if name != "last.ckpt"]
    assert len(left) == 1 and left[0].startswith(".last.ckpt.") and left[0].endswith(".part")

    with atomic_write(target) as file:  # what a kill has left behind is no obstacle
        file.write(b"next")
    assert target.read_bytes() == b"next"


def test_any_error_while_writing_leaves_nothing_behind(tmp_path):
    target = tmp_path / "new" / "a.ckpt"
    for error in (KeyboardInterrupt(), RuntimeError("x"), OSError(28, "No space left on device")):
        with pytest.raises(type(error)) as raised, atomic_write(target) as file:
            file.write(b"half")
            raise error
        if isinstance(error, OSError):
            assert str(target) in str(raised.value) and raised.value.errno == 28
        assert files(tmp_path / "new") == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), atomic_write(tmp_path / "file" / "a.ckpt"):
        pass


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_rights_that_any_new_file_would_have(tmp_path, mask):
    previous = os.umask(mask)
    try:
        with atomic_write(tmp_path / "a") as file:
            file.write(b"x")
        (tmp_path / "b").write_bytes(b"x")
    finally:
        os.umask(previous)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_link_gives_way_and_the_checkpoint_it_pointed_to_stays(tmp_path):
    (tmp_path / "epoch=1.ckpt").write_bytes(b"old")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=1.ckpt")
    with atomic_write(tmp_path / "last.ckpt") as file:
        file.write(b"new")
    assert (tmp_path / "last.ckpt").read_bytes() == b"new" and (tmp_path / "epoch=1.ckpt").read_bytes() == b"old"


@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 2, "D": 4, "recompute": True, "pipeline_splits": ["network.1"]}], ids=str)
def test_a_checkpoint_holds_plain_names_and_loads_in_plain_torch_and_under_any_plan(plan, tmp_path):
    module = Net(lambda: blocks(norm=True))
    trainer = fit(module, loader(classes(32), 2), **plan)
    trainer.save_checkpoint(tmp_path / "a.ckpt")  # after the fit, when the engine is gone
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)

    assert list(checkpoint["state_dict"]) == list(Net(lambda: blocks(norm=True)).state_dict())
    plain = Net(lambda: blocks(norm=True))
    plain.load_state_dict(checkpoint["state_dict"])
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())
    stock = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    other = make_trainer(R=4, num_stages=2)
    values = [
        one.validate(Net(lambda: blocks(norm=True)), loader(classes(9), 4), ckpt_path=tmp_path / "a.ckpt", verbose=False)[0]["val_loss"]
        for one in (stock, other)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("given", [None, TorchCheckpointIO(), AsyncCheckpointIO()], ids=["default", "own", "wrapper"])
def test_the_users_checkpoint_io_is_kept_and_a_wrapper_wraps_atomic_writes(given, tmp_path):
    trainer = fit(Net(), loader(classes(8), 4), plugins=given)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    io = trainer.strategy.checkpoint_io
    if given is None:
        assert type(io) is AtomicCheckpointIO
    else:
        assert io is given
    if isinstance(given, AsyncCheckpointIO):
        assert type(io.checkpoint_io) is AtomicCheckpointIO
        io.teardown()
    for _ in range(100):
        if (tmp_path / "a.ckpt").exists():
            break
        time.sleep(0.05)
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2
