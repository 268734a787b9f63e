"""What a script that a test starts has first: the big libraries with the garbage collector off what they brought, and an end of its time.

torchrun's workers outlive an agent that is killed because a test's time is over, so each ends itself.
"""

import gc
import signal
import sys

SECONDS = 400

if "_pytest" not in sys.modules:
    signal.alarm(SECONDS)
gc.disable()
import lightning_ipu  # noqa: E402, F401

gc.freeze()
gc.enable()
