"""The big libraries, imported as the commands import them: with the garbage collector at rest and, from then on, off what they brought."""

import gc

gc.disable()
import lightning_ipu  # noqa: E402, F401

gc.freeze()
gc.enable()
