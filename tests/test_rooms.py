"""The folders are the map: imports run down, the core knows no side room, and nothing grows too large to read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lightning_proxy.commands import on_board as commands
from lightning_proxy.proxy import on_board as proxys
from lightning_proxy.trainer.plugins import on_board as trainers
from support.paths import ROOT

TOPS = ("proxy", "trainer", "commands", "client")

# From the top down; rooms of one level do not import each other.
LEVELS = {
    "proxy": [
        {"app"},
        {"plugins"},
        {"control"},
        {"gateway"},
        {"policy", "conversation"},
        {"upstreams", "access", "recording", "prices"},
        {"store", "apis"},
        {"returns", "groups"},
        {"config", "types", "providers"},
        {"evidence"},
        {"errors", "json_text", "aside", "bootstrap", "on_board", "guard"},
    ],
    "trainer": [
        {"main"},
        {"opening", "loop"},
        {"plugins"},
        {"publish"},
        {"verify"},
        {"step"},
        {"weights"},
        {"collect", "files"},
        {"collapse", "report", "plan"},
        {"rows"},
        {"credit", "alone"},
        {"types", "rate", "waiting", "hooks"},
    ],
}
# Nothing of the core imports them: `plugins/on_board.py` has their names.
SIDE_ROOMS = {
    "proxy": {
        *("upstreams/litellm", "otel", "agl", "rewarders", "people", "page", "prompts", "promotion"),
        *("algorithms", "guides", "sft", "preferences", "backends", "evaluation", "contexts", "texts", "costs"),
        "environments",
    },
    "trainer": {
        *("algorithms", "rewarders", "guides", "tuning", "sft", "preferences", "promotion", "offline", "distributed"),
        *("backends", "evaluation", "contexts"),
    },
    "commands": {"agl", "costs", "environments", "experiment", "optimize", "page", "people", "prompts", "rewarders"},
}
# What plugs nothing in by itself: what several side rooms share, and algorithms, which the configuration names.
SHARED = {"proxy": set[str](), "trainer": {"tuning", "algorithms"}, "commands": set[str]()}
# What each top-level package may import besides itself.
BELOW = {"proxy": set[str](), "trainer": {"proxy"}, "commands": {"proxy", "trainer", "client"}, "client": set[str]()}

MOST_LINES, MOST_FUNCTION_LINES, MOST_FILES, MOST_WORDS = 900, 60, 24, 25


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


PRODUCT = [*sorted(ROOT.glob("*.py")), *(path for top in TOPS for path in modules(top))]


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


def level(top: str, room: str) -> int | None:
    return next((n for n, rooms in enumerate(LEVELS[top]) if room in rooms), None)


def side_room(top: str, inside: tuple[str, ...]) -> str | None:
    """The side room that a path below the top-level package is in."""
    return next((room for room in SIDE_ROOMS[top] if inside[: room.count("/") + 1] == tuple(room.split("/"))), None)


def test_each_top_level_package_imports_only_those_below_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
        for top in TOPS
        for path in modules(top)
        for line, names in imported(path)
        if names[0] != top and names[0] not in BELOW[top]
    ]
    assert wrong == []


@pytest.mark.parametrize("top", sorted(LEVELS))
def test_imports_run_down(top: str) -> None:
    wrong = []
    for path in modules(top):
        inside = path.relative_to(ROOT / top).with_suffix("").parts
        if side_room(top, inside) or inside == ("__init__",):
            continue
        mine = level(top, inside[0])
        assert mine is not None, f"{path.relative_to(ROOT)} is in no room: {inside[0]}"
        for line, names in imported(path):
            if names[0] != top or names[1] == inside[0] or side_room(top, names[1:]):
                continue
            theirs = level(top, names[1])
            if theirs is None or theirs <= mine:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}")
    assert wrong == []


@pytest.mark.parametrize("top", sorted(SIDE_ROOMS))
def test_the_core_imports_no_side_room(top: str) -> None:
    wrong = []
    for path in modules(top):
        inside = path.relative_to(ROOT / top).with_suffix("").parts
        if side_room(top, inside) is None:
            wrong += [
                f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
                for line, names in imported(path)
                if names[0] in SIDE_ROOMS and side_room(names[0], names[1:])
            ]
    assert wrong == []


@pytest.mark.parametrize("top", sorted(SIDE_ROOMS))
def test_no_side_room_imports_another(top: str) -> None:
    wrong = []
    for path in modules(top):
        mine = side_room(top, path.relative_to(ROOT / top).with_suffix("").parts)
        for line, names in imported(path) if mine else ():
            theirs = side_room(names[0], names[1:]) if names[0] in SIDE_ROOMS else None
            if theirs not in (None, mine, *SHARED.get(names[0], ())):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}")
    assert wrong == []


def test_every_side_room_is_on_board() -> None:
    for top, on_board in (
        ("proxy", proxys.ON_BOARD), ("trainer", trainers.ON_BOARD), ("commands", commands.ON_BOARD),
    ):  # fmt: skip
        assert {room.replace(".", "/") for room in on_board} == SIDE_ROOMS[top] - SHARED[top]


def test_no_modules_import_in_a_circle() -> None:
    """Imports for types alone count too."""
    named = {path.relative_to(ROOT).with_suffix("").parts: path for path in PRODUCT}
    known = {name[:-1] if name[-1] == "__init__" else name: path for name, path in named.items()}
    edges = {
        module: {names if names in known else names[:-1] for _, names in imported(path)} & known.keys()
        for module, path in known.items()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules


def test_no_rooms_of_the_commands_import_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in modules("commands"):
        mine = path.relative_to(ROOT / "commands").with_suffix("").parts[0]
        theirs = {names[1] for _, names in imported(path) if names[0] == "commands"}
        edges.setdefault(mine, set()).update(theirs - {mine})
    TopologicalSorter(edges).prepare()


def test_the_distribution_has_every_room() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {".".join(("lightning_proxy", *path.parent.relative_to(ROOT).parts)) for path in PRODUCT}
    assert sorted(listed) == sorted(rooms)


def test_every_room_is_a_package() -> None:
    assert [path for path in PRODUCT if path.parent != ROOT and not (path.parent / "__init__.py").exists()] == []


def test_no_file_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PRODUCT}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_no_folder_has_too_many_files() -> None:
    folders = [path.parent for path in PRODUCT if path.name != "__init__.py"]
    assert {folder for folder in folders if folders.count(folder) > MOST_FILES} == set()


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


@pytest.mark.parametrize("page", ["docs/architecture.md", "AGENTS.md"])
def test_the_map_names_every_room(page: str) -> None:
    text = (ROOT / page).read_text()
    rooms = {path.name for top in ("proxy", "trainer", "commands") for path in (ROOT / top).iterdir() if path.is_dir()}
    assert [room for room in sorted(rooms - {"__pycache__"}) if f"{room}/" not in text] == []


def test_the_map_draws_the_levels_in_their_order() -> None:
    """Each level of LEVELS stands below the ones that import it, wherever its names are in the picture."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for top, levels in LEVELS.items():
        picture = text.partition(f"## {top}/: ")[2].partition("```")[2].partition("```")[0].splitlines()
        depth = 0
        for level in levels:
            named = [n for n, line in enumerate(picture) for name in level if re.search(rf"\b{name}(/|\.py)", line)]
            assert len(named) == len(level), f"{top}: {sorted(level)} in the picture of docs/architecture.md"
            assert min(named) >= depth, f"{top}: {sorted(level)} stands too high"
            depth = max(named)
