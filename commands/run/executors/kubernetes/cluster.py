"""Talks to a Kubernetes cluster through its official client: creates, watches and deletes the objects of one `run`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from .....proxy.errors import ConfigError, LightningError

CONFLICT, NOT_FOUND = 409, 404
PASSES = (408, 429, 500, 502, 503, 504)
PATIENCE_S = 60.0  # while the cluster's API is away, as for the proxy
RETRY_S = 1.0
ASK_S = 30.0
WATCH_S = 240  # then the API ends a watch, and another begins where it ended
LOG_S = 30 * 86400.0


class ClusterError(LightningError):
    """The cluster's API refused a request, or did not answer it. `status_code` is None if there was no answer."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class Cluster:
    """One namespace of a cluster. Everything in it that has the label selector is ours."""

    def __init__(self, api: client.ApiClient, namespace: str, selector: str) -> None:
        self._api, self._namespace, self._selector = api, namespace, selector
        self._jobs, self._core = client.BatchV1Api(api), client.CoreV1Api(api)

    @classmethod
    async def connect(cls, context: str | None, namespace: str | None, selector: str) -> Cluster:
        """Read the kubeconfig, or the pod's own service account. ConfigError if there is neither."""
        settings = client.Configuration()
        try:
            here = await _load(settings, context)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"no Kubernetes cluster is configured: {error}") from None
        return cls(client.ApiClient(settings), namespace or here, selector)

    async def close(self) -> None:
        await self._api.close()

    async def create_job(self, job: Mapping[str, Any]) -> str:
        """Create a Job and return its uid."""
        create = self._jobs.create_namespaced_job_without_preload_content
        read = self._jobs.read_namespaced_job_without_preload_content
        try:
            made = await self._ask(lambda: create(self._namespace, job, _request_timeout=ASK_S))
        except ClusterError as error:
            if error.status_code != CONFLICT:  # created by a request whose answer was lost
                raise
            name = job["metadata"]["name"]
            made = await self._ask(lambda: read(name, self._namespace, _request_timeout=ASK_S))
        return str(made["metadata"]["uid"])

    async def create_secret(self, secret: Mapping[str, Any]) -> None:
        create = self._core.create_namespaced_secret_without_preload_content
        try:
            await self._ask(lambda: create(self._namespace, secret, _request_timeout=ASK_S))
        except ClusterError as error:
            if error.status_code != CONFLICT:
                raise

    async def failure(self, name: str) -> str | None:
        """Return why there will be no pod of a Job; None if there still may be one."""
        read = self._jobs.read_namespaced_job_without_preload_content
        try:
            job = await self._ask(lambda: read(name, self._namespace, _request_timeout=ASK_S))
        except ClusterError as error:
            if error.status_code != NOT_FOUND:
                raise
            return "it was deleted"
        for condition in (job.get("status") or {}).get("conditions") or ():
            if condition["type"] == "Failed" and condition["status"] == "True":
                return str(condition.get("message") or condition.get("reason"))
        return None

    async def delete_job(self, name: str) -> None:
        """Delete a Job, and with it its pod and its Secret."""
        delete = self._jobs.delete_namespaced_job_without_preload_content
        options = {"propagationPolicy": "Background"}
        try:
            await self._ask(lambda: delete(name, self._namespace, body=options, _request_timeout=ASK_S))
        except ClusterError as error:
            if error.status_code != NOT_FOUND:
                raise

    async def labelled_pods(self, label: str) -> list[dict[str, Any]]:
        """Return the namespace's pods that have a label, whatever its value."""
        list_pods = self._core.list_namespaced_pod_without_preload_content
        listed = await self._ask(lambda: list_pods(self._namespace, label_selector=label, _request_timeout=ASK_S))
        return list(listed["items"])

    async def pods(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield ADDED, MODIFIED or DELETED and the pod, for every change, for ever; first those that are there."""
        version: str | None = None
        while True:
            if version is None:
                listed = await self._ask(lambda: self._list_pods(_request_timeout=ASK_S))
                for pod in listed["items"]:
                    yield "ADDED", pod
                yield "LISTED", listed
                version = listed["metadata"]["resourceVersion"]
            async for kind, thing in self._watch(version):
                if kind == "ERROR":
                    version = None  # too old, as a rule
                    break
                version = thing["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    yield kind, thing

    async def follow_log(self, pod: str, write: Callable[[bytes], object]) -> bool:
        """Hand on a container's output until its end. False if the connection broke, so that some may be missing."""
        try:
            async for piece in self._log(pod, follow=True):
                write(piece)
        except (aiohttp.ClientError, TimeoutError, ClusterError):
            return False
        return True

    async def log(self, pod: str) -> bytes:
        """Return the entire output of a container that has ended."""
        return b"".join([piece async for piece in self._log(pod, follow=False)])

    async def _log(self, pod: str, *, follow: bool) -> AsyncIterator[bytes]:
        read, limit_s = self._core.read_namespaced_pod_log_without_preload_content, LOG_S if follow else ASK_S
        with closing(await read(pod, self._namespace, follow=follow, _request_timeout=limit_s)) as answer:
            if answer.status >= 400:
                raise await _refusal(answer)
            async for piece in answer.content.iter_any():
                yield piece

    async def _watch(self, version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        watching = self._list_pods(
            watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=WATCH_S,
            _request_timeout=WATCH_S + ASK_S,
        )  # fmt: skip
        # A watch that breaks is begun again where it was; that the API is away is found out by asking for a list.
        with suppress(aiohttp.ClientError, TimeoutError):
            with closing(await watching) as answer:
                if answer.status >= 400:
                    await asyncio.sleep(RETRY_S)  # refused for as long as it is not allowed, perhaps
                    yield "ERROR", {}
                    return
                async for line in answer.content:
                    event = json.loads(line)
                    yield event["type"], event["object"]
            return
        await asyncio.sleep(RETRY_S)
        yield "ERROR", {}

    def _list_pods(self, **options: Any) -> Awaitable[aiohttp.ClientResponse]:
        list_pods = self._core.list_namespaced_pod_without_preload_content
        return list_pods(self._namespace, label_selector=self._selector, **options)

    async def _ask(self, ask: Callable[[], Awaitable[aiohttp.ClientResponse]]) -> dict[str, Any]:
        """Send a request, again while the API is away or busy."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with closing(await ask()) as answer:
                    if answer.status < 400:
                        return dict(json.loads(await answer.read()))
                    error = await _refusal(answer)
            except (aiohttp.ClientError, TimeoutError, ValueError) as broken:
                error = ClusterError(f"Kubernetes does not answer: {str(broken) or type(broken).__name__}")
            if error.status_code not in (None, *PASSES) or time.monotonic() >= deadline:
                raise error
            await asyncio.sleep(RETRY_S)


async def _load(settings: client.Configuration, context: str | None) -> str:
    """Fill in the cluster's address and our credentials; return their namespace."""
    files = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
    if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=settings)
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    await config.load_kube_config(
        config_file=files, context=context, client_configuration=settings, persist_config=False
    )
    contexts, current = config.list_kube_config_contexts(files)
    chosen = next((one for one in contexts if one["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


async def _refusal(answer: aiohttp.ClientResponse) -> ClusterError:
    """The API's own message."""
    text = (await answer.read()).decode(errors="replace")
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:300] or answer.reason
    return ClusterError(f"Kubernetes refused a request: {message} (HTTP {answer.status})", answer.status)
