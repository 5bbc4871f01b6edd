"""What nvidia-smi says of the GPUs while something runs: how busy they are, and how much of their memory is taken."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

ASK = ("nvidia-smi", "--query-gpu=index,name,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
EVERY_S = 1.0


@dataclass(frozen=True)
class Look:
    """A card at a time: percent busy and GiB taken, None where the driver does not say."""

    at: float
    name: str
    busy: float | None
    gib: float | None


def look() -> dict[int, Look]:
    """Return each card as it is now; nothing without nvidia-smi."""
    try:
        listing = subprocess.run(ASK, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return read(listing, time.time())


def read(listing: str, at: float) -> dict[int, Look]:
    """Return the cards of nvidia-smi's answer. `[N/A]` stands where the driver does not say."""
    lines = (line.split(", ") for line in listing.splitlines() if line.strip())
    return {int(n): Look(at, name, _number(busy), _scaled(_number(mib))) for n, name, busy, mib in lines}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _scaled(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


@dataclass
class Watch:
    """`with Watch() as watch:` looks at the cards every second in a thread of its own."""

    looks: list[dict[int, Look]] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while there := look():
            self.looks.append(there)
            if self._over.wait(EVERY_S):
                return


def seen(looks: Sequence[Mapping[int, Look]], begin: float, end: float) -> dict[int, dict[str, Any]]:
    """Return for each card: mean percent busy from `begin` to `end`, and the most GiB taken at any time."""
    found = {}
    for number in dict.fromkeys(n for one in looks for n in one):
        of_card = [one[number] for one in looks if number in one]
        busy = [one.busy for one in of_card if begin <= one.at <= end and one.busy is not None]
        gib = [one.gib for one in of_card if one.gib is not None]
        found[number] = {
            "name": of_card[0].name, "busy": fmean(busy) if busy else None, "gib": max(gib) if gib else None
        }  # fmt: skip
    return found
