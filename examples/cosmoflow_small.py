"""CosmoFlow at the size of a notebook: simulate 48 small universes, learn the four numbers that they were made with."""

import tempfile

import pytorch_lightning as pl

from cosmoflow_ipu import CosmoFlowDataModule, CosmoFlowModule
from lightning_ipu import IPUStrategy


def main(folder: str) -> None:
    pl.seed_everything(1)
    data = CosmoFlowDataModule(data_dir=folder, n_train=48, n_valid=8, micro_batch_size=4, oversample=1)  # written to the folder first
    module = CosmoFlowModule(
        network="cosmoflow-mlperf", conv_size=4, input_size=data.input_size, in_channels=data.in_channels, learning_rate=0.02
    )
    trainer = pl.Trainer(
        strategy=IPUStrategy(gradient_accumulation_factor=2),
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    print(f"data: {data.description}")
    print(
        f"mean absolute error on {data.num_validation_samples} universes: {trainer.callback_metrics['val_mae']:.3f} (a constant gets 0.5)"
    )
    for name in ("omega_m", "sigma_8", "n_s", "h_0"):
        print(f"  {name}: {trainer.callback_metrics[f'val_mae_{name}']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
