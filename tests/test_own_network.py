"""A network of one's own in ImageClassifier: any module, any number of classes; and subclasses that set one."""

import copy

import pytest
import torch
from runs import equal_states, make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import ImageClassifier

PLAIN = {"learning_rate": 0.5, "schedule": "const", "momentum": 0.0, "l2_regularization": 0.0, "channels_last": False}


def network(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))


def loader(classes: int = 3, count: int = 8) -> DataLoader:
    drawn = torch.Generator().manual_seed(1)
    images, labels = torch.randn(count, 2, 6, 6, generator=drawn), torch.randint(classes, (count,), generator=drawn)
    return DataLoader(TensorDataset(images, labels), batch_size=2)


@pytest.mark.parametrize("classes", [2, 7])
def test_any_network_trains_as_in_a_plain_loop(classes):
    trained, data = network(classes), loader(classes)
    by_hand = copy.deepcopy(trained)
    make_trainer(A=2).fit(ImageClassifier(network=trained, **PLAIN), data)
    batches = list(data)
    for first in (0, 2):
        losses = [F.cross_entropy(by_hand(images), labels) for images, labels in batches[first : first + 2]]
        gradients = torch.autograd.grad(sum(losses) / 2, list(by_hand.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(by_hand.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for name, value in by_hand.state_dict().items():
        assert torch.allclose(value, trained.state_dict()[name], atol=1e-6), name


class Tuned(ImageClassifier):
    """A subclass that is given a module under another name, and a name under the base's."""

    def __init__(self, *, network: str, head: nn.Module, width: int = 4, **training):
        super().__init__(network=nn.Sequential(nn.Flatten(), nn.Linear(72, width), head), **training)


class Setting(ImageClassifier):
    """A subclass that makes its network itself, after the base's constructor."""

    def __init__(self, *, width: int = 4, **training):
        super().__init__(**training)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(72, width))


@pytest.mark.parametrize(
    ("module", "again", "kept"),
    [
        (lambda: ImageClassifier(network=network(), learning_rate=0.5), lambda: {"network": network()}, {"learning_rate": 0.5}),
        (lambda: Tuned(network="dense", head=nn.Linear(4, 3)), lambda: {"head": nn.Linear(4, 3)}, {"network": "dense", "width": 4}),
        (lambda: Setting(width=3), dict, {"width": 3}),
    ],
    ids=["given", "given by a subclass", "set by a subclass"],
)
def test_a_checkpoint_holds_no_module_and_rebuilds_the_classifier(module, again, kept, tmp_path, recwarn):
    module = module()
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["hyper_parameters"]
    assert saved.items() >= kept.items() and not any(isinstance(value, nn.Module) for value in saved.values())
    assert ("network" in saved) == ("network" in kept)
    loaded = type(module).load_from_checkpoint(tmp_path / "run.ckpt", **again())
    assert equal_states(loaded, module) and loaded.hparams == module.hparams
    assert not [warning for warning in recwarn if "nn.Module" in str(warning.message)]


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_a_label_that_the_network_has_no_output_for_is_named(loss):
    data = DataLoader(TensorDataset(torch.zeros(2, 2, 6, 6), torch.tensor([1, 3])), batch_size=2)
    with pytest.raises(ValueError, match="a label is 3, and the network has 3 outputs: labels are 0 to 2"):
        make_trainer().fit(ImageClassifier(network=network(3), loss=loss), data)


def test_an_output_that_is_none_of_a_classifier_is_named():
    with pytest.raises(ValueError, match=r"output has shape \(2, 4, 4, 4\), and a classifier's is \[batch, classes\]"):
        make_trainer().fit(ImageClassifier(network=network()[:2]), loader())


def test_a_classifier_without_a_network_is_refused():
    with pytest.raises(ValueError, match=r"ImageClassifier has no network: give it as network=\.\.\., or call use\(network\)"):
        make_trainer().fit(ImageClassifier(), loader())


def test_a_subclass_with_a_forward_of_its_own_needs_no_network():
    class Own(ImageClassifier):
        def __init__(self):
            super().__init__(**PLAIN)
            self.dense = nn.Linear(72, 3)

        def forward(self, images):
            return self.dense(images.flatten(1))

    module = Own()
    before = module.dense.weight.clone()
    make_trainer(max_steps=1).fit(module, loader())
    assert not torch.equal(before, module.dense.weight)


def test_a_module_that_builds_its_network_takes_no_other():
    from resnet_ipu import ResNetModule

    with pytest.raises(TypeError, match="multiple values for keyword argument 'network'"):
        ResNetModule(size="8", network=network())
