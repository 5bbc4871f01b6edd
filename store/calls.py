"""Records and reads the calls, and the events that agents report between calls."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.json_text import dumps, dumps_or_none, fields_of, loads_or_none
from ..core.records import CallStatus, Choice, Event, ModelCall, RolloutName, ToolCall
from ..core.returns import earned
from .database import Database, Records, Row, Transaction, read
from .requests import Parent, full_calls, short_calls
from .rewards import Answer, Rewards, answer_once
from .rollouts import ROLLOUT_SEEN, Rollouts

# A row is written twice: by CALL_START, as `incomplete`, before the request goes upstream, and by CALL_END. SQLite
# rewrites a changed row entirely, so large requests have their own table. A request is given as the agent's own bytes,
# or as its difference from its parent's, so no copy of it waits for the commit.

# Refused (`request` would be NULL) when the parent that it is stored against is gone.
CALL_START = """
INSERT INTO calls
    (call_id, rollout_id, seq, parent_id, agent, harness, endpoint, status, upstream, model, policy_version, request,
     started_at)
VALUES (
    :call_id, :rollout_id, (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls WHERE rollout_id = :rollout_id),
    :parent_id, :agent, :harness, :endpoint, 'incomplete', :upstream, :model, :policy_version,
    CASE WHEN :parent_id IS NULL THEN COALESCE('{"new":' || CAST(:request AS TEXT) || '}', '')
         WHEN EXISTS (SELECT 1 FROM calls WHERE call_id = :parent_id) THEN COALESCE(CAST(:request AS TEXT), '') END,
    :at
)
"""
CALL_LARGE_REQUEST = """
INSERT INTO large_requests (call_id, request) VALUES (
    :call_id,
    CASE WHEN :parent_id IS NULL THEN '{"new":' || CAST(:large_request AS TEXT) || '}'
         ELSE CAST(:large_request AS TEXT) END
)
"""
_ENDED = (
    "status", "http_status", "ttft_ms", "latency_ms", "finish_reason", "untrainable_reason", "error", "usage",
    "input_tokens", "cached_tokens", "kept_tokens", "output_tokens", "reasoning_tokens",
    "response", "prompt_shared", "prompt_ids", "token_ids", "logprobs", "more_choices",
)  # fmt: skip
CALL_END = f"""
UPDATE calls SET
    {", ".join(f"{column} = :{column}" for column in _ENDED)},
    upstream = COALESCE(:fallback, upstream),
    model = CASE WHEN :fallback IS NULL THEN model ELSE :model END,
    policy_version = CASE WHEN :fallback IS NULL THEN policy_version END,
    policy_version_end = CASE WHEN policy_version IS NULL OR :fallback IS NOT NULL OR NOT :merged THEN NULL
                              ELSE COALESCE(
                                  (SELECT version FROM policy_versions
                                   WHERE version = calls.policy_version AND policy_versions.status = 'candidate'),
                                  (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1)) END
WHERE call_id = :call_id
"""
ROLLOUT_CALL_ENDED = """
UPDATE rollouts SET
    calls = calls + 1, tokens = tokens + :tokens,
    foreign_calls = foreign_calls
        + (SELECT CASE WHEN policy_version IS NULL THEN 1 ELSE 0 END FROM calls WHERE call_id = :call_id)
WHERE rollout_id = :rollout_id AND EXISTS (SELECT 1 FROM calls WHERE call_id = :call_id)
"""
# Inserts nothing for a call that is gone: its rollout may have been deleted meanwhile.
TOOL_CALL = """
INSERT INTO tool_calls (rollout_id, call_id, position, tool_call_id, name, arguments, place)
SELECT rollout_id, call_id, :position, :tool_call_id, :name, :arguments, :place
FROM calls WHERE call_id = :call_id
"""
# The recorded call that a result belongs to (proxy/gateway/recent.py finds the call that the request sends again, and
# its place). By how well it fits:
#   1  it has the result's id, and it stands there, or no other call has such an id, or it is in that answer;
#   2  a call with these arguments stands there: the client wrote a new id;
#   3  it has the id, and these arguments, or the request does not send it again: the history was edited.
# Example: recorded were "go: f(1), id f:0" and "go, f(1): f(2), id f:0". The result for f(2), id f:0, sent after
# "go · f(1)", fits the second one (1) and is not compared with the first; sent after "summary", it fits the second (3).
# A call that has its result keeps it. `brought_before`: the result, if it may have been. Of equal conversations the
# first is answered first, else the newest call.
TOOL_RESULT = """
UPDATE tool_calls SET result = :result, is_error = :is_error
WHERE result IS NULL AND (call_id, position) = (
    SELECT call_id, position FROM (
        SELECT same.call_id, same.position, same.result, calls.agent,
               CASE WHEN same.place = :place THEN calls.seq ELSE -calls.seq END AS turn,
               CASE WHEN same.name = :name AND same.arguments = :arguments THEN 0 ELSE 1 END AS differs,
               CASE WHEN calls.agent = :agent THEN 0 ELSE 1 END AS is_others,
               CASE WHEN calls.status = 'ok' AND calls.superseded_by IS NULL THEN 0 ELSE 1 END AS is_unused,
               CASE WHEN same.tool_call_id = :tool_call_id
                         AND (same.place = :place OR :is_unique OR calls.response LIKE :answer) THEN 1
                    WHEN same.place = :place AND same.name = :name AND same.arguments = :arguments THEN 2
                    WHEN same.tool_call_id = :tool_call_id
                         AND (:arguments IS NULL OR (same.name = :name AND same.arguments = :arguments)) THEN 3
               END AS fit
        FROM (
            SELECT call_id, position FROM tool_calls WHERE rollout_id = :rollout_id AND place = :place
            UNION
            SELECT call_id, position FROM tool_calls
            WHERE rollout_id = :rollout_id AND tool_call_id = CASE WHEN NOT EXISTS (
                SELECT 1 FROM tool_calls
                WHERE rollout_id = :rollout_id AND place = :place AND tool_call_id = :tool_call_id
                AND name = :name AND arguments = :arguments
            ) THEN :tool_call_id END
        ) AS maybe
        CROSS JOIN tool_calls AS same ON same.call_id = maybe.call_id AND same.position = maybe.position
        CROSS JOIN calls ON calls.call_id = same.call_id
    ) AS found WHERE fit IS NOT NULL
    ORDER BY fit, differs, is_others, is_unused,
             CASE WHEN result = :brought_before THEN 0 WHEN result IS NULL THEN 1 ELSE 2 END, turn, position LIMIT 1
)
"""
CALL_SUPERSEDED = "UPDATE calls SET superseded_by = :call_id WHERE call_id = :earlier"
CALLS = """
SELECT calls.*, large_requests.request AS large_request FROM calls LEFT JOIN large_requests USING (call_id)
WHERE rollout_id = :rollout_id ORDER BY seq
"""
# Some calls, and their parents back to those that are known.
CALLS_WITH_PARENTS = """
WITH RECURSIVE wanted (call_id, parent_id) AS (
    SELECT call_id, parent_id FROM calls WHERE call_id IN (SELECT CAST(value AS TEXT) FROM json_each(:call_ids))
    UNION
    SELECT calls.call_id, calls.parent_id FROM wanted JOIN calls ON calls.call_id = wanted.parent_id
    WHERE calls.call_id NOT IN (SELECT CAST(value AS TEXT) FROM json_each(:known))
)
SELECT calls.*, (SELECT request FROM large_requests WHERE call_id = calls.call_id) AS large_request
FROM wanted CROSS JOIN calls ON calls.call_id = wanted.call_id ORDER BY seq
"""
# A call's number, time and place by time, if the call before it began later, or an event before it. Not in a rollout
# that was trained on: there the numbers of calls are used elsewhere.
OUT_OF_ORDER = """
SELECT seq, started_at AS at,
       (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls AS other
        WHERE rollout_id = :rollout_id AND seq < calls.seq AND started_at <= calls.started_at) AS place
FROM calls WHERE call_id = :call_id AND (
    started_at < (SELECT started_at FROM calls AS other
                  WHERE rollout_id = :rollout_id AND seq < calls.seq ORDER BY seq DESC LIMIT 1)
    OR EXISTS (SELECT 1 FROM events
               WHERE rollout_id = :rollout_id AND seq = calls.seq AND created_at > calls.started_at)
) AND (SELECT step FROM rollouts WHERE rollout_id = :rollout_id) IS NULL
"""
# No two calls have one number, not even for a moment: so numbers below 0 come in between.
MOVED = (
    """
UPDATE calls SET seq = -1 - CASE WHEN call_id = :call_id THEN CAST(:place AS INTEGER) ELSE seq + 1 END
WHERE rollout_id = :rollout_id AND seq >= :place AND seq <= :seq
""",
    "UPDATE calls SET seq = -1 - seq WHERE rollout_id = :rollout_id AND seq < 0",
    """
UPDATE events SET seq = seq + 1
WHERE rollout_id = :rollout_id AND seq <= :seq AND (seq > :place OR (seq = :place AND created_at > :at))
""",
)
CALL_STATUS = """
SELECT CASE WHEN rollout_id = :rollout_id THEN status ELSE 'ok' END AS status FROM calls WHERE call_id = :call_id
"""
# Of the newest calls of a rollout, those that were answered.
CALLS_ANSWERED = """
SELECT group_concat(call_id, ' ') AS call_ids FROM (
    SELECT call_id, status FROM calls WHERE rollout_id = :rollout_id ORDER BY seq DESC LIMIT :newest
) AS recent WHERE status = 'ok'
"""
# Of the newest calls of a rollout, those that a request may repeat: without an answer, or the last one.
CALLS_TO_REPEAT = """
SELECT call_id FROM (
    SELECT call_id, seq, status, superseded_by FROM calls WHERE rollout_id = :rollout_id ORDER BY seq DESC LIMIT :newest
) AS recent
WHERE superseded_by IS NULL
    AND (status <> 'ok' OR seq = (SELECT MAX(seq) FROM calls WHERE rollout_id = :rollout_id))
"""
# The newest by order of insertion: an index on the time would cost every call. Other models' calls do not count.
UNTRAINABLE = """
SELECT untrainable_reason, COUNT(*) AS n FROM (
    SELECT untrainable_reason, policy_version FROM calls ORDER BY rowid DESC LIMIT :newest
) AS recent WHERE untrainable_reason IS NOT NULL AND policy_version IS NOT NULL GROUP BY 1 ORDER BY n DESC, 1
"""
RESPONSES_WITH = """
SELECT call_id, response, upstream FROM calls WHERE rollout_id = :rollout_id AND instr(response, :response_id) > 0
"""
POLICY_LOG_DURING = """
SELECT version, at FROM policy_log
WHERE at >= (SELECT MIN(started_at) FROM calls WHERE rollout_id = :rollout_id) ORDER BY n
"""
RANK = {"ok": 0, "incomplete": 1, "cancelled": 2, "error": 2}  # of calls that a request may repeat
REPEATED = 64  # calls of a rollout that are looked at for one that a request repeats
EVENT_JSON = ("value", "arguments", "result")

EVENT = """
INSERT INTO events (rollout_id, seq, kind, agent, name, value, arguments, result, is_error, created_at)
VALUES (
    :rollout_id, (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls
                  WHERE rollout_id = :rollout_id AND (:comes_last OR started_at <= :at)),
    :kind, :agent, :name, :value, :arguments, :result, :is_error, :at
)
RETURNING event_id
"""


class Giver(NamedTuple):
    """The call that produced a response; its record may be incomplete."""

    rollout_id: str
    call_id: str
    upstream: str | None
    response: dict[str, Any]


class Calls(Records):
    """The table of calls, with their tool calls. The recorder writes it, in batches."""

    def __init__(self, database: Database, rollouts: Rollouts, rewards: Rewards) -> None:
        super().__init__(database)
        self._rollouts = rollouts
        self._rewards = rewards

    async def of(self, rollout_id: str, *, short: bool = False) -> list[ModelCall]:
        """Return the rollout's calls in order, with tool results and rewards. Raises NotFound for an unknown rollout.

        With `short`, a call's request and prompt hold only what they add to its parent's, so the work and memory for
        all calls are linear in the rollout's content.
        """
        await self._rollouts.get(rollout_id)
        tools = "SELECT * FROM tool_calls WHERE rollout_id = :rollout_id ORDER BY call_id, position"
        params = {"rollout_id": rollout_id}
        calls, made, log = [await self._db.all(statement, params) for statement in (CALLS, tools, POLICY_LOG_DURING)]
        rewards = earned(await self._rewards.of(rollout_id), await self._rewards.rules()).calls
        return await asyncio.to_thread(_read_calls, calls, made, log, rewards, short=short)

    async def some(self, call_ids: Collection[str], known: Mapping[str, Parent]) -> list[ModelCall]:
        """Return some of a rollout's calls in order, without tool results and rewards.

        The parents that these calls are restored from are read too, except for the `known` ones.
        """
        rows = await self._db.all(CALLS_WITH_PARENTS, {"call_ids": dumps([*call_ids]), "known": dumps([*known])})
        calls = await asyncio.to_thread(_read_calls, rows, known=known)
        return [call for call in calls if call.call_id in call_ids]

    async def superseded(
        self, rollout_id: str, request: dict[str, Any], known: Mapping[str, Parent], running: Container[str] = ()
    ) -> ModelCall | None:
        """Return the call that this request repeats: the newest unsuccessful call with the same request.

        Failed calls are preferred to unfinished ones, which another process may be answering. If there are neither, the
        rollout's newest call is returned if it has the same request: its answer did not reach the client. Calls in
        `running` and calls before the newest `REPEATED` are ignored. `known`: as in `some`.
        """
        rows = await self._db.all(CALLS_TO_REPEAT, {"rollout_id": rollout_id, "newest": REPEATED})
        calls = await self.some([call_id for (call_id,) in rows if call_id not in running], known)
        alike = [call for call in calls if call.request == request]
        return max(alike, key=lambda call: (RANK[call.status], call.seq), default=None)

    async def put_in_order(self, rollout_id: str, call_id: str) -> bool:
        """Move a call that was reported late to its place by time. Return whether it moved before other calls.

        A call's parent stays before it (proxy/gateway/recorder.py). A rollout that was trained on is left unchanged.
        """

        async def work(db: Transaction) -> bool:
            row: dict[str, Any] = {"rollout_id": rollout_id, "call_id": call_id}
            if (found := await db.one(OUT_OF_ORDER, row)) is None:
                return False
            row |= dict(found)
            for statement in MOVED:
                await db.all(statement, row)
            return bool(row["place"] < row["seq"])

        return await self._db.write(work)

    async def status(self, rollout_id: str, call_id: str) -> CallStatus | None:
        """Return a call's status, or None if there is no such call. A call of another rollout counts as ok."""
        row = await self._db.quick(CALL_STATUS, {"rollout_id": rollout_id, "call_id": call_id})
        return None if row is None else row["status"]

    async def answered(self, rollout_id: str, newest: int) -> set[str]:
        """Return the ids of the calls with status `ok` among the rollout's last `newest` calls."""
        row = await self._db.quick(CALLS_ANSWERED, {"rollout_id": rollout_id, "newest": newest})
        return set() if row is None or row["call_ids"] is None else set(row["call_ids"].split(" "))

    async def giver(self, rollout_id: str, response_id: str) -> Giver | None:
        """Return the call that produced the response with this id; None if there is none."""
        params = {"rollout_id": rollout_id, "response_id": response_id}
        for call_id, response, upstream in await self._db.all(RESPONSES_WITH, params):
            answer = loads_or_none(response)
            if isinstance(answer, dict) and answer.get("id") == response_id:
                return Giver(rollout_id, call_id, upstream, answer)
        return None

    async def untrainable(self, newest: int) -> dict[str, int]:
        """Count the policy's untrainable calls among the `newest` calls, by their stored reason."""
        return dict(map(tuple, await self._db.all(UNTRAINABLE, {"newest": newest})))


def _read_calls(
    rows: Sequence[Row],
    tool_calls: Iterable[Row] = (),
    log: Sequence[Row] = (),
    rewards: Mapping[str, float] = MappingProxyType({}),
    known: Mapping[str, Parent] = MappingProxyType({}),
    *,
    short: bool = False,
) -> list[ModelCall]:
    """Return the calls in `rows`, which are in order of `seq`. `log`: rows of POLICY_LOG_DURING."""
    tools = defaultdict[str, list[ToolCall]](list)
    for tool in tool_calls:
        made = read(ToolCall, tool, id=tool["tool_call_id"], result=loads_or_none(tool["result"]))
        tools[tool["call_id"]].append(made)
    parts, calls = [*short_calls(rows, known)], []
    for row, own in zip(rows, parts if short else full_calls(parts, known), strict=True):
        answer, reason = own.pop("response_token_ids"), row["untrainable_reason"]
        if row["superseded_by"] is not None:
            reason = "the client sent the same request again"
        elif reason is None and row["status"] != "ok":
            reason = f"call {row['status']}"
        calls.append(read(
            ModelCall, row, **own, policy_versions=_versions(row, log), choices=_choices(row, answer),
            **{name: loads_or_none(row[name]) for name in ("response", "usage", "harness")},
            tool_calls=tuple(tools[row["call_id"]]), reward=rewards.get(row["call_id"]),
            trainable=reason is None, untrainable_reason=reason,
        ))  # fmt: skip
    return calls


def _versions(row: Row, log: Sequence[Row]) -> tuple[int, ...]:
    """Return the versions that answered: the first and, with merged weights, those that replaced it meanwhile."""
    first, last = row["policy_version"], row["policy_version_end"]
    if first is None or last is None:
        return () if first is None else (first,)
    ended = row["started_at"] + (row["latency_ms"] or 0.0) / 1000
    between = [entry["version"] for entry in log if row["started_at"] <= entry["at"] <= ended]
    return tuple(dict.fromkeys([first, *between, last]))


def _choices(row: Row, answer: tuple[int, ...]) -> tuple[Choice, ...]:
    if row["token_ids"] is None:
        return ()
    first = Choice(0, answer, tuple(array("f", row["logprobs"] or b"")), row["finish_reason"])
    more = loads_or_none(row["more_choices"]) or ()
    return (first, *(Choice(index, tuple(ids), tuple(lps), reason) for index, ids, lps, reason in more))


class Events(Records):
    """The table of events. Events are context and are never trained on."""

    async def post(
        self, rollout: RolloutName, events: Sequence[Event], key: str | None = None, body: bytes = b"",
        at: float | None = None,
    ) -> Answer:  # fmt: skip
        """Record all of `events` or none, placed after all calls that had begun by the time `at` (default: now).

        Opens the rollout if there is none with this id. `key`: as in `Rewards.post`.
        """
        row = rollout._asdict() | {"pin": None, "at": time.time() if at is None else at, "comes_last": at is None}

        async def work(db: Transaction) -> Answer:
            await db.all(ROLLOUT_SEEN, row)
            recorded = await db.many(EVENT, [
                row | fields_of(event) | {name: dumps_or_none(getattr(event, name)) for name in EVENT_JSON}
                | {"agent": event.agent or rollout.agent} for event in events
            ])  # fmt: skip
            answer = {"rollout_id": rollout.rollout_id, "status": "recorded"}
            return [{"event_id": event_id} | answer for (event_id,) in recorded]

        request = rollout.rollout_id.encode() + b"\n" + body
        return await self._db.write(lambda db: answer_once(db, key, request, work))

    async def of(self, rollout_id: str) -> list[Event]:
        statement = "SELECT * FROM events WHERE rollout_id = :rollout_id ORDER BY seq, created_at, event_id"
        return [
            read(Event, row, **{name: loads_or_none(row[name]) for name in EVENT_JSON})
            for row in await self._db.all(statement, {"rollout_id": rollout_id})
        ]
