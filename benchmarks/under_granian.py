"""The proxy under granian in place of uvicorn, one worker: `python under_granian.py CONFIG`."""

import os
import sys
from pathlib import Path

from granian.server import Server

from lightning_proxy.proxy.app import create_app
from lightning_proxy.proxy.config.file import load_config


def app() -> object:
    return create_app(load_config(Path(os.environ["BENCH_CONFIG"])))


if __name__ == "__main__":
    os.environ["BENCH_CONFIG"] = sys.argv[1]
    proxy = load_config(Path(sys.argv[1])).proxy
    os.chdir(Path(__file__).parent)  # where granian begins to look for the app
    Server(
        f"{Path(__file__).stem}:app", proxy.host, proxy.port, interface="asgi", factory=True, workers=1, loop="uvloop",
        backlog=2048, log_level="warning", websockets=False,
    ).serve()  # fmt: skip
