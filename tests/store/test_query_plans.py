"""Statements that run for every call, page or step must not become slower with the store: they use its indexes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.features.evaluation.evaluations import SERVABLE
from lightning_proxy.store import waiting
from lightning_proxy.store.calls import TOOL_RESULT
from lightning_proxy.store.conversations import CONVERSATION_QUEUE, CONVERSATION_TAKE
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.rollouts import page_of
from lightning_proxy.store.versions import PINNED_VERSIONS
from support.stores import pages, statements


@cache
def known() -> dict[str, str]:
    return pages() | dict(statements())


# Grow with steps, versions and keys, not with calls; or are no tables. `wanted` is a list that a statement is given.
SMALL_TEXT = """
keys policy_log rollout_counts rollout_count_changes schema_numbers sqlite_master CONSTANT recent json_each wanted
reward_function awaiting_rewards prompts prompt_versions prompt_log promotions maybe rewarder_spent returns line
"""
SMALL = SMALL_TEXT.split()
# Indexes of the few rows that are under way or still have their files.
FEW = {
    "steps_claimed", "steps_with_checkpoints", "policy_versions_with_files", "policy_versions_published",
    "evaluations_under_way", "rewards_of_plain_keys",  # until the first of them
}  # fmt: skip
# Run by `keys purge`, `store info` and `policy export`, when a rollout is deleted, now and then, over what its index
# holds, or over the newest calls or rollouts alone.
# Likewise when training without a server starts, for the list of all versions, or until the first few steps are found.
WHOLE_TEXT = """
ALL FIRST LAST PARENTS STEPS_AFTER UNTRAINABLE RECENT_CALLS TIPS_OF POINTS_OF CONVERSATION_COUNTS STORE_TOTALS LABELS
PAGES MEMBERS_ENDED MEMBERS_RUNNING UNLEARNED
"""
WHOLE = {
    "SELECT * FROM steps WHERE status = 'trained' ORDER BY step", "SELECT * FROM policy_versions ORDER BY version",
    "DELETE FROM keys WHERE revoked_at IS NOT NULL RETURNING 1", "tasks by nothing",
    "SELECT COUNT(*), COALESCE(MAX(ended_at), 0) FROM rollouts WH", *WHOLE_TEXT.split(),
}  # fmt: skip
# Sort what belongs to a few steps, one test, rollout or tool-call id, a page of tasks, the newest calls or rollouts, or
# a key's newest rollouts.
SORTS_TEXT = """
COUNT_CHANGES_FOLD ROLLOUT_COUNTS REWARDS_BY_TASK_OF_KEY UNDER_WAY ROLLOUT_COUNTS_OF_KEY TOOL_RESULT PINNED_VERSIONS
CONVERSATION_TAKE CONVERSATION_QUEUE UNTRAINABLE ROLLOUTS_OVER ROLLOUT_FORGET COMPARED_WITH LABELS PROMPT_BEFORE
PROMPT_KEPT PROMPT_REWARDS PROMPT_RUN PROMOTION_OBSERVED PROMOTION_REWARDS POSTED CALLS_WITH_PARENTS NAMES_OF_REWARDS
"""
SORTS = SORTS_TEXT.split()
SORTED = (
    "SELECT * FROM rollouts WHERE step =",
    "SELECT * FROM tool_calls WHERE",
    "SELECT *, value AS reward, 0 AS retrain FROM rewards WHERE",
    "SELECT * FROM events WHERE rollout_id",
    "tasks by",
)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    yield opened
    await opened.close()


async def plan(database: Database, statement: str) -> list[str]:
    parameters = dict.fromkeys(re.findall(r":(\w+)", statement))
    return [row["detail"] for row in await database.all(f"EXPLAIN QUERY PLAN {statement}", parameters)]


async def test_no_table_is_read_from_end_to_end(database: Database) -> None:
    assert await plan(database, known()["page by nothing"]) == ["SEARCH rollouts USING INTEGER PRIMARY KEY (rowid<?)"]
    for name, statement in known().items():
        steps = await plan(database, statement)
        may_scan = name in WHOLE or name.startswith("FORGET_TRAINING")
        may_sort = name in SORTS or name.startswith(SORTED)
        for step in steps:
            is_small = step.startswith("SCAN") and (step.split()[1] in SMALL or step.split()[-1] in FEW)
            assert not step.startswith("SCAN") or is_small or may_scan, (name, steps)
            assert "TEMP B-TREE" not in step or may_sort or steps[0].startswith("SCAN"), (name, steps)


async def test_what_is_asked_for_often_is_read_off_its_index(database: Database) -> None:
    for statement, place, index in (
        (waiting.WAITING_COUNT, 0, "USING COVERING INDEX rollouts_claimable"),
        (waiting.MEMBERS_ENDED_OF, 0, "rollouts_claimable (mode=? AND task_id=?"),
        (waiting.MEMBERS_RUNNING_OF, 0, "rollouts_running_of_task (task_id=?"),
        (waiting.SIBLINGS, 0, "rollouts_by_group (group_id=?)"),
        (waiting.SIBLINGS_ONE_BY_ONE, 0, "rollouts_by_task (task_id=? AND n>? AND n<?)"),
        (waiting.CHANGED, 0, "PRIMARY KEY (rowid>? AND rowid<?)"),
        (waiting.CLAIMABLE_LONE, 1, "INDEX rollouts_lone "),
        (waiting.LONE, 0, "INDEX rollouts_lone "),
        (waiting.EARLIER_OF_TASK, 0, "INDEX rollouts_by_task "),
        (waiting.UNLEARNED, slice(None), "INDEX rollouts_dropped (dropped=? AND n>?)"),
        (known()["REWARDS_BY_TASK"], 0, "USING COVERING INDEX rollouts_by_version"),
        (PINNED_VERSIONS, 0, "USING COVERING INDEX rollouts_running"),
        (page_of(["mode"]), 0, "USING INDEX rollouts_by_mode"),
        (page_of(["mode", "status"]), 0, "USING INDEX rollouts_by_mode_and"),
        (page_of(["prefix"]), 0, "(rollout_id>? AND rollout_id<?)"),
        (SERVABLE, 0, "USING INDEX policy_versions_with_files"),
    ):
        steps = await plan(database, statement)
        assert index in "".join(steps[place]), (statement, steps)
    for statement in (CONVERSATION_TAKE, CONVERSATION_QUEUE):
        tips = await plan(database, statement)
        assert not [step for step in tips if step.startswith("SCAN") and step != "SCAN recent"], tips
    results = [step.split("(", 1)[1] for step in await plan(database, TOOL_RESULT) if " tool_calls_by" in step]
    assert set(results) == {"rollout_id=? AND place=?)", "rollout_id=? AND tool_call_id=?)"}
    some = await plan(database, known()["CALLS_WITH_PARENTS"])
    assert {step.split("(")[1] for step in some if step.startswith("SEARCH calls")} == {"call_id=?)"}
