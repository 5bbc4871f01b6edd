"""Power sampling: exact where p^alpha can be worked out, and as an upstream that agents reach by a model's name."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_proxy.commands.power.sampling import PowerSampler, SampledAnswer
from lightning_proxy.commands.power.server import power_server
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.errors import LightningError
from tests.conftest import System

Running = Callable[..., AbstractAsyncContextManager[System]]

END, LONGEST, ALPHA = 2, 4, 3.0


def next_token(prefix: Sequence[int]) -> tuple[float, float, float]:
    """The chances of 0, 1 and the end; a first 0 is likely, and followed by nothing that is."""
    if not prefix:
        return (0.6, 0.3, 0.1)
    return (0.4, 0.35, 0.25) if prefix[0] == 0 else (0.05, 0.9, 0.05)


class ToyModel:
    """Samples from `next_token` to the end, or to as many tokens as are allowed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def propose(self, beginning: Sequence[int], n: int, tokens: int) -> list[SampledAnswer]:
        return [self._ending(list(beginning), tokens) for _ in range(n)]

    def _ending(self, prefix: list[int], tokens: int) -> SampledAnswer:
        start, logprobs = len(prefix), list[float]()
        while len(logprobs) < tokens:
            chances = next_token(prefix)
            (token,) = self._rng.choices(range(3), chances)
            prefix.append(token)
            logprobs.append(math.log(chances[token]))
            if token == END:
                return SampledAnswer(tuple(prefix[start:]), tuple(logprobs), "stop")
        return SampledAnswer(tuple(prefix[start:]), tuple(logprobs))


def chances_of_answers() -> dict[tuple[int, ...], float]:
    """p of every answer: up to the end, or cut off."""
    found = {}
    for length in range(1, LONGEST + 1):
        for answer in itertools.product(range(3), repeat=length):
            whole = answer[-1] == END or length == LONGEST
            if whole and END not in answer[:-1]:
                found[answer] = math.prod(next_token(answer[:i])[token] for i, token in enumerate(answer))
    return found


def powered(alpha: float) -> dict[tuple[int, ...], float]:
    powers = {answer: p**alpha for answer, p in chances_of_answers().items()}
    return {answer: power / sum(powers.values()) for answer, power in powers.items()}


def chi_square(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; answers expected less than 5 times are one cell."""
    total, cells, rare = sum(seen.values()), [], [0.0, 0.0]
    for answer, p in expected.items():
        cell = [seen[answer], p * total]
        if p * total >= 5:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    cells += [rare] if rare[1] >= 1 else []
    return sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1


def is_plausible(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """By the approximation of Wilson and Hilferty, at a level of 1 in 10,000."""
    statistic, freedom = chi_square(seen, expected)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.72


async def sample(chains: int, **settings: Any) -> Counter[tuple[int, ...]]:
    rng = random.Random(0)
    seen = Counter[tuple[int, ...]]()
    for _ in range(chains):
        sampler = PowerSampler(ToyModel(rng).propose, ALPHA, rng, **settings)
        seen[(await sampler.sample(LONGEST)).token_ids] += 1
    return seen


async def test_answers_come_in_proportion_to_p_to_the_power() -> None:
    seen = await sample(4000, moves_per_block=15, proposals=3)
    assert is_plausible(seen, powered(ALPHA))
    assert not is_plausible(seen, chances_of_answers())


async def test_an_answer_that_grows_block_by_block_comes_in_the_same_proportion() -> None:
    """Where no answer ends before its last block, the blocks are only a start."""
    seen = await sample(4000, moves_per_block=15, proposals=2, block=3)
    long = {answer: p for answer, p in powered(ALPHA).items() if len(answer) == LONGEST}
    whole = sum(long.values())
    grown = Counter({answer: count for answer, count in seen.items() if len(answer) == LONGEST})
    assert is_plausible(grown, {answer: p / whole for answer, p in long.items()})


async def test_one_move_leaves_the_distribution_as_it_is() -> None:
    rng, target = random.Random(0), powered(ALPHA)
    model, seen = ToyModel(rng), Counter[tuple[int, ...]]()
    sampler = PowerSampler(model.propose, ALPHA, rng, proposals=1)
    for answer in rng.choices(list(target), list(target.values()), k=8000):
        logprobs = tuple(math.log(next_token(answer[:i])[token]) for i, token in enumerate(answer))
        start = SampledAnswer(answer, logprobs, "stop" if answer[-1] == END else "length")
        seen[(await sampler.move(start, LONGEST)).token_ids] += 1
    assert is_plausible(seen, target)
    assert 0 < sampler.changes < sampler.moves == 8000


def test_it_is_not_a_low_temperature() -> None:
    """The likeliest first token does not begin the likeliest answer: a temperature prefers it, a power does not."""
    first = {token: sum(p for a, p in powered(ALPHA).items() if a[0] == token) for token in range(3)}
    cold = [chance**ALPHA for chance in next_token(())]
    assert cold[0] / sum(cold) > 0.85
    assert first[1] > first[0]


# As an upstream --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def powered_system(running: Running, directory: Path, publish: str = "lora") -> AsyncIterator[System]:
    """A proxy with an upstream that samples from its policy's vLLM."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    power = UpstreamConfig(name="power", kind="openai", base_url=url, models=["power:4", "power:1"])
    async with (
        running(directory, publish=publish, others=[power]) as system,
        power_server(power, system.config.upstreams[0], directory / "policy"),
    ):
        yield system


async def ask(system: System, model: str = "power:4", **more: Any) -> Any:
    """The answer, or the chunks of a stream."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    base_url = f"{system.url}/rollouts/r/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=messages, **more)
        return [chunk async for chunk in answer] if more.get("stream") else answer


def remembering(bodies: list[dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return {"role": "assistant", "content": "x"}

    return answer


async def test_an_agent_that_asks_for_it_is_answered_once(running: Running, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    async with powered_system(running, tmp_path) as system:
        system.vllm.answer = remembering(bodies)
        answer = await ask(system, temperature=0.2, seed=7, max_tokens=9, stop=["6"])
        assert answer.choices[0].message.content.endswith("5 ")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model_extra["power_sampling"]["moves"] == 10
        assert len(bodies) == 11
        for body in bodies:
            assert (body["model"], body["n"], body["temperature"], body["stop"]) == ("base", 8, 1.0, ["6"])
            assert "seed" not in body
            prompt = body["kv_transfer_params"]["prompt_token_ids"]
            assert prompt[:3] == [1, 2, 3]
            assert body["max_completion_tokens"] == 9 - len(prompt[3:])
        assert {headers["Authorization"] for headers in system.vllm.headers} == {"Bearer unused"}
        _, rollout = await system.call("GET", "/rollouts/r")
    (call,) = rollout["calls"]
    assert (call["status"], call["model"], call["upstream"]) == ("ok", "power:4", "power")
    assert call["policy_version"] is None
    assert call["response_token_ids"][-1] == 6
    assert call["untrainable_reason"] == "the model is not the policy"


async def test_a_stream_is_one_chunk_and_its_end(running: Running, tmp_path: Path) -> None:
    async with powered_system(running, tmp_path) as system:
        chunks = await ask(system, stream=True, stream_options={"include_usage": True}, max_tokens=16)
        _, rollout = await system.call("GET", "/rollouts/r")
    assert chunks[0].choices[0].delta.content.endswith("5")
    assert chunks[0].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens == 3
    assert rollout["calls"][0]["status"] == "ok"


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"response_format": {"type": "json_object"}}, 400, "grammar"),
        ({"response_format": "json"}, 400, "grammar"),
        ({"tool_choice": "required"}, 400, "grammar"),
        ({"n": 2}, 400, "one answer"),
        ({"model": "power:1"}, 400, "above 1"),
        ({"model": "power:lots"}, 404, "does not exist"),
    ],
)
async def test_what_cannot_be_sampled_like_that_is_refused(
    running: Running, tmp_path: Path, asked: dict[str, Any], status: int, says: str
) -> None:
    async with powered_system(running, tmp_path) as system:
        with pytest.raises(openai.APIStatusError, match=says) as refused:
            await ask(system, **asked)
    assert refused.value.status_code == status


async def test_other_routes_and_a_vllm_without_these_are_told_apart(running: Running, tmp_path: Path) -> None:
    async with powered_system(running, tmp_path) as system:
        status, body = await system.call("POST", "/v1/completions", {"model": "power:4", "prompt": "x"})
        assert (status, "only" in body["error"]["message"]) == (501, True)
        system.vllm.renders = False
        with pytest.raises(openai.APIStatusError, match="--enable-scale-out"):
            await ask(system)


async def test_vllms_refusal_is_the_agents_answer(running: Running, tmp_path: Path) -> None:
    async with powered_system(running, tmp_path) as system:
        system.vllm.fails = 400
        with pytest.raises(openai.BadRequestError, match="busy"):
            await ask(system)


async def test_trained_weights_are_not_taken_for_the_base_model(running: Running, tmp_path: Path) -> None:
    async with powered_system(running, tmp_path, "merged") as system:
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        assert (await ask(system)).choices[0].message.content.endswith("5")
        await system.call("POST", "/policy/promote", {"version": version})
        with pytest.raises(openai.NotFoundError, match=f"version {version} is in its place"):
            await ask(system)
        system.vllm.label = "loading"
        with pytest.raises(openai.InternalServerError, match="loading other weights"):
            await ask(system)
        await system.call("POST", "/policy/promote", {"version": 0})
        assert (await ask(system)).choices[0].message.content.endswith("5")


async def test_an_address_that_is_taken_is_one_line(running: Running, tmp_path: Path) -> None:
    async with powered_system(running, tmp_path) as system:
        vllm, power = system.config.upstreams
        with pytest.raises(LightningError, match=f"{power.base_url}: .*in use"):
            async with power_server(power, vllm, tmp_path / "policy"):
                pass


def test_the_same_seed_gives_the_same_answer() -> None:
    once, again = (asyncio.run(sample(20, moves_per_block=3)) for _ in range(2))
    assert once == again
