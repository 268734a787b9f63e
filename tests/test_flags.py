"""What false does to a flag that something else switches on: it is honoured, like everything that is given."""

import importlib

import pytest

from lightning_ipu.command import program

pytestmark = pytest.mark.usefixtures("own_process")


def settings_of(package: str, line: str) -> dict[str, str]:
    """LightningCLI's settings that a short command line comes to."""
    options, rules = (importlib.import_module(f"{package}.{name}") for name in ("options", "rules"))
    started: list[str] = []
    table = {"options": options.OPTIONS, "settle": rules.settle, "folder": options.CONFIGS, "reads_config": package != "cosmoflow_ipu"}
    start = lambda words, *, given: started.extend(words) or 0  # noqa: E731
    assert not program.main(line.split(), prog=package, description="", epilog="", start=start, others={}, **table)
    return dict(word.removeprefix("--").partition("=")[::2] for word in started)


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("resnet_ipu --precision 16.16 --prng false", "trainer.strategy.stochastic_rounding", "false"),
        ("resnet_ipu --dataset IMAGENET --eight-bit-transfer false", "data.eight_bit_transfer", "false"),
        ("resnet_ipu --half-type fp16 --precision 16.32 --auto-loss-scaling false", "trainer.strategy.loss_scaling", "1.0"),
        (
            "resnet_ipu --half-type fp16 --precision 16.32 --auto-loss-scaling false --loss-scaling 8",
            "trainer.strategy.loss_scaling",
            "8.0",
        ),
        ("resnet_ipu --clean-dir false", "clean_dir", None),
        ("cifar_ipu --recipe fast --augmentation false", "data.augment", "false"),
        ("cifar_ipu --recipe fast --no-augmentation false", "data.augment", "true"),
        ("cifar_ipu --generated-data --augmentation false", "data.augment", "false"),
        ("cosmoflow_ipu --config {config} --test false", "then_test", "false"),
        ("cosmoflow_ipu --config {config} --no-augmentation false", "data.augment", "true"),
        ("cosmoflow_ipu --config {config} --n-valid 0 --print-fom false", "data.n_valid", "0"),
    ],
)
def test_false_switches_off_what_a_default_a_recipe_or_a_configuration_switches_on(tmp_path, line, setting, value):
    config = tmp_path / "config.yaml"
    config.write_text("then_test: true\ntrainer: {max_epochs: 1}\ndata: {augment: false}\n")
    package, _, words = line.format(config=config).partition(" ")
    assert settings_of(package, words).get(setting) == value
