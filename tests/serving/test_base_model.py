"""Another `policy.model` on a store that has versions is refused before anything starts, with the way out."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving.mode import check_base_model
from support.command_line import lightning
from support.models import save_small_model
from support.training import bench


def told(config: Config, model: Path | str | None) -> Config:
    policy = config.policy.model_copy(update={"model": model and str(model)})
    return config.model_copy(update={"policy": policy})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A configuration whose store has version 1."""
    directory = tmp_path_factory.mktemp("trained")
    base = save_small_model(directory / "first")

    async def train() -> Config:
        async with bench(base, directory, "lora") as b:
            check_base_model(told(b.config, "second"))  # nothing was published yet
            await b.groups("t1", "t2")
            loop = b.loop(max_steps=1)
            await loop.run(asyncio.Event(), once=True)
            return b.config

    return asyncio.run(train())


def test_only_another_model_is_refused(trained: Config, tmp_path: Path) -> None:
    check_base_model(trained)
    check_base_model(told(trained, None))
    check_base_model(told(trained, tmp_path / "elsewhere" / "first"))  # moved
    with pytest.raises(ConfigError, match="trained on .*first: set it back, or start over with another store.url"):
        check_base_model(told(trained, tmp_path / "second"))


def test_every_command_that_would_use_it_refuses_in_one_line(trained: Config, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    settings = told(trained, save_small_model(tmp_path / "second")).model_dump(mode="json")
    settings["vllm"]["port"] = urlsplit(settings["upstreams"][0]["base_url"]).port
    path.write_text(yaml.safe_dump(settings))
    for command in (["serve"], ["train"], ["vllm"], ["up", "--logs", tmp_path / "logs"]):
        code, _, err = lightning("--config", path, *command)
        assert (code, err.count("\n"), "set it back" in err) == (2, 1, True), err


def test_a_lost_or_damaged_checkpoint_is_not_what_is_complained_of(trained: Config, tmp_path: Path) -> None:
    config = trained.model_copy(
        update={"store": trained.store.model_copy(update={"url": f"sqlite:///{tmp_path}/s.db"})}
    )
    check_base_model(told(config, "second"))
    assert not (tmp_path / "s.db").exists()
    shutil.copy(trained.store.path, tmp_path / "s.db")
    (tmp_path / "s.db").write_bytes(b"no store")
    check_base_model(told(config, "second"))
