"""Fills a store with rows in every table, and reads all of them."""

from __future__ import annotations

from typing import Any

from lightning_proxy.core.records import CallEnd, CallStart, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.store import Store

# What the recorder's rows alone do not reach. Both databases take these statements.
MORE = """
UPDATE calls SET prompt_ids = :blob, logprobs = :blob, latency_ms = 0.1 WHERE call_id = 'b-1'
UPDATE calls SET usage = '{"a": "\\u0000ü"}' WHERE call_id = 'b-1'
INSERT INTO policy_versions (version, status, publish, created_at) VALUES (7, 'ready', 'lora', 1.5)
INSERT INTO policy_log (version, at) VALUES (7, 1732000000.123456)
UPDATE policy_versions SET verified = 1 WHERE version = 7
INSERT INTO promotions (version, against, status, began_at) VALUES (7, 0, 'testing', 1.5)
INSERT INTO promotion_rollouts VALUES ('b', 1, NULL, 0, 7, 1, '', 1)
INSERT INTO steps (step, status, base, created_at) VALUES (3, 'trained', 7, 2)
UPDATE rollouts SET step = 3, group_id = 1, reward = 0.1 WHERE rollout_id = 'a'
UPDATE rollouts SET alias_model = 'gpt' WHERE rollout_id = 'a'
INSERT INTO keys (key_id, key_hash, name, role, created_at) VALUES ('k', 'h', 'Ännchen', 'agent', 1)
INSERT INTO keys (key_id, key_hash, name, role, created_at, revoked_at) VALUES ('K', 'H', 'z', 'admin', 1, 2)
INSERT INTO rollout_keys (key_hash, rollout_id, key_id) VALUES ('rh', 'a', 'k')
INSERT INTO large_requests VALUES ('b-1', '{"large": "ß"}') ON CONFLICT DO NOTHING
INSERT INTO tool_calls VALUES ('a', 'a-0', 0, 'tc', 'search', '{}', NULL, 0, :blob)
INSERT INTO events (rollout_id, seq, kind, value, created_at) VALUES ('a', 0, 'note', '"n"', 3)
INSERT INTO idempotency VALUES ('b', 'x', '{}', 1)
INSERT INTO idempotency VALUES ('B', 'x', '{}', 1)
INSERT INTO conversation_points VALUES (:blob, NULL, 1)
INSERT INTO conversation_tips VALUES (:blob, 1.25, 'a-0', 'a', :blob)
INSERT INTO probes VALUES (7, 'm', '[]', 1, NULL)
INSERT INTO reward_function VALUES ('module:f')
INSERT INTO publishing VALUES (1, 'lora', 'trainer', 1)
INSERT INTO call_credit VALUES (1, 0, 3, 0.5, -0.25, NULL, 'opened')
INSERT INTO prompts VALUES ('p', NULL, 'system', 1)
INSERT INTO prompt_versions (name, version, text, created_at) VALUES ('p', 1, 'Be brief.', 1)
INSERT INTO prompt_log (name, version) VALUES ('p', 1)
INSERT INTO rollout_prompts VALUES ('a', 'p', 1)
INSERT INTO call_prompts VALUES ('a-0', 'p', 1, '[]', NULL, 'Hi')
UPDATE rollouts SET status = 'completed' WHERE rollout_id = 'c'
DELETE FROM rollouts WHERE rollout_id = 'd'
INSERT INTO evaluations (version, step, began_at) VALUES (7, 3, 1)
INSERT INTO rewarder_spoken SELECT n, 'judge' FROM awaiting_rewards
INSERT INTO rewarder_answers VALUES ('q', 1, 'yes')
INSERT INTO rewarder_spent VALUES ('judge', 12, 0.5)
INSERT INTO rewarder_checks VALUES ('judge', 1, 8, 0.75, 0.5, 1)
"""


async def fill(database: Database, *, calls: int = 3, bytes_each: int = 10) -> None:
    """Record rollouts a to e, with calls whose order of recording is not that of their ids, and rows in all tables."""
    store = Store(database)
    async with Recorder(store, merged=False) as recorder:
        for rollout in "bacde":
            for seq in reversed(range(calls)):
                request = {"messages": [{"role": "user", "content": f"{seq} é" + "x" * bytes_each}]}
                name = RolloutName(rollout, agent=None if rollout == "c" else f"agent {rollout}")
                call_id = f"{rollout}-{seq}"
                start = CallStart(call_id, name, "chat/completions", "policy", 0, request, 100.5)
                await recorder.start(start)
                await recorder.end(CallEnd(call_id, rollout, "ok", {"id": "x"}, 200))
    await store.rewards.post([Reward("a", 0.1), Reward("b", 2.0, call_id="b-1", final=False)])
    await database.commit([(sql, [{"blob": bytes(range(256))}]) for sql in MORE.strip().splitlines()])


async def read_all(database: Database, tables: dict[str, tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of these tables, each ordered by its key's values in Python."""
    found = {}
    for table, key in tables.items():
        rows = [dict(row) for row in await database.all(f"SELECT * FROM {table}")]
        found[table] = sorted(rows, key=lambda row: [row[column] for column in key])
    return found
