"""What is redacted is nowhere in the store; what the agent and the model see is as it was."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from lightning_proxy.proxy.apis.tools import tool_calls
from lightning_proxy.proxy.config.file import load_config
from lightning_proxy.proxy.config.server import RedactConfig, StoreConfig
from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.recording.redact import MASK, SHAPES, Redactor
from lightning_proxy.proxy.store.keys import new_key
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, RolloutName
from support.fuzzing import examples

Running = Callable[..., AbstractAsyncContextManager[Any]]
ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
OPENAI = "sk-proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6"
BASE = {"model": "policy", "temperature": 1.0}


def random_text(length: int, alphabet: str = ALNUM) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=length, max_size=length)


def after(prefix: str, length: int, alphabet: str = ALNUM) -> st.SearchStrategy[tuple[str, str]]:
    """A secret with this beginning, and the part of it that must not be found anywhere."""
    # A random text of these lengths has a digit and a capital.
    return random_text(length - 2, alphabet).map(lambda text: (f"{prefix}{text}Q7", f"{text}Q7"))


SECRETS = st.one_of(
    after("sk-", 48),
    after("sk-proj-", 100, ALNUM + "-_"),
    after("sk-ant-api03-", 93, ALNUM + "-_"),
    after("AKIA", 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
    after("aws_secret_access_key = ", 40, ALNUM + "+/"),
    after('"SecretAccessKey": "', 40, ALNUM + "+/"),
    after("ghp_", 36),
    after("github_pat_11AAAAAAA0", 60),
    after("xoxb-2345678901-2345678901-", 24),
    after("Authorization: Bearer ", 30),
    after("lpk-agent-", 43, ALNUM + "-_"),
    after("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.", 43, ALNUM + "-_"),
    random_text(200, ALNUM + "+/").map(
        lambda body: (f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----", body)
    ),
)
TEXT_AROUND = st.text(" .,:;'\"\n()[]{}é😀", max_size=5)
# Where a secret can stand in what is recorded of a call: request, answer, error.
Places = tuple[dict[str, Any], Any, str | None]


def calls_with(text: str) -> dict[str, Places]:
    in_json = json.dumps({"command": f"export KEY={text}", "note": f"\n{text}"})
    tool_call = {"id": "call_1", "type": "function", "function": {"name": "sh", "arguments": in_json}}
    chat = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "done"}}]}
    messages = [{"role": "user", "content": "hi"}]
    parts = [{"type": "text", "text": f"it is {text}"}]
    result = [{"role": "assistant", "tool_calls": [tool_call]}, {"role": "tool", "tool_call_id": "call_1"}]
    return {
        "message": (BASE | {"messages": [{"role": "user", "content": f"use {text}"}]}, chat, None),
        "part": (BASE | {"messages": [{"role": "user", "content": parts}]}, chat, None),
        "tool result": (BASE | {"messages": [*messages, result[0], result[1] | {"content": text}]}, chat, None),
        "name of a key": (BASE | {"messages": messages, "metadata": {text: 1}}, chat, None),
        "model": (BASE | {"model": text, "messages": messages}, chat, None),
        "answer": (BASE | {"messages": messages}, {"choices": [{"message": {"content": text}}]}, None),
        "tool call": (BASE | {"messages": messages}, {"choices": [{"message": {"tool_calls": [tool_call]}}]}, None),
        "tool use": (BASE | {"messages": messages}, {"content": [tool_use(text)]}, None),
        "no JSON": (BASE | {"messages": messages}, f"<html>{text}</html>", None),
        "error": (BASE | {"messages": messages}, None, f"the upstream sent an error: {text}"),
    }


def tool_use(text: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_1", "name": "sh", "input": {"command": text}}


async def record(path: Path, redactor: Redactor, calls: list[Places]) -> None:
    """Each call as a turn of one conversation: its messages come on top of those of the turns before it."""
    history: list[Any] = []
    async with (
        opened(StoreConfig(url=f"sqlite:///{path}")) as database,
        Recorder(Store(database), merged=False, redactor=redactor) as recorder,
    ):
        for i, (request, response, error) in enumerate(calls):
            history = history + request["messages"]
            start = CallStart(
                f"c{i}",
                RolloutName("r1"),
                "chat/completions",
                request["model"],
                0,
                request | {"messages": history},
                1.0,
            )
            await recorder.start(start)
            end = CallEnd(
                f"c{i}", "r1", "error" if error else "ok", response, 200, (1, 2), (Choice(0, (3,), (-0.5,)),),
                tool_calls=tool_calls(response), error=error,
            )  # fmt: skip
            await recorder.end(end)


def stored(path: Path) -> bytes:
    """Every byte of the store: the database file, and the log ahead of it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(path.name + "*")))


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secrets=st.lists(SECRETS, min_size=1, max_size=4), around=TEXT_AROUND, data=st.data())
def test_no_secret_is_in_any_byte_of_the_store(
    tmp_path_factory: pytest.TempPathFactory, secrets: list[tuple[str, str]], around: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("redact") / "s.db"
    calls = []
    for secret, _ in secrets:
        places = calls_with(f"{around}{secret}\n{around}")
        calls.append(places[data.draw(st.sampled_from(sorted(places)))])
    asyncio.run(record(path, Redactor(RedactConfig(secrets=True)), calls))
    found = stored(path)
    assert b"chat/completions" in found
    for _, core in secrets:
        assert core.encode() not in found
        assert core.replace("/", "\\/").encode() not in found


@pytest.mark.parametrize("place", calls_with("x"))
def test_without_redaction_the_same_calls_are_stored_whole(tmp_path: Path, place: str) -> None:
    """So the test above can fail."""
    asyncio.run(record(tmp_path / "s.db", Redactor(RedactConfig()), [calls_with(OPENAI)[place]]))
    assert OPENAI.encode() in stored(tmp_path / "s.db")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_what_holds_no_secret_is_left_as_it_is(value: Any) -> None:
    assert Redactor(RedactConfig(secrets=True)).value(value, "request") is value


@pytest.mark.parametrize(
    "text",
    [
        "sk-" + "word-after-word-" * 20,
        "a risk-assessment-and-mitigation-plan-2024 for the task-force-on-long-words",
        "the bearer of responsibilities and the bearer certificates-of-deposit",
        "sk-learn-is-a-package-with-a-long-name",
        "call_0123456789abcdef0123456789abcdef, toolu_01A09q90qw90lq917835lq9, chatcmpl-tool-0f8c9d",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "what is an AKIA key, and is ghp_ its prefix?",
    ],
)
def test_ordinary_text_is_no_secret(text: str) -> None:
    assert Redactor(RedactConfig(secrets=True)).text(text) == text


@pytest.mark.parametrize("text", ["a\\nsk-", 'x="sk-', "?key=%20sk-", "\\u000ask-", "key:sk-", "(sk-"])
def test_a_secret_is_found_behind_an_escape(text: str) -> None:
    redactor = Redactor(RedactConfig(secrets=True))
    assert redactor.text(text + OPENAI[3:]) == text[:-3] + MASK
    assert redactor.text(redactor.text(text + OPENAI[3:])) == text[:-3] + MASK


def test_our_own_keys_and_those_of_the_configuration_are_secrets() -> None:
    redactor = Redactor(RedactConfig(secrets=True), ["a configured key", "short"])
    named = [f"lpk-{kind}-{'x1' * 20}" for kind in ("reward", "whatever")]
    for key in (new_key("agent"), new_key("admin"), new_key("rollout"), "a configured key", *named):
        assert redactor.text(f"key={key}.") == f"key={MASK}."
    assert redactor.text("in short") == "in short"


def hostile_repeats() -> Iterator[Callable[[int], str]]:
    """Texts of any length in which secrets seem to begin, and never end as one does."""
    runs = ["", "a", "-", "_", ".", " ", "/", "=", "\n", "\\n", "%20", "a.", "aaaaaaaaaaaaaaa ", "-----END a"]
    words = ["PRIVATE KEY", "-----BEGIN PRIVATE KEY-----", "secretaccesskey", "aws_secret_access_key="]
    for hint in (*dict.fromkeys(shape.hint for shape in SHAPES), *words):
        for run in runs:
            yield lambda n, unit=hint + run: unit * (n // len(unit))  # type: ignore[misc]
            yield lambda n, hint=hint, run=run or hint: hint + run * (n // len(run))  # type: ignore[misc]


def test_no_text_takes_many_times_as_long_to_redact_as_a_harmless_one() -> None:
    """The processor's time. Twice the text takes twice as long: with its square, 100 times would be long past."""
    redactor = Redactor(RedactConfig(secrets=True))

    def seconds(text: str) -> float:
        began = time.thread_time()
        redactor.text(text)
        return time.thread_time() - began

    harmless = max(seconds("a word " * (2**14 // 7)) for _ in range(5))
    for text in hostile_repeats():
        assert min(seconds(text(2**14)) for _ in range(2)) < 25 * harmless, text(80)


FIELDS = {
    "request.user": ({"user": "ada", "x": 1}, {"user": MASK, "x": 1}),
    "request.messages.*.content": (
        {"messages": [{"role": "user", "content": "a"}, {"content": [1]}, 3]},
        {"messages": [{"role": "user", "content": MASK}, {"content": MASK}, 3]},
    ),
    "request.messages.1": ({"messages": ["a", "b"]}, {"messages": ["a", MASK]}),
    "request.messages.7.content": ({"messages": ["a"]}, {"messages": ["a"]}),
    "request.temperature": ({"temperature": 0.5}, {"temperature": None}),
    "request.*.id": ({"a": {"id": "1"}, "b": 2}, {"a": {"id": MASK}, "b": 2}),
    "response.user": ({"user": "ada"}, {"user": "ada"}),
}


@pytest.mark.parametrize("path", FIELDS)
def test_chosen_fields_are_masked_wherever_their_path_leads(path: str) -> None:
    before, after_it = FIELDS[path]
    copy = json.loads(json.dumps(before))
    redacted = Redactor(RedactConfig(fields=[path])).value(before, "request")
    assert (redacted, before) == (after_it, copy)
    assert (redacted is before) == (before == after_it)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{patterns: ['(']}", "no regular expression"),
        ("{patterns: ['a*']}", "matches the empty text"),
        ("{fields: [user]}", "'user' is no path"),
        ("{fields: [request]}", "'request' is no path"),
        ("{secret: true}", "recording.redact.secret: unknown key"),
    ],
)
def test_a_wrong_rule_is_one_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "c.yaml").write_text(f"recording: {{redact: {text}}}")
    with pytest.raises(ConfigError, match="recording.redact") as caught:
        load_config(tmp_path / "c.yaml")
    assert named in caught.value.message and "\n" not in caught.value.message


def start_of(request: dict[str, Any]) -> CallStart:
    return CallStart("c", RolloutName("r"), "chat/completions", "policy", 0, request, 1.0)


END = CallEnd(
    "c", "r", "ok", {"choices": [{"logprobs": {"content": [1]}, "token_ids": [3], "message": {"content": "x"}}]}, 200,
    (1, 2), (Choice(0, (3,), (-0.5,), "stop"),),
)  # fmt: skip


def test_the_tokens_of_a_redacted_call_are_not_kept() -> None:
    redactor = Redactor(RedactConfig(patterns=["x"], fields=["request.user"]))
    end = redactor.end(END, shown=False)
    assert (end.prompt_token_ids, end.choices) == ((), (Choice(0, (), (), "stop"),))
    assert end.untrainable_reason == "redacted"
    assert end.response == {"choices": [{"logprobs": None, "token_ids": None, "message": {"content": MASK}}]}
    untouched = END._replace(response=None)
    assert redactor.end(untouched, shown=False).prompt_token_ids == (1, 2)
    assert redactor.end(untouched, shown=True).prompt_token_ids == ()


def test_a_number_that_a_model_wrote_for_a_tool_is_looked_at_as_its_text_would_be() -> None:
    """Chat's arguments are text, Anthropic's input a value."""
    redactor = Redactor(RedactConfig(patterns=[r"\b\d{16}\b"]))
    used = {"type": "tool_use", "id": "t", "name": "pay", "input": {"card": 4111111111111111, "n": [2.5, True]}}
    hidden = used | {"input": {"card": None, "n": [2.5, True]}}
    end = redactor.end(END._replace(response={"content": [used], "created": 4111111111111111}), shown=False)
    assert end.response == {"content": [hidden], "created": 4111111111111111}, "what servers count is no text"
    assert (end.tool_calls[0].arguments, end.prompt_token_ids) == ('{"card":null,"n":[2.5,true]}', ())
    start, shown = redactor.start(start_of({"messages": [{"role": "assistant", "content": [used]}]}))
    assert (start.request["messages"][0]["content"], shown) == ([hidden], True)
    assert redactor.value({"card": 4111111111111111}, "event") == {"card": None}


def test_a_call_stays_trainable_if_only_what_no_model_is_shown_was_redacted() -> None:
    redactor = Redactor(RedactConfig(patterns=["zzz"], fields=["request.user", "request.metadata.*"]))
    start, shown = redactor.start(start_of({"user": "ada", "metadata": {"a": "b"}, "messages": []}))
    assert (start.request, shown) == ({"user": MASK, "metadata": {"a": MASK}, "messages": []}, False)
    assert redactor.start(start_of({"messages": ["zzz"]}))[1] is True


def test_what_the_server_remembers_of_an_earlier_response_is_in_no_token_that_is_kept() -> None:
    goes_on = start_of({"previous_response_id": "resp_1", "input": "and?"})
    first = start_of({"previous_response_id": None, "input": "and?"})
    redactor = Redactor(RedactConfig(patterns=["zzz"]))
    assert (redactor.start(goes_on)[1], redactor.start(first)[1]) == (True, False)
    assert Redactor(RedactConfig(fields=["request.user"])).start(goes_on)[1] is False


def test_what_is_nested_too_deeply_is_not_stored_at_all() -> None:
    deep: Any = "zzz"
    for _ in range(5000):
        deep = [deep]
    redactor = Redactor(RedactConfig(patterns=["zzz"]))
    assert redactor.value(deep, "response") == MASK
    assert redactor.start(start_of({"messages": deep}))[0].request == {}


RULES = {"redact": {"secrets": True, "patterns": ["Rumpelstiltskin"], "fields": ["request.user", "metadata.email"]}}


async def test_a_running_proxy_redacts_every_door_and_changes_nothing_for_the_agent(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, recording=RULES) as system:
        seen = []

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            seen.append(body)
            arguments = json.dumps({"key": OPENAI})
            calls = [{"id": "call_1", "type": "function", "function": {"name": "use", "arguments": arguments}}]
            return {"role": "assistant", "content": "Rumpelstiltskin", "tool_calls": calls}

        system.vllm.answer = answer
        metadata = {"email": "ada@example.org", "note": OPENAI}
        _, (rollout,) = await system.call("POST", "/rollouts", {"task_id": "t", "metadata": metadata})
        rollout_id = rollout["rollout_id"]
        path = f"/rollouts/{rollout_id}/v1/chat/completions"
        body = {"model": "policy", "user": "ada@example.org", "messages": [{"role": "user", "content": f"my {OPENAI}"}]}
        _, first = await system.call("POST", path, body)
        message = first["choices"][0]["message"]
        assert (message["content"], OPENAI in str(message["tool_calls"])) == ("Rumpelstiltskin", True)
        assert seen[0]["messages"] == body["messages"] and seen[0]["user"] == "ada@example.org"

        result = {"role": "tool", "tool_call_id": "call_1", "content": f"{OPENAI} is valid"}
        body["messages"] += [message, result]  # type: ignore[operator]
        await system.call("POST", path, body)
        await system.call("POST", path, body, x_stainless_retry_count="1")
        reward = {"rollout_id": rollout_id, "reward": 1, "comment": f"Rumpelstiltskin used {OPENAI}"}
        assert (await system.call("POST", "/reward", reward))[0] == 200

        _, shown = await system.call("GET", f"/rollouts/{rollout_id}?requests=whole")
        calls = shown["calls"]
        assert calls[1]["superseded_by"] == calls[2]["call_id"], "redacted requests are compared with redacted ones"
        assert calls[0]["tool_calls"][0]["result"] == f"{MASK} is valid"
        assert {call["untrainable_reason"] for call in calls if call["superseded_by"] is None} == {"redacted"}
        assert calls[2]["request"]["messages"][0]["content"] == f"my {MASK}"
        assert shown["metadata"] == {"email": MASK, "note": MASK}
        async with system.session.get(f"{system.url}/metrics") as answer_of_metrics:
            assert "lightning_redacted_calls_total 3.0" in await answer_of_metrics.text()

        system.vllm.answer = None
        twice = b'{"model": "policy", "messages": "%s", "messages": [{"role": "user", "content": "hi"}]}'
        await system.call("POST", "/rollouts/clean/v1/chat/completions", twice % OPENAI.encode())
        (clean,) = (await system.call("GET", "/rollouts/clean"))[1]["calls"]
        assert clean["prompt_token_ids"] == [1, 2, 3] and clean["untrainable_reason"] != "redacted"
        found = stored(tmp_path / "store.db")
        for secret in (OPENAI, "Rumpelstiltskin", "ada@example.org"):
            assert secret.encode() not in found
    assert OPENAI.encode() not in stored(tmp_path / "store.db")
