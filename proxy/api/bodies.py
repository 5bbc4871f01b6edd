"""What routes of the control API share: field types, checked request bodies, pages and errors."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ...core.errors import InvalidRequest
from ...core.records import ID

ID_PATTERN = f"^{ID.pattern}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]
# Our routes check ids in paths and queries, with better errors than 422: the patterns are only for the document.
PathId = Annotated[str, Path(json_schema_extra={"pattern": ID_PATTERN})]

Count = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# In JSON, 3.0 is an integer.
INTEGER = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer = Annotated[int, Field(strict=True, ge=0, lt=2**31), INTEGER]
Limit = Annotated[int, Field(ge=1, le=1000)]


def _position(cursor: str | None) -> int | None:
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor must come from an earlier answer", param="cursor")
    return int(cursor) if cursor else None


# Where a page begins.
Cursor = Annotated[
    int | None, BeforeValidator(_position), WithJsonSchema({"type": "string", "pattern": "^[0-9]{0,18}$"})
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape.

    400: invalid. 401, 403: not allowed. 404: not found. 409: not possible now. 413: too large. 422: wrong types
    or values. 429: too many requests. 503: the store cannot be reached, or the proxy is overloaded.
    """

    error: ErrorDetail


# Instead of FastAPI's own error body, which our routes never send.
ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": Error, "description": "Wrong types or values"},
    "default": {"model": Error, "description": "Any other error"},
}


T = TypeVar("T")


class Listed(BaseModel, Generic[T]):
    data: list[T]


class Page(Listed[T], Generic[T]):
    """`next_cursor`: where the next page begins; null after the last."""

    next_cursor: str | None
