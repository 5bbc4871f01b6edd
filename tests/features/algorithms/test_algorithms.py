"""Algorithms by their names: all are there, and unknown ones are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lightning_proxy.features.algorithms.config import AlgorithmsConfig
from lightning_proxy.trainer.functions import load
from support.paths import ROOT
from support.sections import TrainerConfig

FOLDER = ROOT / "features" / "algorithms"
FILES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py") if path.stem != "config")


def test_each_algorithm_is_one_file_of_at_most_60_lines_that_the_configuration_names() -> None:
    assert sorted(name for names in AlgorithmsConfig.functions.values() for name in names) == FILES
    for name in FILES:
        path = FOLDER / f"{name}.py"
        assert len(path.read_text().splitlines()) <= 60 and load("trainer", name).__doc__


@pytest.mark.parametrize("name", FILES)
def test_documents_say_what_each_algorithm_is_for(name: str) -> None:
    for page in ("credit", "settings"):
        assert f"`{name}`" in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("kind", sorted(AlgorithmsConfig.functions))
def test_an_unknown_name_is_refused_with_those_there_are(kind: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate({kind: "best"})
    (error,) = refused.value.errors()
    assert error["msg"].startswith(f"Value error, {', '.join(TrainerConfig.known(kind))}")
    assert error["msg"].endswith("got 'best'") and "\n" not in error["msg"]
