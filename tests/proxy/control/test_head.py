"""HEAD is answered as GET is, without a body (RFC 9110, section 9.3.2)."""

from typing import Any

SAME_LENGTH = ["/healthz", "/readyz", "/", "/docs", "/openapi.json", "/rollouts", "/rollouts/r1", "/policy", "/prompts"]


async def test_head_is_answered_as_get_is_without_a_body(running: Any, tmp_path: Any) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")

        async def ask(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
            async with system.session.request(method, system.url + path) as answer:
                headers = {name.lower(): value for name, value in answer.headers.items()}
                return answer.status, headers, await answer.read()

        for path in [*SAME_LENGTH, "/metrics", "/v1/models", "/v1/models/policy", "/rollouts/nobody", "/nothing"]:
            (status, headers, body), (wanted, same, _) = await ask("HEAD", path), await ask("GET", path)
            assert (status, body, headers["content-type"]) == (wanted, b"", same["content-type"]), path
            assert path not in SAME_LENGTH or headers["content-length"] == same["content-length"], path
        status, headers, _ = await ask("HEAD", "/feed")  # it ends, and the connection serves the next request
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        status, headers, _ = await ask("HEAD", "/reward")
        assert (status, headers["allow"]) == (405, "POST")
        assert (await ask("GET", "/healthz"))[0] == 200
