"""What `serve` says while it runs: lines with times, each call, or JSON for programs."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.lines import _Once, call_line
from lightning_proxy.proxy.types import CallEnd, CallStart, RolloutName

REFUSING = {"name": "policy", "kind": "openai", "base_url": "http://127.0.0.1:9/v1"}


def served(directory: Path, *options: str) -> list[str]:
    """The lines of a `serve` whose upstream is away, which got one call."""
    settings = {"proxy": {"port": 0}, "store": {"url": "sqlite:///records.db"}, "upstreams": [REFUSING]}
    (directory / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "lightning_proxy.cli", "serve", *options]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stderr is not None
        first = serve.stderr.readline()
        url = re.search(r"http://[^/]+", first)
        assert url is not None, first
        body = json.dumps({"model": "m", "messages": []}).encode()
        request = urllib.request.Request(f"{url[0]}/v1/chat/completions", body, {"X-Rollout-Id": "r1"})
        with pytest.raises(urllib.error.HTTPError, match="502") as refused:
            urllib.request.urlopen(request, timeout=30)
        refused.value.close()
        serve.send_signal(signal.SIGINT)
        return [first, *serve.stderr]


def test_lines_have_times_and_a_failed_call_is_told(tmp_path: Path) -> None:
    lines = served(tmp_path)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines), lines
    assert sum("error" in line and "rollout r1" in line and "HTTP 502" in line for line in lines) == 1, lines
    assert any(line.endswith("1 call: 1 error\n") for line in lines), lines


def test_programs_get_a_json_object_a_line(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in served(tmp_path, "--log-format", "json", "--calls")]
    assert found[0]["event"] == "serving" and found[0]["url"].endswith("/v1")
    call = next(line for line in found if line.get("event") == "call")
    assert (call["rollout_id"], call["status"]) == ("r1", "error")
    assert all({"time", "level", "message"} <= line.keys() for line in found)


def test_what_every_worker_sees_is_logged_by_one_of_them(tmp_path: Path) -> None:
    first, second = _Once(tmp_path), _Once(tmp_path)
    shared, own = (logging.makeLogRecord({"once": once}) for once in (True, False))
    assert [one.filter(shared) for one in (first, second, first)] == [True, False, True]
    assert first.filter(own) and second.filter(own)
    first.close()
    assert second.filter(shared)
    second.close()


def test_a_call_is_one_line() -> None:
    start = CallStart("c1", RolloutName("r1", "t1", key_id="k1"), "chat/completions", "policy", 3, {}, 0.0)
    end = CallEnd("c1", "r1", "ok", {}, 200, (1, 2, 3), latency_ms=1200.0, untrainable_reason="no token ids")
    assert call_line(start, end) == (
        "ok        chat/completions  rollout r1  task t1  key k1  version 3  1.2s  not trainable: no token ids"
    )


@pytest.mark.parametrize("said", [{"error": {"message": "too long"}}, {"message": "too long"}, "too long"])
def test_a_refused_calls_line_has_the_upstreams_reason_without_secrets(said: Any) -> None:
    start = CallStart("c1", RolloutName("r1"), "chat/completions", "m", None, {}, 0.0)
    end = CallEnd("c1", "r1", "error", said, 400, (), error="the upstream answered 400", latency_ms=1.0)
    line = call_line(start, end, lambda text: text.replace("long", "***"))
    assert line.endswith("HTTP 400: too ***")
