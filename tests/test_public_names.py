"""What each package offers by name: all of it is there, and nothing is loaded before it is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("lightning_ipu", "resnet_ipu", "cifar_ipu", "cosmoflow_ipu")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there(name):
    package = importlib.import_module(name)
    assert package.__all__ and set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public).__name__ == public and getattr(package, public).__doc__
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_are_told_of_the_same_names_as_python(name):
    package = importlib.import_module(name)
    imports = [node for node in ast.parse(Path(package.__file__).with_suffix(".pyi").read_text()).body if isinstance(node, ast.ImportFrom)]
    told = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert told == {public: f"{name}.{home}.{public}" for public, home in package._HOMES.items()}


def test_a_package_of_networks_is_imported_without_torch():
    code = "import sys, resnet_ipu, cifar_ipu, cosmoflow_ipu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("earlier", "now", "names"),
    [
        ("lightning_ipu.averaging", "lightning_ipu", ["AveragedWeights"]),
        ("lightning_ipu.host_events", "lightning_ipu", ["EventsPerEpoch"]),
        ("lightning_ipu.profiling", "lightning_ipu", ["ProfileReports"]),
        ("resnet_ipu.data", "resnet_ipu", ["ImageNetDataModule", "FolderImages"]),
        ("resnet_ipu.images", "resnet_ipu.imagenet.images", ["ImageError", "center_crop", "decode", "training_crop"]),
    ],
)
def test_what_configurations_and_scripts_named_is_found_under_its_earlier_path(earlier, now, names):
    for name in names:
        assert getattr(importlib.import_module(earlier), name) is getattr(importlib.import_module(now), name)
