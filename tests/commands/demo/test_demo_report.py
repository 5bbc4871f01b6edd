"""What the demo shows and leaves at its end."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.demo.demo import (
    Demo,
    DemoOptions,
    DemoResult,
    begin,
    curve,
    demo,
    resumed,
    save_png,
    show,
    write_config,
)
from lightning_proxy.commands.eval.report import save
from lightning_proxy.commands.run.report import Totals
from lightning_proxy.commands.signals import Interrupted
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.errors import ConfigError, LightningError
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store

RESULT = DemoResult(
    seed=0,
    steps=3,
    version=3,
    before=Totals(160, 0, 0, 0.03, 0.0),
    after=Totals(160, 0, 0, 0.9, 0.85),
    curve=(0.1, 0.4, 0.8),
    training_s=600.0,
    total_s=900.0,
)


def test_the_table_and_the_curve_are_shown_without_a_terminal() -> None:
    output = io.StringIO()
    show(RESULT, Console(file=output, width=100))
    assert "85%" in output.getvalue()
    assert "mean training reward" in output.getvalue()
    assert "\x1b" not in output.getvalue()
    assert max(len(line) for line in output.getvalue().splitlines()) <= 100


def test_the_curve_is_saved_as_a_picture_and_the_numbers_as_json(tmp_path: Path) -> None:
    save_png(RESULT, tmp_path / "reward.png")
    save(asdict(RESULT), tmp_path / "result.json")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "result.json").read_text())["after"]["solved"] == 0.85


def test_the_curve_holds_whole_windows_only() -> None:
    assert curve([0, 1, 1, 1, 5], window=2) == (0.5, 1.0)


def test_the_demo_never_empties_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="choose another --dir"):
        begin(DemoOptions(directory=tmp_path))
    assert (tmp_path / "thesis.txt").exists()


def test_a_checkout_with_tasks_is_no_earlier_demo(tmp_path: Path) -> None:
    """examples/addition/README.md has them written there, beside config.yaml."""
    (tmp_path / "config.yaml").write_text("proxy:\nstore:\n  url: sqlite:///lightning.db\n")
    (tmp_path / "tasks").mkdir()
    with pytest.raises(ConfigError, match="choose another --dir"):
        begin(DemoOptions(directory=tmp_path))


def test_an_earlier_demos_directory_is_emptied(tmp_path: Path) -> None:
    options = DemoOptions(directory=tmp_path / "demo", seed=3)
    (begin(options).directory / "lightning.db").touch()
    begin(options)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["demo.json"]


def test_a_demo_is_resumed_with_the_options_that_it_began_with_and_only_where_one_began(tmp_path: Path) -> None:
    began = begin(DemoOptions(steps=7, seed=3, directory=tmp_path / "demo", model=tmp_path / "model"))
    assert resumed(tmp_path / "demo") == began
    (tmp_path / "moved").mkdir()
    (tmp_path / "demo" / "demo.json").rename(tmp_path / "moved" / "demo.json")
    for place in ("demo", "moved", "none"):
        with pytest.raises(ConfigError, match=f"no demo was begun in .*{place}"):
            resumed(tmp_path / place)


def test_a_package_that_the_demo_lacks_is_named_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.commands.demo.model.find_spec", lambda name: name != "matplotlib" or None)
    with pytest.raises(LightningError, match=r"needs matplotlib: pip install 'lightning-proxy\[demo\]'"):
        demo(DemoOptions(directory=tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


def test_the_demo_writes_an_ordinary_configuration(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tmp_path / "model", DemoOptions(steps=3, seed=5)))
    assert (config.trainer.max_steps, config.trainer.seed, config.policy.publish) == (3, 5, "merged")
    assert f":{config.vllm.port}/v1" in config.upstreams[0].base_url


def test_a_demo_that_is_stopped_says_what_was_reached_and_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(work: Demo) -> DemoResult:
        work._before, work._steps, work._rewards = RESULT.before, 2, [0.0] * 100 + [0.5] * 128
        await publish(work._directory)
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
    assert "reached: 2 of 90 steps, 228 training rollouts; mean reward of held-out tasks before 0.030" in said
    assert "of the newest 0.500" in said
    assert f"policy version 1 (live): {tmp_path / 'demo' / 'weights'}" in said
    assert "policy export 1 DIR" in said
    assert f"go on: lightning-proxy demo --resume --dir {tmp_path / 'demo'}\n" in said
