"""Named configurations: each is read, builds and takes a weight update; what a file may hold, and what overrides what."""

import json
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from runs import QUIET
from test_cli import CONFIGS, OF_LIGHTNING, run, settled  # noqa: F401 -- fixtures

from cifar_ipu.data import ImageDataModule
from lightning_ipu import IPUStrategy
from lightning_ipu.command import configs
from lightning_ipu.command.parser import build_parser, parse
from lightning_ipu.precision.names import lightning_precision
from resnet_ipu import __main__ as command
from resnet_ipu import keras_names, networks, options
from resnet_ipu.module import ResNetModule

pytestmark = pytest.mark.usefixtures("own_process")

NAMED = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path not in OF_LIGHTNING)
FEWER = ["--micro-batch-size", "2", "--synthetic-data", "host", "--validation-micro-batch-size", "2"]
# What the originals' tables say: samples of a weight update, peak learning rate.
FACTS = {
    "resnet8_test": (8, 0.0008),
    "resnet8_test_lars": (8, 0.001),
    "resnet8_16ipus_bn": (2000, 0.244),
    "resnet8_16ipus_bn_dbn": (2000, 0.244),
    "resnet50_16ipus_16k_bn_pipeline": (16384, 2.0),
    "resnet50_16ipus_8k_bn_pipeline": (8192, 1.0),
    "resnet50_16ipus_8k_gn_pipeline": (8192, 1.0),
    "resnet56_16ipus_8k_bn_pipeline": (8192, 1.0),
    "resnet50_mlperf_bs16": (2304, 4.588),
    "resnet50_mlperf_pod16_bs20": (1920, 3.823),
    "resnet50_mlperf_pod4_bs20": (480, 0.956),
    "mresnet50_on1ipu_pod16": (1536, 3.0587),
    "resnet50_mlperf_pod16_lars": (3456, 10.525),  # 3,520 is rounded
    "resnet50": (16416, 2.0),
    "resnet50-pod4": (16416, 2.0),
    "resnet50-pod64": (16128, 2.0),
}


def options_of(name: str, *words: str) -> dict:
    """The options of a named configuration under those of a command line."""
    parser = build_parser(prog="resnet_ipu", description="", epilog="", options=command.OPTIONS, version=str)
    given = parse(words, parser=parser, options=command.OPTIONS)
    return configs.overlay(configs.read(name, folder=CONFIGS, options=command.OPTIONS, prog="resnet_ipu"), given, command.OPTIONS)


def settings_of(name: str, *words: str) -> dict:
    """LightningCLI's settings, values as they are read back."""
    lines = [line.removeprefix("--").split("=", 1) for line in command.settle(options_of(name, *words))]
    return {key: value if key in ("model.size", "precision", "events.checkpoints") else _read(value) for key, value in lines}


def _read(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def part(settings: dict, prefix: str) -> dict:
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def test_every_configuration_of_the_originals_is_there():
    infer = {f"resnet50_infer_{which}" for which in ("base", "bs1", "bs16", "bs32", "test")}
    assert set(NAMED) == set(FACTS) | infer


@pytest.mark.parametrize("name", FACTS)
def test_a_configuration_has_the_numbers_of_its_original(name, capsys):
    settings = settings_of(name, "--synthetic-data", "host")
    plan = part(settings, "trainer.strategy.")
    samples, rate = FACTS[name]
    micro_batches = plan["replication_factor"] * plan["gradient_accumulation_factor"]
    assert settings["data.micro_batch_size"] * micro_batches == samples
    assert settings["model.learning_rate"] == pytest.approx(rate, rel=1e-3)
    assert ("3456" in capsys.readouterr().err) == (name == "resnet50_mlperf_pod16_lars")


@pytest.mark.parametrize("name", NAMED)
def test_a_configuration_builds_and_takes_a_weight_update(name):
    few = [] if "infer" in name else ["--gradient-accumulation-factor", "1"]
    few += [] if name == "resnet8_16ipus_bn_dbn" else ["--replication-factor", "2"]
    settings = settings_of(name, *FEWER, *few)
    options = part(settings, "data.")
    options |= {"synthetic_samples": 132, "validation_split": 4}
    if "resnet8" not in name:
        options |= {"synthetic_image_size": 32}
    data = ImageDataModule(**options)
    shape = {"num_classes": data.num_classes, "in_channels": 3, "image_size": data.image_size}
    torch.manual_seed(0)
    module = ResNetModule(**part(settings, "model."), **shape)
    before = module.network.fc.weight.clone()
    strategy = IPUStrategy(**part(settings, "trainer.strategy."))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision=lightning_precision(settings["precision"], "bf16"),
        max_epochs=settings.get("trainer.max_epochs"),
        max_steps=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **QUIET,
    )
    if "infer" in name:
        scores = trainer.validate(module, data, verbose=False)[0]
        assert 0 <= scores["val_accuracy"] <= 1
    else:
        trainer.fit(module, data)
        assert trainer.global_step == 1 and not torch.equal(module.network.fc.weight.float(), before.float())
    layers = {"resnet8": 8, "resnet56": 56, "resnet50": 50}[re.search(r"resnet\d+", name)[0]]
    convolutions = sum(isinstance(part, torch.nn.Conv2d) and "downsample" not in name for name, part in module.network.named_modules())
    assert convolutions == layers - 1  # no depth was left out to be quick


def test_the_command_runs_one_and_lists_what_has_no_effect(run):  # noqa: F811
    line = ["--config", "resnet8_16ipus_bn_dbn", "--synthetic-data", "host", "--micro-batch-size", "2", "--global-batch-size", "64"]
    status, output, errors = run(*line, "--max-steps", "1", "--limit-val-batches", "1", "--precision", "32.32")
    words = re.sub(r"[\s│]+", " ", output)
    assert status == 0, errors
    assert "no effect here half-partials, accelerator-side-preprocess (ipu_hardware)" in words
    assert "batch norms over groups of 16 replicas, carried out as one replica with the group's samples" in words
    assert "micro-batch 32 " in words and "global batch 64 samples" in words
    status, output, errors = run("--config", "resnet50_infer_test", "--synthetic-data", "host")
    assert status == 0 and "warning: validate without --ckpt_path: the weights are RANDOM" in errors
    assert "no effect here: half-partials, available-memory-proportion [20]" in output
    few = ["--micro-batch-size", "2", "--global-batch-size", "16", "--max-steps", "1", "--validation", "false"]
    status, output, errors = run("--config", "resnet50_16ipus_8k_bn_pipeline", "--synthetic-data", "host", "--device", "cpu", *few)
    words = re.sub(r"[\s│]+", " ", output)
    assert status == 0 and "image size 32 pixels; 224 on a GPU, 32 on a CPU" in words, errors
    assert "images 1,281,167 to train on, 50,000 to validate on" in words and "stages S 4 (16 virtual IPUs)" in words


# -- files --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("micro-batch-sise: 8", "unknown key 'micro-batch-sise'; did you mean micro-batch-size?"),
        ("micro-batch-size: many", "micro-batch-size: 'many' must be a whole number above 0"),
        ("recompute: 3", "recompute: 3 must be true or false"),
        ("size: 21", "size: '21' is not known; known are 8, 14"),
        ("fp-exceptions: true", "fp-exceptions: an IPU's floating-point exceptions do not exist here"),
        ("resume: true", "unknown key 'resume'"),
        ("size: 20\nmodel-name: resnet50", "model-name: --size is given twice"),
        ("- size", "must hold one option a line, such as `epochs: 30`, not a list"),
        ("size: ]", 'mine.yaml is not a YAML file: .*"mine.yaml", line 1, column 7'),
        ("base: resnet_nowhere", "--config resnet_nowhere: there is no such file, and the package has mresnet50_on1ipu_pod16, resnet50, "),
        ("base: mine", "base: .* leads back to itself"),
        ("norm-layer: {name: layer_norm}", "norm-layer: name: 'layer_norm' is not known; known are custom_batch_norm"),
        ("norm-layer: {name: group_norm}", "norm-layer: group_norm needs num_groups"),
        ("norm-layer: {name: group_norm, channels_per_group: 4}", "channels_per_group: all norms here have the same number of groups"),
        ("ipu_hardware: {half-partial: true}", "ipu_hardware: unknown key 'half-partial'; did you mean half-partials?"),
        ("ipu_hardware: {half-partials: 1}", "ipu_hardware: half-partials: 1 must be true or false"),
        ("ipu_hardware: {prefetch-depth: -1}", "prefetch-depth: -1 must be a whole number of at least 0"),
        ("ipu_hardware: {available-memory-proportion: [15, 15]}", "has 2 values and must have 1 value, as there is one stage"),
        (
            "pipeline-splits: conv2_block1_out\nipu_hardware: {available-memory-proportion: [15, 15, 15]}",
            r"has 3 values and must have 1 or 4 values \(two for each of the 2 stages\)",
        ),
        ("ipu_hardware: {available-memory-proportion: 150}", "available-memory-proportion: 150 must be a percentage above 0"),
        ("ipu_hardware: {device-mapping: [0, 1]}", "device-mapping places 2 stages, but pipeline-splits makes 1"),
        ("pipeline-splits: a\nipu_hardware: {device-mapping: [0, 2]}", r"device-mapping \[0, 2\] must use IPUs 0 to 1, leaving none out"),
        ("ipu_hardware: {fused-preprocessing: true}", "fused-preprocessing needs accelerator-side-preprocess: true"),
        ("ipu_hardware: 3", "ipu_hardware: must be a section of settings"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_line(run, text, message):  # noqa: F811
    Path("mine.yaml").write_text(text)
    status, output, errors = run("--config", "mine.yaml")
    assert status == 2 and output == "" and errors.count("\n") == 1
    assert re.match(f"resnet_ipu: error: .*{message}", errors), errors


def test_a_name_that_is_near_is_offered_and_lightnings_layout_is_sent_on(run):  # noqa: F811
    assert "did you mean resnet8_16ipus_bn?" in run("--config", "resnet8_16ipu_bn")[2]
    assert re.search(r"is laid out for LightningCLI: python -m resnet_ipu fit --config \S+", run("--config", "resnet20_cifar10")[2])


def test_the_command_line_goes_before_the_file_and_the_file_before_its_base_and_the_defaults(tmp_path):
    base, file = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text(
        "size: 8\nbatch-size: 64\nrecompute: true\nglobal-batch-size: 512\nlearning-rate: 0.5\nipu_hardware: {half-partials: true}"
    )
    file.write_text("base: base\nsize: 14\nlearning-rate: null\nipu_hardware: {prefetch-depth: 3}")
    options = options_of(
        str(file), "--epochs", "4", "--gradient-accumulation-factor", "3", "--micro-batch-size", "16", "--recompute", "false"
    )
    assert options == {
        "size": "14",
        "epochs": 4,
        "gradient_accumulation_factor": 3,  # in place of the file's --global-batch-size, which it excludes
        "micro_batch_size": 16,  # and of its --batch-size
        "recompute": False,
        "ipu_hardware": {"half-partials": True, "prefetch-depth": 3},
    }


def test_a_run_by_a_configuration_is_resumed_without_it(run):  # noqa: F811
    Path("mine.yaml").write_text(
        "dataset: sample\nsize: 8\nprecision: '32.32'\nlimit-train-batches: 2\nvalidation: false\nrecompute: true\nepochs: 1"
    )
    assert run("--config", "mine.yaml", "--recompute", "false")[0] == 0
    Path("mine.yaml").unlink()
    status, output, errors = run("--resume", "--epochs", "2")
    assert status == 0 and "goes on after weight update 2" in output and "resuming with --epochs 2 in place of 1" in errors


# -- options that change numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--global-batch-size 64 --gradient-accumulation-factor 2", "--global-batch-size and --gradient-accumulation-factor exclude"),
        ("--replication-factor 4 --dbn-replica-group-size 3", "--dbn-replica-group-size 3 must divide --replication-factor 4: 1, 2, 4"),
        (
            "--replication-factor 2 --dbn-replica-group-size 2 --norm-type group",
            "--dbn-replica-group-size 2 shares .* --norm-type group has",
        ),
        ("--norm-momentum 1", "--norm-momentum 1 must be below 1"),
        ("--initial-learning-rate 1 --learning-rate 1", "--initial-learning-rate and --learning-rate exclude each other"),
        (
            "--pipeline-splits conv6_block1_out --size 50",
            "--pipeline-splits conv6_block1_out: there is no such block; there are conv2_block1",
        ),
        ("--pipeline-splits conv2_block1_4_conv --size 50", "conv2_block1_4_conv: block 1 of conv2 has no such layer"),
        ("--model-name resnet21", "--size: 'resnet21' is not known; known are 8"),
        ("--logs-per-epoch -1", "--logs-per-epoch: '-1' must be a number of at least 0 or a fraction"),
        ("--ckpts-per-epoch a/b", "--ckpts-per-epoch: 'a/b' must be a number of at least 0 or a fraction"),
        ("--first-ckpt-epoch -1", "--first-ckpt-epoch: '-1' must be a number of at least 0"),
        ("--first-ckpt-epoch 2", "--first-ckpt-epoch 2 needs --ckpts-per-epoch"),
        ("--logs-per-epoch 2 --steps-per-log 3", "--logs-per-epoch and --steps-per-log exclude each other"),
        ("--training maybe", "--training: 'maybe' must be true or false"),
        ("--training false --validation false", "--training false and --validation false leave nothing to do"),
        ("--training false --resume", "--resume belongs to a training, and --training is false"),
        ("--validation false --checkpoint-input-dir d", "--checkpoint-input-dir needs validation, which is off"),
        ("--clean-dir", "--clean-dir deletes what --ckpts-per-epoch has kept"),
        ("--image-size 64", "--image-size means nothing for --dataset CIFAR-10: it belongs to --dataset IMAGENET"),
        ("--dataset imagenet --synthetic-data host --fast-decode", "--fast-decode means nothing .* made-up images have none of its files"),
        ("--weight-updates-per-epoch 2 --limit-train-batches 3", "--weight-updates-per-epoch and --limit-train-batches exclude each other"),
        ("--norm-layer {name:x", "--norm-layer: '{name:x' must be a dictionary"),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(run, line, message):  # noqa: F811
    status, output, errors = run(*line.split())
    assert status == 2 and output == "" and errors.count("\n") == 1
    assert re.match(f"resnet_ipu: error: .*{message}", errors), errors


def test_the_global_batch_gives_the_accumulation_rounded_with_a_warning(capsys):
    def accumulation(batch: str) -> str:
        return settled("--micro-batch-size", "3", "--num-replicas", "2", "--global-batch-size", batch)[
            "trainer.strategy.gradient_accumulation_factor"
        ]

    assert accumulation("12") == "2" and capsys.readouterr().err == ""
    assert accumulation("10") == "2"
    assert "--global-batch-size 10 is no multiple of micro-batch 3 x replicas 2: with A = 2 it is 12" in capsys.readouterr().err
    assert accumulation("1") == "1"


def test_updates_per_epoch_and_the_initial_learning_rate_count_weight_updates():
    settings = settled(*"--micro-batch-size 4 --num-replicas 2 --gradient-accumulation-count 3 --weight-updates-per-epoch 5".split())
    assert settings["trainer.limit_train_batches"] == "30"
    settings = settled(*"--micro-batch-size 4 --num-replicas 2 --gradient-accumulation-count 3 --initial-learning-rate 0.01".split())
    assert float(settings["model.learning_rate"]) == pytest.approx(0.24)


def batch_norm_run(*words: str, momentum_only: bool = False):
    """Gradient and statistics of a batch norm after one weight update of 16 samples under the options' plan."""
    settings = settled("--norm-type", "batch", *words)
    plan = {key.removeprefix("trainer.strategy."): json.loads(value) for key, value in settings.items() if key.endswith("_factor")}
    momentum = float(settings.get("model.norm_momentum", 0.1))

    class Normed(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3, momentum=momentum)

        def training_step(self, batch, batch_idx):
            return (self.norm(batch[0]) ** 3).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Normed().double()
    x = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 + 1
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=int(settings["data.micro_batch_size"]))
    trainer = pl.Trainer(strategy=IPUStrategy(**plan), accelerator="cpu", precision="64-true", max_epochs=1, **QUIET)
    trainer.fit(module, loader)
    return module.norm, x


def test_batch_norms_over_a_group_of_replicas_are_those_of_the_groups_samples():
    words = "--micro-batch-size 2 --num-replicas 4 --gradient-accumulation-count 2".split()
    alone, _ = batch_norm_run(*words)
    norm, x = batch_norm_run(*words, "--dbn-replica-group-size", "2")
    # By hand: two groups, each of two replicas x micro-batch 2, on two micro-batches in turn.
    statistics, gradient = torch.zeros(2, 2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for group in range(2):
        mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        for k in range(2):
            samples = x[8 * group + 4 * k : 8 * group + 4 * k + 4]
            normed = (samples - samples.mean(0)) / (samples.var(0, unbiased=False) + 1e-5).sqrt()
            gradient += (3 * normed**3).mean(0) / 3 / 4  # of the mean of (w n)^3 by w, at w = 1
            mean, variance = 0.9 * mean + 0.1 * samples.mean(0), 0.9 * variance + 0.1 * samples.var(0)
        statistics[group] = torch.stack([mean, variance])
    torch.testing.assert_close(norm.weight.detach(), 1 - gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([norm.running_mean, norm.running_var]), statistics.mean(0), rtol=0, atol=1e-12)
    assert not torch.allclose(alone.weight, norm.weight)


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_the_norm_momentum_is_what_a_weight_update_keeps_however_many_micro_batches_it_has(accumulation):
    words = ["--micro-batch-size", str(16 // accumulation), "--gradient-accumulation-count", str(accumulation), "--norm-momentum", "0.75"]
    norm, x = batch_norm_run(*words)
    weights = [0.75 ** (1 - (k + 1) / accumulation) * (1 - 0.75 ** (1 / accumulation)) for k in range(accumulation)]
    means = [part.mean(0) for part in x.chunk(accumulation)]
    torch.testing.assert_close(
        norm.running_mean, sum(weight * mean for weight, mean in zip(weights, means, strict=True)), atol=1e-12, rtol=0
    )
    assert sum(weights) == pytest.approx(0.25)


def test_a_norm_layer_is_what_the_original_means_by_it():
    def settings(layer: str) -> dict:
        return settled("--norm-layer", layer, "--gradient-accumulation-count", "4")

    assert float(settings("{name: custom_batch_norm}")["model.norm_momentum"]) == pytest.approx(1 - 0.97**0.25)
    assert float(settings("{name: batch_norm}")["model.norm_momentum"]) == pytest.approx(0.01)
    group = settings("{name: group_norm, num_groups: 8}")
    assert (group["model.norm_type"], group["model.norm_groups"]) == ("group", "8")


# -- layers of the original and toy models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*options.CIFAR_SIZES, *options.IMAGENET_SIZES])
def test_layers_of_the_original_begin_stages_at_submodules(size):
    network = networks.resnet(size, num_classes=10) if size in ("8", "18", "50") else None
    assert keras_names.blocks_of(size) == networks._TABLE[size].blocks
    if network is None:
        return
    modules = {f"network.{name}" for name, _ in network.named_modules()}
    last = len(keras_names.blocks_of(size))
    cifar = size == "8"
    inner = (
        ["layer1_conv", "layer1_bn", "layer1_relu", "layer2_conv", "layer2_bn"] if cifar else ["1_conv", "1_bn", "1_relu", "2_conv", "2_bn"]
    )
    for stack, count in enumerate(keras_names.blocks_of(size), start=2):
        for block in range(1, count + 1):
            for piece in [*inner, "add", "out", "post_addition_relu"]:
                assert keras_names.module_name(f"conv{stack}_block{block}_{piece}", size) in modules, piece
    assert keras_names.module_name(f"conv{last + 1}_block{keras_names.blocks_of(size)[-1]}_out", size) == "network.avgpool"
    for layer in ("conv1_bn", "conv1_relu", "pool1_pool", "avg_pool", "predictions"):
        assert keras_names.module_name(layer, size) in modules
    assert keras_names.module_name("network.layer2", size) is None


def test_the_splits_of_the_pipelines_are_blocks():
    splits = settings_of("resnet50_16ipus_8k_bn_pipeline", "--synthetic-data", "host")["trainer.strategy.pipeline_splits"]
    assert splits == ["network.layer1.2", "network.layer2.1", "network.layer3.2"]
    splits = settings_of("resnet56_16ipus_8k_bn_pipeline", "--synthetic-data", "host")["trainer.strategy.pipeline_splits"]
    assert splits == ["network.layer1.4", "network.layer1.7", "network.layer2.4"]


@pytest.mark.parametrize(("size", "parameters"), [("toy_model", 242), ("toy_model_bn", 266)])
def test_toy_models_have_the_originals_parameters_and_run(size, parameters):
    module = ResNetModule(size=size)
    assert sum(parameter.numel() for parameter in module.network.parameters()) == parameters
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert ResNetModule(size=size, in_channels=1, image_size=28)(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match="image_size=26 is too small for a toy model: it must be at least 27"):
        ResNetModule(size=size, image_size=26)
    with pytest.raises(ValueError, match="mean nothing to size='toy_model"):
        ResNetModule(size=size, norm_type="group")
