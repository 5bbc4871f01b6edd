"""The order in which a commit locks rows that other processes write, too, so that none wait in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..calls import ROLLOUT_CALL_ENDED
from ..conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT
from ..database import Runs
from ..rollouts import ROLLOUT_SEEN

# By which column the rows of a statement are locked. What else a recorder writes is of a rollout that it has locked.
_BY = {
    ROLLOUT_SEEN: "rollout_id",
    ROLLOUT_CALL_ENDED: "rollout_id",
    CONVERSATION_POINT: "digest",
    CONVERSATION_ORIGIN: "digest",
}
HOLD_ROLLOUTS = """
SELECT 1 FROM rollouts WHERE rollout_id IN (SELECT json_array_elements_text(:ids::json))
ORDER BY rollout_id FOR NO KEY UPDATE
"""


def in_order(statement: str, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the rows of a statement in the order in which every process writes them."""
    column = _BY.get(statement)
    return rows if column is None or len(rows) == 1 else sorted(rows, key=lambda row: row[column])


def rollouts_to_hold(runs: Runs) -> list[str]:
    """Return the rollouts to lock before anything is written: those of calls that begin and of calls that end.

    One statement locks them in order by itself.
    """
    kinds = [rows for statement, rows in runs if _BY.get(statement) == "rollout_id"]
    ids = {row["rollout_id"] for rows in kinds for row in rows}
    return sorted(ids) if len(kinds) > 1 and len(ids) > 1 else []
