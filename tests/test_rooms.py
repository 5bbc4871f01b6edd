"""What the source shows: imports run down and are declared, private parts of others are listed, files are short."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from lightning_proxy.features import FEATURES
from support.paths import ROOT, TOPS

# A folder imports those with a smaller number, and itself. `proxy` and `trainer` never import each other.
RANK = {
    "core": 0, "client": 0, "store": 1, "serving": 2, "proxy": 3, "trainer": 3, "commands": 4, "features": 5, "cli": 6,
    "__main__": 7,
}  # fmt: skip
MOST_LINES, MOST_FUNCTION_LINES, MOST_WORDS = 900, 60, 25
PRODUCT = [
    *(path for path in sorted(ROOT.glob("*.py")) if path.stem in RANK),
    *(path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))),
]
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in PRODUCT}
MODULES = {name[:-1] if name[-1] == "__init__" else name: path for name, path in MODULES.items()}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each import of ours in a file: its line, and the names from the root down to what is imported."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "lightning_proxy" for alias in node.names), f"{path}: absolute"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or (node.module or "").split(".")[0] not in (*TOPS, "cli", "lightning_proxy"), path
        if node.level:
            base = (*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def test_imports_run_down_and_no_feature_imports_another() -> None:
    """Imports for types alone count too."""
    wrong = []
    for path in PRODUCT:
        mine, *below = path.relative_to(ROOT).with_suffix("").parts
        for line, names in imported(path):
            is_above = mine != names[0] and RANK.get(names[0], -1) >= RANK[mine]
            is_other = mine == names[0] == "features" and below[1:] and names[1] not in ("FEATURES", below[0])
            if is_above or is_other or (mine == "client" and names[0] != "client"):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}")
    assert wrong == []


def test_every_feature_is_listed() -> None:
    assert sorted(FEATURES) == sorted(path.name for path in (ROOT / "features").iterdir() if any(path.glob("*.py")))


def test_no_modules_and_no_rooms_of_the_commands_import_in_a_circle() -> None:
    """Imports for types alone count too. CycleError names the modules."""
    edges = {
        module: {names if names in MODULES else names[:-1] for _, names in imported(path)} & MODULES.keys()
        for module, path in MODULES.items()
    }
    TopologicalSorter(edges).prepare()
    rooms: dict[str, set[str]] = {}
    for path in sorted((ROOT / "commands").rglob("*.py")):
        mine = path.relative_to(ROOT / "commands").with_suffix("").parts[0]
        theirs = {names[1] for _, names in imported(path) if names[0] == "commands"}
        rooms.setdefault(mine, set()).update(theirs - {mine})
    TopologicalSorter(rooms).prepare()


def test_files_functions_and_the_first_lines_of_docstrings_are_short() -> None:
    long = [str(path) for path in PRODUCT if len(path.read_text().splitlines()) > MOST_LINES]
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.body[0].lineno + 1  # type: ignore[operator]
                if length > MOST_FUNCTION_LINES:
                    long.append(f"{path}: {node.name}: {length}")
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if len(first.split()) > MOST_WORDS:
                    long.append(f"{path}: {first}")
    assert long == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    """So a name says which one is meant. `client/` is what agents import, and names its own."""
    shared = [path for path in PRODUCT if path.relative_to(ROOT).parts[0] != "client"]
    names = Counter(node.name for path in shared for node in tree_of(path).body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_the_map_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.name for top in TOPS for path in (ROOT / top).iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert [name for name in (*TOPS, *sorted(folders)) if f"{name}/" not in text] == []


# What is imported is declared in pyproject.toml: for everybody, or in the extra of its feature.

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The extras that bring what a folder or file imports beyond `dependencies`; a folder above counts, too.
EXTRAS = {
    "features/algorithms": {"train"}, "features/distributed": {"train"}, "features/evaluation": {"train"},
    "features/teacher": {"train"}, "features/page": {"train"}, "features/tune": {"train"}, "trainer": {"train"},
    "commands/doctor/steps.py": {"train"}, "commands/export": {"train"}, "commands/train.py": {"train"},
    "commands/demo": {"demo", "train"}, "commands/trial.py": {"demo"}, "features/tinker": {"tinker", "train"},
    "features/otel": {"otel"}, "features/ray": {"ray"}, "commands/files.py": {"parquet"},
    "store/postgres": {"postgres"}, "commands/migrate.py": {"postgres"}, "core/prices.py": {"providers"},
    "features/litellm": {"providers"}, "features/optimize": {"optimize", "providers"},
}  # fmt: skip
# What the agents that use the client have of their own.
OWN = {"client": {"openai"}}
# Distributions that are not called like what is imported of them.
NAMES = {
    "google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos", "yaml": "pyyaml",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto": "opentelemetry-proto", "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.trace": "opentelemetry-api", "pydantic_core": "pydantic",  # which pins it
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(found[0]) for text in requirements if (found := re.match(r"[A-Za-z0-9._-]+", text))}


def from_others(path: Path) -> Iterator[str]:
    """Each module of others that a file imports, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        yield from (n for n in names if n.split(".")[0] not in {*sys.stdlib_module_names, "lightning_proxy"})


def distribution(module: str) -> str:
    known = [NAMES[prefix] for prefix in NAMES if f"{module}.".startswith(f"{prefix}.")]
    return known[0] if known else normal(module.split(".")[0])


def above(path: Path) -> Iterator[str]:
    """A file's name, and its folders' names."""
    inside = path.relative_to(ROOT)
    yield from map(str, (inside, *inside.parents))


def requires(path: Path) -> list[str]:
    """What a program for a virtual environment of its own has installed there."""
    found = re.findall(r"^REQUIRES = (\(.*?\))$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for value in found for text in ast.literal_eval(value)]


def test_whatever_is_imported_is_declared() -> None:
    core, extras = declared(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    missing = set()
    for path in PRODUCT:
        its_extras = {extra for place in above(path) for extra in EXTRAS.get(place, ())}
        known = core.union(*(declared(extras[extra]) for extra in its_extras), *(OWN.get(p, ()) for p in above(path)))
        known |= declared(requires(path))
        missing |= {(str(path.relative_to(ROOT)), m) for m in from_others(path) if distribution(m) not in known}
    assert missing == set()


# docs/architecture.md lists every private part of other packages that the product leans on, and where.

SECTION = (ROOT / "docs" / "architecture.md").read_text().partition("## Know which private parts")[2]
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
            names = (n for part in node.body if isinstance(part, ast.AnnAssign | ast.Assign) for n in ast.walk(part))
            yield from (n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_module(module: str) -> Iterator[str]:
    package, *below = module.split(".")
    if (package in PACKAGES and below and module not in PUBLIC) or any(is_private(part) for part in below):
        yield module


@cache
def ours() -> set[str]:
    return set[str]().union(*(defined(tree_of(path)) for path in PRODUCT))


def test_the_list_holds_every_private_part_and_each_is_where_it_says() -> None:
    listed = {(file, part) for parts, files, _ in rows() for file in files for part in parts}
    found = {(str(path.relative_to(ROOT)), part) for path in PRODUCT for part in private(tree_of(path))}
    assert found - listed == set()
    for parts, files, tests in rows():
        texts = {file: (ROOT / file).read_text() for file in files}
        assert [part for part in parts if not any(part in text for text in texts.values())] == []
        assert [file for file, text in texts.items() if not any(part in text for part in parts)] == []
        assert tests and [test for test in tests if not (ROOT / test).exists()] == []
