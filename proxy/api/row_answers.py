"""What `GET /rollouts/{id}/rows` answers, as the OpenAPI document says it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ...store.reports import ComparedRollout


class CreditedCall(BaseModel):
    """How a call was trained, by the newest step that took its rollout: null where it has no credit.

    `row`: the index of the rollout's training row. `placed`: `first` of its rollout; `merged` into a row; `drift`,
    `edited`, `repeated`, `adjoining` or `new`: why it opened a row; otherwise why it is in none.
    """

    call_id: str
    seq: int
    agent: str | None
    step: int | None
    # `return` is a word of Python's own.
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
