"""Packages of others add to the proxy and the trainer, and cannot fail a call."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.proxy import plugins
from lightning_proxy.trainer.credit.strategies import own_credit
from lightning_proxy.trainer.functions import load
from support.command_line import lightning
from support.paths import ROOT
from support.sections import TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package with one module, and an entry point of its name, as an installer leaves them."""

    def written(name: str, body: str) -> None:
        site = tmp_path / "site"
        about = site / f"{name}-1.0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[lightning_proxy.plugins]\n{name} = {name}\n")
        (site / f"{name}.py").write_text(textwrap.dedent(body))
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return written


async def test_the_example_rewards_answers_has_a_route_and_assigns_credit(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "brevity")
    uv, site = shutil.which("uv") or Path(sys.prefix) / ".uv" / "bin" / "uv", tmp_path / "site"
    installs = [uv, "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*installs, "--python", sys.executable, copy], check=True)
    monkeypatch.syspath_prepend(str(site))
    async with running(tmp_path, plugins=["brevity"]) as system:
        assert (await system.chat("r"))[0] == 200
        async with asyncio.timeout(20):
            while await system.get("/plugins/brevity/count") != {"rewarded": 1}:
                await asyncio.sleep(0.02)
        (reward,) = (await system.get("/rollouts/r"))["rewards"]
        assert (reward["source"], reward["reward"]) == ("brevity", pytest.approx(1 / 3))  # two tokens
        assert (await system.get("/status"))["plugins"] == ["brevity"]
    trainer = TrainerConfig(credit="brevity:shared")
    assert Config(plugins=["brevity"], trainer=trainer).trainer.plugins == {"brevity"}
    with pytest.raises(ValueError, match="trainer needs these plugins: brevity; add them to plugins"):
        Config(trainer=trainer)
    assert load("trainer.credit", "brevity:shared").__module__ == "brevity"


def test_a_fault_in_a_plugins_credit_is_named_with_file_and_line(install: Install, tmp_path: Path) -> None:
    install("opo", "def broken(group, config):\n    return 1 / 0\n")
    with pytest.raises(ConfigError) as error:
        own_credit("opo:broken", [], TrainerConfig())
    fault = f"ZeroDivisionError: division by zero ({tmp_path}/site/opo.py, line 2)"
    assert error.value.message == f"trainer.credit opo:broken: it raised {fault}"


LABELS = """
    from contextlib import asynccontextmanager
    from fastapi import APIRouter
    from pydantic import BaseModel
    from lightning_proxy.core.errors import Unprocessable
    from lightning_proxy.proxy.api.rollouts import RolloutDetail, RolloutsBody
    from lightning_proxy.proxy.plugins import AgentRoute, Hooks, ProxyPlugin

    router = APIRouter(route_class=AgentRoute, prefix="/plugins/labels")

    @router.get("/{rollout_id}")
    async def peek(rollout_id: str) -> dict[str, str]:
        return {"rollout_id": rollout_id}

    async def rewrite(question, rollout):
        messages = [{"role": "system", "content": "Be polite."}, *question.body["messages"]]
        return question._replace(body=question.body | {"messages": messages})

    class Label(BaseModel):
        label: str | None = None

    class proxy(ProxyPlugin):
        routers = (router,)
        fields = ((RolloutsBody, Label), (RolloutDetail, Label))
        labels = {}

        @asynccontextmanager
        async def opened(self, core):
            yield Hooks(rewrite=rewrite)

        async def check_rollouts(self, store, added):
            if added.label == "":
                raise Unprocessable("label: it is empty", param="label")

        async def rollouts_opened(self, store, rollout_ids, added):
            self.labels |= dict.fromkeys(rollout_ids, added.label)

        async def rollout_fields(self, store, rollout_id):
            return {"label": self.labels.get(rollout_id)}

        async def status_fields(self, store, key_id):
            raise RuntimeError("broken")
    """


async def test_a_plugin_rewrites_what_the_model_is_shown_adds_fields_and_a_route_for_who_may_see_the_rollout(
    running: Running, tmp_path: Path, install: Install, caplog: Any
) -> None:
    install("labels", LABELS)
    async with running(tmp_path, plugins=["labels"]) as system:
        (opened,) = await system.post("/rollouts", {"label": "a"})
        for _ in range(2):  # the second is stored as a difference from the first
            assert (await system.chat(opened["rollout_id"]))[0] == 200
        rollout = await system.get(f"/rollouts/{opened['rollout_id']}?requests=whole")
        polite = [{"role": "system", "content": "Be polite."}, {"role": "user", "content": "hi"}]
        asked = [*system.vllm.requests, *(call["request"] for call in rollout["calls"])]
        assert ([body["messages"] for body in asked], rollout["label"]) == ([polite] * 4, "a")
        for wrong, why in (
            ({"label": ""}, "label: it is empty"),
            ({"label": 1}, "label: Input should be a valid string"),
            ({"lable": "a"}, "lable: Extra inputs are not permitted"),
        ):
            status, answer = await system.call("POST", "/rollouts", wrong)
            assert (status, answer["error"]["message"]) == (422, why)
        assert (await system.call("GET", "/status"))[0] == 200
        assert "plugin labels: its hook status_fields failed" in caplog.text
        (own, other) = await system.post("/rollouts", {"n": 2})
        for rollout, status in ((own, 200), (other, 403)):
            path, key = f"/plugins/labels/{rollout['rollout_id']}", f"Bearer {own['api_key']}"
            assert (await system.call("GET", path, Authorization=key))[0] == status


BAD = """
    import asyncio
    from contextlib import asynccontextmanager
    from lightning_proxy.proxy.plugins import Hooks, ProxyPlugin

    async def broken(*_):
        raise RuntimeError("broken")

    async def of_none():  # what a hook is told does not fit
        pass

    async def forgets(*_):
        pass

    async def hangs(*_):
        await asyncio.sleep(3600)

    class proxy(ProxyPlugin):
        @asynccontextmanager
        async def opened(self, core):
            yield Hooks(HOOK)
    """


async def test_a_hook_that_raises_or_hangs_fails_no_call(
    running: Running, tmp_path: Path, install: Install, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(plugins, "LIMIT_S", 0.2)
    hooks = {
        "rewrite=broken": "its hook rewrite failed",
        "rewrite=hangs": "its hook rewrite took longer than",
        "rewrite=forgets": "its hook rewrite failed",
        "on_call=of_none": "its hook on_call failed",
        "on_call=hangs": "its hook on_call took longer than",
        "work=(broken,)": "its hook work failed",
    }
    for n, hook in enumerate(hooks):
        install(f"bad{n}", BAD.replace("HOOK", hook))
    async with running(tmp_path, plugins=[f"bad{n}" for n in range(len(hooks))]) as system:
        assert (await system.chat("r"))[0] == 200
        async with asyncio.timeout(20):
            while not all(f"plugin bad{n}: {why}" in caplog.text for n, why in enumerate(hooks.values())):
                await asyncio.sleep(0.02)


OTHERS = """
    from fastapi import APIRouter
    from lightning_proxy.proxy.plugins import ProxyPlugin
    router = APIRouter()
    router.get("/rollouts")(print)
    class proxy(ProxyPlugin):
        routers = (router,)
    """


def test_a_plugin_that_cannot_run_is_one_line(tmp_path: Path, install: Install) -> None:
    config = tmp_path / "config.yaml"
    for name, body, why in (
        ("none", None, "no installed package has a plugin 'none' (installed: "),
        ("odd", "import no_such_module", "odd cannot be imported: ModuleNotFoundError: No module named"),
        (
            "their",
            OTHERS,
            "the routes of their must begin with /plugins/their/ and be in a router with route_class=AgentRoute",
        ),
    ):
        if body is not None:
            install(name, body)
        config.write_text(yaml.safe_dump({"plugins": [name], "store": {"url": f"sqlite:///{tmp_path}/store.db"}}))
        code, _, err = lightning("--config", config, "serve")
        assert (code, f"plugins: {why}" in " ".join(err.split())) == (2, True), err
