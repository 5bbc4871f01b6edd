"""Features can be deleted: their folders, their lines, their tests. What is left is tidy, helps, and learns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.features import FEATURES
from support.paths import ROOT, TOPS

LEFT = """
import importlib, pathlib, lightning_proxy as root
place = pathlib.Path({place!r})
assert pathlib.Path(root.__file__).parent == place, root.__file__
for top in {tops!r}:
    for path in sorted((place / top).rglob("*.py")):
        module = ".".join(("lightning_proxy", *path.relative_to(place).with_suffix("").parts)).removesuffix(".__init__")
        if not module.endswith("ray.driver"):
            importlib.import_module(module)
"""
# Features with a section of the configuration. A feature that was taken out leaves none behind.
SECTIONS = feature_sections()
UNKNOWN = """
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.errors import ConfigError
for key in {keys!r}:
    try:
        load_config(overrides={{key: {{}}}})
    except ConfigError as error:
        assert f"command line: {{key}}: unknown key" in str(error), error
    else:
        raise AssertionError(key)
"""
# What looks at the whole tree.
TESTS = (
    "tests/test_docs.py", "tests/test_rooms.py", "tests/commands/test_printed_commands.py",
    "tests/contract/test_wheel.py::test_each_test_that_the_table_of_promises_names_is_there",
    "tests/contract/test_wheel.py::test_the_wheel_holds_every_file_of_the_package_and_nothing_else",
)  # fmt: skip
# No feature imports another (`tests/test_rooms.py`), so these are deleted a few at once.
GROUPS = [FEATURES[first::6] for first in range(6)]
PROMISES = [f"tests/contract/test_{name}.py" for name in ("rollouts", "tokens", "training", "control", "commands")]
# The other case has evaluations, by a feature.
REALLY = "tests/contract/test_loop.py::test_an_agent_gets_better_while_it_keeps_working[lora]"


class Copy:
    """A copy of the tree without some features."""

    def __init__(self, directory: Path, features: Sequence[str]) -> None:
        self.directory, self.tree = directory, directory / "lightning_proxy"
        self.tree.mkdir()
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        for name in names:
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        listed = self.tree / "features" / "__init__.py"
        for feature in features:
            for folder in ("features", "tests/features"):
                shutil.rmtree(self.tree / folder / feature, ignore_errors=True)
            listed.write_text(re.sub(rf'^    "{feature}",\n', "", listed.read_text(), flags=re.MULTILINE))

    def run(self, *arguments: str) -> str:
        """Run Python on the copy; return what it prints."""
        command = [sys.executable, *arguments]
        environment = os.environ | {"PYTHONPATH": str(self.directory)}
        done = subprocess.run(
            command, cwd=self.tree, env=environment, check=False, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("features", GROUPS, ids="-".join)
def test_features_can_be_deleted(tmp_path: Path, features: Sequence[str]) -> None:
    left_without(tmp_path, features).run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not vllm", *TESTS)


def left_without(directory: Path, features: Sequence[str]) -> Copy:
    """A copy without these features. Its modules, keys, help and style are looked at."""
    copy = Copy(directory, features)
    copy.run("-W", "ignore", "-c", LEFT.format(place=str(copy.tree), tops=TOPS))
    copy.run("-c", UNKNOWN.format(keys=[name for name in features if name in SECTIONS]))
    copy.run("docs/generate.py")  # the pages of keys and metrics
    copy.run("-m", "ruff", "check", "-q", ".")
    assert "train" in copy.run("-m", "lightning_proxy.cli", "--help")
    return copy


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_all_features_can_be_deleted_and_types_and_the_contract_hold_and_an_agent_gets_better(tmp_path: Path) -> None:
    copy = left_without(tmp_path, FEATURES)
    (copy.tree / ".venv" / "typing").mkdir(parents=True)
    (copy.tree / ".venv" / "typing" / "lightning_proxy").symlink_to(copy.tree)
    copy.run("-m", "mypy")
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    copy.run(*tests, "-n", "2", "--dist", "loadgroup", "-m", "not long and not vllm", *TESTS[:3], *PROMISES)
    assert "passed" in copy.run(*tests, REALLY)
