"""Which private names of Lightning, torchmetrics and torch the packages use, file by file, and whether the installed versions have them.

    python tests/private_names.py

Such a name may go with any release, without a warning. The versions in setup.cfg are therefore capped at those that were tested; to raise a cap,
install the new release and run this: exit status 1 says that a name is gone. What the sources bind themselves is not listed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("lightning_ipu", "resnet_ipu", "cifar_ipu", "cosmoflow_ipu")
LIGHTNING = ("pytorch_lightning", "lightning_fabric")
LIBRARIES = (*LIGHTNING, "torchmetrics", "torch")
# The classes of torch and torchmetrics that ours derive from; all of Lightning's are read.
_BASES = {
    "torchmetrics": ("metric.py",),
    "torch": ("nn/modules/module.py", "optim/optimizer.py", "optim/lr_scheduler.py", "utils/data/dataloader.py"),
}

_OF_TENSORS = ("_version", "_cdata")  # which are written in C++
_DEFINED = re.compile(r"^\s*(?:(?:async )?def |class |[\w.]+\.)?(_[A-Za-z]\w*)(?:\(|:| *=(?!=)| *:)", re.M)


class Use(NamedTuple):
    """A private name that a source uses and does not bind: `owner` is what stands before the dot, or the module of an import."""

    name: str
    owner: str
    line: int


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax trees of our packages' files, by path."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def bound(node: ast.ClassDef) -> set[str]:
    """The private names that a class binds: methods, class attributes, and attributes of `self`."""
    names = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name):
            names |= {part.attr} if part.value.id == "self" else set()
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
    return set(filter(is_private, names))


@cache
def _files_with(library: str) -> dict[str, list[Path]]:
    """The files of a library that hold a class of a name, by the name."""
    files = folder_of(library).rglob("*.py") if library in LIGHTNING else [folder_of(library) / name for name in _BASES[library]]
    found: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        for name in re.findall(r"^\s*class (\w+)", path.read_text(), re.M):
            found[name].append(path)
    return found


@cache
def library_class(name: str) -> tuple[list[str], set[str]]:
    """Bases and private names of a library's class; of all of that name, if there are several."""
    files = [path for library in LIBRARIES for path in _files_with(library).get(name, ())]
    nodes = [node for path in files for node in _classes([ast.parse(path.read_text())]) if node.name == name]
    return [base for node in nodes for base in _bases(node)], set().union(*map(bound, nodes))


def folder_of(library: str) -> Path:
    """Where a library's sources are; it is not imported."""
    return Path(find_spec(library).origin).parent


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def inherited(node: ast.ClassDef, ours: dict[str, ast.ClassDef]) -> tuple[set[str], set[str]]:
    """The private names that a class of ours has from its bases and theirs: from library classes, and from others of ours."""
    from_libraries: set[str] = set()
    from_us: set[str] = set()
    seen, above = {node.name}, _bases(node)
    while above:
        if (base := above.pop()) in seen:
            continue
        seen.add(base)
        if base in ours:
            above, from_us = above + _bases(ours[base]), from_us | bound(ours[base])
        else:
            further, names = library_class(base)
            above, from_libraries = above + further, from_libraries | names
    return from_libraries, from_us


@cache
def _classes_in(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _classes(trees: Iterable[ast.Module]) -> list[ast.ClassDef]:
    return [node for tree in trees for node in _classes_in(tree)]


@cache
def _bound_by_us() -> set[str]:
    return set().union(*map(bound, _classes(sources().values())))


def uses(trees: dict[str, ast.Module]) -> dict[str, list[Use]]:
    """The private names that each source uses and does not bind itself, overrides of a library's private methods among them.

    What belongs to a library class among the bases of a class of ours has the owner "super()".
    """
    classes = {node.name: node for node in _classes(trees.values())}
    above = {name: inherited(node, classes) for name, node in classes.items()}
    found: dict[str, list[Use]] = {}
    for path, tree in trees.items():
        own = {name.id for node in tree.body for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        own |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        found[path], here = [], set()
        for node in _classes([tree]):
            of_libraries, of_ours = above[node.name]
            own |= (bound(node) | of_ours) - of_libraries
            here |= of_libraries
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and is_private(part.name)]
            found[path] += [Use(method.name, "super()", method.lineno) for method in methods if method.name in of_libraries]
        for use in (use for node in ast.walk(tree) for use in _accesses(node) if use.name not in own):
            found[path].append(use._replace(owner="super()") if use.owner == "self" and use.name in here else use)
    return found


def _accesses(node: ast.AST) -> Iterator[Use]:
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield Use(node.attr, ast.unparse(node.value), node.lineno)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr", "object.__setattr__"):
        name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if is_private(name):
            yield Use(name, ast.unparse(node.args[0]), node.lineno)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            if is_private(alias.name):
                yield Use(alias.name, node.module, node.lineno)


def owner_of(use: Use) -> str | None:
    """The library that has a name, "" for what is ours or of none of them; None if nobody has it."""
    root = use.owner.partition(".")[0]
    if root in LIBRARIES and re.fullmatch(r"[\w.]+", use.owner):
        return root if _resolves(use.owner, use.name) else None
    if use.name in _OF_TENSORS:
        return "torch" if _resolves("torch.Tensor", use.name) or _resolves("torch.UntypedStorage", use.name) else None
    for library in (*_BASES, *LIGHTNING):
        if use.name in defined_in(library, *_BASES.get(library, ())):
            return library
    others = root in sys.stdlib_module_names or root in ("np", "numpy", "jsonargparse", "argparse")
    if others or use.name in _bound_by_us():
        return ""
    return next((library for library in LIBRARIES if use.name in defined_in(library)), None)


def is_lightnings(use: Use) -> bool:
    """Whether a use is of Lightning's own name, read off the sources alone: not torch's or torchmetrics', nor ours on an object of ours."""
    if use.owner.partition(".")[0] in LIBRARIES:
        return use.owner.startswith(LIGHTNING)
    if use.name in _OF_TENSORS or any(use.name in defined_in(library, *names) for library, names in _BASES.items()):
        return False
    looks_it = re.search(r"(trainer|loop|module|connector|fetcher|loader|callback|strategy|super)(\(\))?$", use.owner)
    return any(use.name in defined_in(library) for library in LIGHTNING) and (bool(looks_it) or use.name not in _bound_by_us())


def _resolves(path: str, name: str) -> bool:
    """Whether `path.name` can be had, importing what is needed."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in (*parts[cut:], name):
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@cache
def defined_in(library: str, *names: str) -> set[str]:
    """Every private name that a library's sources, or some files of them, define or set on an object."""
    folder = folder_of(library)
    files = [folder / name for name in names] or folder.rglob("*.py")
    return {name for path in files for name in _DEFINED.findall(path.read_text(errors="replace"))}


def main() -> int:
    """Print the table; returns the exit status."""
    missing = 0
    for path, used in uses(sources()).items():
        by_library: dict[str | None, set[str]] = defaultdict(set)
        for use in used:
            by_library[owner_of(use)].add(use.name)
        missing += len(by_library[None])
        lines = [f"  {library:<18}{' '.join(sorted(by_library[library]))}" for library in LIBRARIES if by_library[library]]
        lines += [f"  NOWHERE           {' '.join(sorted(by_library[None]))}"] if by_library[None] else []
        if lines:
            print(path, *lines, sep="\n")
    print(f"{missing} private names are in none of the installed versions" if missing else "all are in the installed versions")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
