"""A signal ends a process wherever it is, in a few seconds and without a traceback."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import warm

RUN = "--dataset SAMPLE --size 8 --precision 32.32 --batch-size 16 --replication-factor 2 --limit-val-batches 2 --epochs 50".split()


def start(folder: Path, *more: str, module: list[str] | None = None, **environment: str) -> warm.Process:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    command = [*(module or ["-m", "resnet_ipu"]), *RUN, "--output-dir", "out", *more]
    pipes = {"stdout": warm.PIPE, "stderr": warm.STDOUT}
    return warm.start(command, cwd=folder, env=environment, start_new_session=True, spares=1, **pipes)


def test_a_process_that_waits_for_others_says_so_and_is_not_deaf(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    as_torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    impatient = (
        "import runpy; from lightning_ipu.loop import launcher; launcher.LONG_WAIT = 1; runpy.run_module('resnet_ipu', run_name='__main__')"
    )
    process = start(tmp_path, module=["-c", impatient], **as_torchrun, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    threading.Timer(60, process.kill).start()
    assert any(f"still waiting for all 2 processes at 127.0.0.1:{port}" in line for line in process.stdout)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143 and time.monotonic() - began < 5


def test_an_agreed_stop_of_two_processes_names_none_of_them(tmp_path):
    process = start(tmp_path, "--processes", "2", "--checkpoint-every", "2")
    begun = time.monotonic()
    while not (tmp_path / "out" / "checkpoints" / "last.ckpt").exists() and time.monotonic() - begun < 60:
        time.sleep(0.05)
    for _ in range(2):  # as from a terminal and from a launcher
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "the state is saved in" in output
    assert "and with it the run" not in output and "Traceback" not in output
