"""An upstream's own key, taken out of what the upstream sends: some name it when they refuse it, or echo headers."""

from __future__ import annotations

# A shorter one is no secret ("EMPTY"), and might be a word of an answer.
SHORTEST_KEY = 12


class KeyMask:
    """Puts as many asterisks in the key's place, so that lengths stay true. One for each answer."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._held = b""

    def once(self, data: bytes) -> bytes:
        """What is there as a whole."""
        return data.replace(self._key, b"*" * len(self._key))

    def feed(self, data: bytes) -> bytes:
        """The next piece of a body, less an end that may be the beginning of the key."""
        data = self.once(self._held + data)
        size = next((n for n in range(min(len(self._key) - 1, len(data)), 0, -1) if data.endswith(self._key[:n])), 0)
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held
