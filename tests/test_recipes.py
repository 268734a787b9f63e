"""Recipes against their sources: learning rates by the sources' own formulas, with points worked out by hand; plans and colours."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from image_tree import make_tree
from test_named_configs import part, settings_of
from torchvision.transforms import v2

import resnet_ipu
from lightning_ipu.recipe.schedules import build_schedule
from resnet_ipu.data import ImageNetDataModule

IMAGES, CUBES = 1_281_167, 524_288  # to train on in ImageNet and in CosmoFlow's second data set
SCHEDULE_OPTIONS = ("final_fraction", "power", "decay_rate", "decay_values", "decay_fractions", "decay_at_epochs", "staircase")
SCHEDULE_OPTIONS += ("warmup_fraction", "warmup_epochs", "warmup_start", "warmup_mode", "decay_fraction", "decay_epochs")


def recipe(path: str) -> dict:
    return yaml.safe_load((Path(resnet_ipu.__file__).parents[1] / path).read_text())


def rate_of(model: dict, *, epochs: int, updates: int):
    """The learning rate as a function of the weight update, for a module's options and epochs of so many updates."""
    options = {name: model[name] for name in SCHEDULE_OPTIONS if model.get(name) is not None}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=model["learning_rate"])
    schedule = build_schedule(optimizer, model.get("schedule", "linear"), total=epochs * updates, updates_per_epoch=updates, **options)
    return lambda k: model["learning_rate"] * schedule.lr_lambdas[0](k)


# -- the sources' formulas ----------------------------------------------------------------------------------------------------------


def graphcore_tensorflow(k, *, peak, w, shape, warm, mode="shift", staircase=False):
    """Its decorators around a schedule of the weight update: a staircase, in it the warm-up, in that the decay."""
    k = k // w * w if staircase else k
    warm = int(warm * w)
    if k >= warm:
        return peak * shape(k - warm if mode == "shift" else k)
    return peak * shape(0 if mode == "shift" else k) * (k + 1) / (warm + 1)


def keras_polynomial(*, steps, end, power):
    return lambda s: (1 - end) * (1 - min(s, steps) / steps) ** power + end


def half_cosine(*, steps):
    return lambda s: 0.5 * (1 + math.cos(math.pi * min(s, steps) / steps))


def torchvision_v2(epoch):
    """LinearLR from 0.01 over 5 epochs, then CosineAnnealingLR over 595, both stepped after every epoch."""
    return 0.5 * (0.01 + 0.99 * epoch / 5 if epoch < 5 else 0.5 * (1 + math.cos(math.pi * (epoch - 5) / 595)))


def mlperf_cosmoflow(epoch):
    """With batch size 64, the base batch size, the peak is the base rate; the latest decay whose epoch is below this one counts."""
    factor = 1.0
    for start, value in {16: 0.25, 32: 0.125}.items():
        if start < epoch:
            factor = value
    return 0.001 * factor


W_SGD, W_LARS, W_8K, W_16K, W_V1, W_V2, W_A3, W_PYTORCH = (IMAGES // batch for batch in (1920, 3456, 8192, 16384, 256, 1024, 2048, 16416))
W_COSMO = CUBES // 64  # 8,192
TF2_8K = {"peak": 1.0, "w": W_8K, "warm": 5, "mode": "mask", "staircase": True}
CURVES = {
    # recipe: epochs, updates of one, formula of the update, points worked out by hand
    "resnet_ipu/configs/resnet50_mlperf_sgd.yaml": (
        40,
        667,
        lambda k: graphcore_tensorflow(k, peak=3.8233333, w=667, shape=keras_polynomial(steps=39 * 667, end=2.18e-5, power=2), warm=5),
        {0: 0.00114608, 1667: 1.91166665, 3335: 3.8233333, 26679: 0.040332},  # the last: (2,669 / 26,013)^2 = 0.0105273 of the peak
    ),
    "resnet_ipu/configs/resnet50_mlperf_lars.yaml": (
        38,
        370,
        lambda k: graphcore_tensorflow(k, peak=10.5250925, w=370, shape=keras_polynomial(steps=36 * 370, end=9.33e-6, power=2), warm=2),
        {0: 0.0142039, 740: 10.5250925, 740 + 6660: 2.6313468},  # half of the decay: a quarter
    ),
    "resnet_ipu/configs/resnet50_original.yaml": (
        30,
        40_036,
        lambda k: 0.5 * (1 if k <= 600_540 else 0.1 if k <= 900_810 else 0.01),
        {0: 0.5, 600_540: 0.5, 600_541: 0.05, 900_810: 0.05, 900_811: 0.005},
    ),
    "resnet_ipu/configs/resnet50_torchvision_v1.yaml": (
        90,
        5004,
        lambda k: 0.1 * 0.1 ** (k // 5004 // 30),
        {150_119: 0.1, 150_120: 0.01, 300_239: 0.01, 300_240: 0.001},
    ),
    "resnet_ipu/configs/resnet50_torchvision_v2.yaml": (
        600,
        1251,
        lambda k: torchvision_v2(k // 1251),
        {0: 0.005, 1250: 0.005, 1251: 0.104, 5 * 1251: 0.5, 302 * 1251: 0.25066, 750_599: 3.48478e-06},
    ),
    "resnet_ipu/configs/resnet50_timm_a3.yaml": (
        100,
        625,
        None,  # in the warm-up not timm's, see its head
        {
            0: 1e-4,
            624: 1e-4,
            5 * 625: 0.0079507,
            50 * 625: 0.0040005,
            99 * 625: 2.97351e-6,
        },  # 1e-6 + (0.008 - 1e-6) (1 + cos(pi e / 100)) / 2
    ),
    "resnet_ipu/configs/resnet8_cifar10_4ipus_pipeline.yaml": (
        5,
        12_500,
        lambda k: 0.0625 * (1 if k <= 31_250 else 0.1 if k <= 46_875 else 0.01),
        {31_250: 0.0625, 31_251: 0.00625, 46_876: 0.000625},
    ),
    "cifar_ipu/configs/keras_cifar10.yaml": (100, 1562, lambda k: 0.01, {0: 0.01, 156_199: 0.01}),
    "cifar_ipu/configs/estimator_cifar10_2ipus_pipeline.yaml": (150, 390, lambda k: 0.08, {0: 0.08}),
    "cosmoflow_ipu/configs/graphcore.yaml": (30, 10_000, lambda k: 0.5, {0: 0.5}),
    "cosmoflow_ipu/configs/mlperf.yaml": (
        128,
        W_COSMO,
        lambda k: mlperf_cosmoflow(k // W_COSMO),
        {0: 0.001, 139_263: 0.001, 139_264: 0.00025, 270_335: 0.00025, 270_336: 0.000125},  # 17 and 33 epochs of 8,192
    ),
    "resnet50_16ipus_8k_bn_pipeline": (
        100,
        W_8K,
        lambda k: graphcore_tensorflow(k, shape=half_cosine(steps=100 * W_8K), **TF2_8K),
        {0: 1 / 781, 156: 157 / 781 * 0.999753, 780: 0.993844, 50 * 156: 0.5, 15_599: 0.000246719},
    ),
    "resnet50_16ipus_16k_bn_pipeline": (
        100,
        W_16K,
        lambda k: graphcore_tensorflow(k, peak=2.0, w=W_16K, shape=half_cosine(steps=95 * W_16K), warm=5, staircase=True),
        {0: 2 / 391, 78: 2 * 79 / 391, 390: 2.0},
    ),
    "resnet50_mlperf_bs16": (
        44,
        556,
        lambda k: graphcore_tensorflow(k, peak=4.588, w=556, shape=keras_polynomial(steps=39 * 556, end=2.18e-5, power=2), warm=5),
        {0: 4.588 / 2781, 2780: 4.588, 44 * 556: 0.0001000184},
    ),
    "resnet8_16ipus_bn": (
        70,
        25,
        lambda k: graphcore_tensorflow(k, peak=0.244140625, w=25, shape=half_cosine(steps=65 * 25), warm=5),
        {0: 0.244140625 / 126, 125: 0.244140625, 1749: 2.28125e-07},
    ),
    "resnet8_test_lars": (50, 6250, lambda k: 0.001, {0: 0.001}),
    "resnet50": (
        100,
        W_PYTORCH,
        None,  # there from 0 on and 16 times an epoch: the cosine over the whole run, under a rise over 5 epochs
        {5 * 78: 1.9876883, 50 * 78: 1.0, 75 * 78: 0.2928932},
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_learning_rate_is_the_sources_at_every_update(name):
    epochs, updates, formula, points = CURVES[name]
    model = recipe(name)["model"] if name.endswith(".yaml") else part(settings_of(name, "--synthetic-data", "host"), "model.")
    rate = rate_of(model, epochs=epochs, updates=updates)
    assert {k: rate(k) for k in points} == pytest.approx(points, rel=2e-5)
    total = epochs * updates
    if formula is not None:
        places = sorted(
            {*range(0, total, max(1, total // 500)), *(k + d for k in points for d in (-1, 1) if 0 <= k + d < total), total - 1}
        )
        assert [rate(k) for k in places] == pytest.approx([formula(k) for k in places], rel=1e-6)


def test_the_numbers_of_updates_above_are_those_of_the_plans():
    assert (W_SGD, W_LARS, W_V1, W_V2, W_A3, IMAGES // 32, IMAGES // 2304) == (667, 370, 5004, 1251, 625, 40_036, 556)
    assert (W_8K, W_16K, W_PYTORCH, W_COSMO) == (156, 78, 78, 8192)
    samples = {"mlperf_sgd": 1920, "mlperf_lars": 3456, "torchvision_v1": 256, "torchvision_v2": 1024, "timm_a3": 2048, "original": 32}
    for name, count in samples.items():
        config = recipe(f"resnet_ipu/configs/resnet50_{name}.yaml")
        plan = config["trainer"]["strategy"]["init_args"]
        replicas = plan.get("replication_factor", 1) * plan.get("gradient_accumulation_factor", 1)
        assert config["data"]["micro_batch_size"] * replicas == count
        assert config["trainer"]["max_epochs"] == CURVES[f"resnet_ipu/configs/resnet50_{name}.yaml"][0]


def test_the_batch_norms_of_the_mlperf_recipes_are_those_of_the_named_configurations():
    for lightnings, named in (("mlperf_sgd", "mlperf_pod16_bs20"), ("mlperf_lars", "mlperf_pod16_lars")):
        config, settings = (
            recipe(f"resnet_ipu/configs/resnet50_{lightnings}.yaml"),
            settings_of(f"resnet50_{named}", "--synthetic-data", "host"),
        )
        plan = config["trainer"]["strategy"]["init_args"]
        for name in ("replication_factor", "gradient_accumulation_factor"):
            assert plan[name] == settings[f"trainer.strategy.{name}"]
        assert config["data"]["micro_batch_size"] == settings["data.micro_batch_size"] == {"mlperf_sgd": 40, "mlperf_lars": 36}[lightnings]
        assert config["trainer"]["max_epochs"] == settings["trainer.max_epochs"]
        assert config["model"]["norm_momentum"] == pytest.approx(settings["model.norm_momentum"], rel=1e-5)
        for name in (
            "learning_rate",
            "momentum",
            "l2_regularization",
            "label_smoothing",
            "decay_epochs",
            "final_fraction",
            "warmup_epochs",
        ):
            assert config["model"][name] == pytest.approx(settings[f"model.{name}"], rel=1e-6), name
        kept = (1 - config["model"]["norm_momentum"]) ** plan["gradient_accumulation_factor"]
        assert kept == pytest.approx(0.9, rel=1e-5)  # of the running statistics, over a weight update


def test_torchvisions_second_weights_saw_black_move_in_and_the_mean_colour_where_images_were_erased(tmp_path):
    options = recipe("resnet_ipu/configs/resnet50_torchvision_v2.yaml")["data"]
    make_tree(tmp_path)
    shifting, erasing = ImageNetDataModule(**options | {"data_dir": tmp_path}).augmentation._transforms
    assert isinstance(shifting, v2.TrivialAugmentWide) and isinstance(erasing, v2.RandomErasing)
    white = torch.full((3, 16, 16), 255, dtype=torch.uint8)
    shifted = shifting._apply_image_or_video_transform(white, "TranslateX", 8.0, interpolation=shifting.interpolation, fill=shifting._fill)
    assert shifted[:, :, 0].tolist() == [[0] * 16] * 3 and erasing.value == [124, 116, 104]
    mean = ImageNetDataModule(data_dir=tmp_path, auto_augment="trivialaugment").augmentation._transforms[0]
    shifted = mean._apply_image_or_video_transform(white, "TranslateX", 8.0, interpolation=mean.interpolation, fill=mean._fill)
    assert shifted[:, 0, 0].tolist() == [124, 116, 104]
    with pytest.raises(ValueError, match="auto_augment_fill='black' must be mean or black, and needs auto_augment"):
        ImageNetDataModule(data_dir=tmp_path, auto_augment_fill="black")
