"""What `serve` says while it runs: lines with times, each call, or JSON for programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.lines import MOST, CallLines, _Once, call_line
from lightning_proxy.core.records import CallEnd, CallStart, RolloutName


def test_what_every_worker_sees_is_logged_by_one_of_them(tmp_path: Path) -> None:
    first, second = _Once(tmp_path), _Once(tmp_path)
    shared, own = (logging.makeLogRecord({"once": once}) for once in (True, False))
    assert [one.filter(shared) for one in (first, second, first)] == [True, False, True]
    assert first.filter(own) and second.filter(own)
    first._file.close()
    assert second.filter(shared)
    second._file.close()


def test_a_call_is_one_line() -> None:
    start = CallStart("c1", RolloutName("r1", "t1", key_id="k1"), "chat/completions", "policy", 3, {}, 0.0)
    end = CallEnd("c1", "r1", "ok", {}, 200, (1, 2, 3), latency_ms=1200.0, untrainable_reason="no token ids")
    assert call_line(start, end) == (
        "ok        chat/completions  rollout r1  task t1  key k1  version 3  1.2s  not trainable: no token ids"
    )


@pytest.mark.parametrize(("each", "ok"), [(True, MOST), (False, 0)])
async def test_calls_that_fail_have_lines_however_many_do_not(
    caplog: pytest.LogCaptureFixture, each: bool, ok: int
) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy.serving")
    lines, start = CallLines(each=each), CallStart("c1", RolloutName("r1"), "chat/completions", "m", None, {}, 0.0)
    for status in ["ok"] * 2 * MOST + ["error"]:
        lines.call_ended(start, CallEnd("c1", "r1", status, {}, 200, (), latency_ms=1.0), {})
    lines.flush()
    told = [message.split()[0] for message in caplog.messages]
    assert told == ["ok"] * ok + ["error", "21"]


@pytest.mark.parametrize("said", [{"error": {"message": "too long"}}, {"message": "too long"}, "too long"])
def test_a_refused_calls_line_has_the_upstreams_reason_without_secrets(said: Any) -> None:
    start = CallStart("c1", RolloutName("r1"), "chat/completions", "m", None, {}, 0.0)
    end = CallEnd("c1", "r1", "error", said, 400, (), error="the upstream answered 400", latency_ms=1.0)
    line = call_line(start, end, lambda text: text.replace("long", "***"))
    assert line.endswith("HTTP 400: too ***")
