"""What docs/extending.md says: its patches apply to the packages as they are, and what is said to follow from them does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_patches_of_the_page_apply_and_do_what_is_said(tmp_path):
    for package in ("lightning_ipu", "resnet_ipu", "cifar_ipu"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for patch in blocks("diff"):
        apply = ["git", "apply", "--unidiff-zero", "--recount", "-"]
        done = subprocess.run(apply, cwd=tmp_path, input=patch, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{patch}\n{done.stderr}"
    shown = blocks("python")
    assert len(shown) == 4
    code = "\n".join(f"def shown_{number}():\n{_indented(text)}\nshown_{number}()\n" for number, text in enumerate(shown))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _indented(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`(\w+_ipu/[\w/.]+\.py)`", PAGE)) | set(re.findall(r"^--- a/(\S+)", PAGE, re.MULTILINE))
    assert len(named) >= 5 and all((ROOT / name).is_file() for name in named)
