"""Prompts and their versions, which version is live, and which one each rollout keeps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import Conflict, NotFound
from ...core.json_text import dumps
from ...store.database import Records, Transaction, read

Role = Literal["system", "user"]
ByMode = dict[Literal["train", "eval"], dict[str, float]]
_LIVE = "SELECT version FROM prompt_log WHERE name = {name} ORDER BY n DESC LIMIT 1"
PROMPTS_ALL = f"SELECT name, agent, role, ({_LIVE.format(name='prompts.name')}) AS live FROM prompts ORDER BY name"
PROMPT_VERSIONS = "SELECT * FROM prompt_versions ORDER BY name, version"
PROMPT_NEW = """
INSERT INTO prompts (name, agent, role, created_at) VALUES (:name, :agent, :role, :at) ON CONFLICT (name) DO NOTHING
"""
PROMPT_OF_NAME = f"SELECT agent, role, ({_LIVE.format(name=':name')}) AS live FROM prompts WHERE name = :name"
PROMPT_VERSION_OF_TEXT = (
    "SELECT version FROM prompt_versions WHERE name = :name AND text = :text ORDER BY version LIMIT 1"
)
PROMPT_VERSION_NEW = """
INSERT INTO prompt_versions (name, version, text, parent, comment, metrics, created_at)
SELECT :name, COALESCE(MAX(version), 0) + 1, :text, :parent, :comment, :metrics, :at
FROM prompt_versions WHERE name = :name
RETURNING version
"""
PROMPT_METRICS = "UPDATE prompt_versions SET metrics = :metrics WHERE name = :name AND version = :version"
PROMPT_BACK = """
INSERT INTO prompt_log (name, version)
SELECT name, MAX(version) FROM prompt_log WHERE name = :name AND version < :version GROUP BY name RETURNING version
"""
PROMPT_LOG = "INSERT INTO prompt_log (name, version) VALUES (:name, :version)"
PROMPTS_CHANGED = "SELECT (SELECT MAX(n) FROM prompt_log) AS live, (SELECT MAX(rowid) FROM prompt_versions) AS made"
ROLLOUT_PROMPT = "SELECT version FROM rollout_prompts WHERE rollout_id = :rollout_id AND name = :name"
AGENT_HAS_CALLED = "SELECT 1 FROM calls WHERE rollout_id = :rollout_id AND agent IS :agent LIMIT 1"
ROLLOUT_PROMPT_KEPT = """
INSERT INTO rollout_prompts (rollout_id, name, version)
SELECT rollout_id, :name, :version FROM rollouts WHERE rollout_id = :rollout_id
ON CONFLICT (rollout_id, name) DO NOTHING
"""
CALL_PROMPT = """
INSERT INTO call_prompts (call_id, name, version, place, sent_version, sent)
VALUES (:call_id, :name, :version, :place, :sent_version, :sent)
"""
CALL_PROMPTS_OF = """
SELECT call_prompts.call_id, call_prompts.name, call_prompts.version, place,
    COALESCE(sent, prompt_versions.text) AS sent
FROM calls JOIN call_prompts USING (call_id) LEFT JOIN prompt_versions
    ON prompt_versions.name = call_prompts.name AND prompt_versions.version = sent_version
WHERE calls.rollout_id = :rollout_id ORDER BY calls.seq, call_prompts.name
"""
PROMPT_REWARDS = """
SELECT version, mode, AVG(reward) AS mean, COUNT(*) AS rollouts
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND reward IS NOT NULL AND (NOT :own OR rollouts.key_id IS :key_id) GROUP BY version, mode
"""
# Oldest first. Whoever opens rollouts can name a run: of others, only keys that give evidence count.
PROMPT_RUN = r"""
SELECT rollouts.rollout_id, version, task_id, mode, status, reward,
    COALESCE(metadata ->> '$.held_out', 0) AS held_out
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND metadata ->> '$.optimize' = COALESCE(:run, metadata ->> '$.optimize')
    AND (rollouts.key_id IS :key_id OR (NOT :own AND evidence = 1)) ORDER BY n
/* PostgreSQL:
SELECT rollouts.rollout_id, version, task_id, mode, status, reward,
    COALESCE(metadata::json ->> 'held_out' NOT IN ('false', '0'), FALSE) AS held_out
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND CASE WHEN strpos(metadata, '\u') = 0 THEN
        metadata::json ->> 'optimize' = COALESCE(:run, metadata::json ->> 'optimize') END
    AND (rollouts.key_id IS :key_id OR (NOT :own AND evidence = 1)) ORDER BY n
*/
"""


@dataclass(frozen=True, slots=True)
class PromptVersion:
    """One text of a prompt. `parent`: the version that it was made from. `metrics`: what its maker measured.

    `rewards`: by mode, the mean reward of the rollouts that kept it.
    """

    version: int
    text: str
    created_at: float
    parent: int | None
    comment: str | None
    metrics: dict[str, Any]
    live: bool
    rewards: ByMode


@dataclass(frozen=True, slots=True)
class Prompt:
    """A message of an agent, by the agent's name or by its text, and all texts that it may have. `live`: a version."""

    name: str
    agent: str | None
    role: Role
    live: int
    versions: list[PromptVersion]

    def text_of(self, version: int) -> str:
        """Return the text of a version; NotFound if there is none."""
        if not 1 <= version <= len(self.versions):
            raise NotFound(f"prompt {self.name!r} has no version {version}", param="version")
        return self.versions[version - 1].text

    def version_of(self, text: str) -> int | None:
        """Return the first version with this text."""
        return next((one.version for one in self.versions if one.text == text), None)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a call's model was shown in place of the text that the agent `sent`: a prompt's version.

    `place`: the way to that text in the request, by names and positions.
    """

    call_id: str
    name: str
    version: int
    place: list[str | int]
    sent: str


@dataclass(frozen=True, slots=True)
class TriedOut:
    """A rollout in which a version was tried by an optimisation. `held_out`: it was not part of the search."""

    rollout_id: str
    version: int
    task_id: str
    mode: str
    status: str
    reward: float | None
    held_out: bool


class PromptTable(Records):
    """The tables of prompts. They are small but for what is kept of rollouts and calls.

    `own`: only rollouts that were opened with the key `key_id`.
    """

    async def all(self) -> list[Prompt]:
        """Return every prompt with its versions, by name."""
        versions = defaultdict[str, list[PromptVersion]](list)
        prompts = await self._db.all(PROMPTS_ALL)
        live = {row["name"]: row["live"] for row in prompts}
        for row in await self._db.all(PROMPT_VERSIONS):
            is_live = live.get(row["name"]) == row["version"]
            versions[row["name"]].append(read(PromptVersion, row, live=is_live, rewards={}))
        return [read(Prompt, row, versions=versions[row["name"]]) for row in prompts]

    async def get(self, name: str, version: int | None = None) -> Prompt:
        """Return the prompt of this name; NotFound if there is none, or no such version of it."""
        for prompt in await self.all():
            if prompt.name == name:
                prompt.text_of(version or prompt.live)
                return prompt
        raise NotFound(f"no prompt {name!r}", param="name")

    async def stamp(self) -> tuple[Any, ...]:
        """Return a stamp that changes with every new version and promotion."""
        return tuple(await self._db.quick(PROMPTS_CHANGED) or ())

    async def add(
        self, name: str, made: Mapping[str, Any], match: tuple[str | None, Role] | None, *, promote: bool
    ) -> int:
        """Add a version and return its number. A text that a version has already is that version.

        `made`: its text, parent, comment and metrics. The first version of a new name is live, a further one only if
        `promote`. `match`: the agent and the role. Conflict where the prompt is another message.
        """
        agent, role = match or (None, "system")
        row = {**made, "name": name, "agent": agent, "role": role, "metrics": dumps(made["metrics"]), "at": time.time()}

        async def work(db: Transaction) -> int:
            await db.all(PROMPT_NEW, row)
            (kept,) = await db.all(PROMPT_OF_NAME, row)
            if match is not None and (kept["agent"], kept["role"]) != match:
                message = f"the {kept['role']} message of {kept['agent'] or 'any agent'}; choose another name"
                raise Conflict(f"prompt {name!r} is another message: {message}", param="match")
            version = await db.one(PROMPT_VERSION_OF_TEXT, row) or await db.one(PROMPT_VERSION_NEW, row)
            assert version is not None
            row["version"] = version["version"]
            if made["metrics"]:
                await db.all(PROMPT_METRICS, row)
            if kept["live"] is None or (promote and kept["live"] != row["version"]):
                await db.all(PROMPT_LOG, row)
            return int(row["version"])

        return await self._db.write(work, len(row["text"]))

    async def promote(self, name: str, version: int) -> None:
        """Make a version the live one; NotFound if there is no such version."""
        await self.get(name, version)
        await self._db.execute(PROMPT_LOG, name=name, version=version)

    async def rollback(self, name: str) -> None:
        """Make the newest version live that is older than the live one and was live once. Conflict without one."""
        live = (await self.get(name)).live
        if not await self._db.write(lambda db: db.all(PROMPT_BACK, {"name": name, "version": live})):
            raise Conflict(f"prompt {name!r}: no version older than {live} was ever live")

    async def pin(self, rollout_ids: Sequence[str], versions: Mapping[str, int]) -> None:
        """Let rollouts keep these versions, unless they keep others already. Unknown rollouts keep nothing."""
        rows = [
            {"rollout_id": rollout_id, "name": name, "version": version}
            for rollout_id in rollout_ids
            for name, version in versions.items()
        ]
        await self._db.commit([(ROLLOUT_PROMPT_KEPT, rows)])

    async def kept_by(self, rollout_id: str, name: str) -> int | None:
        """Return the version that a rollout keeps; None before its first."""
        row = await self._db.quick(ROLLOUT_PROMPT, {"rollout_id": rollout_id, "name": name})
        return None if row is None else int(row["version"])

    async def has_begun(self, rollout_id: str, agent: str | None) -> bool:
        """Return whether an agent of a rollout has made a call."""
        return await self._db.quick(AGENT_HAS_CALLED, {"rollout_id": rollout_id, "agent": agent}) is not None

    async def placed_in(self, rollout_id: str) -> list[Placed]:
        """Return the prompts that were put into the rollout's calls, in order."""
        return await self._db.records(Placed, CALL_PROMPTS_OF, rollout_id=rollout_id)

    async def rewards(self, name: str, *, own: bool, key_id: str | None) -> dict[int, ByMode]:
        """Return the mean reward of the rollouts that kept each version, and their number: by version and mode."""
        found = defaultdict[int, ByMode](dict)
        for row in await self._db.all(PROMPT_REWARDS, {"name": name, "own": own, "key_id": key_id}):
            found[row["version"]][row["mode"]] = {"mean": row["mean"], "rollouts": row["rollouts"]}
        return found

    async def tried_out(self, name: str, run: str | None, *, own: bool, key_id: str | None) -> list[TriedOut]:
        """Return the rollouts that an optimisation, by the name of its run, has opened so far, oldest first.

        Without a run, of all optimisations. Unless `own`, rollouts of keys that give evidence count, too.
        """
        return await self._db.records(TriedOut, PROMPT_RUN, name=name, run=run, own=own, key_id=key_id)
