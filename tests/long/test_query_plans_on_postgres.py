"""On a filled PostgreSQL store, statements that run for every call, page or step read no large table as a whole."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.opening import opened
from lightning_proxy.store.postgres.database import SESSION
from lightning_proxy.store.postgres.statements import translated
from support.stores import pages, postgres_server, statements

STATEMENTS = pages() | {name: sql for name, sql in statements() if "sqlite_master" not in sql}
# Run by `store info`, `policy export` and `train` with a new policy, when a rollout is deleted, or on a file alone; or
# the first row answers it, or it looks at the newest 5,000 rollouts.
WHOLE = {
    "ROLLOUT_REWARDS", "TIPS_OF", "POINTS_OF", "CONVERSATION_COUNTS", "STORE_TOTALS",
    "SELECT COUNT(*), COALESCE(MAX(ended_at), 0) FROM rollouts WH",
    "SELECT 1 FROM policy_versions WHERE publish IS NOT NULL LIMI",
    "OFFER_ALL 0", "OFFER_ALL 1",
    "SELECT 1 FROM rollouts WHERE step IS NOT NULL LIMIT 1",
    "SELECT * FROM steps WHERE status = 'trained' ORDER BY step", "SELECT * FROM policy_versions ORDER BY version",
    "PARENTS", "VERSION_EVER_PUBLISHED", "NEWEST_CHECKPOINT", "LABELS",
}  # fmt: skip
VALUES: dict[str, object] = {"limit": 20, "newest": 500, "before": 100, "step": 2990, "version": 98, "task_id": "task9"}

# 30,000 rollouts of 4 calls; one in a hundred is still running, one in fifty waits for the trainer.
FILL = """
SET session_replication_role = replica;
INSERT INTO rollouts
    (rollout_id, task_id, agent, mode, status, policy_version, reward, rewarded_at, calls, created_at, ended_at, step,
     key_id, group_id)
SELECT 'r' || i, CASE WHEN i % 10 > 0 THEN 'task' || i / 8 END, 'agent' || i % 5,
    CASE WHEN i % 25 = 0 THEN 'eval' ELSE 'train' END, CASE WHEN i % 100 = 0 THEN 'running' ELSE 'completed' END,
    i / 300, i % 2, i, 4, i, i + 1, CASE WHEN i % 50 > 0 THEN i / 10 END, 'key' || i % 40, i / 8
FROM generate_series(1, 30000) AS i;
INSERT INTO calls (call_id, rollout_id, seq, endpoint, status, started_at, request, response, token_ids)
SELECT 'c' || i, 'r' || i / 4 + 1, i % 4, 'chat/completions', CASE WHEN i % 1000 = 0 THEN 'incomplete' ELSE 'ok' END,
    i, repeat('x', 200), repeat('y', 200), '\\x0000'
FROM generate_series(0, 119999) AS i;
INSERT INTO rewards (rollout_id, call_id, name, value, final, created_at)
SELECT 'r' || i, NULL, 'reward', 1, 1, i FROM generate_series(1, 30000) AS i;
INSERT INTO tool_calls
SELECT 'r' || i / 4 + 1, 'c' || i, 0, 'tool' || i, 'search', '{}', NULL, NULL, sha256(i::TEXT::BYTEA)
FROM generate_series(0, 59999) AS i;
INSERT INTO events (rollout_id, seq, kind, created_at)
SELECT 'r' || i, 0, 'note', i FROM generate_series(1, 30000) AS i;
INSERT INTO rollout_keys SELECT 'hash' || i, 'r' || i FROM generate_series(1, 30000) AS i;
INSERT INTO rollout_agents SELECT 'agent' || n % 5, n FROM rollouts;
INSERT INTO rollout_prompts SELECT 'r' || i, 'writer', i % 3 FROM generate_series(1, 30000) AS i;
INSERT INTO call_prompts SELECT 'c' || i, 'writer', i % 3, '[]' FROM generate_series(0, 59999) AS i;
INSERT INTO call_credit SELECT i, 0, i / 100, 1, 1, 1, 'kept' FROM generate_series(1, 30000) AS i;
INSERT INTO conversation_points SELECT sha256(i::TEXT::BYTEA), 'r' || i, i FROM generate_series(1, 30000) AS i;
INSERT INTO conversation_tips
SELECT sha256(i::TEXT::BYTEA), i, 'c' || i, 'r' || i / 4 + 1 FROM generate_series(0, 59999) AS i;
INSERT INTO idempotency SELECT 'key' || i, 'hash', '{}', i FROM generate_series(1, 30000) AS i;
INSERT INTO feed (kind, ref) SELECT 'call', 'c' || i FROM generate_series(1, 10000) AS i;
INSERT INTO large_requests SELECT 'c' || i, 'x' FROM generate_series(0, 119999, 10) AS i;
INSERT INTO steps (step, status, version, base, created_at)
SELECT i, 'trained', i, i - 1, i FROM generate_series(1, 10000) AS i;
UPDATE steps SET checkpoint = 's' || step WHERE step > 9990;
INSERT INTO policy_versions (version, status, publish, path, served_model, step, created_at)
SELECT i, CASE WHEN i > 9997 THEN 'publishing' ELSE 'ready' END, 'lora', CASE WHEN i > 9990 THEN 'v' || i END,
    'policy-v' || i, i, i
FROM generate_series(1, 10000) AS i;
RESET session_replication_role;
"""
LARGE = {*re.findall(r"INSERT INTO (\w+)", FILL)}


@pytest.fixture(scope="module")
def plans() -> Iterator[dict[str, Any]]:
    """The plan of every statement for values that a running store may ask for."""
    with postgres_server() as server:
        yield asyncio.run(_plans(server.new_database()))


async def _plans(url: str) -> dict[str, Any]:
    async with opened(StoreConfig(url=url)):
        pass
    found: dict[str, Any] = {}
    connection = await asyncpg.connect(url, server_settings=SESSION)
    try:
        await connection.execute(FILL)
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("SET plan_cache_mode = force_custom_plan")
        for name, sql in STATEMENTS.items():
            text, names = translated(sql)
            types = [kind.name for kind in (await connection.prepare(text)).get_parameters()]
            values = [f"'{_value(*one)}'::{one[1]}" for one in zip(names, types, strict=True)]
            await connection.execute(f"PREPARE tried AS {text}")
            given = f"({', '.join(values)})" if values else ""
            (row,) = await connection.fetch(f"EXPLAIN (FORMAT JSON) EXECUTE tried{given}")
            found[name] = json.loads(row[0])[0]["Plan"]
            await connection.execute("DEALLOCATE tried")
    finally:
        await connection.close()
    return found


def _value(name: str, kind: str) -> object:
    """A value that a running store may ask for."""
    if name in VALUES:
        return VALUES[name]
    values = {"int8": 29_000, "int4": 7, "float8": 29_990.0, "bool": True, "bytea": "\\x00", "json": '["7"]'}
    return values.get(kind, "r7")


def read_whole(plan: dict[str, Any]) -> Iterator[str]:
    if plan["Node Type"] == "Seq Scan" and plan["Relation Name"] in LARGE:
        yield plan["Relation Name"]
    for part in plan.get("Plans", ()):
        yield from read_whole(part)


def test_no_large_table_is_read_as_a_whole(plans: dict[str, Any]) -> None:
    small = {name for name in plans if name in WHOLE or name.startswith("FORGET_TRAINING")}
    wrong = {name: plan for name, plan in plans.items() if name not in small and [*read_whole(plan)]}
    print(json.dumps(wrong, indent=1))
    assert [*wrong] == []
