"""What the page asks of a running proxy, where there is a store alone."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()


@router.get("/readyz")
async def readyz() -> dict[str, str]:
    """There is nothing that could answer a call."""
    return {"status": "alone", "store": "ok"}
