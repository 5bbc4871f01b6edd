"""Serves the page over a store alone, which is only read. No upstream is called."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from ...core.config.root import Config
from ...proxy.app import Dispatch, api_to_read

router = APIRouter()


@router.get("/readyz")
async def readyz() -> dict[str, str]:
    """There is nothing that could answer a call."""
    return {"status": "alone", "store": "ok"}


def create_dashboard(config: Config) -> ASGIApp:
    """Return the page over a store as an app."""
    return Dispatch(dashboard_api(config), forwards=False)


def dashboard_api(config: Config) -> FastAPI:
    """Return the page and the routes that read."""
    return api_to_read(config, router)
