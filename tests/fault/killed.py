"""`python -m resnet_ipu` with slow writes, so that a kill can be made to fall inside a save: killed.py SECONDS [options]."""

import os
import signal
import sys
import time

signal.alarm(400)  # also where whoever started it has been killed
LIGHT_START = True  # it loads as the command does

from lightning_ipu import machine  # noqa: E402
from resnet_ipu.__main__ import main  # noqa: E402


class SlowDisk:
    """The os module with an fsync that takes its time."""

    def __getattr__(self, name):
        return getattr(os, name)

    @staticmethod
    def fsync(descriptor: int) -> None:
        time.sleep(float(sys.argv[1]))
        os.fsync(descriptor)


if __name__ == "__main__":
    machine.load("lightning_ipu.command.run")
    from lightning_ipu import files as checkpoint

    checkpoint.os = SlowDisk()
    sys.exit(main(sys.argv[2:]))
