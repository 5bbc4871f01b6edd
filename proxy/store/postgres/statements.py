"""The statements that PostgreSQL needs another text for: those that read JSON or lists."""

from __future__ import annotations

from types import ModuleType

from .. import calls, waiting
from ..calls import CALL_END, CALL_START, CALLS_ANSWERED
from ..reports import feed, tasks, traffic
from ..resources import prompts
from ..retention import PAGES
from ..rollouts import IS_ANOTHERS, ROLLOUT_OF_ANOTHER_KEY, ROLLOUT_REWARDS, ROLLOUT_SEEN, ROLLOUTS_OF_NUMBERS
from ..training import STEPS_FIRST, STEPS_NEWEST, TRAINED_DATA
from ..versions import VERSION_NAMED, VERSIONS_TO_SERVE

# A number is used up only by a rollout that is new: the newest of so many are counted by their numbers.
_SEEN = f"""
WITH known AS (
    UPDATE rollouts SET
        task_id = COALESCE(task_id, :task_id),
        agent = COALESCE(agent, :agent),
        mode = CASE WHEN {IS_ANOTHERS} THEN NULL WHEN :mode = 'eval' THEN 'eval' ELSE mode END,
        policy_version = COALESCE(policy_version, :pin)
    WHERE rollout_id = :rollout_id RETURNING 1
)
INSERT INTO rollouts (rollout_id, task_id, agent, mode, policy_version, key_id, evidence, created_at)
SELECT :rollout_id, :task_id, :agent, :mode, :pin, :key_id, :evidence, :at WHERE NOT EXISTS (SELECT 1 FROM known)
ON CONFLICT (rollout_id) DO UPDATE SET
    task_id = COALESCE(rollouts.task_id, excluded.task_id),
    agent = COALESCE(rollouts.agent, excluded.agent),
    mode = CASE WHEN {IS_ANOTHERS} THEN NULL WHEN excluded.mode = 'eval' THEN 'eval' ELSE rollouts.mode END,
    policy_version = COALESCE(rollouts.policy_version, excluded.policy_version)
"""


def _listed(name: str, kind: str = "BIGINT") -> str:
    """The values of a JSON list that is a parameter."""
    return f"SELECT json_array_elements_text(:{name}::json)::{kind}"


def _wanted(ref: str, kind: str, statement: str) -> str:
    """A statement of the feed: it names what it reads by a list of texts.

    With OFFSET each is looked up, where the server might read the whole table.
    """
    begun, rest = statement.split("FROM json_each(:refs) AS wanted CROSS JOIN ", 1)
    table, rest = rest.split(" ON ", 1)
    rest = rest.split("wanted.value", 1)[1]
    begun = begun.replace(f"{ref} AS ref", f"{ref}::TEXT AS ref", 1)
    wanted = f"(SELECT value::{kind} FROM json_array_elements_text(:refs::json)) AS wanted (value)"
    looked_up = f"(SELECT * FROM {table} WHERE {ref} = wanted.value OFFSET 0)"
    return f"{begun}FROM {wanted} CROSS JOIN LATERAL {looked_up} AS {table}{rest}"


def _of_lists(module: ModuleType, numbers: str, texts: str) -> dict[str, str]:
    """The statements of a module that look into lists of numbers or of texts that they are given."""
    kinds = dict.fromkeys(numbers.split(), "BIGINT") | dict.fromkeys(texts.split(), "TEXT")
    found: dict[str, str] = {}
    for sql in (text for name, text in vars(module).items() if name.isupper() and isinstance(text, str)):
        other = sql
        for name, kind in kinds.items():
            other = other.replace(f"SELECT value FROM json_each(:{name})", _listed(name, kind))
        found |= {sql: other} if other != sql else {}
    return found


def _of_json(column: str, name: str) -> str:
    """A text or number in a JSON column; NULL where an escape may stand that PostgreSQL has no character for."""
    return f"CASE WHEN strpos({column}, '\\u') = 0 THEN {column}::json ->> '{name}' END"


def _tokens(name: str) -> str:
    """A number of tokens in `usage`, as whole; NULL if it is none."""
    found = _of_json("usage", name)
    return f"CASE WHEN {found} ~ '^[0-9]{{1,15}}$' THEN ({found})::BIGINT WHEN {found} IS NOT NULL THEN 0 END"


# Whether what a commit does with a call was done. `pg_xact_status` would not do: after a crash the server gives the
# number of a lost transaction to another one.
RECORDED = {
    CALL_START: "SELECT 1 FROM calls WHERE call_id = :call_id",
    CALL_END: "SELECT 1 FROM calls WHERE call_id = :call_id AND status = :status AND latency_ms IS :latency_ms",
}
_LISTS = _of_lists(waiting, "numbers awaited", "rollout_ids") | _of_lists(tasks, "", "task_ids")
_LISTS |= _of_lists(calls, "", "call_ids known")
TEXTS = _LISTS | {
    ROLLOUT_SEEN: _SEEN,
    CALLS_ANSWERED: CALLS_ANSWERED.replace("group_concat", "string_agg"),
    # Of few rollouts: with OFFSET the rewards of each are looked up, where the server would read all rewards.
    waiting.REWARDS_SINCE_VERSION: waiting.REWARDS_SINCE_VERSION.replace(
        "CROSS JOIN rewards ON rewards.rollout_id = rollouts.rollout_id",
        "CROSS JOIN LATERAL (SELECT * FROM rewards WHERE rollout_id = rollouts.rollout_id OFFSET 0) AS rewards",
    ),
    PAGES: """
SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0)::BIGINT AS bytes, 0::BIGINT AS free
FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace
""",
    ROLLOUT_OF_ANOTHER_KEY: f"""
SELECT rollout_id FROM rollouts WHERE rollout_id IN ({_listed("rollout_ids", "TEXT")})
AND key_id IS NOT :key_id LIMIT 1
""",
    ROLLOUTS_OF_NUMBERS: f"SELECT * FROM rollouts WHERE n IN ({_listed('numbers')}) ORDER BY n DESC",
    ROLLOUT_REWARDS: ROLLOUT_REWARDS.replace("SELECT value FROM json_each(:versions)", _listed("versions")),
    VERSION_NAMED: VERSION_NAMED.replace(
        "IN (SELECT value FROM json_each(:names))", f"= ANY(ARRAY({_listed('names', 'TEXT')}))"
    ),
    VERSIONS_TO_SERVE: VERSIONS_TO_SERVE.replace("SELECT value FROM json_each(:pinned)", _listed("pinned")),
    TRAINED_DATA: TRAINED_DATA.replace("SELECT value FROM json_each(:steps)", _listed("steps")),
    STEPS_NEWEST: STEPS_NEWEST.replace(
        "json_remove(metrics, '$.reward_by_task')",
        "(SELECT json_object_agg(key, value) FROM json_each(metrics::json) WHERE key <> 'reward_by_task')::TEXT",
    ),
    STEPS_FIRST: STEPS_FIRST.replace("json_extract(metrics, '$.method')", _of_json("metrics", "method")).replace(
        "NOT json_extract(metrics, '$.skipped')", f"{_of_json('metrics', 'skipped')} IN ('false', '0')"
    ),
    feed.NEWEST: "SELECT feed_newest() AS newest",
    feed.FEED_CALLS: _wanted("calls.call_id", "TEXT", feed.FEED_CALLS),
    feed.FEED_REWARDS: _wanted("reward_id", "BIGINT", feed.FEED_REWARDS),
    feed.FEED_ROLLOUTS: _wanted("n", "BIGINT", feed.FEED_ROLLOUTS),
    feed.FEED_STEPS: _wanted("step", "BIGINT", feed.FEED_STEPS),
    feed.FEED_VERSIONS: _wanted("policy_versions.version", "BIGINT", feed.FEED_VERSIONS),
    traffic.RECENT_CALLS: f"""
SELECT status, started_at, latency_ms, ttft_ms,
       COALESCE({_tokens("completion_tokens")}, {_tokens("output_tokens")}, LENGTH(token_ids) / 4, 0) AS tokens
FROM calls ORDER BY rowid DESC LIMIT :newest
""",
    prompts.PROMPT_RUN: prompts.PROMPT_RUN.replace(
        "COALESCE(metadata ->> '$.held_out', 0)",
        f"COALESCE({_of_json('metadata', 'held_out')} NOT IN ('false', '0'), FALSE)",
    ).replace("metadata ->> '$.optimize'", _of_json("metadata", "optimize")),
}
