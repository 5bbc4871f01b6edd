"""Proxies that the tests of a file share, and names of rollouts that no other test uses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from contract.scripted import Scripted, scripted_twice
from contract.system import Proxy, in_this_process


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In this process, without keys, in front of a played vLLM."""
    with in_this_process(tmp_path_factory.mktemp("proxy")) as one:
        yield one


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Scripted]]:
    """Two proxies on one store, in front of one scripted server."""
    with scripted_twice(tmp_path_factory.mktemp("models")) as both:
        yield both


@pytest.fixture(scope="module")
def model(models: list[Scripted]) -> Scripted:
    return models[0]


@pytest.fixture
def name() -> str:
    return f"r-{uuid.uuid4().hex}"


@pytest.fixture
def rollout(name: str) -> str:
    return name
