"""torchvision's weights in our networks: loaded key for key, validated alike, refused by name where they do not fit."""

from pathlib import Path

import pytest
import torch
import torchvision
from runs import loader, make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resnet_ipu.module import ResNetModule

OPTIONS = {"num_classes": 1000, "image_size": 224}


def published(path: Path, name: str = "resnet18") -> nn.Module:
    """A torchvision model whose weights and statistics are of no initialisation, and its .pth file."""
    generator = torch.Generator().manual_seed(0)
    model = torchvision.models.get_model(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
    torch.save(model.state_dict(), path)
    return model.eval()


def test_validation_with_a_torchvision_file_gives_what_torchvisions_own_model_gives(tmp_path):
    model = published(tmp_path / "weights.pth", "resnext50_32x4d")
    images = torch.randn(12, 3, 33, 33, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = torch.cat([model(image[None]) for image in images])
    labels = torch.where(torch.arange(12) % 3 > 0, logits.argmax(1), 7)  # two of three are right
    trainer = make_trainer(R=2)
    scores = trainer.validate(
        ResNetModule(size="x50", pretrained=tmp_path / "weights.pth", **OPTIONS), loader(TensorDataset(images, labels), 5), verbose=False
    )[0]
    assert scores["val_accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=1e-7)
    assert scores["val_loss"] == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-5)


def test_what_does_not_fit_is_refused_with_the_first_keys_that_differ(tmp_path):
    state = published(tmp_path / "weights.pth").state_dict()

    def refusal(content: object = None, **options) -> str:
        path = tmp_path / "weights.pth"
        if content is not None:
            path = tmp_path / "other.pth"
            torch.save(content, path)
        with pytest.raises(ValueError) as error:
            ResNetModule(**{"size": "18", "pretrained": path, **OPTIONS, **options})
        assert str(path) in str(error.value)
        return str(error.value)

    assert "fc.weight (1000 x 512 there, 10 x 512 here), fc.bias (1000 there, 10 here) differ" in refusal(num_classes=10)
    assert "conv1.weight (64 x 3 x 7 x 7 there, 64 x 1 x 3 x 3 here)" in refusal(in_channels=1, image_size=28)
    assert "layer1.2.conv1.weight (missing there, 64 x 64 x 3 x 3 here)" in refusal(size="34")
    assert "extra (4 there, missing here) differ" in refusal({**state, "extra": torch.zeros(4)})
    assert "is no state_dict of tensors (it holds model, epoch)" in refusal({"model": state, "epoch": 3})
    (tmp_path / "half.pth").write_bytes((tmp_path / "weights.pth").read_bytes()[:1000])
    with pytest.raises(
        ValueError, match="pretrained: .*half.pth is not a complete file of torch.save: it is cut off, damaged or another kind of file"
    ):
        ResNetModule(size="18", pretrained=tmp_path / "half.pth", **OPTIONS)
    with pytest.raises(ValueError, match="none.pth cannot be read: No such file"):
        ResNetModule(size="18", pretrained=tmp_path / "none.pth", **OPTIONS)
    older = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}  # as torchvision's first files
    torch.save(older, tmp_path / "older.pth")
    assert torch.equal(ResNetModule(size="18", pretrained=tmp_path / "older.pth", **OPTIONS).network.fc.bias, state["fc.bias"])


def test_a_checkpoint_does_not_need_the_file_that_its_run_started_from(tmp_path):
    published(tmp_path / "weights.pth")
    module = ResNetModule(size="18", pretrained=tmp_path / "weights.pth", **OPTIONS)
    trainer = make_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "weights.pth").unlink()
    loaded = ResNetModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert torch.equal(loaded.network.fc.bias, module.network.fc.bias)
