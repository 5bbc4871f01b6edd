"""What calls used and cost: every API's `usage`, prices, and sums by day, model, key, task, rollout and mode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

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

Running = Callable[..., AbstractAsyncContextManager[Any]]
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
    table = {
        "known": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6},
        "odd": {"input_cost_per_token": "x"},
    }
    monkeypatch.setattr(prices, "_table", lambda: table)
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
    store: Store,
    rollout: RolloutName,
    model: str,
    usage: Any,
    *,
    version: int | None = None,
    at: float = NOW,
    ids: tuple[int, ...] = (),
    end: tuple[CallStatus, int | None] = ("ok", 200),
) -> str:
    call_id = f"{rollout.rollout_id}-{model}-{at:.0f}"
    async with Recorder(store, merged=False) as recorder:
        await recorder.start(CallStart(call_id, rollout, "chat/completions", model, version, {"n": call_id}, at))
        await recorder.end(
            CallEnd(call_id, rollout.rollout_id, end[0], {}, end[1], ids, (Choice(0, ids),), usage=usage)
        )
    return call_id


async def costs(system: Any, query: str = "", **headers: str) -> Any:
    status, answer = await system.call("GET", f"/costs{query}", **headers)
    assert status == 200, answer
    return answer


async def test_costs_are_summed_up_in_every_way(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, prices={"big": [10, 20, 1]}) as system, system.store() as store:
        await record(store, RolloutName("a", "t1", None), "big", CHAT)
        await record(store, RolloutName("a", "t1", None), "new", RESPONSES, at=NOW + 86400)
        await record(store, RolloutName("b", "t2", None, "eval"), "policy", None, version=0, ids=(1, 2, 3))
        await record(store, RolloutName("b", "t2", None, "eval"), "silent", None, at=NOW + 1)
        by_model = await costs(system, "?by=model")
        big = {"name": "big", "calls": 1, "unknown": 0, "unpriced": 0, "usd": pytest.approx(0.00086),
               "input_tokens": 100, "cached_tokens": 60, "output_tokens": 20, "reasoning_tokens": 5}  # fmt: skip
        assert by_model["data"][0] == big
        rest = {one["name"]: (one["usd"], one["unknown"], one["unpriced"]) for one in by_model["data"][1:]}
        assert rest == {"new": (0, 0, 1), "policy": (0, 0, 0), "silent": (0, 1, 0)}
        assert (by_model["total"]["calls"], by_model["total"]["input_tokens"]) == (4, 203)
        for by, names in (("day", ["2027-01-16", "2027-01-15"]), ("key", [None]), ("mode", ["train", "eval"]),
                          ("task", ["t1", "t2"]), ("rollout", ["a", "b"])):  # fmt: skip
            assert [one["name"] for one in (await costs(system, f"?by={by}"))["data"]] == names
        assert (await costs(system, f"?since={NOW + 2}"))["total"]["calls"] == 1
        _, rollout = await system.call("GET", "/rollouts/a")
        assert (rollout["tokens"], rollout["costs"]["output_tokens"]) == (40, 40)
        assert rollout["costs"]["of_calls"][f"a-big-{NOW:.0f}"] == {k: v for k, v in big.items() if k != "name"}


async def test_what_is_billed_without_a_usage_is_not_free(tmp_path: Path) -> None:
    ended: list[tuple[CallStatus, int | None]] = [("cancelled", None), ("error", 200), ("error", 429), ("error", None)]
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        for number, end in enumerate(ended):
            await record(store, RolloutName("a", "t1", None), "big", None, at=NOW + number, end=end)
        await record(store, RolloutName("b", "t1", None), "policy", None, version=0, end=ended[0])
        total = summed((await CostTable(database, CONFIG).since(0.0, "day", None)).values())
        assert [total[name] for name in ("calls", "unknown", "unpriced", "usd")] == [5, 2, 0, 0]


async def test_a_stream_that_was_cut_after_its_first_usage_is_not_known(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        await record(Store(database), RolloutName("a", "t1", None), "big", MESSAGES, end=("cancelled", 200))
        total = summed((await CostTable(database, CONFIG).since(0.0, "day", None)).values())
        assert [total[name] for name in ("calls", "unknown", "input_tokens")] == [1, 1, 100]


async def test_keys_of_one_name_are_summed_up(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        for name in ("a", "b"):
            _, stored = await store.keys.create("team", "agent", Limits(), recording=True, scope="own")
            await record(store, RolloutName(name, "t1", None, key_id=stored.key_id), "big", CHAT)
            await store.keys.revoke("team")
        found = await CostTable(database, CONFIG).since(0.0, "key", None)
        assert {name: cost["calls"] for name, cost in found.items()} == {"team": 2}


async def test_a_key_of_its_own_rollouts_sees_the_costs_of_these(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"], admin_keys=["admin"]) as system, system.store() as store:
        key, stored = await store.keys.create("mine", "agent", Limits(), recording=True, scope="own")
        await record(store, RolloutName("a", "t1", None, key_id=stored.key_id), "big", CHAT)
        await record(store, RolloutName("b", "t1", None), "big", CHAT)
        admin = await costs(system, "?by=key", Authorization="Bearer admin")
        assert sorted(one["name"] or "" for one in admin["data"]) == ["", "mine"]
        mine = {"Authorization": f"Bearer {key}"}
        while (await system.call("GET", "/costs", **mine))[0] == 401:
            await asyncio.sleep(0.1)
        own = await costs(system, "?by=rollout", **mine)
        assert [one["name"] for one in own["data"]] == ["a"]


async def test_a_terminal_shows_costs(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, RolloutName("a", "t1", None), "no such model", CHAT, at=time.time())
        done = await system.lightning("costs", "--by", "model")
        assert done.returncode == 0
        assert "no such model" in done.stdout and "all calls" in done.stdout, "next to rewarders"
        assert "1 calls of models without a price" in done.stdout
        wrong = await system.lightning("costs", "--by", "colour")
        assert (wrong.returncode, "'day'" in wrong.stderr) == (2, True)
