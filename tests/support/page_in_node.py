"""The page's modules in node: what its views draw over a proxy, without a browser."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.page.proxy import files

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
HERE = Path(__file__).with_suffix(".mjs")


def unpacked(directory: Path) -> Path:
    """Write the page's files, as the proxy serves them, into a folder."""
    for name, body in files().items():
        path = directory / "page" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return directory / "page"


async def in_node(*argv: str | Path, said: Any) -> Any:
    """Run a module in node, which reads JSON and prints JSON."""
    process = await asyncio.create_subprocess_exec("node", *map(str, argv), stdin=PIPE, stdout=PIPE, stderr=PIPE)
    out, problems = await asyncio.wait_for(process.communicate(json.dumps(said).encode()), 120)
    assert process.returncode == 0, problems.decode()
    return json.loads(out)


async def drawn(system: Any, directory: Path, *places: str | tuple[str, ...], key: str = "") -> list[dict[str, Any]]:
    """What these places of the page show, each after the buttons that follow its address were pressed."""
    wanted = [[place] if isinstance(place, str) else place for place in places]
    found: list[dict[str, Any]] = await in_node(HERE, unpacked(directory), system.url, key, said=wanted)
    assert [one["problems"] for one in found] == [[]] * len(found)
    return found
