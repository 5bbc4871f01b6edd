"""`keys create|list|revoke|purge`: who may call. A running proxy notices a change within a second."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from .command_line import Commands, Json, configuration
from .formats import count, print_json, print_view, table

if TYPE_CHECKING:
    from ..store.keys import Keyring, Role, StoredKey

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Make and revoke the keys of agents and admins.")

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME")]
HEADS = ("role", "requests\n/min", "tokens\n/min", "at\nonce", "recorded", "made", "revoked")
PER_WORKER = "in each worker; default: proxy.limits"
Number = Annotated[int | None, typer.Option(metavar="N", min=1, max=2**31 - 1, help=PER_WORKER)]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="may also change the policy and delete rollouts")] = False,
    requests_per_minute: Number = None,
    tokens_per_minute: Number = None,
    concurrent: Number = None,
    recording: Annotated[bool, typer.Option("--recording/--no-recording", help="record its calls")] = True,
    scope: Annotated[Literal["all", "own"], typer.Option(help="`own`: sees and rewards only what it opened")] = "all",
    evaluator: Annotated[bool, typer.Option("--evaluator", help="its rewards count in tests of a new version")] = False,
    as_json: Json = False,
) -> None:
    """Make a key and print it. It is shown only once: the store keeps only its hash."""
    from ..core.errors import ConfigError
    from ..core.records import Limits

    if admin and scope == "own":
        raise ConfigError("an admin key sees all rollouts: use either --admin or --scope own")
    role: Role = "admin" if admin else "agent"
    limits = Limits(requests_per_minute, tokens_per_minute, concurrent)
    key, stored = _with_keyring(
        context,
        lambda ring: ring.create(name, role, limits, recording=recording, scope=scope, evaluator=evaluator),
    )
    if as_json:
        print_json({"key": key} | _view(stored))
        return
    typer.echo(f"{role} key {name!r}; it is not shown again:", err=True)
    typer.echo(key)


@app.command("list")
def list_keys(context: typer.Context, as_json: Json = False) -> None:
    """List all keys, including revoked ones, oldest first."""

    keys = _with_keyring(context, lambda ring: ring.all(), to_write=False) if _has_store(context) else []
    if as_json:
        print_json({"data": [_view(key) for key in keys]})
        return
    shown = table("name", *HEADS, padding=(0, 1))
    shown.columns[0].overflow, shown.columns[0].no_wrap, shown.columns[0].min_width = "fold", False, 10  # never cut
    for key in keys:
        role = key.role + ", own" * (key.scope == "own") + ", evaluator" * key.evaluator
        limits = map(count, (key.requests_per_minute, key.tokens_per_minute, key.concurrent))
        made, revoked = (
            "-" if at is None else time.strftime("%Y-%m-%d", time.localtime(at))
            for at in (key.created_at, key.revoked_at)
        )
        shown.add_row(key.name, role, *limits, "yes" if key.recording else "no", made, revoked)
    print_view(shown)


@app.command()
def revoke(context: typer.Context, name: Name) -> None:
    """Revoke a key and the rollout keys that were made with it."""
    from ..core.errors import NotFound

    async def work(ring: Keyring) -> list[StoredKey]:
        await ring.revoke(name)
        return await ring.all()

    if not _has_store(context):
        raise NotFound(f"no key {name!r}: there is no store yet")
    left = any(key.live for key in _with_keyring(context, work))
    typer.echo(f"revoked {name!r}")
    if not left:
        more = "if the configuration has none either, `keys purge` lets this machine call without a key again"
        typer.echo(f"no key is left in the store, but calls still need one; {more}")


@app.command()
def purge(context: typer.Context) -> None:
    """Delete revoked keys. If the store and the configuration then have no keys, this machine may call without one."""
    n = _with_keyring(context, lambda ring: ring.purge()) if _has_store(context) else 0
    typer.echo(f"deleted {n} revoked key{'s' * (n != 1)}")


def _with_keyring(context: typer.Context, work: Callable[[Keyring], Awaitable[T]], *, to_write: bool = True) -> T:
    from asyncio import run

    from ..store.keys import Keyring
    from ..store.opening import opened

    async def do() -> T:
        async with opened(configuration(context).store, to_write=to_write) as database:
            return await work(Keyring(database))

    return run(do())


def _has_store(context: typer.Context) -> bool:
    """Return whether there may be a store; a PostgreSQL server is not asked. Only `create` makes a store."""
    return configuration(context).store.may_be_there


def _view(key: StoredKey) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "key_hash"}
