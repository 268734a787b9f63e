"""Augmentation: of single images by (seed, epoch, index), of a micro-batch's images among each other, and never in evaluation."""

import math

import pytest
import torch
from runs import equal_states, fit, loader, make_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cifar_ipu.augment import ImageAugmentation
from cifar_ipu.data import ImageDataModule
from lightning_ipu.data.order import Share
from lightning_ipu.data.training import TrainingData
from resnet_ipu.augment import Mixing
from resnet_ipu.module import ResNetModule

EVERYTHING = {"auto_augment": "randaugment", "color_jitter": 0.4, "random_erasing": 0.5}


def picture(channels: int, size: int = 16) -> torch.Tensor:
    return torch.randint(256, (channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


# -- single images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [EVERYTHING, {"auto_augment": "trivialaugment"}], ids=["everything", "trivialaugment"])
def test_an_augmented_image_is_a_function_of_seed_epoch_and_index_and_no_stream_moves(channels, options):
    augment, image = ImageAugmentation(**options, fill=(0.5,) * channels), picture(channels)
    before = image.clone()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn = {
        place: augment(image, seed=place[0], epoch=place[1], index=place[2])
        for place in [(s, e, i) for s in (0, 1) for e in (0, 1) for i in range(8)]
    }
    assert torch.equal(torch.rand(3), expected) and torch.equal(image, before)
    assert all(result.shape == image.shape and result.dtype == torch.uint8 for result in drawn.values())
    again = ImageAugmentation(**options, fill=(0.5,) * channels)
    torch.rand(5)
    assert all(torch.equal(again(image, seed=s, epoch=e, index=i), result) for (s, e, i), result in reversed(drawn.items()))
    assert len({result.numpy().tobytes() for result in drawn.values()}) > len(drawn) // 2


def test_each_option_does_what_it_says():
    image = torch.full((3, 20, 20), 100, dtype=torch.uint8)

    def over_draws(**options) -> list[torch.Tensor]:
        augment = ImageAugmentation(**options, fill=(1.0, 0.0, 0.5))
        return [augment(image, seed=0, epoch=0, index=index) for index in range(200)]

    erased = [(result != 100).any(0).float().mean().item() for result in over_draws(random_erasing=0.25)]
    assert 30 < sum(share > 0 for share in erased) < 70 and all(share == 0 or 0.01 < share < 0.36 for share in erased)
    filled = next(result for result in over_draws(random_erasing=1.0) if (result != 100).any())
    row, column = (filled != 100).any(0).nonzero()[0].tolist()
    assert filled[:, row, column].tolist() == [255, 0, 128]
    jittered = torch.stack(over_draws(color_jitter=0.2)).float()
    assert jittered.min() >= 79 and jittered.max() <= 121 and jittered.min() < 85 and jittered.max() > 115
    assert all(torch.equal(result, image) for result in over_draws())


def parts(module: ImageDataModule, workers: int = 0) -> list[torch.Tensor]:
    """The images of the first micro-batches of epoch 1."""
    loaded = DataLoader(module._parts["train"], batch_size=8, shuffle=True, num_workers=workers)
    stream = TrainingData(loaded, seed=5, share=Share(places=range(1), per_update=1)).epoch(1, first=0, last=4)
    return [batch[0] for batch in stream]


def test_the_loader_augments_training_images_alone_whatever_workers_and_batches_are():
    module = ImageDataModule(dataset="SAMPLE", **EVERYTHING)
    plain = ImageDataModule(dataset="SAMPLE")
    ours, theirs = parts(module), parts(plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, parts(module, workers=2), strict=True))
    changed = sum((one != other).flatten(1).any(1).sum().item() for one, other in zip(ours, theirs, strict=True))
    assert changed > 24
    train = module._parts["train"]
    together = train.seeded_batch([3, 900, 7], seed=2, epoch=4)[0]
    assert all(
        torch.equal(train.seeded_batch([index], seed=2, epoch=4)[0][0], image) for index, image in zip([3, 900, 7], together, strict=True)
    )
    for part in ("validation", "test"):
        assert torch.equal(
            module._parts[part].seeded_batch([0, 1], seed=0, epoch=0)[0], plain._parts[part].seeded_batch([0, 1], seed=0, epoch=0)[0]
        )
    torch.manual_seed(0)
    first = train[3][0]
    torch.manual_seed(0)
    assert torch.equal(train[3][0], first) and not torch.equal(train[3][0], first)  # under another strategy the global stream decides


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_augment": "auto"}, "auto_augment='auto' is unknown: choose from randaugment, trivialaugment"),
        ({"randaugment_magnitude": 5}, "randaugment_magnitude=5 must lie between 0 and 30, and needs auto_augment='randaugment'"),
        ({"color_jitter": 1.5}, "color_jitter=1.5 must be above 0 and at most 1"),
        ({"random_erasing": 1.5}, "random_erasing=1.5 is a probability"),
        ({"random_erasing": 0.5, "augment": False}, "random_erasing: 0.5 makes no sense: augment is false"),
        ({"auto_augment": "randaugment", "synthetic": "host"}, "auto_augment: randaugment makes no sense: synthetic images"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ImageDataModule(**{"dataset": "SAMPLE", **options})


# -- micro-batches ------------------------------------------------------------------------------------------------------------


def test_mixed_images_are_two_images_in_the_shares_of_their_labels():
    images = torch.randn(6, 3, 9, 10).contiguous(memory_format=torch.channels_last)
    labels = torch.tensor([0, 1, 2, 3, 4, 4])
    kinds = []
    for draw in range(40):
        torch.manual_seed(draw)
        mixed, shares = Mixing(num_classes=5, mixup=0.4, cutmix=1.0)(images, labels)
        assert torch.allclose(shares.sum(1), torch.ones(6)) and shares[5, 4] == 1  # both its images are of class 4
        share = shares[0, 0].item()
        assert torch.allclose(shares[:5], share * F.one_hot(labels, 5)[:5] + (1 - share) * F.one_hot(labels.roll(1), 5)[:5], atol=1e-6)
        own, other = (mixed == images), (mixed == images.roll(1, 0))
        if torch.all(own | other):
            kinds.append("cutmix")
            assert own.float().mean().item() == pytest.approx(share, abs=1e-6)
        else:
            kinds.append("mixup")
            assert torch.allclose(mixed, share * images + (1 - share) * images.roll(1, 0), atol=1e-5)
    assert 10 < kinds.count("mixup") < 30
    with pytest.raises(ValueError, match="a micro-batch of 1 has none"):
        Mixing(num_classes=5, mixup=0.4)(images[:1], labels[:1])
    with pytest.raises(ValueError, match=r"cutmix=0.0 must be above 0"):
        Mixing(num_classes=5, cutmix=0.0)


class Logits(ResNetModule):
    """Answers every image with logit 10 for class 0 and 0 for the nine others."""

    def forward(self, images):
        logits = torch.zeros(len(images), 10)
        logits[:, 0] = 10.0
        return logits + 0 * self.network.fc.bias.sum()


def score(images: DataLoader, **options) -> dict[str, float]:
    trainer = fit(
        Logits(size="8", in_channels=1, learning_rate=1e-9, momentum=0.0, schedule="const", **options),
        images,
        images,
        num_sanity_val_steps=0,
    )
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_smoothing_and_mixing_are_of_the_training_alone_and_accuracy_counts_shares():
    right = loader(TensorDataset(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)), 4)
    smoothed = score(right, label_smoothing=0.1)
    assert smoothed["train_loss"] == pytest.approx(0.9004, abs=1e-4) and smoothed["val_loss"] == pytest.approx(0.000409, abs=1e-6)
    halves = loader(TensorDataset(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])), 4)
    plain, mixed = score(halves), score(halves, mixup=1.0)
    assert mixed["val_loss"] == plain["val_loss"] == pytest.approx(5.000409, abs=1e-5) and mixed["val_accuracy"] == 0.5
    assert mixed["train_accuracy"] == pytest.approx(0.5) == plain["train_accuracy"]  # shares a and 1 - a in turn
    assert mixed["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-6)  # cross-entropy is linear in the target
    # Every class decides for itself: both classes of a mixed image are right, of ten one is found.
    off, on, missed = math.log(2.0), math.log1p(math.exp(-10.0)), 10 + math.log1p(math.exp(-10.0))
    bce, bce_mixed = score(halves, loss="bce"), score(halves, loss="bce", cutmix=1.0)
    assert bce_mixed["val_loss"] == bce["val_loss"] == pytest.approx((on + 9 * off + missed + 9 * off) / 20, rel=1e-5)
    assert bce_mixed["train_loss"] in (pytest.approx((on + 9 * off) / 10, rel=1e-5), pytest.approx(bce["val_loss"], rel=1e-5))


def test_mixing_depends_on_the_plan_and_not_on_host_steps_recomputation_stages_or_what_was_drawn_before():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 1, 8, 8, generator=generator), torch.randint(10, (48,), generator=generator))

    def trained(**options) -> ResNetModule:
        mixing = options.pop("mixing", {"mixup": 0.4, "cutmix": 1.0})
        torch.manual_seed(7)
        module = ResNetModule(size="8", in_channels=1, image_size=8, schedule="const", **mixing)
        fit(module, loader(data, 4, shuffle=True), R=2, A=2, **options)
        return module

    reference = trained()
    assert equal_states(trained(D=3, recompute=True, pipeline_splits=["network.layer2"]), reference)
    assert not equal_states(trained(mixing={}), reference) and not equal_states(trained(seed=2), reference)
    module = ResNetModule(size="8", in_channels=1, image_size=8, schedule="const", mixup=0.2)
    with pytest.raises(ValueError, match="a micro-batch of 1 has none"):
        make_trainer().fit(module, loader(data, 1))
