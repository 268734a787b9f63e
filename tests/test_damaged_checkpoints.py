"""A checkpoint that is damaged, or none, is named in one line, whoever reads it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Net, classes, loader, make_trainer

from lightning_ipu.files import read_checkpoint
from resnet_ipu.__main__ import main


def whole(path: Path) -> bytes:
    torch.save({"state_dict": {"weight": torch.zeros(1000)}, "global_step": 3}, path)
    return path.read_bytes()


DAMAGED = {
    "cut short": lambda path: whole(path)[:2000],
    "empty": lambda path: b"",
    "a page": lambda path: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "a text": lambda path: b"version https://git-lfs.github.com/spec/v1\n",
    "a foreign pickle": lambda path: pickle.dumps({"path": Path("x")}),
    "a plain pickle": lambda path: pickle.dumps([1, 2]),
    "zeros": lambda path: bytes(5000),
    "a flipped byte": lambda path: whole(path).replace(b"global_step", b"global\xffstep"),
    "half of an upload": lambda path: whole(path)[1000:],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_no_checkpoint_is_named(kind, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(DAMAGED[kind](path))
    with pytest.raises(ValueError, match="a.ckpt is no") as raised:
        read_checkpoint(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="a.ckpt is no"):  # as the strategy reads it
        make_trainer().fit(Net(), loader(classes(8), 4), ckpt_path=path)


def test_a_folder_a_state_dict_and_a_missing_file_are_named(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.ckpt")
    for name, words in {"weights.ckpt": "is no checkpoint of a run", "none.ckpt": "No such file", ".": "Is a directory"}.items():
        with pytest.raises(ValueError, match=words) as raised:
            read_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)


def test_a_command_reads_the_hyperparameters_that_a_run_reads(tmp_path):
    harmless = {"folder": Path("x"), "rate": np.float32(0.5), "table": np.arange(3)}
    torch.save({"state_dict": {}, "global_step": 3, "hyper_parameters": harmless}, tmp_path / "a.ckpt")
    read = read_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]
    assert read["folder"] == Path("x") and read["rate"] == np.float32(0.5) and read["table"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "words",
    [
        "validate --ckpt_path results/checkpoints/last.ckpt",
        "fit --ckpt_path results/checkpoints/last.ckpt",
        "fit --resume true",
        "validate --checkpoint_input_dir results/checkpoints",
        "average --checkpoint-input-path results",
        "fit --model.pretrained results/checkpoints/last.ckpt --model.size 18",
    ],
)
def test_every_command_names_it_in_one_line(words, command_line, tmp_path):
    path = tmp_path / "results" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(whole(path)[:2000])
    data = "" if "average" in words else " --data.dataset SAMPLE --machine.keep_freed_memory false"
    status, _, errors = command_line(main, *(words + data).split())
    lines = [line for line in errors.splitlines() if "warning" not in line]
    assert status == 2 and len(lines) == 1 and "results/checkpoints/last.ckpt is no" in lines[0], errors
