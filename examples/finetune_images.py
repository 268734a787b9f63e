"""Fine-tune a network of torchvision's on your own images: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg.

    python examples/finetune_images.py DIR resnet18-f37072fd.pth

Without DIR it makes a folder of generated images; without the file of weights the network starts from random ones.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
import torchvision
from PIL import Image

from lightning_ipu import ImageClassifier, IPUStrategy
from resnet_ipu import ImageNetDataModule


def generate(folder: Path) -> None:
    """Images of noise in two hues."""
    random = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 16)):
        for name, hue in (("blue", (0.3, 0.3, 1)), ("red", (1, 0.3, 0.3))):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                image = random.uniform(0, 255, (64, 64, 1)) * hue
                Image.fromarray(image.astype(np.uint8)).save(folder / split / name / f"{number}.png")


def main(folder: Path, weights: str | None = None, *, image_size: int = 224) -> None:
    pl.seed_everything(1)
    data = ImageNetDataModule(data_dir=folder, micro_batch_size=4, image_size=image_size)  # random crops, mirrored
    network = torchvision.models.resnet18()
    if weights is not None:
        network.load_state_dict(torch.load(weights, weights_only=True))
    network.fc = torch.nn.Linear(network.fc.in_features, data.num_classes)
    module = ImageClassifier(network=network, optimizer="adamw", learning_rate=1e-3, schedule="cosine", warmup_fraction=0.1)
    trainer = pl.Trainer(
        strategy=IPUStrategy(gradient_accumulation_factor=2),
        max_epochs=3,
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    print(f"classes: {data.class_summary}")
    print(f"accuracy on {data.num_validation_samples} validation images: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *sys.argv[2:3])
    else:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            main(Path(folder), image_size=32)
