"""`init`: writes a small commented configuration from options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..core.errors import ConfigError, LightningError

# What a value may be written as without quotes, in YAML.
_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:"
COLUMN = 40


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The options. None: the key is left out, and has its default."""

    model: str | None
    port: int
    store: Path
    upstream: str | None
    kind: str
    group_size: int
    tasks_per_step: int


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write")] = Path("config.yaml"),
    model: Annotated[str | None, typer.Option(help="a Hugging Face id or a directory, to train")] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="the proxy's port")] = 8080,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of a model server that is already running, with /v1")
    ] = None,
    kind: Annotated[Literal["vllm", "openai", "litellm"], typer.Option(help="what the upstream is")] = "vllm",
    store: Annotated[Path, typer.Option(help="the store's file")] = Path("lightning.db"),
    group_size: Annotated[int, typer.Option(metavar="N", min=2, max=1000, help="rollouts of a task")] = 8,
    tasks_per_step: Annotated[int, typer.Option(metavar="N", min=1, help="groups that make a step")] = 8,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Write a small commented configuration."""
    options = InitOptions(model, port, store, upstream, kind, group_size, tasks_per_step)
    typer.echo(write(file, options, force=force), err=True)


def write(path: Path, options: InitOptions, *, force: bool) -> str:
    """Write the file and return what to do next. Raise ConfigError for a wrong option, LightningError if it fails."""
    from ..core.config.file import load_config

    if path.exists() and not force:
        raise LightningError(f"{path} already exists; --force overwrites it")
    text = configuration(options)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        try:
            load_config(part)
        except ConfigError as error:
            raise ConfigError(error.message.replace(str(part), str(path))) from None
        part.replace(path)
    except OSError as error:
        raise LightningError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    option = "" if path == Path("config.yaml") else f"--config {path} "
    command = "up" if options.model and not options.upstream else "serve"
    return f"wrote {path}; next: lightning-proxy {option}{command}"


def configuration(options: InitOptions) -> str:
    """Return the configuration as YAML."""
    lines = [
        "# Every key that is not here has its default.",
        "# A variable can set each key, too: LIGHTNING_PROXY__PORT=9000.",
        "",
        "proxy:",
        _line("port", options.port, f"agents use http://127.0.0.1:{options.port}/v1", 2),
        "",
        "store:",
        _line("url", f"sqlite:///{options.store}", "what is recorded", 2),
    ]
    if options.upstream is not None:
        comment = {"vllm": "recorded with token ids, and trained on"}.get(options.kind, "recorded")
        lines += ["", "upstreams:", _line("- name", "policy", "", 2), _line("kind", options.kind, comment, 4)]
        lines += [_line("base_url", options.upstream, "what answers the agents", 4)]
    if options.model is None:
        lines += ["", "# To train: a Hugging Face id or a directory.", "# policy:", "#   model: Qwen/Qwen3-0.6B"]
        return "\n".join(lines) + "\n"
    lines += [
        "",
        "policy:",
        _line("model", options.model, "what vLLM serves and the trainer trains", 2),
        "",
        "trainer:",
    ]
    lines += [_line("group_size", options.group_size, "rollouts of a task, compared with each other", 2)]
    lines += [_line("tasks_per_step", options.tasks_per_step, "groups that make a step", 2)]
    return "\n".join(lines) + "\n"


def _line(name: str, value: object, comment: str, indent: int) -> str:
    text = str(value)
    is_plain = text[:1].isalpha() and not text.endswith(":") and all(character in _PLAIN for character in text)
    shown = text if isinstance(value, int) or is_plain else json.dumps(text)
    line = f"{' ' * indent}{name}: {shown}"
    return f"{line:<{COLUMN - 1}} # {comment}" if comment else line
