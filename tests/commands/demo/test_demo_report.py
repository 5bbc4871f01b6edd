"""What the demo shows and leaves at its end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_proxy.commands.demo.demo import Demo, DemoOptions, begin, demo, resumed, show
from lightning_proxy.commands.signals import Interrupted
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.errors import ConfigError, LightningError
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store

BEFORE, AFTER = (
    {"mean_reward": mean, "rollouts": 160, "passed": passed} for mean, passed in ((0.03, 0.0), (0.9, 0.85))
)
RESULT = {
    "variant": "demo", "seed": 0, "steps_taken": 3, "version": 3, "best": None, "rollouts": 192,
    "held_out": {"before": BEFORE, "after": AFTER}, "minutes": {"start": 2.0, "training": 10.0},
    "steps": [{"reward_mean": mean, "rollouts": 64} for mean in (0.1, 0.4, 0.8)],
}  # fmt: skip


def test_the_table_and_the_curve_are_shown_without_a_terminal() -> None:
    output = io.StringIO()
    show(RESULT, Console(file=output, width=100))
    assert "85%" in output.getvalue()
    assert "mean training reward" in output.getvalue()
    assert "3 steps; since this start 10.0 min of training, 12.0 min in all" in output.getvalue()
    assert "\x1b" not in output.getvalue()
    assert max(len(line) for line in output.getvalue().splitlines()) <= 100


def test_an_earlier_demos_directory_is_emptied_and_never_another(tmp_path: Path) -> None:
    options = DemoOptions(directory=tmp_path / "demo")
    (begin(options).directory / "lightning.db").touch()
    begin(options)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["demo.json"]
    with pytest.raises(ConfigError, match="choose another --dir"):
        begin(DemoOptions(directory=tmp_path))
    assert (tmp_path / "demo").exists()


def test_a_demo_is_resumed_with_the_options_that_it_began_with_and_only_where_one_began(tmp_path: Path) -> None:
    began = begin(DemoOptions(steps=7, directory=tmp_path / "demo", model=tmp_path / "model"))
    assert resumed(tmp_path / "demo") == began
    (tmp_path / "moved").mkdir()
    (tmp_path / "demo" / "demo.json").rename(tmp_path / "moved" / "demo.json")
    for place in ("demo", "moved", "none"):
        with pytest.raises(ConfigError, match=f"{place} has no demo to resume"):
            resumed(tmp_path / place)


def test_a_package_that_the_demo_lacks_is_named_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.commands.demo.model.find_spec", lambda name: name != "matplotlib" or None)
    with pytest.raises(LightningError, match=r"needs matplotlib: pip install 'lightning-proxy\[demo\]'"):
        demo(DemoOptions(directory=tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


def test_a_demo_that_is_stopped_says_how_to_go_on_and_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(work: Demo) -> dict[str, Any]:
        await publish(work.directory)
        raise Interrupted("stopped")

    async def publish(directory: Path) -> None:
        config = load_config(directory / "config.yaml")
        async with opened(config.store) as database:
            versions = Store(database).versions
            (directory / "weights").mkdir()
            await versions.saved(await versions.new("merged", 2, {}), str(directory / "weights"), "policy")
            await versions.set_live(1)

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(Demo, "run", stopped)
    with pytest.raises(Interrupted):
        demo(DemoOptions(directory=tmp_path / "demo", model=tmp_path / "model"))
    said = capsys.readouterr().out
    assert f"policy version 1 (live): {tmp_path / 'demo' / 'weights'}" in said
    assert "policy export 1 DIR" in said
    assert f"go on: lightning-proxy demo --resume --dir {tmp_path / 'demo'}\n" in said
