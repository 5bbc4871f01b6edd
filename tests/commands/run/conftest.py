"""Runs of programs against a control API, by every way of running them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.control_api import ControlApi, Program, served
from support.ray_cluster import RayCluster, ray_cluster


@pytest.fixture
async def proxy() -> AsyncIterator[ControlApi]:
    async with served() as api:
        yield api


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayCluster]:
    """A real cluster with a head and two nodes, for one program each."""
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        cluster.add_node()
        cluster.add_node()
        yield cluster


@pytest.fixture(params=["process", "preload", pytest.param("ray", marks=pytest.mark.long)])
def program(request: pytest.FixtureRequest, proxy: ControlApi) -> Program:
    """Makes a runner of a Python program, one for each way of running it."""
    return Program(request.param, settings(request, proxy))


def settings(request: pytest.FixtureRequest, proxy: ControlApi) -> dict[str, object]:
    """The configuration."""
    if request.param == "ray":
        return {"run": {"executor": "ray"}, "ray": {"address": request.getfixturevalue("ray_nodes").address}}
    return {}
