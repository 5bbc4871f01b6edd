"""What the routes of the control API share: types of fields, bodies, which are checked at the edge, pages, errors."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ...core.errors import InvalidRequest, TooLarge

MOST_REWARDS = 10_000  # in one list

ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,200}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]
# In paths and queries they are checked with more to say than 422: their patterns are only for the document.
PathId = Annotated[str, Path(json_schema_extra={"pattern": ID_PATTERN})]

Count = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Comment = Annotated[str | None, Field(max_length=10_000)]
Flag = Annotated[bool, Field(strict=True)]
# In JSON, 3.0 is an integer.
INTEGER = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer = Annotated[int, Field(strict=True, ge=0, lt=2**31), INTEGER]
Limit = Annotated[int, Field(ge=1, le=1000)]


def _position(cursor: str | None) -> int | None:
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor must be one that an earlier answer gave", param="cursor")
    return int(cursor) if cursor else None


# Where a page begins, or goes on.
Cursor = Annotated[
    int | None, BeforeValidator(_position), WithJsonSchema({"type": "string", "pattern": "^[0-9]{0,18}$"})
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RewardBody(Body):
    """One reward. `final` defaults to true without `call_id`, to false with it."""

    rollout_id: Id
    reward: Annotated[Finite, Field(strict=True)]
    call_id: Id | None = None
    name: Name = "reward"
    source: Annotated[str, Field(max_length=200)] | None = None
    comment: Comment = None
    final: Flag | None = None
    retrain: Flag = False


def _not_too_many(rewards: Any) -> Any:
    """Refuse a list that is too long before any reward in it is looked at."""
    if isinstance(rewards, list) and len(rewards) > MOST_REWARDS:
        raise TooLarge(f"{len(rewards)} rewards in one list; post at most {MOST_REWARDS} at once")
    return rewards


RewardList = Annotated[list[RewardBody], BeforeValidator(_not_too_many)]


class RolloutsBody(Body, extra="allow", json_schema_extra={"additionalProperties": False}):
    """Opens `n` sibling rollouts of one task. With `n` 0 it only checks that the model can be had.

    `policy_version` or `model`: what answers the policy's alias in them, if not the live version. Without
    `may_reward` their keys may only call the model.
    `sibling_of`: a rollout whose task and group they join, as one that is begun anew joins that of the one it replaces.
    """

    task_id: Id | None = None
    mode: Literal["train", "eval"] = "train"
    metadata: dict[str, Any] = {}
    n: Annotated[int, Field(strict=True, ge=0, le=1000), INTEGER] = 1
    may_reward: Flag = True
    sibling_of: Id | None = None
    policy_version: Integer | None = None
    model: Name | None = None


class EndBody(Body):
    status: Literal["completed", "failed", "discarded"]
    reason: Comment = None


class PromoteBody(Body):
    version: Integer


class ValueBody(Body):
    """A state, in which the agent takes the actions that follow, or a note, which is no part of the transitions."""

    kind: Literal["state", "note"]
    agent: Id | None = None
    name: Name | None = None
    value: Any


class ActionBody(Body):
    """An action that the agent took without a model, and its result."""

    kind: Literal["action"]
    agent: Id | None = None
    name: Name
    arguments: Any = None
    result: Any = None
    is_error: Flag = False


EventBody = Annotated[ValueBody | ActionBody, Field(discriminator="kind")]
EventList = Annotated[list[EventBody], Field(max_length=1000)]


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


# FastAPI's own error body, which it names by default, is none of ours.
ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": Error, "description": "Wrong types"},
    "default": {"model": Error, "description": "Any other error"},
}


T = TypeVar("T")


class Listed(BaseModel, Generic[T]):
    data: list[T]


class Page(Listed[T], Generic[T]):
    """`next_cursor`: where the next page begins; null after the last."""

    next_cursor: str | None
