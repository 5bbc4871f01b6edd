"""The statements of the store as PostgreSQL takes them, and its schema beside SQLite's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.rollouts import ROLLOUT_FILTERS, page_of, page_statement
from support.statements import statements
from support.stores import Server, postgres_server

asyncpg = pytest.importorskip("asyncpg", reason="asyncpg is not installed (the extra `postgres`)")
from lightning_proxy.store.postgres.database import HOLD_ROLLOUTS, RECORDED  # noqa: E402
from lightning_proxy.store.postgres.statements import translated  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
async def database(server: Server) -> AsyncIterator[Database]:
    async with opened(StoreConfig(url=server.new_database())) as database:
        yield database


def test_parameters_get_numbers_and_few_words_change() -> None:
    for sql, text, names in (
        ("SELECT :b, :a, :b", "SELECT $1, $2, $1", ("b", "a")),
        ("SELECT ':a', \":b\", x::json", "SELECT ':a', \":b\", x::json", ()),
        ("SELECT 'it''s :a', :a", "SELECT 'it''s :a', $1", ("a",)),
        ("WHERE a IS :a AND b IS NOT :b AND c IS NOT NULL",
         "WHERE a IS NOT DISTINCT FROM $1 AND b IS DISTINCT FROM $2 AND c IS NOT NULL", ("a", "b")),
        ("a CROSS JOIN b ON b.n = a.n", "a JOIN b ON b.n = a.n", ()),
        ("FROM rollouts INDEXED BY x_1\nWHERE TRUE", "FROM rollouts\nWHERE TRUE", ()),
        ("n IN (SELECT CAST(value AS BIGINT) FROM json_each(:a))",
         "n = ANY(ARRAY(SELECT json_array_elements_text($1::json)::BIGINT))", ("a",)),
        ("id NOT IN (SELECT CAST(value AS TEXT) FROM json_each(:a))",
         "id NOT IN (SELECT json_array_elements_text($1::json)::TEXT)", ("a",)),
        ("SELECT json(:a) /* PostgreSQL: SELECT :a::json */", " SELECT $1::json ", ("a",)),
    ):  # fmt: skip
        assert translated(sql) == (text, names)


async def test_every_statement_of_the_store_is_one_for_postgresql(server: Server, database: Database) -> None:
    pages = {f"page by {name}": page_of([name]) for name in ROLLOUT_FILTERS}
    wanted = {"min_reward": 0.0, "max_reward": 1.0, "since": 0.0, "text": "ä", "prefix": "r"}
    pages["search"] = page_statement({"agent": "a", "status": "ok", "task_id": "t"} | wanted)[0]
    pages["search by text"] = page_statement({"text": "x"})[0]
    wrong = {}
    connection = await asyncpg.connect(database._config.url)  # type: ignore[attr-defined]
    own = {"HOLD_ROLLOUTS": HOLD_ROLLOUTS} | {sql: sql for sql in RECORDED.values()}
    for name, sql in {**dict(statements()), **pages, **own}.items():
        if "sqlite_master" in sql:
            continue
        text, names = translated(sql)
        try:
            prepared = await connection.prepare(text)
            assert len(prepared.get_parameters()) == len(names)
        except asyncpg.PostgresError as error:
            wrong[name] = f"{error}: {text}"
    await connection.close()
    assert wrong == {}
