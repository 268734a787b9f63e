"""The Lightning module that trains a ResNet or ResNeXt classifier; it runs under any Trainer and strategy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from lightning_ipu.errors import UserError, as_user_errors
from lightning_ipu.files import load
from lightning_ipu.recipe.classifier import Batch, ImageClassifier
from resnet_ipu.augment import Mixing
from resnet_ipu.networks import ToyModel, resnet

TOY_MODELS = ("toy_model", "toy_model_bn")


class ResNetModule(ImageClassifier):
    """Image classifier trained on the cross-entropy; logs train_, val_ and test_ loss and accuracy (0 to 1).

    Args:
        size: number of layers: 8, 14, 20, 32, 44, 56, 110 (CIFAR), 18, 34, 50, 101, 152 (ImageNet), x50, x101 (ResNeXt 32x4d); or
            toy_model, toy_model_bn: two small convolutions, without and with batch norms.
        num_classes: classes of the data set.
        in_channels: channels of the images.
        image_size: side of the images in pixels; chooses the stem where none is given.
        stem: cifar (3x3, stride 1, no pooling) or imagenet (7x7, stride 2, max-pooling); null is cifar up to 64 pixels.
        norm_type: batch, group or none.
        norm_groups: groups of each group norm; null is 16.
        norm_momentum: share of a micro-batch in the running statistics of batch norms; null is 0.1.
        shortcut_type: A (zero-padded) or B (1x1 convolution) where the shape changes, C (1x1 convolution everywhere); null is A
            for the CIFAR sizes and B for the others.
        zero_init_last_norm: start every block as its shortcut alone; null is true where there are norms.
        mixup: α of mixup, cutmix: α of cutmix, of the images of a micro-batch; null is none, both takes one of them in each by chance. In
            training only, whose train_accuracy then is the mean share that the predicted class has in the mixed label.
        pretrained: file with a state_dict of this network under torchvision's names, such as its .pth files; loaded key for key.
        **training: optimizer, schedule and the rest; see ``ImageClassifier``.

    Raises:
        UserError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        size: str | int = "20",
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        stem: Literal["cifar", "imagenet"] | None = None,
        norm_type: Literal["batch", "group", "none"] = "batch",
        norm_groups: int | None = None,
        norm_momentum: float | None = None,
        shortcut_type: Literal["A", "B", "C"] | None = None,
        zero_init_last_norm: bool | None = None,
        mixup: float | None = None,
        cutmix: float | None = None,
        pretrained: str | Path | None = None,
        **training: Any,
    ) -> None:
        super().__init__(network=None, **training)
        if image_size < 1:
            raise UserError(f"image_size={image_size} must be at least 1 pixel")
        if norm_momentum is not None and not 0 < norm_momentum <= 1:
            raise UserError(f"norm_momentum={norm_momentum} must be above 0 and at most 1")
        if stem is None:
            stem = "cifar" if image_size <= 64 else "imagenet"
        if zero_init_last_norm is None:
            zero_init_last_norm = norm_type != "none"
        with as_user_errors():
            if size in TOY_MODELS:
                if (norm_type, norm_groups, shortcut_type) != ("batch", None, None):
                    raise UserError(f"norm_type, norm_groups and shortcut_type mean nothing to size={size!r}: its norms are in its name")
                shape = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
                momentum = 0.1 if norm_momentum is None else norm_momentum
                network: nn.Module = ToyModel(**shape, norm=size == "toy_model_bn", norm_momentum=momentum)
            else:
                network = resnet(
                    str(size),  # YAML reads 20 as a number
                    num_classes=num_classes,
                    in_channels=in_channels,
                    stem=stem,
                    norm=norm_type,
                    norm_groups=norm_groups,
                    norm_momentum=norm_momentum,
                    shortcut_type=shortcut_type,
                    zero_init_last_norm=zero_init_last_norm,
                )
        self.use(network)
        self.pretrained = pretrained
        if pretrained is not None:
            load_pretrained(self.network, Path(pretrained))
        self._mixing = Mixing(num_classes=num_classes, mixup=mixup, cutmix=cutmix) if mixup is not None or cutmix is not None else None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch if self._mixing is None else self._mixing(*batch), batch_idx)


def load_pretrained(network: nn.Module, path: Path) -> None:
    """Load a state_dict that a network of the same names and shapes was saved with, such as torchvision's.

    Raises:
        UserError: the file cannot be read, or is not this network's; the message names it and the first keys that differ.
    """
    state = load(path, option="pretrained: ")
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        found = f"it holds {', '.join(map(str, list(state)[:4]))}" if isinstance(state, Mapping) else f"it holds a {type(state).__name__}"
        raise UserError(f"pretrained: {path} is no state_dict of tensors ({found}); a run's checkpoint is for --ckpt_path")
    own = network.state_dict()
    differing = []
    for name in dict.fromkeys([*own, *state]):
        shapes = [" x ".join(map(str, tensors[name].shape)) or "a number" if name in tensors else "missing" for tensors in (state, own)]
        counter = name.endswith("num_batches_tracked") and name not in state  # absent in files of torch before 0.4.1
        if shapes[0] != shapes[1] and not counter:
            differing.append(f"{name} ({shapes[0]} there, {shapes[1]} here)")
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UserError(
            f"pretrained: {path} is not of this network: {', '.join(differing[:3])}{more} differ; size, stem, num_classes and in_channels"
            " must be those it was trained with"
        )
    network.load_state_dict(state, strict=False)
