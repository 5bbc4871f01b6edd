"""What `GET /rollouts/{id}/rows` answers, as the OpenAPI document says it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ..store.reports.credit import ComparedRollout


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


class PrefixRun(BaseModel):
    """Tokens that the same rows pass through. `depth` is that of the first; `parent` the index of the run before.

    `trained`: how many of them an answer has that is trained on. `parts`: what they are, in order, each with how many;
    `left_out` is an answer that is not trained on. `rows`: rollout ids with the index of their row.
    `call_ids`: calls whose answers lie in it, in part or entirely.
    """

    parent: int | None
    depth: int
    tokens: int
    trained: int
    parts: list[tuple[Literal["context", "answer", "left_out"], int]]
    rows: list[tuple[str, int]]
    call_ids: list[str]


class TrainingRows(BaseModel):
    """`group`: the rollouts that this one was or will be compared with, itself among them, at most 256, oldest first.

    `tree`: the training rows of all of them as one prefix tree, in preorder; `tree_left_out` rows are too many for it.
    """

    rollout_id: str
    task_id: str | None
    step: int | None
    dropped: str | None
    group: list[ComparedRollout]
    calls: list[CreditedCall]
    rows: list[TrainingRow]
    tree: list[PrefixRun]
    tree_left_out: int
