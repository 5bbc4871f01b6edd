"""The folders are the map: imports run down, no feature knows another, and nothing grows too large to read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
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


def imported(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each import of ours in a file: its line, and the names from the root down to what is imported."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "lightning_proxy" for alias in node.names), f"{path}: absolute"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or (node.module or "").split(".")[0] not in (*TOPS, "cli", "lightning_proxy"), path
        if node.level:
            base = (*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def test_imports_run_down() -> None:
    """Imports for types alone count too."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
        for path in PRODUCT
        for line, names in imported(path)
        if (
            (mine := path.relative_to(ROOT).parts[0].removesuffix(".py")) != names[0]
            and RANK.get(names[0], -1) >= RANK[mine]
        )
        or (mine == "client" and names[0] != "client")
    ]
    assert wrong == []


def test_no_feature_imports_another() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
        for path in sorted((ROOT / "features").glob("*/**/*.py"))
        for line, names in imported(path)
        if names[0] == "features" and names[1] not in ("FEATURES", path.relative_to(ROOT).parts[1])
    ]
    assert wrong == []


def test_every_feature_is_listed() -> None:
    assert sorted(FEATURES) == sorted(path.name for path in (ROOT / "features").iterdir() if any(path.glob("*.py")))


def test_no_modules_import_in_a_circle() -> None:
    """Imports for types alone count too."""
    edges = {
        module: {names if names in MODULES else names[:-1] for _, names in imported(path)} & MODULES.keys()
        for module, path in MODULES.items()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules


def test_no_rooms_of_the_commands_import_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in sorted((ROOT / "commands").rglob("*.py")):
        mine = path.relative_to(ROOT / "commands").with_suffix("").parts[0]
        theirs = {names[1] for _, names in imported(path) if names[0] == "commands"}
        edges.setdefault(mine, set()).update(theirs - {mine})
    TopologicalSorter(edges).prepare()


def test_no_file_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PRODUCT}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {node.name}": length
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.body[0].lineno + 1) > MOST_FUNCTION_LINES  # type: ignore[operator]
    }
    assert long == {}


def test_the_first_line_of_a_docstring_can_be_read_in_one_go() -> None:
    long = []
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if len(first.split()) > MOST_WORDS:
                    long.append(f"{path.relative_to(ROOT)}: {first}")
    assert long == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    """So a name says which one is meant. `client/` is what agents import, and names its own."""
    places = defaultdict[str, list[str]](list)
    for path in PRODUCT:
        if path.relative_to(ROOT).parts[0] != "client":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: of for name, of in places.items() if len(of) > 1} == {}


def test_the_map_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.name for top in TOPS for path in (ROOT / top).iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert [name for name in (*TOPS, *sorted(folders)) if f"{name}/" not in text] == []
