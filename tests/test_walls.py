"""The walls of the house, read off the sources: who may import whom, who may know Lightning's private names, and how long a file may be.

What does not keep to them yet is listed below. The lists only get shorter: an entry that is no longer needed fails as well.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache

import private_names
from private_names import LIGHTNING, ROOT, sources

ROOMS = "precision cutting engine data loop recipe limits strategy command".split()  # lower ones first
GROUND = ("errors", "plan", "placement", "randomness", "files", "machine")  # below all rooms
EARLIER_NAMES = ("averaging", "host_events", "profiling")  # re-exports for configurations that name them
FILE_LINES, FUNCTION_LINES, NESTING = 450, 60, 4

UPWARD: set[str] = set()
CIRCLES: set[str] = set()
LIGHTNING_BELOW_THE_LOOP: set[str] = set()
LIGHTNINGS_PRIVATE_NAMES: dict[str, str] = {}
TOO_LONG: set[str] = {
    "cifar_ipu/data/module.py: __init__",
    "cosmoflow_ipu/data/module.py: __init__",
    "cosmoflow_ipu/module.py: __init__",
    "cosmoflow_ipu/networks.py: cosmoflow",
    "resnet_ipu/networks.py: resnet",
}


@cache
def ours() -> dict[str, ast.Module]:
    """The modules of lightning_ipu, by their names in it."""
    inside = {path.removeprefix("lightning_ipu/"): tree for path, tree in sources().items() if path.startswith("lightning_ipu/")}
    return {path.removesuffix(".py").replace("/", "."): tree for path, tree in inside.items() if not path.endswith("__init__.py")}


def imports(tree: ast.Module) -> set[str]:
    """Every module that a source names: imports anywhere in it, typing's and those in functions included, and modules named in strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+_ipu(\.\w+)+", node.value):
            found.add(node.value)
    return found


@cache
def graph() -> dict[str, set[str]]:
    """The modules of lightning_ipu, and those of them that each imports."""
    inner = {module: {name.removeprefix("lightning_ipu.") for name in imports(tree)} for module, tree in ours().items()}
    return {module: names & ours().keys() - {module, *EARLIER_NAMES} for module, names in inner.items() if module not in EARLIER_NAMES}


def height(module: str) -> int:
    room = module.partition(".")[0]
    return -1 if room in GROUND else ROOMS.index(room)


def test_imports_go_downwards():
    arrows = [(one, other) for one, others in graph().items() for other in others]
    assert len(arrows) > 100
    assert {f"{one} -> {other}" for one, other in arrows if height(other) > height(one)} == UPWARD


def test_there_is_no_circle_of_imports():
    circle = dict(graph())
    while free := [module for module, names in circle.items() if not names & circle.keys()]:
        circle = {module: names for module, names in circle.items() if module not in free}
    while free := circle.keys() - set().union(*circle.values()):
        circle = {module: names for module, names in circle.items() if module not in free}
    assert set(circle) == CIRCLES


def test_lightning_is_not_imported_below_the_loop():
    below = ("engine.", "cutting.", "precision.", *GROUND)
    found = {
        module
        for module, tree in ours().items()
        if module.startswith(below) and module != "precision.plugin" and any(name.startswith(LIGHTNING) for name in imports(tree))
    }
    assert found == LIGHTNING_BELOW_THE_LOOP


def test_lightnings_private_names_appear_in_the_loop_room_only():
    found: dict[str, set[str]] = {}
    for path, uses in private_names.uses(sources()).items():
        names = {use.name for use in uses if private_names.is_lightnings(use)}
        if names and not path.startswith("lightning_ipu/loop/"):
            found[path] = names
    assert found == {path: set(names.split()) for path, names in LIGHTNINGS_PRIVATE_NAMES.items()}


def test_a_private_name_that_is_gone_is_told_from_those_that_are_there(monkeypatch, capsys):
    source = """
        import torch
        from torchmetrics.metric import _gone_with_a_release
        torch._foreach_add, torch._C._set_grad_enabled, torch._gone_too, trainer._data_connector, trainer._never_there, metric._defaults
        class Quiet(pl.Callback):
            def __init__(self): self._own = 1
            def told(self): return self._own, self._generate_state_key, self._neither
    """
    read = private_names.defined_in  # all of torch's sources, which take ten seconds, are not read here
    monkeypatch.setattr(
        private_names, "defined_in", lambda library, *names: set() if (library, names) == ("torch", ()) else read(library, *names)
    )
    trees = {"here.py": ast.parse(textwrap.dedent(source))}
    uses = private_names.uses(trees)["here.py"]
    assert {use.name: private_names.owner_of(use) for use in uses} == {
        **{"_C": "torch", "_foreach_add": "torch", "_set_grad_enabled": "torch", "_defaults": "torchmetrics"},
        **{"_data_connector": "pytorch_lightning", "_generate_state_key": "pytorch_lightning"},
        **dict.fromkeys(["_gone_with_a_release", "_gone_too", "_never_there", "_neither"]),
    }
    monkeypatch.setattr(private_names, "sources", lambda: trees)
    assert private_names.main() == 1
    assert "NOWHERE           _gone_too _gone_with_a_release _neither _never_there\n4 private names are in none" in capsys.readouterr().out
    monkeypatch.setattr(private_names, "sources", lambda: {"here.py": ast.parse("import torch; torch._foreach_add")})
    assert private_names.main() == 0


def test_packages_import_lightning_ipu_and_never_the_reverse():
    packages = [package for package in private_names.PACKAGES if package != "lightning_ipu"]
    allowed = {"resnet_ipu": ("cifar_ipu",)}
    for path, tree in sources().items():
        package = path.partition("/")[0]
        others = [name for name in packages if name != package and name not in allowed.get(package, ())]
        assert not [name for name in imports(tree) if name.partition(".")[0] in others], path


def test_networks_import_torch_alone():
    networks = [path for path in sources() if path.endswith("/networks.py")]
    assert len(networks) == 3
    for path in networks:
        for name in imports(sources()[path]):
            assert name.partition(".")[0] in (
                "torch",
                "__future__",
                "collections",
                "dataclasses",
                "functools",
                "itertools",
                "math",
                "typing",
            ), path


def test_what_a_user_can_put_right_is_raised_as_a_user_error():
    """A command prints those in one line; ValueErrors of the files named here are made such by whoever calls them."""
    callers_say_more = ("networks.py", "data/tf_example.py", "imagenet/images.py", "resnet_ipu/keras_names.py")
    for path, tree in sources().items():
        raised = {ast.unparse(node.exc.func) for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)}
        assert "MisconfigurationException" not in raised and ("ValueError" not in raised or path.endswith(callers_say_more)), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                assert node.name == "UserError" or ast.unparse(node.bases[0]).endswith(("UserError", "PlanError")), node.name


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How deep the blocks of a function are nested; `elif` and functions within it do not count."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        opens = isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match))
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (opens and not is_elif)))
    return deepest


def test_files_functions_and_nesting_have_a_limit():
    found: set[str] = set()
    for path, tree in sources().items():
        if (ROOT / path).read_text().count("\n") > FILE_LINES:
            found.add(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                if node.end_lineno - node.lineno + 1 > FUNCTION_LINES or nesting(node) > NESTING:
                    found.add(f"{path}: {node.name}")
    assert found == TOO_LONG
