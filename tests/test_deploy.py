"""A release: its version, and deploy/, which fits the program: commands, keys, ports, routes, alerts and metrics."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from typer.core import TyperGroup

import lightning_proxy
from contract.system import free_port, in_this_process
from lightning_proxy.cli import app
from lightning_proxy.core.config.file import load_config
from lightning_proxy.trainer.report.metric_schema import METRICS
from support.command_line import lightning
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "lightning-proxy.service"
AFTERWARDS_S = 10  # to close the store
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def one(target: str, word: str) -> str:
    """What an instruction of one target of the Dockerfile says."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    (section,) = re.findall(rf"^FROM \S+ AS {target}\n(?:(?!FROM ).*\n)*", text, re.MULTILINE)
    (said,) = re.findall(rf"^{word} +(.+)$", section, re.MULTILINE)
    return str(said)


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
def test_an_image_runs_a_command_with_keys_and_the_wheel_with_extras_that_are_there(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/contract/test_wheel.py builds that wheel of what the Dockerfile copies, and starts its program."""
    for name, value in environment(target).items():
        monkeypatch.setenv(name, value)
    config = load_config()
    assert config.proxy.host == "0.0.0.0"
    assert one(target, "EXPOSE") == str(config.proxy.port) == environment(target)["LIGHTNING_PROXY__PORT"]
    assert json.loads(one(target, "ENTRYPOINT")) == ["lightning-proxy"]
    require_command(json.loads(one(target, "CMD")))
    assert one(target, "COPY") == "--from=wheel /wheels /wheels"
    (extras,) = re.findall(r"\[([\w,]+)\]", one(target, "RUN"))
    assert {"providers", "postgres", "otel"} <= set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "--wheel-dir /wheels" in one("wheel", "RUN")


def test_the_images_are_of_a_vllm_and_a_python_that_were_tested() -> None:
    image, _, version = one("all", "FROM").partition(" ")[0].partition(":v")
    asked = next(one for one in PROJECT["optional-dependencies"]["vllm"] if one.startswith("vllm"))
    assert image == "vllm/vllm-openai" and version in Requirement(asked).specifier
    version = one("proxy", "FROM").partition(":")[2].partition("-")[0]
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_images_are_healthy_while_they_serve_and_the_pod_answers_its_probes(tmp_path: Path) -> None:
    """Kubernetes asks without a key, by the pod's address."""

    def is_healthy(target: str, port: str) -> bool:
        command = json.loads(one(target, "HEALTHCHECK").partition(" CMD ")[2])
        given = environment(target) | {"LIGHTNING_PROXY__PORT": port}
        return subprocess.run([sys.executable, *command[1:]], capture_output=True, env=given).returncode == 0

    (container,) = pod()["containers"]
    probes = [container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")]
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    with in_this_process(tmp_path, proxy={"api_keys": ["a-key-of-the-secret"]}) as proxy:
        for target in ("proxy", "all"):
            ports = (str(free_port()), proxy.url.rpartition(":")[2])
            assert [is_healthy(target, port) for port in ports] == [False, True]
        for path in (*(probe["path"] for probe in probes), annotations["prometheus.io/path"]):
            assert proxy.call("GET", path, Host="10.1.2.3:8080").status == 200, path
    (port,) = manifests()["Service"]["spec"]["ports"]
    assert {port["targetPort"], *(probe["port"] for probe in probes)} <= {port["name"] for port in container["ports"]}


def test_the_service_starts_a_command_that_is_there_and_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = dict(re.findall(r"^(\w+)=(.*)$", SERVICE.read_text(), re.MULTILINE))
    program, *arguments = shlex.split(said["ExecStart"])
    assert Path(program).name == "lightning-proxy"
    require_command(arguments)
    monkeypatch.setenv(*said["Environment"].split("=", 1))
    assert int(said["TimeoutStopSec"]) >= load_config().proxy.stop_timeout_s + AFTERWARDS_S
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    here = tmp_path / SERVICE.name
    here.write_text(SERVICE.read_text().replace(program, str(Path(sys.executable).with_name("lightning-proxy"))))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pod_runs_the_image_has_time_to_end_and_nobody_shares_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = pod()["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], '["a-key-of-the-secret"]')
    assert container["image"] == f"lightning-proxy:{PROJECT['version']}"
    assert str(pod()["securityContext"]["runAsUser"]) == one("proxy", "USER")
    require_command(container["args"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {one("proxy", "WORKDIR"), str(Path(container["args"][1]).parent)} <= mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod()["volumes"]}
    (tmp_path / "config.yaml").write_text(manifests()["ConfigMap"]["data"]["config.yaml"])
    config = load_config(tmp_path / "config.yaml")
    assert [config.proxy.port] == [port["containerPort"] for port in container["ports"]]
    assert config.rollouts.end_after_idle_s and config.store.retention.max_age_days, "it does not grow"
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(pause) + config.proxy.stop_timeout_s + AFTERWARDS_S
    assert pod()["terminationGracePeriodSeconds"] >= needed
    deployment = manifests()["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert pod()["enableServiceLinks"] is False, (
        "Kubernetes would set LIGHTNING_PROXY_PORT=tcp://… by the service's name"
    )


# Alerts and the dashboard

PLAYED = ROOT / "tests" / "alerts.yaml"
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"] if "targets" in panel]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_every_alert_is_played_firing_and_quiet_and_prometheus_takes_the_files(tmp_path: Path) -> None:
    played = [one for test in yaml.safe_load(PLAYED.read_text())["tests"] for one in test["alert_rule_test"]]
    for fires in (True, False):
        alerts = {one["alertname"] for one in played if ("exp_alerts" in one) == fires}
        assert alerts == {rule["alert"] for rule in RULES}
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (Debian's prometheus) on PATH")
    subprocess.run(["promtool", "check", "config", "--lint-fatal", DEPLOY / "prometheus.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", PLAYED], check=True)
    asked = [expression.replace("$__rate_interval", "1m").replace("$job", ".*") for expression in SHOWN]
    rules = [{"record": f"shown:{n}", "expr": expression} for n, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True)


def test_the_alerts_and_the_dashboard_name_metrics_and_labels_that_are_there(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        text = proxy.call("GET", "/metrics").body.decode()
    there = {*re.findall(r"\blightning_\w+", text)}
    there |= {f"{name}_bucket" for name in re.findall(r"^# TYPE (\w+) histogram$", text, re.MULTILINE)}
    for expressions in (SHOWN, [rule["expr"] for rule in RULES]):
        used = {name for expression in expressions for name in re.findall(r"\blightning_\w+", expression)}
        assert len(used) > 8 and used - there == set()
        shown = {name for expression in expressions for name in re.findall(r'metric="(\w+)"', expression)}
        assert shown - set(METRICS) == {"step"}


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    assert lightning("--version").stdout == f"lightning-proxy {PROJECT['version']}\n"
    assert lightning_proxy.__version__ == PROJECT["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = headings[headings[0] == "Unreleased"]
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} - (unreleased|\d{{4}}-\d\d-\d\d)", newest), newest
    asked = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(tags) <= {f"v{PROJECT['version']}"}, "pyproject.toml names another version than the tag"
