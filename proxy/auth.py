"""Who may call: agents and admins by configured keys, one rollout by a key given out for it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr

from lightning_proxy.proxy.config import ProxyConfig
from lightning_proxy.proxy.errors import Forbidden, Unauthorized
from lightning_proxy.proxy.ports import Caller
from lightning_proxy.proxy.store import Store
from lightning_proxy.proxy.types import Rollout

ROLLOUT_KEY_PREFIX = "lpk-rollout-"
CACHED_KEYS = 20_000


def new_rollout_key() -> str:
    return ROLLOUT_KEY_PREFIX + secrets.token_urlsafe(24)


def hash_key(key: str) -> str:
    """What the store keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def require_local(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Where no key is asked for, refuse what a web page can send: by its Origin, or under a name that points at us.

    Raises Forbidden. https://owasp.org/www-community/attacks/DNS_Rebinding
    """
    for name, value in headers:
        text = value.decode("latin-1")
        if name not in (b"host", b"origin") or (name == b"origin" and _is_app(text)):
            continue
        if not _is_loopback(text):
            raise Forbidden(
                f"without keys only this machine is served, not {name.decode()} {text[:100]!r}: "
                "configure proxy.api_keys"
            )


def _is_app(origin: str) -> bool:
    """Whether an Origin is a desktop program's (vscode-file://…), which no web page can have."""
    return "://" in origin and not origin.lower().startswith(("http://", "https://"))


@lru_cache(1024)
def _is_loopback(authority: str) -> bool:
    """Whether a Host header, or an Origin's URL, names the loopback interface."""
    try:
        host = urlsplit(authority if "://" in authority else f"//{authority}").hostname
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


class Keys:
    """Checks the keys of requests. Without configured keys everybody is let in (and only loopback is bound)."""

    def __init__(self, config: ProxyConfig, store: Store) -> None:
        self._store = store
        self._agents = _hashes(config.api_keys)
        self._admins = _hashes(config.admin_keys)
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who makes a call of the data path; raises Unauthorized. Header names are lower-case."""
        keys = _keys(headers)
        for key in keys:
            if key.startswith(ROLLOUT_KEY_PREFIX):
                return Caller((await self._rollout_of(key)).rollout_id, forward_authorization=False)
        if any(self._matches(key, self._agents) or self._matches(key, self._admins) for key in keys):
            return Caller(None, forward_authorization=False)
        if self._agents:
            raise Unauthorized(
                "a valid API key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key"
            )
        return Caller(None, forward_authorization=True)

    async def require_agent(self, headers: Mapping[str, str], rollout_ids: set[str] | None = None) -> None:
        """Let agents and admins in; a rollout's key only where nothing but that rollout is touched."""
        caller = await self.authenticate(headers)
        if caller.rollout_id is not None and rollout_ids != {caller.rollout_id}:
            raise Forbidden(f"this key is for rollout {caller.rollout_id!r} only")

    def require_admin(self, headers: Mapping[str, str]) -> None:
        """Let admins in; where no admin key is configured, agents (without any key: everybody)."""
        wanted = self._admins or self._agents
        if wanted and not any(self._matches(key, wanted) for key in _keys(headers)):
            raise Unauthorized("an admin key is needed: send it as 'Authorization: Bearer …'", code="invalid_api_key")

    def _matches(self, key: str, hashes: tuple[str, ...]) -> bool:
        if not hashes:
            return False
        digest = hash_key(key)
        # No early exit: the time taken says nothing about the keys.
        return sum(hmac.compare_digest(digest, known) for known in hashes) > 0

    async def _rollout_of(self, key: str) -> Rollout:
        digest = hash_key(key)
        rollout = self._rollouts.get(digest) or await self._store.rollout_of_key(digest)
        if rollout is None:
            raise Unauthorized("this rollout key is not known", code="invalid_api_key")
        self._rollouts[digest] = rollout
        if len(self._rollouts) > CACHED_KEYS:
            self._rollouts.popitem(last=False)
        return rollout


def _keys(headers: Mapping[str, str]) -> list[str]:
    """The keys in a request, wherever the clients of OpenAI, Anthropic and Azure put them."""
    bearer = headers.get("authorization", "")
    found = [bearer[7:].strip()] if bearer[:7].lower() == "bearer " else []
    return found + [headers[name] for name in ("x-api-key", "api-key") if name in headers]


def _hashes(keys: list[SecretStr]) -> tuple[str, ...]:
    return tuple(hash_key(key.get_secret_value()) for key in keys)
