"""The Job and the Secret of one run of the program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .....client.program import NAMES, reached_directly
from .....proxy.config.run import KubernetesConfig
from .....proxy.errors import ConfigError

RUN, JOB, ROLLOUT = "lightning-proxy/run", "lightning-proxy/job", "lightning-proxy/rollout"
KEPT_S = 3600  # a Job that nobody deleted, because `run` itself was killed
LEFT_S = 5  # for a program to end after SIGTERM
AWAY_S = 60  # a node that does not answer; Kubernetes itself waits five minutes

# What namespaces with the pod security standard "restricted" ask for. A user by number, since most images name none.
POD_SECURITY = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

DEFAULT: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "spec": {
        "template": {
            "spec": {
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,  # LIGHTNING_…_PORT=tcp://… would be read as configuration
                "terminationGracePeriodSeconds": LEFT_S,
                "tolerations": [
                    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute",
                     "tolerationSeconds": AWAY_S}
                    for what in ("not-ready", "unreachable")
                ],
                "containers": [{"name": "agent"}],
            }
        }
    },
}  # fmt: skip


class Manifests:
    """Makes the objects of each run from the configuration. ConfigError if its template is no Job."""

    def __init__(self, config: KubernetesConfig, command: Sequence[str], run: str) -> None:
        self._run, self._command = run, [_literal(part) for part in command]
        self._base = DEFAULT if config.template is None else _read(config.template)
        container = self._base["spec"]["template"]["spec"]["containers"][0]
        self._own: dict[str, Any] = {"resources": config.resources} if config.template is None else {}
        if config.image is not None:
            self._own["image"] = config.image
        elif "image" not in container:
            raise ConfigError("executor kubernetes needs run.kubernetes.image, the agent's container image")

    def job(self, name: str, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the Job: one pod, one try. Its keys are in the Secret of the same name."""
        job = copy.deepcopy(self._base)
        labels = {RUN: self._run, JOB: name}
        metadata = job.setdefault("metadata", {})
        metadata["name"] = name
        spec = job["spec"]
        # Kubernetes must not try again by itself: that would be a second run in the same rollout.
        spec.update(completions=1, parallelism=1, backoffLimit=0, podReplacementPolicy="Failed")
        spec.pop("podFailurePolicy", None)
        spec.setdefault("ttlSecondsAfterFinished", KEPT_S)
        template = spec["template"]
        for made in (metadata, template.setdefault("metadata", {})):
            made.setdefault("labels", {}).update(labels)
            made.setdefault("annotations", {})[ROLLOUT] = env["LIGHTNING_ROLLOUT_ID"]
        template["spec"]["restartPolicy"] = "Never"
        _restrict(template["spec"])
        container = template["spec"]["containers"][0]
        container.update(self._own, command=self._command)
        container.pop("args", None)
        env = _directly(env, container.get("env", ()))
        given = [one for one in container.get("env", ()) if one["name"] not in env]
        container["env"] = given + [_variable(key, value, env["OPENAI_API_KEY"], name) for key, value in env.items()]
        return job

    def secret(self, name: str, env: Mapping[str, str], job_uid: str) -> dict[str, Any]:
        """Return the Secret with the run's keys. It is deleted with the Job."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": {RUN: self._run, JOB: name}, "ownerReferences": [owner]},
            "immutable": True,
            "stringData": {key: value for key, value in env.items() if value == env["OPENAI_API_KEY"]},
        }


def _restrict(pod: dict[str, Any]) -> None:
    """Run the pod without root and privileges, but for what a template says itself."""
    pod["securityContext"] = POD_SECURITY | pod.get("securityContext", {})
    for one in (*pod["containers"], *pod.get("initContainers", ())):
        one["securityContext"] = SECURITY | one.get("securityContext", {})


def _directly(env: Mapping[str, str], template: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The variables with the proxy's host in NO_PROXY, but where the template takes that from elsewhere."""
    there = {one["name"]: one.get("value", "") for one in template}
    elsewhere = {one["name"] for one in template if "valueFrom" in one} & {*NAMES}
    return {name: value for name, value in reached_directly(env, there).items() if name not in elsewhere}


def _variable(key: str, value: str, key_of_rollout: str, secret: str) -> dict[str, Any]:
    if value == key_of_rollout:
        return {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    return {"name": key, "value": _literal(value)}


def _literal(text: str) -> str:
    """Kubernetes puts variables in the place of $(NAME), in commands and values. Here nothing is one."""
    return text.replace("$", "$$")


def _read(path: Path) -> dict[str, Any]:
    try:
        job = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"run.kubernetes.template: cannot read {path}: {error}") from None
    try:
        container = job["spec"]["template"]["spec"]["containers"][0]
        usable = job["apiVersion"] == "batch/v1" and job["kind"] == "Job" and isinstance(container, dict)
    except (KeyError, IndexError, TypeError):
        usable = False
    if not usable:
        raise ConfigError(f"run.kubernetes.template: {path} is no Job of batch/v1 with a container")
    return dict(job)
