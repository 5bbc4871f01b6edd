"""The keys that `lightning-proxy keys` makes: stored as hashes, with a name and limits."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Literal
from uuid import uuid4

from ..core.config.root import Config
from ..core.errors import ConfigError, Conflict, NotFound
from ..core.records import Limits, check_id
from .database import ConstraintRefused, Records, read
from .opening import opened

_NEW = (
    "key_id", "key_hash", "name", "role", "scope", "evaluator", "requests_per_minute", "tokens_per_minute",
    "concurrent", "recording", "created_at",
)  # fmt: skip
KEY_NEW = f"INSERT INTO keys ({', '.join(_NEW)}) VALUES (:{', :'.join(_NEW)})"
KEY_REVOKE = "UPDATE keys SET revoked_at = :at WHERE name = :name AND revoked_at IS NULL RETURNING *"

Role = Literal["agent", "admin", "rollout"]
Scope = Literal["all", "own"]

KEY_PREFIX = "lpk-"
ROLLOUT_KEY_PREFIX = KEY_PREFIX + "rollout-"


def new_key(role: Role) -> str:
    return f"{KEY_PREFIX}{role}-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Hash a key for the store. One round of SHA-256 is enough: nobody can guess 256 random bits.

    (Passwords need a slow hash, because people choose them.)
    """
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A stored key. `recording`: whether its calls are recorded.

    `scope`: whether it sees and rewards all rollouts, or only those that it opened. `evaluator`: its rewards are
    evidence, as an admin key's are (`store/rewards.py`).
    """

    key_id: str
    key_hash: str
    name: str
    role: Role
    scope: Scope
    evaluator: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    recording: bool
    created_at: float
    revoked_at: float | None = None

    @property
    def live(self) -> bool:
        return self.revoked_at is None

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent)


class Keyring(Records):
    """The table of keys. It has few rows and is always read in full."""

    async def all(self) -> list[StoredKey]:
        """Return all keys, including revoked ones, oldest first."""
        return await self._db.records(StoredKey, "SELECT * FROM keys ORDER BY created_at, key_id")

    async def create(
        self, name: str, role: Role, limits: Limits, *, recording: bool, scope: Scope = "all", evaluator: bool = False
    ) -> tuple[str, StoredKey]:
        """Make a key and return it; only its hash is stored. Raises Conflict if a live key has this name."""
        key = new_key(role)
        stored = StoredKey(
            uuid4().hex[:12], hash_key(key), check_id(name, "name"), role, scope, evaluator, **asdict(limits),
            recording=recording, created_at=time.time(),
        )  # fmt: skip
        try:
            await self._db.execute(KEY_NEW, **asdict(stored))
        except ConstraintRefused:
            raise Conflict(f"there is already a key named {name!r}: revoke it first, or choose another name") from None
        return key, stored

    async def revoke(self, name: str) -> StoredKey:
        """Revoke a key and the rollout keys made with it. Raises NotFound if no live key has this name."""
        row = {"name": name, "at": time.time()}
        if (revoked := await self._db.write(lambda db: db.one(KEY_REVOKE, row))) is None:
            raise NotFound(f"no live key is named {name!r}")
        return read(StoredKey, revoked)

    async def purge(self) -> int:
        return len(await self._db.write(lambda db: db.all("DELETE FROM keys WHERE revoked_at IS NOT NULL RETURNING 1")))


async def require_keys(config: Config) -> None:
    """Raise ConfigError if other machines can reach the proxy and there is no key.

    Raises StoreUnavailable if the store cannot be opened.
    """
    proxy = config.proxy
    async with opened(config.store) as database:
        has_keys = bool(proxy.api_keys) or any(key.live for key in await Keyring(database).all())
        if not proxy.is_loopback and not has_keys:
            raise ConfigError(
                f"proxy.host {proxy.host!r} is reachable from other machines, and there is no key; make one with "
                "`lightning-proxy keys create NAME`, set proxy.api_keys, or keep proxy.host on 127.0.0.1"
            )
