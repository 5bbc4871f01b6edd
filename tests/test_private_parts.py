"""docs/architecture.md lists every private part of other packages that the product leans on, and where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from lightning_proxy.features import FEATURES
from support.paths import ROOT, TOPS

SECTION = (ROOT / "docs" / "architecture.md").read_text().partition("## Know which private parts")[2]
FILES = [
    *(path for path in ROOT.glob("*.py") if path.name != "setup.py"),
    *(path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))),
]
CODE = re.compile(r"`([^`]+)`")
# Of these packages, modules below the first name are private, but for those that their documentation names.
PACKAGES = ("uvicorn", "aiohttp", "trl", "transformers", "vllm", "litellm")
PUBLIC = {"aiohttp.abc", "transformers.integrations", "transformers.utils.logging"}
DOCUMENTED = {"_replace", "_asdict", "_fields", "_exit"}  # of named tuples, and of os


def rows() -> list[tuple[set[str], set[str], set[str]]]:
    """Return each row's parts, by their last names unless they are modules, its files and its tests."""
    lines = [line.split("|")[1:-1] for line in SECTION.splitlines() if line.startswith("| `")]
    found = [tuple(set(filter(_is_here, CODE.findall(cell))) for cell in cells[:3]) for cells in lines]
    return [row for row in found if row[1]]  # type: ignore[misc]


def _is_here(name: str) -> bool:
    """Whether it is no file of a feature that was taken out."""
    feature = name.partition("features/")[2].partition("/")[0]
    return not feature or feature in FEATURES


def private(tree: ast.Module) -> Iterator[str]:
    """Return names of others with a leading underscore, and modules that are not public."""
    own = set(defined(tree)) | DOCUMENTED
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            known = ours() | DOCUMENTED if of_self(node) else own
            yield from {node.attr} - known
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                yield str(name.value)
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from private_module(node.module or "")
            yield from (alias.name for alias in node.names if is_private(alias.name))
        if isinstance(node, ast.Import):
            yield from (found for alias in node.names for found in private_module(alias.name))


def defined(tree: ast.Module) -> Iterator[str]:
    """Return the names of what is a file's own: methods, and attributes of `self` and of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            targets = [t for n in node.body if isinstance(n, ast.AnnAssign | ast.Assign) for t in targets_of(n)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def targets_of(node: ast.AnnAssign | ast.Assign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_module(module: str) -> Iterator[str]:
    package, *below = module.split(".")
    if (package in PACKAGES and below and module not in PUBLIC) or any(is_private(part) for part in below):
        yield module


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}


@cache
def ours() -> set[str]:
    return set[str]().union(*map(defined, trees().values()))


def test_the_list_holds_every_private_part_that_the_code_shows() -> None:
    listed = {(file, part) for parts, files, _ in rows() for file in files for part in parts}
    found = {(path, part) for path, tree in trees().items() for part in private(tree)}
    assert found - listed == set()


def test_each_listed_part_is_where_the_list_says() -> None:
    for parts, files, tests in rows():
        texts = {file: (ROOT / file).read_text() for file in files}
        assert [part for part in parts if not any(part in text for text in texts.values())] == []
        assert [file for file, text in texts.items() if not any(part in text for part in parts)] == []
        assert tests and [test for test in tests if not (ROOT / test).exists()] == []


def test_no_private_method_of_another_package_is_overridden_unseen() -> None:
    """`defined` takes an overriding method for our own, so the bases of others are asked themselves."""
    from lightning_proxy.commands.serve import OneServer, SeveralServers
    from lightning_proxy.proxy.gateway.server import ServerProtocol
    from lightning_proxy.proxy.gateway.upstream import _Protocol
    from lightning_proxy.trainer.step.trainer import LightningTrainer

    listed = set[str]().union(*(parts for parts, _, _ in rows()))
    for kind in (
        LightningTrainer, OneServer, SeveralServers, ServerProtocol, _Protocol, *trainers_of_preferences(),
    ):  # fmt: skip
        others = [base for base in kind.__mro__[1:] if not base.__module__.startswith("lightning_proxy")]
        ours = {name for name in vars(kind) if is_private(name) and name != "_abc_impl"}
        overridden = {name for name in ours if any(name in vars(base) for base in others)}
        assert overridden <= listed, kind


def trainers_of_preferences() -> Iterator[type]:
    """Where the feature is there."""
    if "tune" in FEATURES:
        from lightning_proxy.features.tune.methods import PairTrainer, ThumbTrainer

        yield from (PairTrainer, ThumbTrainer)
