"""Statements that run for every call, page or step must not become slower with the store: they use its indexes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.store import sql
from lightning_proxy.proxy.store.database import Database

PAGES = {
    f"page by {name or 'nothing'}": sql.ROLLOUTS_PAGE.format(filters=sql.ROLLOUT_FILTERS.get(name, ""))
    for name in ("", "status", "task_id", "mode")
} | {"page by agent": sql.ROLLOUTS_PAGE_OF_AGENT.format(filters="")}
STATEMENTS = PAGES | {
    name: getattr(sql, name)
    for name in (
        "ROLLOUT", "ROLLOUT_OF_KEY", "ROLLOUT_SEEN", "ROLLOUT_END", "ROLLOUT_DELETE", "CALL_START", "CALL_END",
        "CALLS", "CALL_LARGE_REQUEST", "CALL_SUPERSEDED", "ROLLOUT_CALL_ENDED", "TOOL_CALLS", "TOOL_RESULT", "REWARDS",
        "ROLLOUT_COMPLETE", "CLAIMABLE_OF_TASK", "CLAIM", "CLAIMED", "DROP", "RELEASE", "RELEASE_DROPPED",
        "LIVE_VERSION", "PINNED_VERSIONS", "IDEMPOTENT_ANSWER", "IDEMPOTENT_FORGET", "CONVERSATION_LEADS_TO",
        "CONVERSATION_WAITS", "POINTS_FORGET", "CALL_NEWEST", "CALLS_UNDER_WAY", "TIPS_FORGET", "LONE", "EARLIER",
        "EARLIER_OF_TASK", "ROLLOUTS_REWARDED_AS", "ROLLOUTS_SINCE_VERSION", "REWARDS_SINCE_VERSION", "REWARD_NEWEST",
        "EVENT", "EVENTS", "CALL_STATUS", "RESPONSES_WITH",
    )
}  # fmt: skip

# These sort what belongs to one step, rollout or tool-call id.
FEW = {"REWARDS_SINCE_VERSION", "CLAIMED", "TOOL_RESULT", "TOOL_CALLS", "REWARDS", "PINNED_VERSIONS"}


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    yield opened
    await opened.close()


async def plan(database: Database, statement: str) -> list[str]:
    parameters = dict.fromkeys(sql_parameters(statement))
    return [row["detail"] for row in await database.all(f"EXPLAIN QUERY PLAN {statement}", parameters)]


def sql_parameters(statement: str) -> set[str]:
    return {word.split(":")[1].rstrip(",);\n") for word in statement.split() if ":" in word}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_no_table_is_read_from_end_to_end(database: Database, name: str) -> None:
    steps = await plan(database, STATEMENTS[name])
    if name == "page by nothing":
        assert steps == ["SEARCH rollouts USING INTEGER PRIMARY KEY (rowid<?)"]
    for step in steps:
        # The policy's log is as long as there were versions; its newest row is the first one read.
        assert not step.startswith("SCAN") or step == "SCAN policy_log", steps
        assert "TEMP B-TREE" not in step or name in FEW, steps


async def test_claims_look_at_nothing_but_what_can_be_claimed(database: Database) -> None:
    assert "USING COVERING INDEX rollouts_claimable" in (await plan(database, sql.CLAIMABLE_GROUPS))[0]


async def test_versions_of_running_rollouts_are_read_off_an_index(database: Database) -> None:
    assert "USING COVERING INDEX rollouts_running" in (await plan(database, sql.PINNED_VERSIONS))[0]


async def test_a_tip_is_taken_from_those_of_its_digest(database: Database) -> None:
    steps = await plan(database, sql.CONVERSATION_TAKE)
    assert not [step for step in steps if step.startswith("SCAN") and step != "SCAN recent"], steps


@pytest.mark.parametrize(("filters", "index"), [("mode", "rollouts_by_mode"), ("mode status", "rollouts_by_mode_and")])
async def test_a_rare_mode_is_found_without_looking_at_the_others(database: Database, filters: str, index: str) -> None:
    page = sql.ROLLOUTS_PAGE.format(filters=" ".join(sql.ROLLOUT_FILTERS[name] for name in filters.split()))
    assert f"USING INDEX {index}" in (await plan(database, page))[0]


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("CLAIMABLE_LONE", "rollouts_lone"),
        ("LONE", "rollouts_lone"),
        ("EARLIER_OF_TASK", "rollouts_by_task"),
        ("ROLLOUTS_REWARDED_AS", "rollouts_unrewarded"),
    ],
)
async def test_what_waits_or_came_before_is_read_off_its_index(database: Database, statement: str, index: str) -> None:
    assert f"INDEX {index} " in (await plan(database, getattr(sql, statement)))[0]
