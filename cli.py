"""The command line. Heavy modules are imported only by the commands that need them, to keep --help fast."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from .commands import init, keys, store
from .commands.command_line import (
    RECORD,
    START,
    SYSTEM,
    WORK,
    Command,
    Commands,
    Concurrency,
    Json,
    Outputs,
    Preload,
    Tasks,
    brought,
    config_file,
    configuration,
    telemetry_off,
)
from .commands.show import policy, rollouts

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave no room for words at 80 columns, and are noise in a pipe
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Train the model behind any agent with reinforcement learning by changing OPENAI_BASE_URL.",
)

app.add_typer(rollouts.app, name="rollouts", rich_help_panel=RECORD)
app.add_typer(policy.app, name="policy", rich_help_panel=RECORD)
app.add_typer(keys.app, name="keys", rich_help_panel=SYSTEM)
app.add_typer(store.app, name="store", rich_help_panel=SYSTEM)
app.command(rich_help_panel=START)(init.init)
# Without this setting a negative reward would be read as an option.
app.command(rich_help_panel=WORK, context_settings={"ignore_unknown_options": True})(rollouts.reward)

Model = Annotated[str | None, typer.Option(help="a Hugging Face id or a directory (policy.model)")]
Port = Annotated[int | None, typer.Option(metavar="N", help="the proxy's port (proxy.port)")]
OWNER_ONLY = 0o077  # for files of this process and its children: records, logs and weights hold conversations
ONE_EACH = "trainer.group_size; 1 with --mode eval"
AHEAD = "pause new rollouts while more than N steps' worth are not yet in the live weights; 0 keeps you on-policy"


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"lightning-proxy {version('lightning-proxy')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="a YAML file", show_default="./config.yaml if it is there")
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    os.environ.update(telemetry_off())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a cut character, or one that the terminal lacks
    context.obj = config_file(config)


@app.command(rich_help_panel=SYSTEM)
def up(
    context: typer.Context,
    model: Model = None,
    port: Port = None,
    logs: Annotated[Path, typer.Option(help="directory for logs of vLLM, proxy and trainer")] = Path("lightning-logs"),
) -> None:
    """Run the system: policy server (vLLM), proxy, trainer. Ctrl-C stops all of it."""
    from rich.console import Console

    from .commands.signals import run_until_signal
    from .commands.system.system import Launch
    from .commands.system.up import up as run

    overrides = {"policy.model": model, "proxy.port": port}
    os.umask(OWNER_ONLY)
    launch = Launch(context.obj, overrides)
    run_until_signal(run(configuration(context, overrides), launch, logs, Console()))


@app.command(rich_help_panel=SYSTEM)
def serve(
    context: typer.Context,
    port: Port = None,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="a vLLM server's URL, with /v1; the only upstream")
    ] = None,
    model: Annotated[str | None, typer.Option(help="the model's name on that server (policy.model)")] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="log lines for people or for programs")] = "text",
) -> None:
    """Run the proxy alone."""
    from .commands.serve import serve as run

    os.umask(OWNER_ONLY)
    upstreams = None if upstream is None else [{"name": "policy", "base_url": upstream}]
    overrides = {"proxy.port": port, "upstreams": upstreams, "policy.model": model}
    run(configuration(context, overrides), log_format)


@app.command(rich_help_panel=SYSTEM)
def train(
    context: typer.Context,
    model: Model = None,
    once: Annotated[bool, typer.Option("--once", help="train on what is ready now, then exit")] = False,
    method: Annotated[
        str, typer.Option(help="`rl`, or tuning: `sft` imitates, `dpo` prefers better siblings, `kto` good rollouts")
    ] = "rl",
    offline: Annotated[bool, typer.Option("--offline", help="train on recorded data, without vLLM and proxy")] = False,
    data: Annotated[
        Path | None, typer.Option(help="with --offline: a store or an export to read", show_default="store.url")
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", min=1, help="passes over the data")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="directory of an offline run", show_default="policy.directory/offline")
    ] = None,
) -> None:
    """Run the trainer alone."""
    from .commands.train import train as run
    from .core.errors import ConfigError
    from .trainer.plugins import Offline, Run, methods

    if method not in methods():
        raise ConfigError(f"--method must be one of {', '.join(methods())}; got {method!r}")
    tuning = method != "rl"
    if not offline and (data or directory or (epochs and not tuning)):
        raise ConfigError("--data and --dir need --offline; --epochs needs --offline or a method other than rl")
    os.umask(OWNER_ONLY)
    config = configuration(context, {"policy.model": model} | ({f"tune.{method}.epochs": epochs} if tuning else {}))
    from_data = Offline(data, directory, epochs or 1) if offline else None
    run(config, Run(method=method, once=once, offline=from_data))


@app.command(rich_help_panel=SYSTEM)
def vllm(context: typer.Context, model: Model = None) -> None:
    """Run vLLM alone, set up for the proxy and the trainer."""
    from .commands.vllm import exec_vllm

    os.umask(OWNER_ONLY)
    exec_vllm(configuration(context, {"policy.model": model}))


@app.command(rich_help_panel=WORK, context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Command,
    tasks: Tasks,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="rollouts per task", show_default=ONE_EACH)
    ] = None,
    concurrency: Concurrency = 8,
    mode: Annotated[Literal["train", "eval"], typer.Option(help="`eval`: recorded but never trained on")] = "train",
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="passes over the tasks")] = 1,
    ahead: Annotated[float | None, typer.Option(metavar="N", min=0, max=1000, help=AHEAD)] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", min=0, help="start no more rollouts once it is spent")
    ] = None,
    preload: Preload = "",
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="list of opened rollouts; those with a reward are not repeated")
    ] = None,
    logs: Outputs = None,
    as_json: Json = False,
) -> None:
    """Run an agent program on tasks. Each task gets `--group-size` sibling rollouts."""
    from .commands.run.command import run_command

    run_command(
        configuration(context),
        command,
        tasks=tasks,
        preload=preload.split(",") if preload else [],
        group_size=group_size,
        concurrency=concurrency,
        mode=mode,
        repeat=repeat,
        ahead=ahead,
        budget_usd=budget,
        resume=resume,
        logs=logs,
        as_json=as_json,
    )


@app.command(name="eval", rich_help_panel=WORK, context_settings={"allow_interspersed_args": False})
def evaluate(
    context: typer.Context,
    command: Command,
    tasks: Tasks,
    models: Annotated[
        str, typer.Option(help="comma-separated: live, a version's number, a model's name; the first is the baseline")
    ] = "live",
    samples: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="rollouts per task and model")] = 1,
    concurrency: Concurrency = 8,
    promote: Annotated[
        bool, typer.Option("--promote", help="make versions live one by one if they are not served side by side")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write all numbers to this JSON file")] = None,
    preload: Preload = "",
    as_json: Json = False,
) -> None:
    """Compare policy versions and other models on held-out tasks."""
    from .commands.eval import eval_command

    eval_command(
        configuration(context),
        command,
        tasks=tasks,
        models=models,
        preload=preload.split(",") if preload else [],
        samples=samples,
        concurrency=concurrency,
        promote=promote,
        out=out,
        as_json=as_json,
    )


@policy.app.command("export")
def export_version(
    context: typer.Context,
    version: Annotated[int, typer.Argument(metavar="N")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")],
    form: Annotated[
        Literal["adapter", "merged"] | None, typer.Option("--as", help="merged: a full model", show_default="as served")
    ] = None,
) -> None:
    """Write a version as a directory that vLLM and transformers can load. The proxy need not be running."""
    from .commands.export.policy import export_policy
    from .commands.signals import run_until_signal

    written = run_until_signal(export_policy(configuration(context), version, directory, form))
    what = "a LoRA adapter" if written == "adapter" else "a full model"
    typer.echo(f"policy version {version} is in {directory}: {what}, with a model card (README.md)")


@app.command(rich_help_panel=START)
def demo(
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="maximum number of training steps")] = 90,
    directory: Annotated[Path, typer.Option("--dir", help="the demo's files; emptied first")] = Path("lightning-demo"),
    model: Annotated[Path | None, typer.Option(help="the model's directory, created on first use")] = None,
    api: Annotated[Literal["chat", "messages", "responses"], typer.Option(help="the API that the agent uses")] = "chat",
    resume: Annotated[bool, typer.Option("--resume", help="continue the demo in --dir, with its options")] = False,
) -> None:
    """Run the whole loop with a small real model on this machine."""
    from .commands.demo.demo import DemoOptions
    from .commands.demo.demo import demo as run

    run(DemoOptions(steps=steps, directory=directory, model=model, api=api), resume=resume)


@app.command(rich_help_panel=SYSTEM)
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show the state of the running system. The exit code is 1 if it is not ready."""
    from .commands.show.status import show_status

    if not show_status(configuration(context), as_json=as_json):
        raise typer.Exit(1)


@app.command(rich_help_panel=RECORD)
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="ends in .jsonl or .parquet; `-` and pipes take JSON Lines")],
    kind: Annotated[Literal["transitions", "sft"], typer.Option(help="`sft`: for fine-tuning")] = "transitions",
    mode: Annotated[
        Literal["train", "eval", "all"] | None, typer.Option(help="only of this mode", show_default="all; sft: train")
    ] = None,
    status: Annotated[
        Literal["running", "completed", "failed", "discarded", "all"] | None,
        typer.Option(help="only of this status", show_default="all; sft: completed and failed"),
    ] = None,
    task: Annotated[str | None, typer.Option(help="only rollouts of this task id")] = None,
    min_reward: Annotated[float | None, typer.Option(help="only rollouts with at least this reward")] = None,
    since: Annotated[
        str | None, typer.Option(help="only rollouts opened since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
) -> None:
    """Write recorded rollouts as JSON Lines or Parquet. The proxy need not be running."""
    from .commands.export.export import export_command

    filters = {"mode": mode, "status": status, "task_id": task, "min_reward": min_reward, "since": since}
    export_command(configuration(context), file, kind, **filters)


@app.command(name="import", rich_help_panel=RECORD)
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="JSON Lines or Parquet, a chat conversation per line or row")],
    model: Annotated[str, typer.Option(help="the model of lines without `model`")] = "imported",
    reward: Annotated[float, typer.Option(help="the reward of lines without `reward`")] = 1.0,
) -> None:
    """Record conversations from elsewhere as examples to imitate. The proxy need not be running.

    `train --method sft` learns from them.
    """
    from .commands.export.import_ import import_command

    os.umask(OWNER_ONLY)
    import_command(configuration(context), file, model, reward)


@app.command(rich_help_panel=START)
def plan(
    context: typer.Context,
    model: Model = None,
    gpus: Annotated[str | None, typer.Option(help="cards x GiB: 1x24, 8x80", show_default="this machine's")] = None,
    as_json: Json = False,
) -> None:
    """Show what fits on which GPUs, without starting anything."""
    from .commands.plan import plan_command

    plan_command(configuration(context, {"policy.model": model}), gpus, as_json=as_json)


@app.command(rich_help_panel=START, context_settings={"allow_interspersed_args": False})
def doctor(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(help="with --learn: the agent program, after `--`")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="train one step to check that this system learns")] = False,
    tasks: Annotated[
        Path | None, typer.Option(help="with --learn: JSON Lines for the program", show_default="four questions")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every link, from configuration to rewards, and say what to fix. The exit code is 1 if a check fails."""
    from .core.errors import ConfigError

    if not learn and (command or tasks):
        raise ConfigError("--tasks and a program need --learn")
    if tasks and not command:
        raise ConfigError("--tasks needs an agent program, after `--`")
    if learn:
        from .commands.doctor.learn import learn_command

        done = learn_command(context.obj, tasks, command or [], as_json=as_json)
    else:
        from .commands.doctor.doctor import doctor as run

        done = run(context.obj, as_json=as_json)
    if not done:
        raise typer.Exit(1)


for add_to in brought("add_to"):
    add_to(app)


if __name__ == "__main__":
    app()
