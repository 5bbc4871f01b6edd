"""`init`: writes a small commented configuration from options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..core.errors import ConfigError, LightningError

START = """\
# Every key that is not here has its default.
# A variable can set each key, too: LIGHTNING_PROXY__PORT=9000.

proxy:
  port: 8080    # agents use http://127.0.0.1:8080/v1

store:
  url: sqlite:///lightning.db    # for calls, rewards and versions
"""
UPSTREAM = """
upstreams:
  - name: policy
    kind: {kind}    # {recorded}
    base_url: {upstream}    # the model server that answers the agents
"""
NO_MODEL = """
# To train: a Hugging Face id or a directory.
# policy:
#   model: Qwen/Qwen3-0.6B
"""
MODEL = """
policy:
  model: {model}    # what vLLM serves and the trainer trains

trainer:
  group_size: 8    # rollouts of a task, compared with each other
  tasks_per_step: 8    # groups that make a step
"""


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write")] = Path("config.yaml"),
    model: Annotated[str | None, typer.Option(help="the model to train: a Hugging Face id or a directory")] = None,
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="a running model server, with /v1")] = None,
    kind: Annotated[Literal["vllm", "openai", "litellm"], typer.Option(help="what the upstream is")] = "vllm",
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Write a small commented configuration."""
    from ..core.config.file import load_config
    from .files import written

    recorded = "recorded with token ids, and trained on" if kind == "vllm" else "recorded"
    text = START
    if upstream is not None:
        text += UPSTREAM.format(kind=kind, recorded=recorded, upstream=json.dumps(upstream, ensure_ascii=False))
    text += NO_MODEL if model is None else MODEL.format(model=json.dumps(model, ensure_ascii=False))
    if file.exists() and not force:
        raise LightningError(f"{file} already exists; --force overwrites it")
    with written(file) as part:
        part.write_text(text)
        try:
            load_config(part)
        except ConfigError as error:
            raise ConfigError(error.message.replace(str(part), str(file))) from None
    option = "" if file == Path("config.yaml") else f"--config {file} "
    command = "up" if model and not upstream else "serve"
    typer.echo(f"wrote {file}; next: lightning-proxy {option}{command}", err=True)
