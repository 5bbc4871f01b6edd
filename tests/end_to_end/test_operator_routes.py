"""What a web page, or an agent on this machine, can do to a real vLLM that `up` started."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from contract.real import System
from lightning_proxy.serving.operator import key_file, operator_headers

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(600)]

ROUTES = (
    "/pause?mode=keep", "/resume", "/collective_rpc", "/update_weights", "/update_weight_version", "/sleep",
    "/reset_prefix_cache", "/invocations", "/tokenize", "/inference/v1/generate",
)  # fmt: skip
ABSENT = "/v1/load_lora_adapter"
PAGE = {"Origin": "https://evil.example", "Content-Type": "text/plain"}


def test_nobody_without_the_operators_key_moves_the_policys_server(merged: System) -> None:
    root = f"http://127.0.0.1:{merged.vllm_port}"
    for route in ROUTES:
        assert (post(root + route, PAGE), post(root + route, {})) == (403, 401), route
    assert (post(root + ABSENT, PAGE), post(root + ABSENT, {})) == (403, 404), "with merged weights there is none"
    assert post(root + "/v1/chat/completions", PAGE) == 403
    assert post(root + "/v1/chat/completions", {"Content-Type": "application/json"}) == 200
    key = operator_headers(merged.directory / "policy")
    assert post(root + "/reset_prefix_cache", key) == 200, "the proxy and the trainer have the key"
    assert post(root + "/v1/chat/completions", key | {**PAGE, "Content-Type": "application/json"}) == 200
    logs = [log.read_text() for log in (merged.directory / "logs").iterdir()]
    assert not any(key_file(merged.directory / "policy").read_text() in log for log in logs)


def post(url: str, headers: dict[str, str]) -> int:
    body = json.dumps({"model": "speller", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
