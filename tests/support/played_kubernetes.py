"""Plays a Kubernetes cluster: the API's own routes for Jobs, Secrets, pods and logs, and a node that runs containers.

A container is a process of this machine with the container's environment only. Every object is checked by the API's
schema, and every request by the caller's role.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from aiohttp import web

TOKEN = "token-of-the-cluster"
NAMESPACE = "agents"
VERBS = {"POST": "create", "DELETE": "delete"}
_VARIABLE = re.compile(r"\$\$|\$\(([^)]+)\)")

Object = dict[str, Any]


class PlayedCluster:
    """The control plane and one node. `url` is set once it runs."""

    def __init__(self, rules: list[Object]) -> None:
        self.url = ""
        self.rules = rules
        self.jobs: dict[str, Object] = {}
        self.secrets: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.created: list[Object] = []  # everything that was ever created, as it came
        self.asked: set[tuple[str, str]] = set()  # resource and verb
        self.full = False  # no node has room
        self.images_missing = False
        self.pods_forbidden = False
        self.away = 0  # requests to answer with 503
        self.secrets_late_s = self.jobs_late_s = 0.0
        self.cuts_logs = False  # a log that is followed breaks off after its first piece
        self._version = itertools.count(1)
        self._events: list[tuple[int, str, Object]] = []
        self._oldest = 0  # versions up to this one are forgotten
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self._logs: dict[str, bytes] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._work: set[asyncio.Task[None]] = set()
        self.app = web.Application(middlewares=[self._guarded])
        batch, core = f"/apis/batch/v1/namespaces/{NAMESPACE}", f"/api/v1/namespaces/{NAMESPACE}"
        self.app.router.add_post(f"{batch}/jobs", self._create_job)
        self.app.router.add_get(f"{batch}/jobs/{{name}}", self._get_job)
        self.app.router.add_delete(f"{batch}/jobs/{{name}}", self._delete_job)
        self.app.router.add_post(f"{core}/secrets", self._create_secret)
        self.app.router.add_get(f"{core}/pods", self._list_pods)
        self.app.router.add_get(f"{core}/pods/{{name}}/log", self._log)

    def kubeconfig(self, directory: Path) -> Path:
        cluster, user = {"server": self.url}, {"token": TOKEN}
        context = {"cluster": "played", "user": "agents", "namespace": NAMESPACE}
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "played",
            "clusters": [{"name": "played", "cluster": cluster}],
            "users": [{"name": "agents", "user": user}],
            "contexts": [{"name": "played", "context": context}],
        }))  # fmt: skip
        return path

    async def lose_node(self) -> None:
        """Its pods are ended by Kubernetes; Jobs make no others."""
        for name, process in list(self._processes.items()):
            condition = {
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
                "message": "Taint manager: deleting due to NoExecute taint",
            }  # fmt: skip
            self.pods[name]["status"].setdefault("conditions", []).append(condition)
            _kill(process)

    async def delete_pod(self, name: str) -> None:
        await self._remove_pod(name)

    async def vanish(self, name: str) -> None:
        """Remove a pod while nobody watches."""
        _kill(self._processes[name])
        del self.pods[name]
        await self.forget_versions()

    async def forget_versions(self) -> None:
        """End all watches, and keep no old versions: watchers have to list again."""
        async with self._changed:
            self._oldest = next(self._version)
            self._events.clear()
            for watch in self._watches:
                watch.cancel()

    async def close(self) -> None:
        for process in self._processes.values():
            _kill(process)
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if request.headers.get("Authorization", "").lower() != f"bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        if self.away:
            self.away -= 1
            return _status(503, "ServiceUnavailable", "apiserver is shutting down")
        parts = request.path.partition(f"/namespaces/{NAMESPACE}/")[2].split("/")
        resource = parts[0] + ("/log" if parts[-1] == "log" else "")
        verb = VERBS.get(request.method) or ("get" if len(parts) > 1 else "list")
        verb = "watch" if request.query.get("watch") == "true" else verb
        self.asked.add((resource, verb))
        if not any(resource in rule["resources"] and verb in rule["verbs"] for rule in self.rules):
            return _status(403, "Forbidden", f"{resource} is forbidden: cannot {verb} resource")
        return await handler(request)  # type: ignore[no-any-return]

    def _made(self, made: Object) -> Object:
        kubernetes_validate.validate(made, "1.37", strict=True)
        self.created.append(copy.deepcopy(made))
        made["metadata"] |= {"namespace": NAMESPACE, "uid": f"uid-{next(self._version)}"}
        return made

    async def _create_job(self, request: web.Request) -> web.Response:
        job = await request.json()
        await asyncio.sleep(self.jobs_late_s)
        name = job["metadata"]["name"]
        if name in self.jobs:
            return _status(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        try:
            self.jobs[name] = self._made(job)
        except kubernetes_validate.ValidationError as error:
            return _status(422, "Invalid", f"Job is invalid: {error.message}")
        work = asyncio.create_task(self._run_pod(job))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return web.json_response(job, status=201)

    async def _get_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["name"])
        return web.json_response(job) if job else _status(404, "NotFound", "job not found")

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.jobs.pop(name, None) is None:
            return _status(404, "NotFound", f'jobs.batch "{name}" not found')
        if (await request.json())["propagationPolicy"] != "Background":
            return _status(500, "Untried", "only Background is played")
        self.secrets = {key: one for key, one in self.secrets.items() if not _is_owned(one, name)}
        for pod in [key for key, one in self.pods.items() if _is_owned(one, name)]:
            await self._remove_pod(pod)
        return _status(200, "", "")

    async def _create_secret(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.secrets_late_s)
        secret = self._made(await request.json())
        data = {key: base64.b64encode(value.encode()).decode() for key, value in secret.pop("stringData").items()}
        self.secrets[secret["metadata"]["name"]] = {**secret, "data": data}
        return web.json_response(secret, status=201)

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        key, equals, value = request.query["labelSelector"].partition("=")

        def fits(pod: Object) -> bool:
            labels = pod["metadata"]["labels"]
            return labels.get(key) == value if equals else key in labels

        if request.query.get("watch") != "true":
            items = [pod for pod in self.pods.values() if fits(pod)]
            metadata = {"resourceVersion": str(next(self._version))}
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        watch = asyncio.create_task(self._send_events(answer, int(request.query["resourceVersion"]), fits))
        self._watches.add(watch)
        with suppress(asyncio.CancelledError, ConnectionError, TimeoutError):
            async with asyncio.timeout(int(request.query["timeoutSeconds"])):
                await watch
        self._watches.discard(watch)
        return answer

    async def _send_events(self, answer: web.StreamResponse, since: int, fits: Callable[[Object], bool]) -> None:
        while True:
            async with self._changed:
                if since < self._oldest:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                    await answer.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                    return
                new = [event for event in self._events if event[0] > since]
                if not new:
                    await self._changed.wait()
                    continue
            for version, kind, pod in new:
                since = version
                if fits(pod):
                    await answer.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._logs:
            said = f'container "agent" in pod "{name}" is waiting to start: ContainerCreating'
            return _status(400, "BadRequest", said) if name in self.pods else _status(404, "NotFound", "no pod")
        answer = web.StreamResponse()
        await answer.prepare(request)
        sent = 0
        while True:
            async with self._changed:
                piece = self._logs.get(name, b"")[sent:]
                ended = name not in self._processes
                if not piece and not ended and request.query.get("follow") == "true":
                    await self._changed.wait()
                    continue
            await answer.write(piece)
            sent += len(piece)
            if self.cuts_logs and request.query.get("follow") == "true" and piece:
                assert request.transport is not None
                request.transport.abort()
                return answer
            if not piece:
                return answer

    async def _tell(self, kind: str, pod: Object) -> None:
        async with self._changed:
            version = next(self._version)
            pod["metadata"]["resourceVersion"] = str(version)
            self._events.append((version, kind, copy.deepcopy(pod)))
            self._changed.notify_all()

    async def _state(self, pod: Object, phase: str, state: Object) -> None:
        container = pod["spec"]["containers"][0]["name"]
        pod["status"] |= {"phase": phase, "containerStatuses": [{"name": container, "state": state}]}
        await self._tell("MODIFIED", pod)

    async def _run_pod(self, job: Object) -> None:
        """The Job's controller, the scheduler and the kubelet in turn."""
        if self.pods_forbidden:
            said = {"reason": "FailedCreate", "message": "pods are forbidden: exceeded quota"}
            job["status"] = {"conditions": [{"type": "Failed", "status": "True", **said}]}
            return
        name = f"{job['metadata']['name']}-{os.urandom(3).hex()[:5]}"
        pod = copy.deepcopy(job["spec"]["template"])
        pod["metadata"] |= {"name": name, "uid": f"uid-{next(self._version)}"}
        pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": job["metadata"]["name"]}]
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        await self._tell("ADDED", pod)
        if self.full:
            said = {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **said}]
            await self._tell("MODIFIED", pod)
            return
        if self.images_missing:
            said = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "agent:1"'}
            await self._state(pod, "Pending", {"waiting": said})
            return
        while (env := self._environment(pod)) is None:
            said = {"reason": "CreateContainerConfigError", "message": "secret not found"}
            await self._state(pod, "Pending", {"waiting": said})
            await asyncio.sleep(0.05)
        await self._run_container(pod, env)

    async def _run_container(self, pod: Object, env: Mapping[str, str]) -> None:
        container, name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        command = [_expanded(part, env) for part in container["command"]]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            said = {"reason": "StartError", "exitCode": 128, "message": f'exec: "{command[0]}": {error.strerror}'}
            await self._state(pod, "Failed", {"terminated": said})
            return
        self._processes[name], self._logs[name] = process, b""
        await self._state(pod, "Running", {"running": {}})
        assert process.stdout is not None
        try:
            while piece := await process.stdout.read(1 << 16):
                async with self._changed:
                    self._logs[name] += piece
                    self._changed.notify_all()
            code = await process.wait()
        finally:
            _kill(process)
            await process.wait()
            self._processes.pop(name, None)
        code = 128 - code if code < 0 else code
        if name in self.pods:
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            await self._state(pod, "Failed" if code else "Succeeded", {"terminated": ended})

    def _environment(self, pod: Object) -> dict[str, str] | None:
        """The container's variables; None while a Secret is missing."""
        env: dict[str, str] = {"PATH": os.environ["PATH"]}  # the image's
        for one in pod["spec"]["containers"][0].get("env", ()):
            if "value" in one:
                env[one["name"]] = _expanded(one["value"], env)
                continue
            reference = one["valueFrom"]["secretKeyRef"]
            if (secret := self.secrets.get(reference["name"])) is None:
                return None
            env[one["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        return env

    async def _remove_pod(self, name: str) -> None:
        pod = self.pods.pop(name)
        if process := self._processes.get(name):
            _kill(process)
        await self._tell("DELETED", pod)


def _is_owned(thing: Object, job: str) -> bool:
    return any(owner["name"] == job for owner in thing["metadata"].get("ownerReferences", ()))


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """As the kubelet does: $(NAME) is a variable that was named before, and $$ is $."""
    return _VARIABLE.sub(lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
    return web.json_response(body | {"code": code}, status=code)


@asynccontextmanager
async def played_cluster(rules: list[Object]) -> AsyncIterator[PlayedCluster]:
    cluster = PlayedCluster(rules)
    runner = web.AppRunner(cluster.app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield cluster
    finally:
        await cluster.close()
        await runner.cleanup()
