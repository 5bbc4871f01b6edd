"""Reads memory and disks of this machine, and the memory plan that `up` kept."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.policy import PolicyConfig
from ..config.root import Config
from ..json_text import loads_or_none

Room = dict[str, Any]

KIB, MIB = 2**10, 2**20
ASK = ("nvidia-smi", "--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits")
ASKING_S = 5.0
# What a container may use and uses: cgroups, version 2.
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def memory() -> list[Room]:
    """Return the memory of this machine, or of its container where that is limited; nothing on another system."""
    try:
        known = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = (KIB * int(known[name]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, LookupError):
        return []
    with suppress(OSError, ValueError):  # not limited; another kernel
        if (limit := int(LIMIT.read_text())) < total:
            return [{"of": "container", "total": limit, "used": min(limit, int(USED.read_text()))}]
    return [{"of": "machine", "total": total, "used": total - free}]


async def cards() -> list[Room]:
    """Return the memory of each GPU; nothing without nvidia-smi."""
    if shutil.which(ASK[0]) is None:
        return []
    asked = await asyncio.create_subprocess_exec(
        *ASK, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        said, _ = await asyncio.wait_for(asked.communicate(), ASKING_S)
    except TimeoutError:
        asked.kill()
        await asked.wait()
        return []
    found = re.findall(r"^(\d+), *(\d+), *(\d+)", said.decode(errors="replace"), re.MULTILINE)
    return [{"of": f"GPU {n}", "total": MIB * int(total), "used": MIB * int(used)} for n, total, used in found]


def disks(config: Config) -> list[Room]:
    """Return the room on the disks of the policy and of a store that is a file, as far as their folders are there."""
    folders = {"policy": config.policy.directory}
    if not config.store.is_postgres:
        folders["store"] = config.store.path.expanduser().absolute().parent
    found: dict[int, tuple[list[str], Path]] = {}  # by disk
    for of, folder in folders.items():
        with suppress(OSError):  # no policy was published yet
            found.setdefault(folder.stat().st_dev, ([], folder))[0].append(of)
    used = [(f"disk of {' and '.join(names)}", shutil.disk_usage(folder)) for names, folder in found.values()]
    return [{"of": of, "total": usage.total, "used": usage.total - usage.free} for of, usage in used]


def kept_plan(config: PolicyConfig) -> dict[str, dict[str, float]] | None:
    """Return the memory plan that `up` kept, in GiB on a card; None without one."""
    try:
        plan = loads_or_none(config.plan_file.read_text())
        sides = {side: plan[f"{side}_gib"] for side in ("vllm", "trainer")}
        return {side: {str(name): float(gib) for name, gib in of.items()} for side, of in sides.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
