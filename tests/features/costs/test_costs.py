"""What calls used and cost: every API's `usage`, prices, sums by day, model, key and so on; and `run --budget`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.limits import Budget
from lightning_proxy.core import prices
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.prices import Price, Prices, Used, used
from lightning_proxy.core.records import CallEnd, CallStart, CallStatus, Choice, Limits, RolloutName
from lightning_proxy.features.costs.proxy import CostTable, summed
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url

End = tuple[CallStatus, int | None]
NOW = 1_800_000_000.0  # 2027-01-15
CONFIG = Config.model_validate({"upstreams": [{"name": "a", "kind": "openai", "base_url": "http://127.0.0.1:1/v1"}]})

CHAT = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 5}}  # fmt: skip
RESPONSES = {"input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 60},
             "output_tokens_details": {"reasoning_tokens": 5}}  # fmt: skip
MESSAGES = {"input_tokens": 10, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 30, "output_tokens": 20}


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        (CHAT, Used(100, 60, 0, 20, 5)),
        (RESPONSES, Used(100, 60, 0, 20, 5)),
        (MESSAGES, Used(100, 60, 30, 20, 0)),
        ({"prompt_tokens": 3, "total_tokens": 3}, Used(3)),  # of embeddings
        # xAI's and Gemini's reasoning is in the total alone
        (CHAT | {"total_tokens": 125}, Used(100, 60, 0, 25, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 120}, Used(10, 0, 0, 110)),
        ({"prompt_tokens": 100, "completion_tokens": 5, "prompt_cache_hit_tokens": 90}, Used(100, 90, 0, 5)),
        ({"prompt_tokens": -1, "completion_tokens": "many", "prompt_tokens_details": []}, Used()),
        ({}, None), (None, None), ([1], None),
    ],
)  # fmt: skip
def test_every_apis_usage_is_read(usage: Any, found: Used | None) -> None:
    assert used(usage) == found


def test_cached_tokens_cost_less() -> None:
    assert Price(3, 15, 0.3, 3.75).of(used(MESSAGES) or Used()) == pytest.approx(
        (10 * 3 + 60 * 0.3 + 30 * 3.75 + 20 * 15) / 1e6
    )


def test_the_first_pattern_counts_and_then_litellms_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"known": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}}
    monkeypatch.setattr(prices, "_table", lambda: table | {"odd": {"input_cost_per_token": "x"}})
    known = Prices({"known-*": [5, 6, 0.5], "*-large": [7, 8]})
    assert known.of("known-large") == Price(5, 6, 0.5, 5)
    assert known.of("very-large") == Price(7, 8, 7, 7)
    assert known.of("known") == known.of("provider/known") == pytest.approx(Price(1, 2, 1, 1))
    assert known.of("router/provider/known") == known.of("known")
    assert known.of("hosted_vllm/known") is None  # a machine of one's own
    assert (known.of("odd"), known.of("new"), known.of(None)) == (None, None, None)


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs litellm")
def test_litellms_table_is_read_without_importing_it() -> None:
    price = Prices({}).of("openai/gpt-4o-mini")
    assert price is not None
    assert 0 < price.cached < price.input < price.output


async def record(
    store: Store, name: str, model: str, usage: Any, at: float = NOW, end: End = ("ok", 200), ids: Any = (), **more: Any
) -> None:
    """A call of a rollout; one with the model `policy` is the policy's. `more`: of `RolloutName`."""
    call_id, version = f"{name}-{model}-{at:.0f}", 0 if model == "policy" else None
    rollout = RolloutName(name, f"task of {name}", **more)
    async with Recorder(store, merged=False) as recorder:
        await recorder.start(CallStart(call_id, rollout, "chat/completions", model, version, {"n": call_id}, at))
        await recorder.end(CallEnd(call_id, name, end[0], {}, end[1], ids, (Choice(0, ids),), usage=usage))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


async def total(store: Store, *names: str) -> list[Any]:
    found = summed((await CostTable(store.database, CONFIG).since(0.0, "day", None)).values())
    return [found[name] for name in names]


async def costs(system: Any, query: str) -> Any:
    return await system.get(f"/costs{query}")


async def test_costs_are_summed_up_in_every_way(start: Any) -> None:
    async with start(prices={"big": [10, 20, 1]}) as system, system.store() as store:
        await record(store, "a", "big", CHAT)
        await record(store, "a", "new", RESPONSES, at=NOW + 86400)
        await record(store, "b", "policy", None, ids=(1, 2, 3), mode="eval")
        await record(store, "b", "silent", None, at=NOW + 1, mode="eval")
        by_model = await costs(system, "?by=model")
        big = {"name": "big", "calls": 1, "unknown": 0, "unpriced": 0, "usd": pytest.approx(0.00086),
               "input_tokens": 100, "cached_tokens": 60, "output_tokens": 20, "reasoning_tokens": 5}  # fmt: skip
        assert by_model["data"][0] == big
        rest = {one["name"]: (one["usd"], one["unknown"], one["unpriced"]) for one in by_model["data"][1:]}
        assert rest == {"new": (0, 0, 1), "policy": (0, 0, 0), "silent": (0, 1, 0)}
        assert (by_model["total"]["calls"], by_model["total"]["input_tokens"]) == (4, 203)
        for by, names in (("day", ["2027-01-16", "2027-01-15"]), ("key", [None]), ("mode", ["train", "eval"]),
                          ("task", ["task of a", "task of b"]), ("rollout", ["a", "b"])):  # fmt: skip
            assert [one["name"] for one in (await costs(system, f"?by={by}"))["data"]] == names
        assert (await costs(system, f"?since={NOW + 2}"))["total"]["calls"] == 1
        rollout = await system.get("/rollouts/a")
        assert (rollout["tokens"], rollout["costs"]["output_tokens"]) == (40, 40)
        assert rollout["costs"]["of_calls"][f"a-big-{NOW:.0f}"] == {k: v for k, v in big.items() if k != "name"}


async def test_what_is_billed_without_a_usage_or_with_the_first_of_a_cut_stream_is_not_free(store: Store) -> None:
    ended: list[End] = [("cancelled", None), ("error", 200), ("error", 429), ("error", None)]
    for number, end in enumerate(ended):
        await record(store, "a", "big", None, at=NOW + number, end=end)
    await record(store, "b", "policy", None, end=ended[0])
    assert await total(store, "calls", "unknown", "unpriced", "usd") == [5, 2, 0, 0]
    await record(store, "c", "big", MESSAGES, end=("cancelled", 200))
    assert await total(store, "calls", "unknown", "input_tokens") == [6, 3, 100]


async def test_keys_of_one_name_are_summed_up(store: Store) -> None:
    for name in ("a", "b"):
        _, stored = await store.keys.create("team", "agent", Limits(), recording=True, scope="own")
        await record(store, name, "big", CHAT, key_id=stored.key_id)
        await store.keys.revoke("team")
    found = await CostTable(store.database, CONFIG).since(0.0, "key", None)
    assert {name: cost["calls"] for name, cost in found.items()} == {"team": 2}
    assert [*await CostTable(store.database, CONFIG).since(0.0, "rollout", stored.key_id)] == ["b"], "what a key sees"


async def test_a_terminal_shows_costs(start: Any) -> None:
    async with start() as system, system.store() as store:
        await record(store, "a", "no such model", CHAT, at=time.time())
        done = await system.lightning("costs", "--by", "model")
        assert done.returncode == 0
        assert "no such model" in done.stdout and "all calls" in done.stdout, "next to rewarders"
        assert "1 calls of models without a price" in done.stdout


# `run --budget`: no further rollouts once so much is spent; those begun end.

# `rewards`: the first rollout has a reward, so that a resumed run has done it.
AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()

messages = [{"role": "user", "content": "hi"}]
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
if "rewards" in sys.argv and not os.path.exists("rewarded"):
    open("rewarded", "w").close()
    post(os.environ["LIGHTNING_URL"] + "/reward", {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 1})
"""


@pytest.fixture
async def priced(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A proxy at which a prompt of 3 tokens costs 0.3 USD."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    Path("tasks.jsonl").write_text("".join(f'{{"task_id": "t{n}"}}\n' for n in range(3)))
    async with start(prices={"policy": [100_000, 0]}) as system:
        yield system


async def run(system: Any, budget: str, *more: str, agent: str = "") -> Any:
    options = ("--group-size", "2", "--concurrency", "1", "--budget", budget, "--json", "--tasks", "tasks.jsonl", *more)
    return await system.lightning("run", *options, "--", sys.executable, "agent.py", agent)


async def test_a_run_stops_in_order_once_its_budget_is_spent(priced: Any) -> None:
    done = await run(priced, "0.5")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["rollouts"], summary["failed"]) == (3, 2, 0), done.stderr
    assert summary["usd"] == 0.6
    assert "0.6 of 0.5 USD are spent. No more rollouts were started" in done.stderr
    done = await run(priced, "5")
    assert (done.returncode, json.loads(done.stdout)["rollouts"]) == (0, 6), done.stderr


async def test_a_run_that_is_resumed_has_what_is_left_of_its_budget(priced: Any) -> None:
    for _ in range(2):
        done = await run(priced, "0.5", "--resume", "kept", agent="rewards")
        assert "0.6 of 0.5 USD are spent" in done.stderr
    assert len((await priced.get("/rollouts"))["data"]) == 2


async def test_a_call_that_was_cut_off_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(*_: object, **__: object) -> Any:
        return {"spent": []}

    api = ApiClient("http://127.0.0.1:1")
    budget = Budget(api, 5.0)
    monkeypatch.setattr(api, "request", request)
    for status, is_spent in (("cancelled", False), ("ok", True)):  # the answers of a program may all lack a usage
        cost = {"usd": 1.0, "unpriced": 0, "unknown": 1}
        budget.ended({"calls": [{"call_id": "a", "status": status}], "costs": cost | {"of_calls": {"a": cost}}})
        assert await budget.wait() is not is_spent
