"""The ResNet Lightning module under a stock Trainer: learning rates, losses, metrics, options."""

import math
from typing import get_args, get_type_hints

import jsonargparse
import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu.recipe.classifier import ImageClassifier
from lightning_ipu.recipe.optimizers import LARS, OPTIMIZERS, parameter_groups
from lightning_ipu.recipe.schedules import SCHEDULES, WARMUP_MODES, cosine, linear, stepped
from resnet_ipu.module import ResNetModule
from resnet_ipu.networks import NORMS, SHORTCUT_TYPES, STEMS, resnet


def loader(samples: int, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(10, (samples,), generator=generator)), batch_size=batch_size)


def stock_trainer(**options) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=1, **{**quiet, **options})


class Recorder(pl.Callback):
    """The learning rates of every weight update, and the training metrics of every batch."""

    def __init__(self) -> None:
        self.rates, self.metrics = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.rates.append({group["lr"] for group in optimizer.param_groups})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, linear),
        (
            {"schedule": "cosine", "warmup_fraction": 0.4, "final_fraction": 0.0},
            lambda k, n: cosine(k, n, warmup_fraction=0.4, final_fraction=0.0),
        ),
        ({"schedule": "stepped"}, stepped),
        ({"schedule": "stepped", "decay_values": [1, 0.5], "decay_fractions": [0.2]}, lambda k, n: 1 if k <= 2 else 0.5),
        ({"schedule": "const"}, lambda k, n: 1.0),
        (
            {"schedule": "polynomial", "warmup_epochs": 1, "warmup_mode": "mask", "power": 1, "final_fraction": 0.0, "decay_epochs": 4},
            lambda k, n: min(1, (k + 1) / 6) * (1 - k / 20),
        ),
        ({"schedule": "exponential", "warmup_fraction": 0.0, "decay_rate": 0.9, "staircase": True}, lambda k, n: 0.9 ** (k // 5)),
    ],
)
def test_the_learning_rate_moves_with_every_weight_update_not_with_batches_or_epochs(options, factor):
    recorder = Recorder()
    trainer = stock_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=recorder)
    trainer.fit(ResNetModule(size="8", learning_rate=0.04, **options), loader(40))

    assert trainer.global_step == 10
    assert [len(rates) for rates in recorder.rates] == [1] * 10
    assert [rate for rates in recorder.rates for rate in rates] == pytest.approx([0.04 * factor(k, 10) for k in range(10)])


def test_training_on_a_few_images_lowers_the_loss_it_logs():
    torch.manual_seed(1)
    recorder = Recorder()
    stock_trainer(max_epochs=25, callbacks=recorder).fit(ResNetModule(size="8", learning_rate=0.1), loader(16, batch_size=16))

    assert recorder.metrics[0]["train_loss_step"] == pytest.approx(math.log(10), abs=0.5)
    assert recorder.metrics[-1]["train_loss_step"] < 0.7 * recorder.metrics[0]["train_loss_step"]
    assert recorder.metrics[-1]["train_accuracy_step"] > recorder.metrics[0]["train_accuracy_step"]


def test_every_parameter_of_a_subclass_is_trained_and_decays_as_the_networks_do():
    class Heated(ResNetModule):
        def __init__(self):
            super().__init__(size="8", learning_rate=0.1, momentum=0.0, schedule="const", l2_regularization=0.1)
            self.heat, self.matrix = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(2, 2))

        def forward(self, images):
            return super().forward(images) * self.heat + 0 * self.matrix.sum()

    module, (images, labels) = Heated(), next(iter(loader(4)))
    with torch.no_grad():
        logits = ResNetModule.forward(module, images)
        shares = (2 * logits).softmax(1) - F.one_hot(labels, 10)
    gradient = float((shares * logits).sum() / 4)
    stock_trainer(max_steps=1).fit(module, loader(4))
    assert float(module.heat.detach()) == pytest.approx(2 - 0.1 * gradient, abs=1e-5)
    assert module.matrix.detach().flatten().tolist() == pytest.approx([1 - 0.1 * 0.1] * 4)


def test_label_smoothing_follows_its_formula_in_training_and_is_off_in_evaluation():
    module = ResNetModule(size="8", label_smoothing=0.3, momentum=0.0, learning_rate=1e-9)
    images, labels = next(iter(loader(4)))
    with torch.no_grad():
        log_probabilities = module(images).log_softmax(1)
    nll = -log_probabilities[range(4), labels].mean()
    recorder = Recorder()
    stock_trainer(max_steps=1, callbacks=recorder).fit(module, loader(4))

    assert recorder.metrics[0]["train_loss_step"] == pytest.approx(float(0.7 * nll - 0.3 * log_probabilities.mean()), rel=1e-5)
    evaluated = stock_trainer().validate(module, loader(4), verbose=False)[0]
    with torch.no_grad():
        assert evaluated["val_loss"] == pytest.approx(float(F.cross_entropy(module.eval()(images), labels)), rel=1e-5)


def test_validation_and_test_score_every_sample_alike_and_prediction_gives_probabilities():
    module, data = ResNetModule(size="8"), loader(10)  # the last batch is short
    images, labels = data.dataset.tensors
    with torch.no_grad():
        logits = module.eval()(images)
    expected = {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float((logits.argmax(1) == labels).double().mean())}

    trainer = stock_trainer()
    for split, run in (("val", trainer.validate), ("test", trainer.test)):
        assert run(module, data, verbose=False)[0] == pytest.approx(
            {f"{split}_{name}": value for name, value in expected.items()}, rel=1e-5
        )
    for batches in (data, DataLoader(images, batch_size=4)):  # with labels, and without
        torch.testing.assert_close(torch.cat(trainer.predict(module, batches)), logits.softmax(1))
    decisions = ResNetModule(size="8", loss="bce")  # one for each class, apart from the others
    decisions.load_state_dict(module.state_dict())
    torch.testing.assert_close(torch.cat(trainer.predict(decisions, data)), 1 / (1 + (-logits).exp()))


@pytest.mark.parametrize(("autocast", "network", "expected"), [(True, torch.float32, torch.float32), (False, torch.float64, torch.float64)])
def test_the_loss_is_taken_in_at_least_32_bits(autocast, network, expected):
    module = ResNetModule(size="8").to(network)
    images = torch.randn(4, 3, 8, 8, dtype=network)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = module(images)
        probabilities = module.predict_step((images, None), 0)

    assert logits.dtype == (torch.bfloat16 if autocast else network)
    assert probabilities.dtype == expected
    torch.testing.assert_close(probabilities.sum(1), torch.ones(4, dtype=expected))


@pytest.mark.parametrize(
    ("image_size", "stem", "kernel"), [(28, None, 3), (64, None, 3), (65, None, 7), (224, None, 7), (28, "imagenet", 7), (224, "cifar", 3)]
)
def test_the_image_size_chooses_the_stem_unless_one_is_given(image_size, stem, kernel):
    assert ResNetModule(size="8", image_size=image_size, stem=stem).network.conv1.kernel_size == (kernel, kernel)


def test_channels_last_covers_network_and_images_and_changes_no_number():
    torch.manual_seed(0)
    module = ResNetModule(size="20")
    plain = ResNetModule(size="20", channels_last=False)
    plain.load_state_dict(module.state_dict())
    formats = {True: [], False: []}
    for built, seen in ((module, formats[True]), (plain, formats[False])):
        for block in (built.network.layer1, built.network.layer3[0], built.network.avgpool):
            block.register_forward_pre_hook(
                lambda _, inputs, seen=seen: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
            )
    images = torch.randn(2, 3, 16, 16)

    torch.testing.assert_close(module(images), plain(images))
    assert formats == {True: [True] * 3, False: [False] * 3}
    assert module.network.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_norms_and_biases_do_not_decay_unless_asked():
    network = resnet("50", num_classes=1000, stem="imagenet")
    torch.nn.init.ones_(network.fc.bias)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = torch.optim.SGD(parameter_groups(network, weight_decay=0.1), lr=1.0)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    moved = [not torch.equal(parameter, old) for parameter, old in zip(network.parameters(), before, strict=True)]
    assert [parameter.ndim > 1 for parameter in network.parameters()] == moved
    assert (moved.count(False), moved.count(True)) == (107, 54)
    assert [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(network, weight_decay=0.1, decay_all=True)] == [
        (161, 0.1)
    ]
    network.requires_grad_(False).fc.requires_grad_(True)
    assert [group["params"] for group in parameter_groups(network, weight_decay=0.1)] == [[network.fc.weight], [network.fc.bias]]


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "decoupled_decay": 0.0}),
        ({"momentum": 0.0, "weight_decay": 0.0}, torch.optim.SGD, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
        (
            {"momentum": 0.8, "nesterov": False, "weight_decay": 0.2, "decay_all": True},
            torch.optim.SGD,
            {"momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "decoupled_decay": 0.2},
        ),
        ({"optimizer": "adamw"}, torch.optim.Adam, {"decoupled_decay": 0.01, "weight_decay": 0.0}),
        (
            {"optimizer": "rmsprop", "l2_regularization": 0.3, "optimizer_options": {"alpha": 0.5}},
            torch.optim.RMSprop,
            {"momentum": 0, "alpha": 0.5, "weight_decay": 0.3, "decoupled_decay": 0.0},
        ),
        (
            {"optimizer": "lars", "weight_decay": 0.1, "l2_regularization": 0.2},
            LARS,
            {"momentum": 0.9, "weight_decay": 0.2, "decoupled_decay": 0.1},
        ),
    ],
)
def test_the_optimizer_is_the_one_that_the_options_describe(options, kind, expected):
    trainer = stock_trainer(max_steps=1)
    trainer.fit(ResNetModule(size="8", **options), loader(4))
    (optimizer,) = trainer.optimizers

    assert isinstance(optimizer, kind)
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected
    assert len(optimizer.param_groups) == (1 if options.get("decay_all") else 2)


def test_a_checkpoint_rebuilds_the_module_and_its_options(tmp_path):
    trainer = stock_trainer(max_steps=1)
    module = ResNetModule(size="14", norm_type="group", norm_groups=8, shortcut_type="C", schedule="stepped", decay_values=[1, 0.3, 0.1])
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = ResNetModule.load_from_checkpoint(tmp_path / "run.ckpt")
    images = torch.randn(2, 3, 8, 8)

    assert loaded.hparams == module.hparams
    assert torch.equal(loaded.eval()(images), module.eval()(images))


def test_the_signature_is_a_command_line_and_offers_every_legal_value(tmp_path):
    hints = get_type_hints(ImageClassifier.__init__) | get_type_hints(ResNetModule.__init__)
    for name, legal in (
        ("stem", STEMS),
        ("norm_type", NORMS),
        ("shortcut_type", SHORTCUT_TYPES),
        ("schedule", SCHEDULES),
        ("optimizer", OPTIMIZERS),
        ("warmup_mode", WARMUP_MODES),
    ):
        literal = hints[name] if not any(hint is type(None) for hint in get_args(hints[name])) else get_args(hints[name])[0]
        assert set(get_args(literal)) == set(legal), name

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ResNetModule, "model")
    parser.add_argument("--config", action="config")
    (tmp_path / "run.yaml").write_text("model: {size: 14, shortcut_type: B}\n")  # YAML reads 14 as a number
    for arguments in (["--config", str(tmp_path / "run.yaml")], ["--model.size=14", "--model.shortcut_type=B"]):
        built = ResNetModule(**parser.parse_args(arguments).model.as_dict())
        assert [len(stage) for stage in (built.network.layer1, built.network.layer2, built.network.layer3)] == [2, 2, 2]
        assert isinstance(built.network.layer2[0].downsample, torch.nn.Sequential)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "19"}, "size='19' is unknown"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be above 0"),
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"weight_decay": -1e-4}, "weight_decay=-0.0001 must be"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum=0.9 means nothing to optimizer='adamw'"),
        ({"optimizer": "lars", "optimizer_options": {"alpha": 0.9}}, "alpha=0.9 means nothing to optimizer='lars'"),
        ({"optimizer_options": {"weight_decay": 0.1, "lr": 1}}, "optimizer_options has lr, weight_decay: the module's own arguments"),
        ({"schedule": "const", "power": 2}, "power=2 means nothing to schedule='const'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must lie between 0 and 1"),
        ({"image_size": 0}, "image_size=0 must be"),
        ({"schedule": "step"}, "schedule='step' is unknown"),
        ({"decay_values": [1, 0.1]}, "decay_values.*means nothing to schedule='linear'"),
        ({"norm_groups": 8}, "norm_groups=8 belongs to norm='group'"),
        ({"norm_type": "none", "zero_init_last_norm": True}, "zero_init_last_norm=True needs norms"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ResNetModule(**{"size": "8", **options})


def test_a_schedule_refuses_a_run_without_an_end():
    with pytest.raises(ValueError, match="'linear' needs the length of the run"):
        stock_trainer(max_epochs=-1).fit(ResNetModule(size="8"), loader(4))
