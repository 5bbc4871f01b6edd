"""Serves the page over a store alone, which is only read. No upstream is called."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from ..app import Dispatch, add_routes, control_api, open_parts
from ..config.root import Config
from ..control import policy, rollouts, status, tasks
from ..plugins.on_board import plugins_of

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
    plugins = plugins_of(config)
    control = control_api(partial(open_parts, config, plugins, writes=False))
    core = (module.router for module in (rollouts, tasks, policy, status))
    add_routes(control, *core, router, *(one for plugin in plugins for one in plugin.routers))
    control.router.routes[:] = [route for route in control.routes if getattr(route, "methods", {"GET"}) & {"GET"}]
    return control
