"""vLLM's own table of routes, with our guard in front: no spelling reaches an operator's endpoint without the key."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.system import free_port, wait_until
from lightning_proxy.serving.operator import KEY_FILE_VARIABLE, key_file, operator_headers, relay_headers
from support.fuzzing import METHODS, spellings
from support.twice import get

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

NO_ROUTE = (307, 404, 405)
OUR_REFUSALS = ("x-lightning-operator-key", "control characters", "Invalid HTTP request")
READABLE = ("/health", "/ping", "/version", "/metrics", "/load")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, list[str], Path]]:
    """The port of vLLM's app, its routes, and the directory with its key."""
    directory, port = tmp_path_factory.mktemp("guarded"), free_port()
    operator_headers(directory)
    env = os.environ | {KEY_FILE_VARIABLE: str(key_file(directory)), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(port)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env)
    try:
        assert server.stdout is not None
        lines = (line for line in server.stdout if line.startswith(b'["'))
        routes = json.loads(next(lines))
        wait_until(lambda: get(f"http://127.0.0.1:{port}/version"), 60, "vLLM's app answers")
        yield port, routes, directory
    finally:
        server.kill()
        server.communicate()


class Asker:
    """Sends paths as they are, one after the other on one connection."""

    def __init__(self, port: int, headers: dict[str, str] | None = None) -> None:
        self._port, self._headers = port, headers or {}

    async def is_refused(self, method: str, path: str) -> bool:
        """Whether no endpoint saw the request; vLLM's own 400 for a body would mean that one did."""
        status, text = await self.ask(method, path)
        ours = method == "HEAD" or any(part in text for part in OUR_REFUSALS)
        return status in NO_ROUTE or (status in (400, 401) and ours)

    async def ask(self, method: str, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        own = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        writer.write(f"{head}{own}Connection: close\r\n\r\n{{}}".encode())
        answer = (await reader.read()).decode(errors="replace")
        writer.close()
        return int(answer.split()[1]), answer


async def test_no_spelling_reaches_an_operators_endpoint_of_vllm_without_the_key(
    vllm: tuple[int, list[str], Path],
) -> None:
    port, routes, directory = vllm
    closed = [path for path in routes if is_the_operators(path)]
    assert {"/v1/load_lora_adapter", "/collective_rpc", "/adapters/{adapter_name}", "/invocations"} <= {*closed}
    nobody, relayed = Asker(port), Asker(port, relay_headers(directory) | {"Origin": "https://app.example"})
    reached = []
    for route in closed:
        for path in spellings(route.replace("{adapter_name}", "a"), rounds=150):
            for method in METHODS if path.endswith(("%0a", "/")) else ("POST",):
                if not (await nobody.is_refused(method, path) and await relayed.is_refused(method, path)):
                    reached.append((method, path))
    assert not reached
    with_key = Asker(port, operator_headers(directory))
    assert not await with_key.is_refused("POST", "/v1/load_lora_adapter%0a"), "vLLM's router takes it for this"


def is_the_operators(path: str) -> bool:
    return path not in READABLE and (not path.startswith("/v1/") or path.endswith("_lora_adapter"))


def main(port: int) -> None:
    """Serve vLLM's own app with our guard and no engine, and print its routes."""
    os.environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    import uvicorn
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from lightning_proxy.serving.operator import GUARD

    options = ["--enable-scale-out", "--enable-lora", "--middleware", GUARD]
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(options), ("generate",))
    print(json.dumps([route.path for route in app.routes]), flush=True)
    uvicorn.run(app, port=port, lifespan="off", log_level="critical")


if __name__ == "__main__":
    main(int(sys.argv[1]))
