"""The answers of the control API. Those that features add to, or that a key may see less of, are made as dicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...core.records import (
    CallFields,
    Choice,
    Event,
    Mode,
    PolicyVersion,
    PublishMode,
    Rollout,
    RolloutStatus,
    Transition,
)
from ...store.reports import ComparedRollout, RecentTraffic, Summary
from ...store.rewards import Uncounted
from ...store.training import Collapse, Step
from ...store.versions import MeanReward
from ...store.waiting import Standstill


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape.

    400: not valid. 401, 403: no right to it. 404: not there. 409: not now. 413: too large. 422: wrong types. 503: the
    store cannot be reached.
    """

    error: ErrorDetail


class Rewarded(BaseModel):
    reward_id: int
    rollout_id: str
    status: Literal["recorded"]


class EventRecorded(BaseModel):
    event_id: int
    rollout_id: str
    status: Literal["recorded"]


@dataclass
class Opened:
    rollout_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class ListedRollout(Rollout, Summary):
    """With `words`: first words of its first request and last answer, model, key's name, mean latency of its calls.

    `awaits_reward`: as in the answer about one rollout. `last_call`, with `words`: the status of its last call.
    """

    awaits_reward: bool


class RolloutPage(BaseModel):
    data: list[ListedRollout]
    next_cursor: str | None


class RequestOf(BaseModel):
    """What a request takes from an earlier call's: of each field named here, the first so many.

    That is items of a list, characters (Unicode code points) of a text, members of an object of the full field there.
    The request itself has what comes after them.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    call_id: str


class PromptOf(BaseModel):
    """What a prompt takes from an earlier call: the first so many of its tokens, prompt and answer."""

    call_id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallFields):
    """A call. What `request` and `prompt_token_ids` have comes after `request_of` and `prompt_of`, if there are any."""

    request_of: RequestOf | None
    prompt_of: PromptOf | None
    response_token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    sampling: dict[str, Any]
    choices: list[Choice] | None = None


class RewardSeen(BaseModel):
    reward_id: int
    rollout_id: str
    reward: float
    call_id: str | None
    name: str
    source: str | None
    comment: str | None
    final: bool
    created_at: float


class RolloutDetail(BaseModel):
    """A rollout's fields; `calls` are the calls themselves, in order, and `call_count` how many there are.

    `events`: those that the agent posted between them, each with the `seq` of the next call. `awaits_reward`: the
    reward function (`rewards.function`) has not been asked about it yet.
    """

    rollout_id: str
    status: RolloutStatus
    call_count: int
    calls: list[Call]
    events: list[Event]
    rewards: list[RewardSeen]
    awaits_reward: bool


@dataclass
class Transitions:
    """The state of a model's call may have `request_of` and `prompt_of`, as a call has."""

    data: list[Transition]


class CreditedCall(BaseModel):
    """How a call was trained, by the newest step that took its rollout: null where it has no credit.

    `row`: the index of the rollout's training row. `placed`: `first` of its rollout; `merged` into a row; `drift`,
    `edited`, `repeated`, `adjoining` or `new`: why it opened a row; otherwise why it is in none.
    """

    call_id: str
    seq: int
    agent: str | None
    step: int | None
    returned: float | None = Field(alias="return")
    advantage: float | None
    row: int | None
    placed: str | None


class TrainingRow(BaseModel):
    row: int
    call_ids: list[str]
    tokens: int
    trained_tokens: int


class TrainingRows(BaseModel):
    """`group`: the rollouts it was or will be compared with, itself among them, at most 256, oldest first."""

    rollout_id: str
    task_id: str | None
    step: int | None
    dropped: str | None
    group: list[ComparedRollout]
    calls: list[CreditedCall]
    rows: list[TrainingRow]


@dataclass
class TaskReward:
    rollout_id: str
    reward: float
    at: float
    mode: Mode
    policy_version: int | None


Solved = Literal["never", "always", "sometimes"]


@dataclass
class TaskSeen:
    """A task, in the newest rollouts. Mean, `std`, `min` and `max` are those of the rewards of `rewarded` rollouts.

    `solved`: `never` if each reward is the lowest that any task got, `always` if each is the highest. `recent`: the
    newest 32 rollouts that have a reward, oldest first; `at` is Unix time.
    """

    task_id: str
    rollouts: int
    rewarded: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    solved: Solved | None
    last_at: float
    recent: list[TaskReward]


@dataclass
class TaskPage:
    """`of_newest`: how many rollouts were looked at."""

    data: list[TaskSeen]
    next_cursor: str | None
    of_newest: int


class Policy(BaseModel):
    """The live version."""

    alias: str
    live_version: int
    served_model: str | None
    adapters: dict[str, str]
    publish: PublishMode
    live_at: float | None
    steps: int
    last_step: Step | None
    collapse: Collapse | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen(PolicyVersion):
    """A version, whether it is the live one, and why it cannot be made live (`obstacle`), if it is not `promotable`.

    `rewards`: the mean reward of the rollouts that began with it, by mode. `parent`: the version whose weights its
    training step started from.
    """

    live: bool
    promotable: bool
    obstacle: str | None
    rewards: dict[Mode, MeanReward]
    parent: int | None


class Versions(BaseModel):
    data: list[VersionSeen]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSide(MeanReward):
    tokens: float | None = None
    latency_ms: float | None = None


@dataclass
class ComparedTask:
    """A task of both versions. `tokens` of a rollout and `latency_ms` of its calls are means; with `costs` alone."""

    task_id: str
    a: TaskSide
    b: TaskSide


@dataclass
class Compared:
    """Two versions on the tasks that both had. Each task counts once, however many rollouts it has.

    `rollouts_a`, `rollouts_b`: all rewarded rollouts of the mode that have a task, in common or not.
    `difference`: how far `b` is above `a`, with its 95 % interval by the bootstrap over tasks, as `eval` has it. All of
    these are null without a common task.
    """

    a: int
    b: int
    mode: Mode
    rollouts_a: int
    rollouts_b: int
    tasks: int
    mean_a: float | None
    mean_b: float | None
    difference: float | None
    interval: tuple[float, float] | None
    data: list[ComparedTask]


class Steps(BaseModel):
    data: list[Step]
    next_cursor: str | None


@dataclass
class Verified:
    """How the live version was seen to be served; `story` says it to people.

    `deviations`: by how many standard deviations the servers' answers were those of the new weights and not of those
    before; null where that was not recorded. `difference`: how far they were from the trainer's own, in nats. `by`:
    what was compared where answers told nothing. `probed_at`: when the proxy last compared an answer with the
    version's first one (Unix time); `problem`: what was wrong.
    """

    version: int
    verified: bool
    deviations: float | None
    difference: float | None
    by: str | None
    probed_at: float | None
    problem: str | None
    story: str


class Status(BaseModel):
    """`rollouts`: how many there are by mode and status. `waiting`: complete rollouts that no step has taken yet.

    `dropped`: how many of the newest 200 training rollouts will not be trained on, by reason. `unrewarded`: how many
    of them are completed and have no reward that counts; `other_rewards`: how many of these got a reward of another
    name, by name. `untrainable`: how many of the newest 200 calls cannot be trained on, by reason, the policy's alone.
    `publishing`: why new weights cannot reach the policy's server. `standstill`: nothing was learned from the newest
    rollouts. `collapse`: as in `GET /policy`. `uncounted`: none of the newest rewards acts on everybody. `plugins`: the
    names of those that the configuration asks for. `verified`: how the live version was seen to be served. `recent`:
    the newest calls, at most 500. `per_step`: how many rollouts a training step takes. The last three are null for a
    key that sees only its own rollouts.
    """

    rollouts: dict[Mode, dict[RolloutStatus, int]]
    waiting: int
    per_step: int | None
    dropped: dict[str, int]
    unrewarded: int
    other_rewards: dict[str, int]
    untrainable: dict[str, int]
    publishing: str | None
    standstill: Standstill | None
    uncounted: Uncounted | None
    collapse: Collapse | None
    verified: Verified | None
    plugins: list[str]
    recent: RecentTraffic | None


class Ready(BaseModel):
    """`down`: watched servers that do not answer. `retention`: why the store is larger than it is to be.

    `publish`: the trainer publishes in another way than this proxy serves.
    """

    status: Literal["ready", "degraded", "not ready"]
    store: str
    upstream: str
    policy: str | None = None
    publish: str | None = None
    retention: str | None = None
    down: list[str] = []


# FastAPI's own error body, which it names by default, is none of ours.
ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": Error, "description": "Wrong types"},
    "default": {"model": Error, "description": "Any other error"},
}
