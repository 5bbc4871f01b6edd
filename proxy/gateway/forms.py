"""The model that a form asks for: uploads of sound and pictures name it in a field of multipart/form-data."""

from __future__ import annotations

import re
from typing import Any

_NAME = b'name="model"\r\n'
# The field's other headers, its value, and the boundary that ends it.
_VALUE = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--")


def is_form(body: bytes) -> bool:
    """Whether a body begins as forms do, and nothing else that names a model."""
    return body.startswith(b"--")


def form_model(body: bytes) -> dict[str, Any]:
    """The `model` of a form, as it would be in a JSON body; empty without one."""
    found = _model_field(body)
    return {} if found is None else {"model": found[1].decode(errors="replace")}


def with_form_model(body: bytes, model: str) -> bytes:
    """The same form asking for another model."""
    found = _model_field(body)
    return body if found is None else body[: found.start(1)] + model.encode() + body[found.end(1) :]


def _model_field(body: bytes) -> re.Match[bytes] | None:
    at = body.find(_NAME) if is_form(body) else -1
    return None if at < 0 else _VALUE.match(body, at + len(_NAME))
