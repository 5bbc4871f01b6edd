"""The numbered scripts of the schema: the core's own, and those that each side room brings, counted apart.

A room's are `proxy/ROOM/migrations/sqlite/NNNN_NAME.sql` and `…/postgres/NNNN_NAME.sql`. They run after the core's.
What a room that is gone has left in a store stays there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

HOUSE: Traversable = resources.files("lightning_proxy.proxy")
ROOMS = HOUSE
# By room: its last script that was run.
MAKE_ROOMS = "CREATE TABLE IF NOT EXISTS room_migrations (room TEXT PRIMARY KEY, number BIGINT NOT NULL)"
ROOMS_SEEN = "SELECT room, number FROM room_migrations"
ROOM_SEEN = """
INSERT INTO room_migrations (room, number) VALUES (:room, :number)
ON CONFLICT (room) DO UPDATE SET number = excluded.number
"""

_NAME = re.compile(r"(\d{4})_.*\.sql")

Scripts = dict[int, str]


def scripts_in(folder: Traversable) -> Scripts:
    """Return the scripts in a folder, by their numbers."""
    return {int(match[1]): file.read_text() for file in folder.iterdir() if (match := _NAME.fullmatch(file.name))}


class RoomScripts:
    """The scripts of the rooms on board, by room. `seen` says the last of each that a store has seen."""

    def __init__(self, database: Literal["sqlite", "postgres"]) -> None:
        folders = {room.name: room / "migrations" / database for room in ROOMS.iterdir()}
        self._rooms = {room: scripts_in(folder) for room, folder in sorted(folders.items()) if folder.is_dir()}

    def unseen(self, seen: Mapping[str, int]) -> list[tuple[str, int, str]]:
        """Return what a store has not seen, in the order in which it is run: room, number and script."""
        return [
            (room, number, script)
            for room, scripts in self._rooms.items()
            for number, script in sorted(scripts.items())
            if number > seen.get(room, 0)
        ]

    def is_newer(self, seen: Mapping[str, int]) -> bool:
        """Return whether a newer release of a room on board has worked on a store."""
        return any(seen.get(room, 0) > max(scripts) for room, scripts in self._rooms.items())
