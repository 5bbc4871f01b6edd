"""Without a gate nothing asks for a test; with one, a server more is needed where weights are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving import mode
from lightning_proxy.serving.mode import decide
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store
from support.command_line import lightning
from support.stores import store_url

ONE = [{"name": "policy", "base_url": "http://127.0.0.1:1/v1"}]
TWO = [ONE[0] | {"replicas": ["http://127.0.0.1:2/v1"]}]


@pytest.mark.parametrize("command", ["serve", "train"])
def test_one_merged_server_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"policy": {"publish": "merged"}, "promotion": {"mode": "gated"}, "upstreams": ONE}))
    done = lightning("--config", path, command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "promotion.mode gated needs a second server where weights are published merged" in done.stderr


async def test_where_the_machine_decides_how_to_publish_the_trainer_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"store": {"url": store_url(tmp_path)}, "promotion": {"mode": "gated"}}
    one, two = (Config.model_validate(settings | {"upstreams": upstreams}) for upstreams in (ONE, TWO))
    database = await open_database(one.store)
    store = Store(database)
    monkeypatch.setattr(mode, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="needs a second server"):
        await decide(one, store, "trainer")
    assert await decide(two, store, "trainer") == "merged"
    await database.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"policy": {"publish": "lora", "pin_rollouts": False}, "promotion": {"mode": "gated"}},
            "it needs policy.pin_rollouts",
        ),
        ({"promotion": {"reward_range": [1, 0]}}, "the lowest and the highest reward"),
        ({"promotion": {"share": 0.6}}, "less than or equal to 0.5"),
        ({"promotion": {"metrics": {}}}, "at least 1 item"),
    ],
)
def test_what_a_gate_cannot_do_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.model_validate(settings)
