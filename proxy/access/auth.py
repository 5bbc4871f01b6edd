"""Decides who may call: agents and admins with configured or stored keys, and rollouts with their own keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from ...core.config.server import ProxyConfig
from ...core.errors import Forbidden, NotFound, StoreUnavailable, Unauthorized
from ...core.http import foreign
from ...core.records import Limits, RolloutName, Sender
from ...store.keys import ROLLOUT_KEY_PREFIX, StoredKey, hash_key
from ...store.rollouts import RolloutKey
from ...store.store import Store
from .limits import OF_ALL, Kind, Limiter

log = logging.getLogger(__name__)
audit = logging.getLogger("lightning_proxy.audit")  # what people change, by name and id of a key, never the key itself

CACHED_KEYS = 20_000
CACHED_S = 2.0  # then every worker refuses the key of a rollout that was deleted, and calls with that of an ended one
REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `rollout`: the rollout that its key was made for, if any.

    `forward_authorization`: upstreams without a configured key get the sender's own. `key_id`: the id of the stored
    key, its own or the one that opened its rollout. `own`: the caller sees and rewards only rollouts of that key.
    `evidence`: its rewards count in the test of a new version. `name`: the name of its key in the log.
    """

    rollout: RolloutKey | None = None
    forward_authorization: bool = False
    limiter: Limiter | None = None
    recorded: bool = True
    key_id: str | None = None
    is_admin: bool = False
    own: bool = False
    evidence: bool = False
    name: str | None = None

    def log_change(self, change: str) -> None:
        """Log what this caller changed, with the name and id of its key."""
        key = (
            f"key {self.name}" + f" (id {self.key_id})" * (self.key_id is not None)
            if self.name
            else "a request without a key"
        )
        log_change(f"{change}, by {key}", key=self.name, key_id=self.key_id)

    @property
    def owner(self) -> Hashable:
        """Return the owner of a request's share of memory: a key, or all rollout keys made with a key."""
        return self.key_id or self.name, self.rollout is not None

    @property
    def sender(self) -> Sender:
        """Return this caller in the store's form, as one who rewards and ends rollouts."""
        return Sender(self.key_id, self.own, self.evidence)

    @property
    def sees(self) -> str | None:
        """Return the id of the key to whose rollouts the caller is limited; None if its scope is not `own`."""
        return self.key_id if self.own else None

    def shown(self, kind: Kind, view: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a view that the caller may see."""
        return view | OF_ALL[kind] if self.own else view

    @property
    def rollout_id(self) -> str | None:
        return None if self.rollout is None else self.rollout.rollout_id

    def counted(self, *, answers: bool = False, reads: bool = False) -> AbstractContextManager[None]:
        """Count a request during the block, as `Limiter` does. Admins' requests count only if a model answers them."""
        if self.limiter is None or (self.is_admin and not answers):
            return nullcontext()
        return self.limiter.counted(answers=answers, reads=reads)

    def admit(self, name: RolloutName) -> RolloutName:
        """Return the rollout that a request names, with this caller's key as its owner.

        Raises Forbidden if a rollout's own key names another rollout, task or mode. Code that the policy runs can read
        that key, and could otherwise choose what its rollout is compared with, or keep it out of training.
        """
        of = self.rollout
        name = name._replace(key_id=self.key_id, evidence=self.evidence)
        if of is None:
            return name
        if name.rollout_id != of.rollout_id:
            raise Forbidden(f"this key is for rollout {of.rollout_id!r} only")
        if name.task_id not in (None, of.task_id):
            raise Forbidden(f"a rollout's own key cannot change the rollout's task, {of.task_id!r}", param="task_id")
        if name.mode not in ("train", of.mode):
            raise Forbidden(f"a rollout's own key cannot change the rollout's mode, {of.mode!r}", param="mode")
        return name


class Keys:
    """Checks keys. A proxy on a loopback address lets everybody in until a key is made or `proxy.api_keys` is set.

    All stored keys are read together, twice a second, so that no request reads their table.
    Revoked keys still count as made: revoking the last key, or the last admin key, lets nobody in who was kept out
    before.
    """

    def __init__(self, config: ProxyConfig, store: Store) -> None:
        self._config, self._store = config, store
        self._default = Limits(**dict(config.limits))
        # By their hashes: the time of a look-up reveals nothing about keys.
        self._configured: dict[str, Caller] = {}
        for section, is_admin in (("api_keys", False), ("admin_keys", True)):
            for n, key in enumerate(getattr(config, section)):
                name, hashed = f"proxy.{section}[{n}]", hash_key(key.get_secret_value())
                self._configured[hashed] = Caller(
                    limiter=self._limiter(), is_admin=is_admin, evidence=is_admin, name=name
                )
        self._stored: Sequence[StoredKey] = ()
        self._by_id: dict[str, Caller] = {}
        # Let in only while no key is needed: then everybody is an admin, unless there are admins' keys.
        self._anybody = Caller(forward_authorization=True, limiter=self._limiter())
        self._rollouts: dict[str, tuple[RolloutKey, float]] = {}

    async def refresh(self) -> None:
        """Read the stored keys again. Raise StoreUnavailable if the store cannot be read."""
        stored = await self._store.keys.all()
        if stored == self._stored:
            return
        live = [key for key in stored if key.live]
        self._by_id = {key.key_id: self._by_id.get(key.key_id) or self._caller(key) for key in live}
        self._callers = self._configured | {key.key_hash: self._by_id[key.key_id] for key in live}
        self._stored = stored
        self._has_admins = bool(self._config.admin_keys) or any(key.role == "admin" for key in stored)
        self._anybody = replace(self._anybody, evidence=not self._has_admins)
        self.required = bool(stored or self._config.api_keys) or not self._config.is_loopback

    async def watch(self) -> None:
        """Read the stored keys repeatedly until cancelled. While the store cannot be read, the last ones stay valid."""
        failing = False
        while True:
            await asyncio.sleep(REFRESH_S)
            before = self._stored
            try:
                await self.refresh()
                failing = False
                log_keys(before, self._stored)
            except StoreUnavailable as error:
                if not failing:
                    log.warning("the keys cannot be refreshed: %s", error)
                failing = True

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller. Raises Unauthorized if a needed key is missing or invalid. `headers`: in lower case."""
        # Wherever the clients of OpenAI, Anthropic and Azure put them.
        bearer = headers.get("authorization", "")
        keys = [bearer[7:].strip()] if bearer[:7].lower() == "bearer " else []
        keys += [headers[name] for name in ("x-api-key", "api-key") if name in headers]
        for key in keys:
            if key.startswith(ROLLOUT_KEY_PREFIX):
                return await self._of_rollout(hash_key(key))
        for key in keys:
            if (caller := self._callers.get(hash_key(key))) is not None:
                return caller
        if self.required:
            raise Unauthorized(
                "a valid API key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key"
            )
        return self._anybody

    async def require(self, caller: Caller, rollout_ids: Iterable[str]) -> None:
        """Raise NotFound if the caller may not see a rollout, Forbidden if a rollout's own key is used beyond it."""
        wanted = {*rollout_ids}
        if caller.rollout_id is not None and wanted != {caller.rollout_id}:
            raise Forbidden(f"this key is for rollout {caller.rollout_id!r} only")
        if caller.own and (other := await self._store.rollouts.of_another_key(wanted, caller.key_id)):
            raise NotFound(f"no rollout {other!r}", param="rollout_id")

    def require_admin(self, caller: Caller) -> None:
        """Raise Unauthorized unless the caller is an admin or, while no admin key exists, may see all rollouts."""
        if not caller.is_admin and (self._has_admins or caller.own or caller.rollout is not None):
            raise Unauthorized("an admin key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key")

    def _limiter(self, own: Limits | None = None) -> Limiter | None:
        limits = (own or self._default) | self._default
        return Limiter(limits) if limits else None

    def _caller(self, key: StoredKey) -> Caller:
        limiter, is_admin, own = self._limiter(key.limits), key.role == "admin", key.scope == "own"
        evidence = is_admin or key.evaluator
        return Caller(None, False, limiter, key.recording, key.key_id, is_admin, own, evidence, key.name)

    async def _of_rollout(self, key_hash: str) -> Caller:
        """The caller behind a rollout's key. The key that opened the rollout must be live, and its limits apply."""
        rollout, until = self._rollouts.get(key_hash, (None, 0.0))
        if rollout is None or until < monotonic():
            rollout, until = await self._store.rollouts.of_key(key_hash), monotonic() + CACHED_S
        giver = self._anybody if rollout is None or rollout.key_id is None else self._by_id.get(rollout.key_id)
        if rollout is None or giver is None:
            why = "this rollout key is unknown, or the key that opened its rollout was revoked"
            raise Unauthorized(why, code="invalid_api_key")
        self._rollouts[key_hash] = rollout, until
        if len(self._rollouts) > CACHED_KEYS:
            del self._rollouts[next(iter(self._rollouts))]
        # Where none is needed, a rollout's key might as well be left out.
        evidence = rollout.evidence or (self._anybody.evidence and not self.required)
        return Caller(rollout, False, giver.limiter, giver.recorded, rollout.key_id, evidence=evidence, name=giver.name)


def require_local(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise Forbidden for a request that a web page could send: one with a foreign Origin or host name.

    https://owasp.org/www-community/attacks/DNS_Rebinding
    """
    if (header := foreign(headers)) is not None:
        raise Forbidden(
            f"without keys, only this machine is served, not {header}: make a key with "
            "`lightning-proxy keys create NAME`, or configure proxy.api_keys"
        )


def credentials(headers: Mapping[str, str]) -> str:
    """Return the keys in a request's headers as one string."""
    return "\n".join(headers.get(name, "") for name in ("authorization", "x-api-key", "api-key"))


def log_change(change: str, *, once: bool = False, **fields: Any) -> None:
    """Log a change; JSON logs also get `fields`. `once`: all workers see the change, but only one logs it."""
    audit.info("%s", change, extra={"fields": {"event": "audit"} | fields, "once": once})


def log_keys(before: Sequence[StoredKey], after: Sequence[StoredKey]) -> None:
    """Log keys that commands made, revoked or purged in the store since the last check."""
    old, new = {key.key_id: key for key in before}, {key.key_id: key for key in after}
    for key_id, key in (old | new).items():
        changes = []
        if key_id not in old:
            changes.append(f"was created ({key.role}, scope {key.scope}{', evaluator' * key.evaluator})")
        if key_id not in new:
            changes.append("was purged")
        elif not key.live and (key_id not in old or old[key_id].live):
            changes.append("was revoked")
        for change in changes:
            log_change(f"key {key.name} (id {key_id}) {change}", once=True, key_id=key_id)
