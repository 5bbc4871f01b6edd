"""`serve`: the proxy in one uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from lightning_proxy.commands.processes import require_free_port
from lightning_proxy.proxy.config import Config
from lightning_proxy.proxy.edge import EdgeProtocol

UVICORN: dict[str, Any] = {
    "http": EdgeProtocol,
    "ws": "none",
    "log_level": "warning",
    "access_log": False,
    # The upstream's own headers are passed on; a second `server` and `date` would not be transparent.
    "server_header": False,
    "date_header": False,
    "timeout_graceful_shutdown": 5,
    # Longer than any client keeps an idle connection: none is closed just as a request comes in.
    "timeout_keep_alive": 75,
}


def serve(config: Config) -> None:
    """Serve until SIGINT or SIGTERM; LightningError if the port is taken, or keys are needed and there is none."""
    import gc

    import uvicorn

    from lightning_proxy.proxy.app import create_app
    from lightning_proxy.proxy.keyring import require_keys

    asyncio.run(require_keys(config))
    require_free_port(config.proxy.host, config.proxy.port, "proxy.port")
    gc.freeze()  # what was imported stays; looking through it again and again cost a tenth of the throughput
    uvicorn.run(create_app(config), host=config.proxy.host, port=config.proxy.port, **UVICORN)
