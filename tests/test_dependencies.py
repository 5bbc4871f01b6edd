"""What the product imports is declared in pyproject.toml: for everybody, or in the extra of its feature."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT, TOPS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The extras that bring what a folder or file imports beyond `dependencies`; those of a folder above count, too.
EXTRAS = {
    "features/algorithms": {"train"},
    "features/distributed": {"train"},
    "features/evaluation": {"train"},
    "features/teacher": {"train"},
    "features/otel": {"otel"},
    "store/postgres": {"postgres"},
    "core/prices.py": {"providers"},
    "features/page": {"train"},
    "features/litellm": {"providers"},
    "trainer": {"train"},
    "features/tinker": {"tinker", "train"},
    "features/tune": {"train"},
    "commands/demo": {"demo", "train"},
    "commands/doctor/steps.py": {"train"},
    "commands/trial.py": {"demo"},
    "commands/export": {"train"},
    "commands/migrate.py": {"postgres"},
    "features/optimize": {"optimize", "providers"},
    "commands/files.py": {"parquet"},
    "features/ray": {"ray"},
    "commands/train.py": {"train"},
}
# What the agents that use the client have of their own.
OWN = {"client": {"openai"}}
# Distributions that are not called like what is imported of them.
NAMES = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.trace": "opentelemetry-api",
    "pydantic_core": "pydantic",  # which pins it
    "yaml": "pyyaml",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(found[0]) for text in requirements if (found := re.match(r"[A-Za-z0-9._-]+", text))}


def imported(path: Path) -> Iterator[str]:
    """Each module of others that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        yield from (n for n in names if n.split(".")[0] not in {*sys.stdlib_module_names, "lightning_proxy"})


def distribution(module: str) -> str:
    known = [NAMES[prefix] for prefix in NAMES if f"{module}.".startswith(f"{prefix}.")]
    return known[0] if known else normal(module.split(".")[0])


def above(path: Path) -> Iterator[str]:
    """A file's name, and those of the folders above it."""
    inside = path.relative_to(ROOT)
    yield from (str(inside), *(str(parent) for parent in inside.parents))


def requires(path: Path) -> list[str]:
    """What a program for a virtual environment of its own has installed there."""
    assigned = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    found = [node.value for node in assigned if [ast.unparse(target) for target in node.targets] == ["REQUIRES"]]
    return [text for value in found for text in ast.literal_eval(value)]


def test_whatever_is_imported_is_declared() -> None:
    core, extras = declared(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    files = [*ROOT.glob("*.py"), *(f for top in TOPS for f in top_files(top))]
    missing = set()
    for path in files:
        if path.name == "setup.py":
            continue
        its_extras = {extra for place in above(path) for extra in EXTRAS.get(place, ())}
        known = core.union(*(declared(extras[extra]) for extra in its_extras), *(OWN.get(p, ()) for p in above(path)))
        known |= declared(requires(path))
        missing |= {(str(path.relative_to(ROOT)), m) for m in imported(path) if distribution(m) not in known}
    assert missing == set()


def top_files(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))
