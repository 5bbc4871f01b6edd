"""The command line: parse, wire, call. What a command needs is imported when it runs, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .commands import keys, store
from .commands.show import policy, rollouts

if TYPE_CHECKING:
    from .commands.system.system import Launch
    from .proxy.config.root import Config


class _Group(TyperGroup):
    """Shows our own errors as one line, with their exit code."""

    def invoke(self, ctx: Any) -> Any:
        from .proxy.errors import LightningError

        try:
            return super().invoke(ctx)
        except LightningError as error:
            typer.echo(f"lightning-proxy: {error.message}", err=True)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train the model behind any agent with reinforcement learning by changing OPENAI_BASE_URL.",
)

app.add_typer(rollouts.app, name="rollouts")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(store.app, name="store")
# Without this setting a negative reward would be taken for an option.
app.command(context_settings={"ignore_unknown_options": True})(rollouts.reward)

Model = Annotated[str | None, typer.Option(help="policy.model: a Hugging Face id or a directory")]
Port = Annotated[int | None, typer.Option(help="proxy.port")]
Logs = Annotated[Path, typer.Option(help="where the parts' logs go")]
Json = Annotated[bool, typer.Option("--json", help="for programs")]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"lightning-proxy {version('lightning-proxy')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="a YAML file; ./config.yaml if there is one")
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and end")
    ] = False,
) -> None:
    # Taken where it lies, if it is there: `lightning-proxy up` in a checkout does what config.yaml says.
    here = Path("config.yaml")
    context.obj = config or (here if here.is_file() else None)


@app.command()
def up(context: typer.Context, model: Model = None, port: Port = None, logs: Logs = Path("lightning-logs")) -> None:
    """Run the whole system: policy server (vLLM), proxy, trainer. Ctrl-C stops all of it."""
    from rich.console import Console

    from .commands.signals import run_until_signal
    from .commands.system.up import up as run

    config, launch = _load(context, {"policy.model": model, "proxy.port": port})
    run_until_signal(run(config, launch, logs, Console()))


@app.command()
def serve(context: typer.Context, port: Port = None) -> None:
    """Run the proxy alone."""
    from .commands.serve import serve as run

    run(_load(context, {"proxy.port": port})[0])


@app.command()
def train(
    context: typer.Context,
    model: Model = None,
    once: Annotated[bool, typer.Option("--once", help="train on what is ready now, then end")] = False,
    max_steps: Annotated[int | None, typer.Option(help="trainer.max_steps")] = None,
    method: Annotated[
        str, typer.Option(help="rl, or sft: imitate the best rollouts (trainer.sft), once, then end")
    ] = "rl",
    min_reward: Annotated[float | None, typer.Option(help="sft: trainer.sft.min_reward")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="on recorded data, without vLLM and proxy")] = False,
    data: Annotated[
        Path | None, typer.Option(help="--offline: a store, or an export; by default store.url. It is only read")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="--offline: how often to go through the data; sft: trainer.sft.epochs")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="--offline: where the run is kept; by default offline/ in policy.directory"),
    ] = None,
) -> None:
    """Run the trainer alone."""
    from typing import cast, get_args

    from .commands.train import Method, Offline
    from .commands.train import train as run
    from .proxy.errors import ConfigError

    if method not in get_args(Method):
        raise ConfigError(f"--method is rl or sft, got {method!r}")
    sft = method == "sft"
    if not offline and (data or directory or (epochs and not sft)):
        raise ConfigError("--data and --dir go with --offline, --epochs with it or with --method sft")
    if min_reward is not None and not sft:
        raise ConfigError("--min-reward goes with --method sft")
    overrides = {"trainer.sft.min_reward": min_reward, "trainer.sft.epochs": epochs if sft else None}
    config, _ = _load(context, {"policy.model": model, "trainer.max_steps": max_steps, **overrides})
    offline_run = Offline(data, directory, epochs or 1) if offline else None
    run(config, once=once, offline=offline_run, method=cast(Method, method))


@app.command()
def vllm(context: typer.Context, model: Model = None) -> None:
    """Run the policy server alone: vLLM, with the options that the proxy and the trainer need."""
    from .commands.vllm import exec_vllm

    exec_vllm(_load(context, {"policy.model": model})[0])


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="the agent program, after `--`")],
    tasks: Annotated[Path, typer.Option(help="JSON Lines: one task a line")],
    group_size: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="rollouts per task; by default trainer.group_size, with --mode eval 1"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="programs at once")] = 8,
    mode: Annotated[str, typer.Option(help="train, or eval: recorded but never trained on")] = "train",
    repeat: Annotated[int, typer.Option(min=1, help="how often to go through the tasks")] = 1,
    ahead: Annotated[
        float | None,
        typer.Option(
            min=0, max=1000, help="training steps that rollouts may be ahead of the live version; then it waits"
        ),
    ] = None,
    preload: Annotated[str, typer.Option(help="modules to import once, for `python script.py …`")] = "",
    logs: Annotated[Path | None, typer.Option(help="keep each program's output here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Run an agent program once per task and sibling, each in a rollout of its own."""
    from .commands.run.command import RunRequest, run_command

    modules = preload.split(",") if preload else []
    run_command(
        _load(context, {})[0],
        RunRequest(tasks, command, modules, group_size, concurrency, mode, repeat, ahead, logs, as_json),
    )


@app.command(name="eval", context_settings={"allow_interspersed_args": False})
def evaluate(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="the agent program, after `--`")],
    tasks: Annotated[Path, typer.Option(help="JSON Lines: one held-out task a line")],
    models: Annotated[
        str, typer.Option(help="what answers, each compared with the first: live, a policy version, a model, power:4")
    ] = "live",
    samples: Annotated[int, typer.Option(min=1, max=1000, help="rollouts per task and model")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="programs at once")] = 8,
    pass_at: Annotated[float, typer.Option(help="the reward from which on a rollout has passed")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of the intervals")] = 0,
    promote: Annotated[
        bool, typer.Option("--promote", help="make versions live in turn, where they are not served side by side")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write all numbers to this JSON file")] = None,
    preload: Annotated[str, typer.Option(help="modules to import once, for `python script.py …`")] = "",
    logs: Annotated[Path | None, typer.Option(help="keep each program's output here")] = None,
    as_json: Json = False,
) -> None:
    """Compare policy versions and other models on held-out tasks: mean reward, pass@k, intervals."""
    from .commands.eval.command import EvalRequest, eval_command
    from .commands.eval.report import Scoring

    modules = preload.split(",") if preload else []
    config, scoring = _load(context, {})[0], Scoring(pass_at, seed)
    eval_command(
        config, EvalRequest(tasks, models, command, modules, samples, concurrency, promote, scoring, out, logs, as_json)
    )


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 90,
    seed: Annotated[int, typer.Option(help="of tasks and trainer")] = 0,
    directory: Annotated[Path, typer.Option("--dir", help="where it works; emptied first")] = Path("lightning-demo"),
    model: Annotated[Path | None, typer.Option(help="the model's directory; made on first use")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="answers per held-out task in an evaluation")] = 8,
    ahead: Annotated[float, typer.Option(min=0, help="steps that rollouts may be ahead of the live version")] = 0.0,
) -> None:
    """Show the whole loop on a small real model on this machine."""
    from .commands.demo.config import DemoOptions
    from .commands.demo.demo import demo as run

    run(DemoOptions(steps, seed, directory, model, repeat, ahead))


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show how the running system is; exit code 1 when it is not ready."""
    from .commands.show.status import show_status

    if not show_status(_load(context, {})[0], as_json=as_json):
        raise typer.Exit(1)


@app.command()
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="`-` for standard output")],
    kind: Annotated[str, typer.Option(help="transitions, or sft: conversations")] = "transitions",
    format: Annotated[str | None, typer.Option(help="jsonl or parquet; default by the file's suffix")] = None,
    mode: Annotated[str | None, typer.Option(help="train or eval")] = None,
    status: Annotated[str | None, typer.Option(help="running, completed, failed or discarded")] = None,
    task: Annotated[str | None, typer.Option(help="task id")] = None,
    min_reward: Annotated[float | None, typer.Option(help="leaves out rollouts without a reward, too")] = None,
    since: Annotated[
        str | None, typer.Option(help="opened since: 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
) -> None:
    """Write what was recorded as JSON Lines or Parquet; reads the store, so the proxy need not run."""
    from .commands.export.export import export_command

    filters = {"mode": mode, "status": status, "task_id": task, "min_reward": min_reward, "since": since}
    export_command(_load(context, {})[0], file, format, kind, filters)


@app.command()
def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Check the whole chain and say what to fix; exit code 1 if a check failed."""
    from .commands.doctor.doctor import doctor as run

    if not run(context.obj, as_json=as_json):
        raise typer.Exit(1)


def _load(context: typer.Context, overrides: dict[str, Any]) -> tuple[Config, Launch]:
    from .commands.system.system import Launch
    from .proxy.config.file import load_config

    return load_config(context.obj, overrides), Launch(context.obj, overrides)


if __name__ == "__main__":
    app()
