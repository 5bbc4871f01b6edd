"""Programs as Kubernetes Jobs, against a played cluster that runs them as processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lightning_proxy.commands.run.executors.kubernetes import cluster as api
from lightning_proxy.commands.run.executors.kubernetes import runner as jobs
from lightning_proxy.commands.run.run import RunOptions
from lightning_proxy.commands.run.runner import CANNOT_START
from lightning_proxy.proxy.errors import ConfigError, LightningError
from support.control_api import ControlApi
from support.paths import ROOT
from support.played_kubernetes import PlayedCluster
from support.running import Program, run_all, task

Running = Callable[..., AbstractAsyncContextManager[Any]]
SLEEPS = "import time; print('begun', flush=True); time.sleep(1000)"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "WAITS_S", 0.1)
    monkeypatch.setattr(api, "RETRY_S", 0.05)


@pytest.fixture
def program(proxy: ControlApi, kubernetes: PlayedCluster) -> Program:
    run = {"executor": "kubernetes", "proxy_url": proxy.url, "kubernetes": {"image": "agent:1"}}
    return Program("kubernetes", run)


async def started(cluster: PlayedCluster) -> str:
    """Wait for a pod that runs; return its name."""
    while True:
        for name, pod in cluster.pods.items():
            if pod["status"]["phase"] == "Running":
                return name
        await asyncio.sleep(0.02)


async def test_the_key_is_in_a_secret_and_nothing_is_left_behind(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    runner = program(tmp_path, "import os; assert os.environ['OPENAI_API_KEY'] == 'k-r0'")
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions())
    assert not result.failed, result.reason
    job, secret = kubernetes.created
    assert (job["kind"], "k-r0" in json.dumps(job)) == ("Job", False)
    assert (secret["kind"], secret["stringData"]["OPENAI_API_KEY"]) == ("Secret", "k-r0")
    assert {*secret["stringData"].values()} == {"k-r0"}
    assert job["metadata"]["annotations"] == {"lightning-proxy/rollout": "r0"}
    assert (kubernetes.jobs, kubernetes.secrets, kubernetes.pods) == ({}, {}, {})


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
async def test_what_is_created_is_valid(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path, version: str
) -> None:
    await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    assert {made["kind"] for made in kubernetes.created} == {"Job", "Secret"}
    for made in kubernetes.created:
        kubernetes_validate.validate(made, version, strict=True)
    for role in yaml.safe_load_all((ROOT / "deploy" / "agents-role.yaml").read_text()):
        kubernetes_validate.validate(role, version, strict=True)


async def test_a_pod_may_run_in_a_restricted_namespace(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    template = tmp_path / "job.yaml"
    template.write_text("""
        apiVersion: batch/v1
        kind: Job
        spec:
          template:
            spec:
              securityContext: {runAsUser: 4711, fsGroup: 3}
              initContainers: [{name: first, image: "mine:2"}]
              containers: [{name: main, image: "mine:2", securityContext: {readOnlyRootFilesystem: true}}]
    """)
    await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    program.run["kubernetes"] = {"template": str(template)}
    await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    plain, own = (made["spec"]["template"]["spec"] for made in kubernetes.created if made["kind"] == "Job")
    for pod in (plain, own):
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        for one in (*pod["containers"], *pod.get("initContainers", ())):
            given = one["securityContext"]
            assert (given["allowPrivilegeEscalation"], given["capabilities"]) == (False, {"drop": ["ALL"]})
        assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & pod.keys()
    assert plain["securityContext"]["runAsUser"] == 1000
    assert (own["securityContext"]["runAsUser"], own["securityContext"]["fsGroup"]) == (4711, 3)
    assert own["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


async def test_a_job_is_tried_once_by_kubernetes(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    await run_all(proxy, program(tmp_path, "raise SystemExit(1)"), [task(1)], RunOptions())
    spec = kubernetes.created[0]["spec"]
    assert (spec["backoffLimit"], spec["completions"], spec["template"]["spec"]["restartPolicy"]) == (0, 1, "Never")


async def test_dollars_in_tasks_and_commands_are_not_variables(
    proxy: ControlApi, program: Program, tmp_path: Path
) -> None:
    odd = "$(OPENAI_API_KEY) $$(HOME) $ $$ $x $("
    line = json.dumps({"task_id": "t", "text": odd})
    text = "import os, sys; print(os.environ['LIGHTNING_TASK'], sys.argv[1], sep='|')"
    runner = program(tmp_path, text, odd)
    await run_all(proxy, runner, [type(task(1))("t", line)], RunOptions(logs=tmp_path / "logs"))
    assert (tmp_path / "logs" / "r0.log").read_text() == f"{line}|{odd}\n"


@pytest.mark.parametrize("what", ["lose_node", "delete_pod", "vanish"])
async def test_a_run_whose_pod_goes_away_is_begun_anew(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path, what: str
) -> None:
    text = f"import os\nif os.environ['LIGHTNING_ROLLOUT_ID'] == 'r0':\n    {SLEEPS}"
    running = asyncio.create_task(run_all(proxy, program(tmp_path, text), [task(1)], RunOptions()))
    pod = await started(kubernetes)
    await asyncio.sleep(0.1)
    await (kubernetes.lose_node() if what == "lose_node" else getattr(kubernetes, what)(pod))
    (result,) = await running
    assert (result.rollout_id, result.failed, result.restarts) == ("r1", False, 1)
    assert proxy.rollouts["r0"]["status"] == "discarded"


async def test_a_container_that_cannot_start_fails_its_run_after_some_time(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.images_missing = True
    program.run["kubernetes"]["start_timeout_s"] = 0.5
    (result,) = await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    why = 'ImagePullBackOff: Back-off pulling image "agent:1"'
    assert (result.exit_code, result.reason) == (CANNOT_START, f"exit code 126: the container cannot start: {why}")
    assert program.said == [f"waiting for Kubernetes: {why}"]


async def test_a_program_that_is_not_in_the_image_is_named(proxy: ControlApi, program: Program) -> None:
    (result,) = await run_all(proxy, program.command("/nowhere/agent"), [task(1)], RunOptions())
    assert result.exit_code == CANNOT_START
    assert "/nowhere/agent" in (result.reason or "")


async def test_a_pod_without_a_node_is_waited_for_and_told_of(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.full = True
    running = asyncio.create_task(run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions(group_size=2)))
    while not program.said:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    full = "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
    assert program.said == [f"waiting for Kubernetes: {full}"]
    assert kubernetes.pods == {}


async def test_a_job_that_gets_no_pod_is_lost(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.pods_forbidden = True
    (result,) = await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    assert result.reason == "the Job has no pod: pods are forbidden: exceeded quota"
    assert "waiting for Kubernetes: no pod starts" in program.said


async def test_an_api_that_is_away_for_a_moment_is_waited_for(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.away = 3
    (result,) = await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    assert not result.failed, result.reason


async def test_a_watch_that_is_too_old_is_begun_anew(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    text = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\nraise SystemExit(7)"
    running = asyncio.create_task(run_all(proxy, program(tmp_path, text), [task(1)], RunOptions()))
    await started(kubernetes)
    await asyncio.sleep(0.1)
    await kubernetes.forget_versions()
    go.touch()
    (result,) = await running
    assert (result.exit_code, result.restarts) == (7, 0)


async def test_a_job_whose_creation_is_cancelled_is_not_left_behind(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.jobs_late_s = 0.3
    running = asyncio.create_task(run_all(proxy, program(tmp_path, SLEEPS), [task(1)], RunOptions()))
    while ("jobs", "create") not in kubernetes.asked:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.5)
    assert len(kubernetes.created) == 1 and kubernetes.jobs == {}


async def test_a_secret_that_comes_after_the_pod_is_no_failure(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.secrets_late_s = 0.4
    (result,) = await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    assert not result.failed, result.reason


async def test_a_log_is_written_as_the_program_goes_and_is_whole_if_the_connection_breaks(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.cuts_logs = True
    go, log = tmp_path / "go", tmp_path / "logs" / "r0.log"
    text = (
        f"import pathlib, time\nprint('one', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\nprint('two')"
    )
    running = asyncio.create_task(run_all(proxy, program(tmp_path, text), [task(1)], RunOptions(logs=log.parent)))
    while not log.exists() or log.read_text() != "one\n":
        await asyncio.sleep(0.02)
    assert log.stat().st_mode & 0o077 == 0
    go.touch()
    await running
    assert log.read_text() == "one\ntwo\n"


async def test_what_the_role_does_not_allow_is_one_error(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    kubernetes.rules = [rule for rule in kubernetes.rules if rule["resources"] != ["secrets"]]
    with pytest.raises(LightningError, match=r"Kubernetes refused a request: secrets is forbidden.*HTTP 403"):
        await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions(group_size=2))
    assert [rollout["status"] for rollout in proxy.rollouts.values()] == ["discarded"] * 2
    assert kubernetes.jobs == {}


async def test_the_role_allows_only_what_is_asked_for(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    kubernetes.pods_forbidden = True
    await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions())
    allowed = {(what, verb) for rule in kubernetes.rules for what in rule["resources"] for verb in rule["verbs"]}
    assert kubernetes.asked == allowed


async def test_a_template_gives_what_the_options_do_not(
    proxy: ControlApi, kubernetes: PlayedCluster, program: Program, tmp_path: Path
) -> None:
    template = tmp_path / "job.yaml"
    template.write_text("""
        apiVersion: batch/v1
        kind: Job
        metadata: {labels: {team: red}}
        spec:
          backoffLimit: 6
          ttlSecondsAfterFinished: 60
          template:
            spec:
              restartPolicy: OnFailure
              nodeSelector: {disk: ssd}
              containers:
                - name: main
                  image: mine:2
                  args: [ignored]
                  env: [{name: EXTRA, value: "1"}, {name: LIGHTNING_URL, value: "http://elsewhere"}]
    """)
    program.run["kubernetes"] = {"template": str(template)}
    text = "import os; print(os.environ['EXTRA'], os.environ['LIGHTNING_URL'])"
    await run_all(proxy, program(tmp_path, text), [task(1)], RunOptions(logs=tmp_path / "logs"))
    assert (tmp_path / "logs" / "r0.log").read_text() == f"1 {proxy.url}\n"
    job = kubernetes.created[0]
    spec = job["spec"]["template"]["spec"]
    assert (spec["nodeSelector"], spec["containers"][0]["image"]) == ({"disk": "ssd"}, "mine:2")
    assert (job["spec"]["ttlSecondsAfterFinished"], job["spec"]["backoffLimit"]) == (60, 0)
    assert (spec["restartPolicy"], job["metadata"]["labels"]["team"]) == ("Never", "red")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"proxy_url": None}, "executor kubernetes needs --proxy-url"),
        ({"proxy_url": "10.0.0.1:8080"}, "proxy_url must be an http"),
        ({"kubernetes": {}}, "executor kubernetes needs run.kubernetes.image"),
        ({"kubernetes": {"template": "/nowhere.yaml"}}, "cannot read /nowhere.yaml"),
        ({"kubernetes": {"template": str(ROOT / "config.yaml")}}, "config.yaml is no Job of batch/v1"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_starts(settings: dict[str, Any], told: str) -> None:
    run = {"executor": "kubernetes", "proxy_url": "http://proxy:8080", "kubernetes": {"image": "a"}} | settings
    with pytest.raises((ConfigError, ValueError), match=told):
        Program("kubernetes", run).command("agent")


async def test_no_configured_cluster_is_one_error(
    proxy: ControlApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = {"executor": "kubernetes", "proxy_url": proxy.url, "kubernetes": {"image": "a"}}
    with pytest.raises(ConfigError, match="no Kubernetes cluster is configured"):
        await run_all(proxy, Program("kubernetes", run).command("agent"), [task(1)], RunOptions())


async def test_the_command_runs_agents_as_jobs(running: Running, kubernetes: PlayedCluster, tmp_path: Path) -> None:
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(
        "import json, os, urllib.request\n"
        "def post(url, body):\n"
        "    key = os.environ['OPENAI_API_KEY']\n"
        "    headers = {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}'}\n"
        "    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()\n"
        "messages = [{'role': 'user', 'content': 'hi'}]\n"
        "post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'model': 'policy', 'messages': messages})\n"
        "rollout = os.environ['LIGHTNING_ROLLOUT_ID']\n"
        "post(os.environ['LIGHTNING_URL'] + '/reward', {'rollout_id': rollout, 'reward': 0.25})\n"
    )
    async with running(tmp_path) as system:
        config = system.config.model_dump(mode="json")
        where = ("--executor", "kubernetes", "--proxy-url", system.url)
        system.config = type(system.config).model_validate(config | {"run": {"kubernetes": {"image": "agent:1"}}})
        options = ("--tasks", tasks, "--group-size", "3", "--json", *where)
        code, out, err = await system.lightning("run", *options, "--", sys.executable, agent)
        assert code == 0, err
        found = json.loads(out)
        assert (found["mean_reward"], found["failed"], found["without_call"]) == (0.25, 0, 0), err
    assert len([made for made in kubernetes.created if made["kind"] == "Job"]) == 3


async def test_eval_starts_its_programs_where_the_configuration_says(
    running: Running, kubernetes: PlayedCluster, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1"}\n')
    async with running(tmp_path) as system:
        run = {"executor": "kubernetes", "proxy_url": system.url, "kubernetes": {"image": "agent:1"}}
        system.config = type(system.config).model_validate(system.config.model_dump(mode="json") | {"run": run})
        code, _, err = await system.lightning("eval", "--tasks", tasks, "--samples", "2", "--", sys.executable, "-V")
        assert code == 0, err
    assert len([made for made in kubernetes.created if made["kind"] == "Job"]) == 2
