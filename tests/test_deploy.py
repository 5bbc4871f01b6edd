"""The files in deploy/ fit the program: its commands, options, keys, ports, routes and metrics."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from lightning_proxy.cli import app
from lightning_proxy.core.config.file import load_config
from support.paths import ROOT
from support.served import proxy_in_front

DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "lightning-proxy.service"
AFTERWARDS_S = 10  # to close the store
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(target: str) -> list[tuple[str, str]]:
    """Those of one target of the Dockerfile, in order."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]
    (begin,) = (n for n, (word, rest) in enumerate(pairs) if word == "FROM" and rest.endswith(f" AS {target}"))
    end = next((n for n, (word, _) in enumerate(pairs) if word == "FROM" and n > begin), len(pairs))
    return pairs[begin:end]


def one(target: str, word: str) -> str:
    (found,) = (rest for name, rest in instructions(target) if name == word)
    return found


def environment(target: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(one(target, "ENV")))


def require_command(arguments: list[str]) -> None:
    """Parse a command line as the program does, without running it."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    with group.make_context("lightning-proxy", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        command.make_context(name, rest, parent=context)


def manifests() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("target", ["proxy", "all"])
def test_an_image_runs_a_command_that_is_there_with_keys_that_are_there(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(target).items():
        monkeypatch.setenv(name, value)
    config = load_config()
    assert config.proxy.host == "0.0.0.0"
    assert one(target, "EXPOSE") == str(config.proxy.port) == environment(target)["LIGHTNING_PROXY__PORT"]
    assert json.loads(one(target, "ENTRYPOINT")) == ["lightning-proxy"]
    require_command(json.loads(one(target, "CMD")))


@pytest.mark.parametrize("target", ["proxy", "all"])
def test_an_image_installs_the_wheel_with_extras_that_are_there(target: str) -> None:
    """tests/contract/test_wheel.py builds that wheel of what the Dockerfile copies, and starts its program."""
    (copied,) = (rest for word, rest in instructions(target) if word == "COPY")
    assert copied == "--from=wheel /wheels /wheels"
    (extras,) = re.findall(r"\[([\w,]+)\]", one(target, "RUN"))
    assert {"providers", "postgres", "otel"} <= set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "--wheel-dir /wheels" in one("wheel", "RUN")


def test_the_image_of_all_has_a_vllm_that_we_work_with() -> None:
    image, _, version = one("all", "FROM").partition(" ")[0].partition(":v")
    asked = next(one for one in PROJECT["optional-dependencies"]["vllm"] if one.startswith("vllm"))
    lowest, below = re.findall(r"\d+\.\d+", asked)
    assert image == "vllm/vllm-openai"
    assert [*map(int, lowest.split("."))] <= [*map(int, version.split("."))] < [*map(int, below.split("."))]


def test_the_image_of_the_proxy_has_a_python_that_was_tested() -> None:
    version = one("proxy", "FROM").partition(":")[2].partition("-")[0]
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


@pytest.mark.parametrize("target", ["proxy", "all"])
async def test_an_image_is_healthy_while_it_serves(tmp_path: Path, target: str) -> None:
    command = json.loads(one(target, "HEALTHCHECK").partition(" CMD ")[2])
    async with proxy_in_front(tmp_path) as proxy:
        here = [sys.executable, *command[1:]]
        given = environment(target) | {"LIGHTNING_PROXY__PORT": str(proxy.port)}
        assert subprocess.run(here, capture_output=True, env=given).returncode == 1
        await proxy.start()
        assert subprocess.run(here, capture_output=True, env=given).returncode == 0


def test_the_service_starts_a_command_that_is_there_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.partition("=") for line in SERVICE.read_text().splitlines() if "=" in line and line[0] != "#"]
    said = {name: value for name, _, value in lines}
    program, *arguments = shlex.split(said["ExecStart"])
    assert Path(program).name == "lightning-proxy"
    require_command(arguments)
    name, _, value = said["Environment"].partition("=")
    monkeypatch.setenv(name, value)
    assert int(said["TimeoutStopSec"]) >= load_config().proxy.stop_timeout_s + AFTERWARDS_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_no_fault_in_the_service(tmp_path: Path) -> None:
    text, program = SERVICE.read_text(), Path(sys.executable).with_name("lightning-proxy")
    here = tmp_path / SERVICE.name
    here.write_text(text.replace("/opt/lightning-proxy/bin/lightning-proxy", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pod_runs_the_image_of_the_proxy_as_the_image_wants_it() -> None:
    (container,) = pod()["containers"]
    assert container["image"] == f"lightning-proxy:{PROJECT['version']}"
    assert str(pod()["securityContext"]["runAsUser"]) == one("proxy", "USER")
    require_command(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert one("proxy", "WORKDIR") in mounts and str(Path(container["args"][1]).parent) in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod()["volumes"]}


def test_the_pod_has_time_to_end_and_nobody_shares_its_store() -> None:
    settings = yaml.safe_load(manifests()["ConfigMap"]["data"]["config.yaml"])
    (container,) = pod()["containers"]
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(pause) + settings["proxy"]["stop_timeout_s"] + AFTERWARDS_S
    assert pod()["terminationGracePeriodSeconds"] >= needed
    deployment = manifests()["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})


def test_the_pod_gets_no_variables_that_look_like_keys_of_ours() -> None:
    """A service of this name has Kubernetes set LIGHTNING_PROXY_PORT=tcp://… in each pod that does not refuse."""
    assert manifests()["Service"]["metadata"]["name"] == "lightning-proxy"
    assert pod()["enableServiceLinks"] is False


def test_the_store_of_the_pod_does_not_grow_for_ever(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(manifests()["ConfigMap"]["data"]["config.yaml"])
    config = load_config(tmp_path / "config.yaml")
    assert (config.rollouts.end_after_idle_s, config.store.retention.max_age_days) == (3600, 30)


async def test_the_pod_answers_its_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes asks without a key, by the pod's address."""
    settings = yaml.safe_load(manifests()["ConfigMap"]["data"]["config.yaml"])
    (container,) = pod()["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], '["a-key-of-the-secret"]')
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", **{key: value for key, value in settings["proxy"].items() if key not in ("host", "port")})
        await proxy.start()
        annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        probes = [container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")]
        for path in (*(probe["path"] for probe in probes), annotations["prometheus.io/path"]):
            async with session.get(proxy.url + path, headers={"Host": "10.1.2.3:8080"}) as answer:
                assert answer.status == 200, path
        await proxy.end(signal.SIGTERM)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings["proxy"]["port"]}
    assert {probe["port"] for probe in probes} <= set(ports)
    (port,) = manifests()["Service"]["spec"]["ports"]
    assert port["targetPort"] in ports
