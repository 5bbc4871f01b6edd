"""Stores answers to posts with an Idempotency-Key, so that a repeated post gets the same answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from ..core.errors import Conflict
from .database import Transaction

Answer = list[dict[str, Any]]

IDEMPOTENT_FORGET = """
DELETE FROM idempotency WHERE key IN (SELECT key FROM idempotency WHERE created_at < :before LIMIT :limit)
"""


async def answer_once(db: Transaction, key: str | None, body: bytes, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do `work`, or return the stored answer to the same key and body. Raise Conflict if the body differs."""
    if key is None:
        return await work()
    body_hash = hashlib.sha256(body).hexdigest()
    row = await db.one("SELECT body_hash, answer FROM idempotency WHERE key = :key", {"key": key})
    if row is not None and row["body_hash"] != body_hash:
        raise Conflict("this Idempotency-Key was used for another body; use a new key", param="Idempotency-Key")
    if row is not None:
        earlier: Answer = orjson.loads(row["answer"])
        return earlier
    answer = await work()
    await db.run(
        "INSERT INTO idempotency (key, body_hash, answer, created_at) VALUES (:key, :body_hash, :answer, :at)",
        {"key": key, "body_hash": body_hash, "answer": orjson.dumps(answer).decode(), "at": time.time()},
    )
    return answer
