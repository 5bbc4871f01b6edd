"""The records that proxy, store, trainer and commands share. Immutable; no I/O.

`RolloutName`, `CallStart` and `CallEnd` are named tuples: creating one takes a quarter of a frozen dataclass's time.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from .errors import InvalidRequest

CallStatus = Literal["ok", "error", "cancelled", "incomplete"]
RolloutStatus = Literal["running", "completed", "failed", "discarded"]
Mode = Literal["train", "eval"]
PublishMode = Literal["lora", "merged"]
# `candidate`, `rejected`: only with `promotion.mode: gated`, while a version is tested or after it failed its test.
VersionStatus = Literal["publishing", "candidate", "ready", "live", "rejected", "failed"]
CollapseSign = Literal["reward", "clip_share", "kl", "kl_base"]
Header = tuple[bytes, bytes]  # an HTTP header, as ASGI represents it

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias",
)  # fmt: skip

ID = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


def check_id(value: str, what: str) -> str:
    """Return `value` if it is a valid id; raise InvalidRequest naming `what` otherwise."""
    if not ID.fullmatch(value):
        problem = f"{what} must be 1 to 200 characters of A-Z a-z 0-9 . _ : -, got {value[:60]!r}"
        raise InvalidRequest(problem, param=what)
    return value


class RolloutName(NamedTuple):
    """The rollout that a request belongs to.

    `named`: a header, URL or key names the rollout. `key_id`: the stored key that opens it if it is new. `evidence`: as
    in Sender, for that key.
    """

    rollout_id: str
    task_id: str | None = None
    agent: str | None = None
    mode: Mode = "train"
    named: bool = True
    key_id: str | None = None
    evidence: bool = True


class Sender(NamedTuple):
    """Who opens, ends or rewards rollouts. The default is the operator.

    `key_id`: the stored key, if any. `own`: the sender may act only on rollouts that were opened with that key.
    `evidence`: the sender's rewards count towards the test of a new version.
    """

    key_id: str | None = None
    own: bool = False
    evidence: bool = True


OPERATOR = Sender()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments`: the model's text, which may be invalid JSON, or JSON of what the server parsed."""

    id: str | None
    name: str
    arguments: str
    result: Any = None
    is_error: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, which the agent sends in a later request. Some agents send no `tool_call_id`."""

    tool_call_id: str | None
    content: Any
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer. In calls that can be trained on, each token id has a log-probability."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None


class CallStart(NamedTuple):
    """A call as it is sent upstream. It is stored at once, as `incomplete`.

    `request` is the body that the model sees, `request_text` its JSON text if available.
    `policy_version`: 0 is the base model, None a model outside the policy. `pins`: this version answers the rollout
    from now on. `is_retry`: the client says that it sends the same request again. `imported`: as in CallEnd. `harness`:
    as in ModelCall.
    """

    call_id: str
    rollout: RolloutName
    endpoint: str
    model: str | None
    policy_version: int | None
    request: dict[str, Any]
    started_at: float
    is_retry: bool = False
    request_text: bytes | None = None
    upstream: str | None = None
    pins: bool = True
    imported: bool = False
    harness: dict[str, str] | None = None


class CallEnd(NamedTuple):
    """How a call ended. `response`: the answer that the agent received (a stream is assembled), or the error body.

    `fallback`: the upstream that answered in place of the intended one; then no policy version answered. `model`: the
    model requested from the fallback. `imported`: another process made the call and reported it later, so the version
    that is live now may not be the one that answered.
    """

    call_id: str
    rollout_id: str
    status: CallStatus
    response: Any
    http_status: int | None
    prompt_token_ids: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    usage: dict[str, Any] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    untrainable_reason: str | None = None
    ttft_ms: float | None = None
    latency_ms: float = 0.0
    fallback: str | None = None
    model: str | None = None
    imported: bool = False

    @property
    def trainable(self) -> bool:
        return self.untrainable_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFields:
    """The fields of a call that the store, the trainer and the control API share.

    `policy_versions`: all that were live while the call ran, in order; several only if weights are replaced in place.
    `superseded_by`: the call that sent the same request again. `extends`: the earlier call that this prompt continues:
    the prompt begins with that call's prompt and answer. `request_of`, `prompt_of`: as in store/requests.py; None if
    the full value is here.
    """

    call_id: str
    seq: int
    agent: str | None
    endpoint: str
    status: CallStatus
    http_status: int | None
    error: str | None
    upstream: str | None
    model: str | None
    policy_version: int | None
    policy_versions: tuple[int, ...]
    request: dict[str, Any]
    response: Any
    prompt_token_ids: tuple[int, ...]
    extends: str | None
    usage: dict[str, Any] | None
    tool_calls: tuple[ToolCall, ...]
    reward: float | None
    trainable: bool
    untrainable_reason: str | None
    superseded_by: str | None
    started_at: float
    ttft_ms: float | None
    latency_ms: float | None
    request_of: dict[str, Any] | None = None
    prompt_of: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall(CallFields):
    """A call read back from the store.

    `harness`: what the agent's program says in headers: the `thread` of the call, the `parent` thread that started it,
    if any, and its `kind`.
    """

    rollout_id: str
    choices: tuple[Choice, ...]
    harness: dict[str, str] | None = None

    @property
    def response_token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def is_decision(self) -> bool:
        """Whether the agent received an answer and did not send the same request again."""
        return self.status == "ok" and self.superseded_by is None

    @property
    def row_token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.response_token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.choices[0].logprobs if self.choices else ()

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason if self.choices else None

    @property
    def temperature(self) -> float | None:
        """Return the request's temperature: 1.0 if absent, as in OpenAI's API; None if it is not a number."""
        value = self.request.get("temperature")
        try:
            return 1.0 if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of the request; None for each that is left to the server's default."""
        return {name: self.request.get(name) for name in SAMPLING}


@dataclass(frozen=True, slots=True)
class Reward:
    """One posted reward. `call_id` None: a reward for the rollout itself."""

    rollout_id: str
    reward: float
    call_id: str | None = None
    name: str = "reward"
    source: str | None = None
    comment: str | None = None
    final: bool = True
    retrain: bool = False
    reward_id: int | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A step of the agent that is not a call. `seq`: the number of the next call in the rollout.

    States and notes have a `value`; actions have `arguments`, `result` and `is_error`.
    """

    kind: Literal["state", "action", "note"]
    agent: str | None = None
    name: str | None = None
    value: Any = None
    arguments: Any = None
    result: Any = None
    is_error: bool = False
    event_id: int = 0
    seq: int = 0
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of an agent on one task.

    `step` is the training step that took it, `dropped` the reason why the trainer will not take it; both may be None.
    `dropped_by`: the step that was being prepared when it was dropped, if any. `reward` is its return (`returns.py`):
    `own_reward`, or else the sum of its calls' rewards.
    """

    rollout_id: str
    task_id: str | None
    agent: str | None
    mode: Mode
    status: RolloutStatus
    reason: str | None
    metadata: dict[str, Any]
    policy_version: int | None
    step: int | None
    created_at: float
    ended_at: float | None
    calls: int = 0
    tokens: int = 0
    reward: float | None = None
    own_reward: float | None = None
    dropped: str | None = None
    dropped_by: int | None = None


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the weights; 0 is the base model. `path`: the directory of the version's adapter or merged model.

    `adapters`: the name in vLLM of each adapter in `policy.adapters`. Their files are in sub-directories of `path` with
    the adapters' names. `verified`: a check showed that vLLM serves these weights.
    """

    version: int
    status: VersionStatus
    publish: PublishMode | None
    path: str | None
    served_model: str | None
    step: int | None
    created_at: float
    live_at: float | None = None
    error: str | None = None
    verified: bool = False
    adapters: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def served_models(self) -> tuple[str, ...]:
        """Return the names under which vLLM serves this version; () if there are none."""
        return () if self.served_model is None else (self.served_model, *self.adapters.values())


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the rollout's Markov decision process.

    `call_id`: None for an action that the agent posted, which no model chose.
    """

    t: int
    kind: Literal["llm", "tool"]
    agent: str | None
    call_id: str | None
    state: Any
    action: Any
    reward: float
    next_state: Any
    done: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    def __or__(self, other: Limits) -> Limits:
        """These limits; where one is None, the other's."""
        return replace(other, **{name: most for name, most in asdict(self).items() if most is not None})

    def __bool__(self) -> bool:
        return self != Limits()
