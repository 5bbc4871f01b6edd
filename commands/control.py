"""A client of the proxy's control API (contract, section 3), for the commands that talk to a running proxy."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from ..proxy.config.root import Config
from ..proxy.errors import LightningError
from ..proxy.types import Mode
from .system.processes import address

UNAUTHORIZED = 401
AWAY = (None, 502, 503, 504)
RETRY_S = 1.0


class ControlError(LightningError):
    """The proxy refused a control request; `status_code` is its HTTP status, None if it was not reached."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class ProxyNotThere(ControlError):
    """Nothing listens where the proxy should be."""

    def __init__(self, url: str) -> None:
        super().__init__(f"no proxy answers at {url}; start it with `lightning-proxy serve`")


@dataclass(frozen=True, slots=True)
class OpenRollout:
    """What an agent needs to make calls that belong to one rollout."""

    rollout_id: str
    base_url: str
    api_key: str


class ControlClient:
    """`async with ControlClient(url) as api:`; every method raises ControlError.

    `patience_s`: for so long it goes on asking a proxy that it has reached before, and that is away or cannot write.
    """

    def __init__(self, url: str, api_key: str | None = None, *, patience_s: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._reached = False
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, config: Config, *, patience_s: float = 0.0) -> ControlClient:
        """For the proxy of this configuration, with the key in LIGHTNING_API_KEY, else one of the configuration."""
        proxy = config.proxy
        configured = [key.get_secret_value() for key in proxy.admin_keys or proxy.api_keys]
        # From a file, with the end of its line perhaps.
        key = os.environ.get("LIGHTNING_API_KEY", "").strip() or next(iter(configured), None)
        return cls(f"http://{address(proxy.host, proxy.port)}", key, patience_s=patience_s)

    async def __aenter__(self) -> ControlClient:
        timeout = aiohttp.ClientTimeout(total=60)
        self._session = aiohttp.ClientSession(
            headers=self.headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def open_rollouts(self, task_id: str, mode: Mode, n: int, **choice: Any) -> list[OpenRollout]:
        """`choice`: `policy_version` or `model`, what answers them if not the live version."""
        answer = await self.request("POST", "/rollouts", {"task_id": task_id, "mode": mode, "n": n, **choice})
        return [OpenRollout(one["rollout_id"], one["base_url"], one["api_key"]) for one in answer]

    async def end_rollout(self, rollout_id: str, status: str, reason: str | None = None) -> None:
        await self.request("POST", f"/rollouts/{rollout_id}/end", {"status": status, "reason": reason})

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        return await self.request("GET", f"/rollouts/{rollout_id}")

    async def rollouts(self, **filters: str | int | None) -> dict[str, Any]:
        params = {name: str(value) for name, value in filters.items() if value is not None}
        return await self.request("GET", "/rollouts", params=params)

    async def delete_rollout(self, rollout_id: str) -> None:
        await self.request("DELETE", f"/rollouts/{rollout_id}")

    async def policy(self) -> dict[str, Any]:
        return await self.request("GET", "/policy")

    async def request(self, method: str, path: str, body: Any = None, params: dict[str, str] | None = None) -> Any:
        """One request; the decoded answer. The proxy's own error message is the ControlError's."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = await self._request_once(method, path, body, params)
                self._reached = True
                return answer
            except ControlError as error:
                if not self._reached or error.status_code not in AWAY or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _request_once(self, method: str, path: str, body: Any, params: dict[str, str] | None) -> Any:
        assert self._session is not None, "use `async with`"
        try:
            async with self._session.request(method, self.url + path, json=body, params=params) as answer:
                text, status = await answer.read(), answer.status
        except aiohttp.ClientConnectorError:
            raise ProxyNotThere(self.url) from None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ControlError(f"no usable answer from the proxy at {self.url}: {reason}") from None
        try:
            data = json.loads(text) if text else None
        except ValueError:
            raise ControlError(f"what answers at {self.url} is no lightning-proxy (HTTP {status})", status) from None
        if status >= 400:
            error_body = data.get("error") if isinstance(data, dict) else None
            message = error_body.get("message") if isinstance(error_body, dict) else str(data)[:300]
            hint = "; give it to this command in LIGHTNING_API_KEY" if status == UNAUTHORIZED else ""
            raise ControlError(f"{method} {path}: {message}{hint} (HTTP {status})", status)
        return data
