"""OTLP out: what a collector receives of recorded calls, and that nobody waits for one."""

from __future__ import annotations

import asyncio
import builtins
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from traffic.server import serving

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.otel.otlp import Span, read_spans
from lightning_proxy.proxy.app import create_app

Running = Callable[..., AbstractAsyncContextManager[Any]]


class Collector:
    """Keeps the spans that it is sent. `hangs`: takes them in and never answers."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.names: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.hangs = False

    async def traces(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.hangs:
            await asyncio.sleep(600)
        self.spans += read_spans(body := await request.read(), "protobuf")[0]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")


async def chat(system: Any, text: str = "hi", **headers: str) -> dict[str, str]:
    """The answer's headers, and its status."""
    body = {"model": "policy", "temperature": 0.7, "messages": [{"role": "user", "content": text}]}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=names) as answer:
        await answer.read()
        return dict(answer.headers) | {"status": str(answer.status)}


def collecting(collector: Collector) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/traces", collector.traces)
    return app


async def test_a_recorded_call_is_a_span_below_the_agents_own(running: Running, tmp_path: Path) -> None:
    collector, trace, parent = Collector(), "ab" * 16, "cd" * 8
    async with serving(collecting(collector)) as at:
        telemetry = {"otlp_endpoint": at, "otlp_headers": {"X-Team": "agents"}}
        recording = {"redact": {"patterns": ["answered"]}}
        async with running(tmp_path, otel=telemetry, recording=recording) as system:
            got = await chat(
                system, X_Rollout_Id="r1", X_Task_Id="t", X_Agent_Name="a", traceparent=f"00-{trace}-{parent}-01"
            )
            await chat(system, X_Recording="off")
            system.vllm.status = 500
            await chat(system, X_Rollout_Id="r2")
        ok, failed = collector.spans
    assert (collector.names[0], ok.trace_id, ok.error) == ("chat policy", trace, None)
    expected = {
        "service.name": "lightning-proxy",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.response.model": "base",
        "gen_ai.response.id": "x1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.agent.name": "a",
        "lightning.rollout_id": "r1",
        "lightning.task_id": "t",
        "lightning.call_id": got["x-call-id"],
        "lightning.policy_version": 0,
        "lightning.trainable": True,
    }
    assert {name: ok.attributes.get(name) for name in expected} == expected
    assert not [name for name, value in ok.attributes.items() if "hi" in str(value).split()], "nothing that was said"
    assert ok.ended_at > ok.started_at
    assert (failed.attributes["error.type"], failed.error) == ("500", "the upstream [redacted] 500")
    assert {headers["x-team"] for headers in collector.headers} == {"agents"}


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_a_collector_that_is_away_costs_no_call(running: Running, tmp_path: Path, how: str) -> None:
    collector = Collector()
    collector.hangs = True
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        async with serving(collecting(collector)) as there:
            at = there if how == "hangs" else f"http://127.0.0.1:{taken.getsockname()[1]}"
            async with running(tmp_path, otel={"otlp_endpoint": at}) as system:
                answers = [await chat(system) for _ in range(20)]
    assert {answer["status"] for answer in answers} == {"200"}
    for thread in threading.enumerate():
        if thread.name.startswith("Otel"):
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive(), "it still tries"


def test_without_the_sdk_the_configuration_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name, name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    config = Config.model_validate({"otel": {"otlp_endpoint": "http://127.0.0.1:4318"}})
    with pytest.raises(ConfigError, match=r"pip install 'lightning-proxy\[otel\]'"):
        create_app(config)


async def test_without_the_packages_spans_are_refused_with_what_to_install(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lightning_proxy.features.otel.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "lightning_proxy.features.otel.otlp", None)
    async with running(tmp_path) as system:
        status, answer = await system.call("POST", "/otlp/v1/traces", {})
    assert (status, "pip install 'lightning-proxy[otel]'" in answer["error"]["message"]) == (501, True)
