"""A proxy that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.system import Proxy, in_this_process


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In this process, without keys, in front of a played vLLM."""
    with in_this_process(tmp_path_factory.mktemp("proxy")) as one:
        yield one
