"""`store info|compact|backup|restore|migrate`: shows, shrinks, copies, restores and moves the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command_line import Commands, Json, configuration
from .formats import count, duration, print_json, progress_bar, size

if TYPE_CHECKING:
    from ..core.config.server import StoreConfig
    from ..store.retention import Pages

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show, compact, back up, restore and migrate the store.")


@app.command()
def info(context: typer.Context, as_json: Json = False) -> None:
    """Show what is in the store and how large it is. The proxy need not be running."""
    from .signals import run_until_signal

    found = run_until_signal(read_info(_store_of(context)))
    if as_json:
        print_json(found)
    else:
        typer.echo(info_text(found))


@app.command()
def compact(context: typer.Context) -> None:
    """Shrink the file of an SQLite store by the space of deleted rollouts. The proxy may keep serving."""
    from .signals import run_until_signal

    before, after = run_until_signal(shorten(_store_of(context)))
    typer.echo(f"{size(before.bytes)} before, {size(after.bytes)} now")


@app.command()
def backup(context: typer.Context, file: Annotated[Path, typer.Argument(help="a new file")]) -> None:
    """Copy a snapshot of an SQLite store to a file. The proxy may keep serving."""
    from ..store.sqlite.file import back_up

    back_up(_store_of(context).path, file)
    typer.echo(f"copied to {file}: {size(file.stat().st_size)}. Trained weights are not in it, but in policy.directory")


@app.command()
def restore(context: typer.Context, file: Annotated[Path, typer.Argument(help="a file from `store backup`")]) -> None:
    """Restore an SQLite store from a backup. There must be no store at store.url yet."""
    from ..store.sqlite.file import restore as run

    path = configuration(context).store.path.absolute()
    run(file, path)
    typer.echo(f"restored {path} from {file}. Trained weights are not in a backup: policy.directory must be there, too")


@app.command("migrate")
def migrate_store(
    source: Annotated[str, typer.Argument(metavar="FROM", help="sqlite:///FILE or postgresql://…; it is only read")],
    target: Annotated[str, typer.Argument(metavar="TO", help="the other kind of URL, where there is no store yet")],
) -> None:
    """Move a store from SQLite to PostgreSQL, or back, and compare each row.

    Stop the proxies and the trainer first: what they record during the move is not copied. TO is complete at the end,
    or not there at all.
    """
    from .migrate import move
    from .signals import run_until_signal

    rows = run_until_signal(move(source, target))
    typer.echo(f"{count(rows)} rows moved, each compared. Trained weights are not in a store, but in policy.directory")


async def read_info(config: StoreConfig) -> dict[str, Any]:
    from ..store.opening import opened
    from ..store.retention import read_pages, read_totals
    from ..store.rollouts import Rollouts

    async with opened(config, to_write=False) as database:
        pages = await read_pages(database)
        counts = {f"{mode} {status}": n for (mode, status), n in (await Rollouts(database).counts()).items() if n}
        totals = await read_totals(database)
    log = None if config.is_postgres else Path(f"{config.path}-wal")
    return {
        "path": database.where,
        **pages._asdict(),
        "log_bytes": log.stat().st_size if log is not None and log.exists() else 0,
        "rollouts": counts,
        **totals,
        "retention": config.retention.model_dump(),
    }


def info_text(found: dict[str, Any]) -> str:
    rollouts = sum(found["rollouts"].values())
    of_kinds = ", ".join(f"{count(n)} {kind}" for kind, n in sorted(found["rollouts"].items()))
    limits = found["retention"]
    lines = [
        f"{found['path']}: {size(found['bytes'])}, {size(found['free'])} of it free"
        f"; write-ahead log {size(found['log_bytes'])}",
        f"{count(rollouts)} rollouts{f' ({of_kinds})' if rollouts else ''}, {count(found['calls'])} calls,"
        f" {count(found['rewards'])} rewards",
    ]
    if found["oldest"] is not None:
        lines.append(f"the oldest rollout was opened {duration(time.time() - found['oldest'])} ago")
    kept = [f"{limits[name]:g} {unit}" for name, unit in (("max_age_days", "days"), ("max_gib", "GiB")) if limits[name]]
    lines.append(f"kept: {' and '.join(kept) or 'everything'} (store.retention)")
    return "\n".join(lines)


async def shorten(config: StoreConfig) -> tuple[Pages, Pages]:
    """Shrink the file of an SQLite store by its free space. Return its size and free space before and after."""
    from ..store.opening import opened
    from ..store.retention import give_back, read_pages

    async with opened(config) as database:
        before = await read_pages(database)
        with progress_bar() as progress:
            bar = progress.add_task("giving back", total=before.free)
            await give_back(database, on_step=lambda pages: progress.update(bar, completed=before.free - pages.free))
        await database.checkpoint()
        return before, await read_pages(database)


def _store_of(context: typer.Context) -> StoreConfig:
    from ..core.errors import LightningError

    config = configuration(context).store
    if not config.may_be_there:
        raise LightningError(f"there is no store at {config.where} (store.url)")
    return config
