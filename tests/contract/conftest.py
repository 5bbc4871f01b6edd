"""Proxies that the tests of a file share, and names of rollouts that no other test uses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import yaml

from contract.scripted import Scripted, scripted
from contract.system import Proxy, in_this_process


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In this process, without keys, in front of a played vLLM."""
    with in_this_process(tmp_path_factory.mktemp("proxy")) as one:
        yield one


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Scripted]]:
    """Two proxies on one store, in front of one scripted server."""
    with scripted(tmp_path_factory.mktemp("one")) as one:
        config = yaml.safe_load(one.proxy.config.read_text())
        same = {section: config[section] for section in ("store", "upstreams")}
        with in_this_process(tmp_path_factory.mktemp("other"), **same) as other:
            yield [one, Scripted(other, one.server)]


@pytest.fixture(scope="module")
def model(models: list[Scripted]) -> Scripted:
    return models[0]


@pytest.fixture
def name() -> str:
    return f"r-{uuid.uuid4().hex}"


@pytest.fixture
def rollout(name: str) -> str:
    return name
