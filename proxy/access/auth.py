"""Decides who may call: agents and admins by configured or stored keys, one rollout by the key made for it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from pydantic import SecretStr

from ..config.server import LimitsConfig, ProxyConfig
from ..errors import Forbidden, StoreUnavailable, Unauthorized
from ..store.keys import ROLLOUT_KEY_PREFIX, StoredKey, hash_key
from ..store.store import Store
from ..types import Limits
from .limits import Limiter

log = logging.getLogger(__name__)

CACHED_KEYS = 20_000
CACHED_S = 2.0  # a deleted rollout's key is refused then, by every worker
REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its rollout, if the key was made for one, and its right to use a keyless upstream.

    `key_id`: the stored key that it comes down to, if one.
    """

    rollout_id: str | None
    forward_authorization: bool
    limiter: Limiter | None = None
    recorded: bool = True
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights that one key gives. `key_id` is None for a key from the configuration."""

    key_id: str | None
    is_admin: bool
    caller: Caller


class Keys:
    """Checks the keys of requests. It lets everybody on this machine in until the first key is made.

    Stored keys are read twice a second, all at once: a request asks no database. A revoked key still counts as made:
    revoking the last one, or the last admin's, lets nobody in who was kept out before.
    """

    def __init__(self, config: ProxyConfig, store: Store) -> None:
        self._store = store
        self._default = _limits(config.limits)
        # Keys are looked up by a digest that nobody outside can compute: how long it takes says nothing about them.
        self._salt = secrets.token_bytes(32)
        self._configured = self._of_config(config.api_keys, is_admin=False)
        self._configured |= self._of_config(config.admin_keys, is_admin=True)
        self._grants = self._configured
        self._stored: list[StoredKey] = []
        self._by_id: dict[str, Grant] = {}
        self._always_required = bool(config.api_keys) or not config.is_loopback
        self._admins_configured = bool(config.admin_keys)
        self._has_admins = self._admins_configured
        self.required = self._always_required
        self._anybody = Caller(None, True, _limiter(self._default))
        self._rollouts: OrderedDict[str, tuple[tuple[str, str | None], float]] = OrderedDict()

    async def refresh(self) -> None:
        """Read the stored keys again. Raise StoreUnavailable if the store cannot be read."""
        stored = await self._store.keys.all()
        if stored == self._stored:
            return
        known = {key.key_id: self._by_id.get(key.key_id) or self._grant(key) for key in stored if key.live}
        self._grants = self._configured | {self._digest(k.key_hash): known[k.key_id] for k in stored if k.live}
        self._stored, self._by_id = stored, known
        self._has_admins = self._admins_configured or any(key.role == "admin" for key in stored)
        self.required = self._always_required or bool(stored)

    async def watch(self) -> None:
        """Read the stored keys again and again until cancelled. Keep the last ones while the store cannot be read."""
        failing = False
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
                failing = False
            except StoreUnavailable as error:
                if not failing:
                    log.warning("the keys cannot be read again: %s", error)
                failing = True

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller of a data path request, or raise Unauthorized. `headers` have lower-case names."""
        keys = _keys(headers)
        for key in keys:
            if key.startswith(ROLLOUT_KEY_PREFIX):
                return await self._of_rollout(key)
        for key in keys if self._grants else ():
            if (grant := self._find(key)) is not None:
                return grant.caller
        if self.required:
            raise Unauthorized(
                "a valid API key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key"
            )
        return self._anybody

    async def require_agent(self, headers: Mapping[str, str], rollout_ids: set[str] | None = None) -> Caller:
        """Let agents and admins in. Let a rollout's own key in only if the request touches that rollout alone."""
        caller = await self.authenticate(headers)
        if caller.rollout_id is not None and rollout_ids != {caller.rollout_id}:
            raise Forbidden(f"this key is for rollout {caller.rollout_id!r} only")
        return caller

    def require_admin(self, headers: Mapping[str, str]) -> None:
        """Let admins in; without an admin key, let agents in; without any key, let everybody in."""
        if not (self.required or self._has_admins):
            return
        found = (self._find(key) for key in _keys(headers))
        if not any(grant is not None and (grant.is_admin or not self._has_admins) for grant in found):
            raise Unauthorized("an admin key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key")

    def _of_config(self, keys: list[SecretStr], *, is_admin: bool) -> dict[bytes, Grant]:
        callers = ((hash_key(key.get_secret_value()), Caller(None, False, _limiter(self._default))) for key in keys)
        return {self._digest(key_hash): Grant(None, is_admin, caller) for key_hash, caller in callers}

    def _grant(self, key: StoredKey) -> Grant:
        caller = Caller(None, False, _limiter(key.limits | self._default), key.recording, key.key_id)
        return Grant(key.key_id, key.role == "admin", caller)

    def _find(self, key: str) -> Grant | None:
        return self._grants.get(self._digest(hash_key(key)))

    def _digest(self, key_hash: str) -> bytes:
        return hashlib.blake2b(key_hash.encode(), key=self._salt, digest_size=32).digest()

    async def _of_rollout(self, key: str) -> Caller:
        """The caller behind a rollout's key. The key that asked for it must still be live, and its limits count."""
        digest = hash_key(key)
        owner, until = self._rollouts.get(digest, (None, 0.0))
        if owner is None or until < monotonic():
            owner, until = await self._store.rollouts.of_key(digest), monotonic() + CACHED_S
        rollout_id, key_id = owner or (None, None)
        grant = None if key_id is None else self._by_id.get(key_id)
        if owner is None or (key_id is not None and grant is None):
            raise Unauthorized("this rollout key is not known, or was revoked", code="invalid_api_key")
        self._rollouts[digest] = (owner, until)
        if len(self._rollouts) > CACHED_KEYS:
            self._rollouts.popitem(last=False)
        giver = self._anybody if grant is None else grant.caller
        return Caller(rollout_id, False, giver.limiter, giver.recorded, key_id)


def _keys(headers: Mapping[str, str]) -> list[str]:
    """The keys in a request, wherever the clients of OpenAI, Anthropic and Azure put them."""
    bearer = headers.get("authorization", "")
    found = [bearer[7:].strip()] if bearer[:7].lower() == "bearer " else []
    return found + [headers[name] for name in ("x-api-key", "api-key") if name in headers]


def _limits(config: LimitsConfig) -> Limits:
    return Limits(config.requests_per_minute, config.tokens_per_minute, config.concurrent)


def _limiter(limits: Limits) -> Limiter | None:
    return Limiter(limits) if limits else None
