"""How fast a training set is read when nothing else is done: the command's --data-benchmark."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from cosmoflow_ipu.data import reading_rates
from lightning_ipu.command.run import CommandLine


class DataBenchmark(CommandLine):
    """The command with everything built as for training, which then reads the training set three times in a random order."""

    trains = False

    @override
    def fit(self, **arguments: Any) -> None:
        self.datamodule.prepare_data()
        print("Epoch, Bandwidth(GB/s), Samples/Second")
        for epoch, (bandwidth, rate) in enumerate(reading_rates(self.datamodule, epochs=3), start=1):
            print(f"{epoch}, {bandwidth:.3f}, {rate:.1f}", flush=True)

    @override
    def after_fit(self) -> None:
        """Nothing: nothing was trained."""
