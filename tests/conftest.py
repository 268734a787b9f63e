"""What every test starts from: one thread, a quiet Lightning, random streams and a seed of its own."""

import functools
import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # runs.py, for the tests in folders below


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands out the tests
    import loaded  # noqa: F401
    import pytorch_lightning  # noqa: F401 -- sets its own log level when it is imported
    import torch
    from lightning_fabric.utilities import registry

    registry.entry_points = functools.cache(registry.entry_points)  # each Trainer reads the metadata of all installed packages
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric|torch.jit")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning:pytorch_lightning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning:lightning_fabric")
    config.addinivalue_line("filterwarnings", "ignore:no checkpoint holds")  # the modules and callbacks of tests take notes


@pytest.fixture(autouse=True)
def own_seed(monkeypatch):
    """Each test has its own global seed and streams: nothing that ran before it decides its numbers."""
    import torch

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.pop("PL_SEED_WORKERS", None)


@pytest.fixture
def own_process(monkeypatch):
    """What a command sets (handlers of signals, how warnings are shown, threads) ends with the test, as with a process of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.filterwarnings("ignore", category=category)  # as Python does outside tests
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


@pytest.fixture
def command_line(own_process, tmp_path, monkeypatch, capfd):
    """Runs a command's main with arguments in an empty directory: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(main, *arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        return status, *capfd.readouterr()

    return run
