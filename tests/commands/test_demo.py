"""A demo empties only its own directory, and goes on where it was killed, in front of a real vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from contract.system import CLI, wait_until
from lightning_proxy.commands.demo.demo import DemoOptions, begin, demo, resumed
from lightning_proxy.core.errors import ConfigError, LightningError
from support.models import save_spelling_model

STEPS = 2


def test_a_demo_has_a_directory_of_its_own_and_is_resumed_with_the_options_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, moved = tmp_path / "demo", tmp_path / "moved"
    began = begin(DemoOptions(steps=7, directory=place, model=tmp_path / "model"))
    assert resumed(place) == began
    (place / "lightning.db").touch()
    begin(began)
    assert [path.name for path in place.iterdir()] == ["demo.json"], "an earlier demo's is emptied"
    with pytest.raises(ConfigError, match="choose another --dir"):
        begin(DemoOptions(directory=tmp_path))
    moved.mkdir()
    (place / "demo.json").rename(moved / "demo.json")
    for none in (place, moved, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"{none} is not the directory of a demo"):
            resumed(none)
    monkeypatch.setattr("lightning_proxy.commands.demo.model.find_spec", lambda name: name != "matplotlib" or None)
    with pytest.raises(LightningError, match=r"needs matplotlib: pip install 'lightning-proxy\[demo\]'"):
        demo(DemoOptions(directory=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def start(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    with (directory / "out.log").open("wb") as log:
        command = [*CLI, "demo", "--dir", str(directory / "demo"), *options]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)


def live_version(demo: Path) -> int:
    with suppress(OSError, TypeError, KeyError, httpx.HTTPError):
        port = yaml.safe_load((demo / "config.yaml").read_text())["proxy"]["port"]
        return int(httpx.get(f"http://127.0.0.1:{port}/policy", timeout=10).json()["live_version"])
    return 0


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_killed_demo_goes_on_where_it_was(tmp_path: Path) -> None:
    model, demo, log = save_spelling_model(tmp_path / "model", letters="0123456789ab"), tmp_path / "demo", "out.log"
    first = start(tmp_path, "--model", str(model), "--steps", str(STEPS))
    try:
        wait_until(lambda: first.poll() is not None or live_version(demo), 480, "a version is live")
        before = (demo / "before.json").read_text()
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not (demo / "result.json").exists(), (tmp_path / log).read_text()

    again = start(tmp_path, "--resume")
    try:
        assert again.wait(900) == 0, (tmp_path / log).read_text()
    finally:
        again.kill()
    result = json.loads((demo / "result.json").read_text())
    assert "'What is" in (tmp_path / log).read_text(), "answers are shown in words"
    assert result["steps_taken"] == len(result["steps"]) == STEPS
    assert result["held_out"]["before"]["mean_reward"] == json.loads(before)["rows"][0]["mean_reward"]
    said = (tmp_path / log).read_text()
    assert said.count("evaluating the held-out tasks") == 1 and f"{STEPS} steps; since this start" in said
