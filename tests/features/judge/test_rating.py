"""The queue of a person who rates, rewards that are taken back, and the page's view in a real browser."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from support.judging import completed
from support.views import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]
SETTINGS = {"trainer": {"reward_weights": {"reward": 1.0, "human": 1.0}}}


async def rated(system: Any, rollout: str, value: float, person: str = "anna", **more: Any) -> int:
    body = {"rollout_id": rollout, "reward": value, "name": "human", "source": person, "final": False, **more}
    status, answer = await system.call("POST", "/reward", body)
    assert status == 200
    reward_id: int = answer["reward_id"]
    return reward_id


async def queue(system: Any, person: str = "anna", **key: str) -> list[str]:
    status, answer = await system.call("GET", f"/people/queue?person={person}", **key)
    assert status == 200, answer
    return [one["rollout_id"] for one in answer["data"]]


async def test_a_queue_has_what_its_person_has_not_rated(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        for name, value in (("low", 0.0), ("middle", 0.4), ("high", 1.0)):
            await completed(system, name, "yes")
            await system.call("POST", "/reward", {"rollout_id": name, "reward": value})
        await completed(system, "none", "yes")
        await system.chat("running")
        assert await queue(system) == ["none", "high", "middle", "low"]
        await rated(system, "middle", 1, "anna")
        assert await queue(system, "anna") == ["none", "high", "low"]
        assert await queue(system, "ben") == ["none", "high", "middle", "low"]


async def test_what_others_do_changes_nothing_in_the_queue_of_an_own_key(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        own, plain = [await system.key(name, scope=scope) for name, scope in (("own", "own"), ("plain", "all"))]
        for name, value, key in (
            ("low", 0.0, own), ("middle", 0.4, own), ("high", 1.0, own), ("other", 9.0, plain)
        ):  # fmt: skip
            assert (await system.chat(name, **key))[0] == 200
            body = {"rollout_id": name, "reward": value}
            assert (await system.call("POST", "/reward", body, **key))[0] == 200
        async with system.store() as store:  # far more of others are newer
            await store.database.commit([("UPDATE rollouts SET n = n + 6000 WHERE rollout_id = 'other'", [{}])])
        assert await queue(system, **own) == ["high", "middle", "low"]
        assert await queue(system, **plain) == ["other", "high", "middle", "low"]


async def test_a_reward_that_is_taken_back_counts_no_more(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        await completed(system, "r", "yes")
        call_id = (await system.call("GET", "/rollouts/r"))[1]["calls"][0]["call_id"]
        await rated(system, "r", 0.25, call_id=call_id)
        last = await rated(system, "r", 1)
        other = (await system.call("POST", "/reward", {"rollout_id": "r", "reward": 1}))[1]["reward_id"]
        assert (await system.call("GET", "/rollouts/r"))[1]["reward"] == 2
        assert (await system.call("DELETE", f"/rollouts/r/rewards/{last}"))[0] == 204
        assert (await system.call("GET", "/rollouts/r"))[1]["reward"] == 1
        for gone in (last, other):
            assert (await system.call("DELETE", f"/rollouts/r/rewards/{gone}"))[0] == 404
        assert len((await system.call("GET", "/rollouts/r"))[1]["rewards"]) == 2


async def test_a_person_rates_rollouts_and_calls_and_undoes(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as system:
        for name in ("a", "b", "c"):
            await completed(system, name, f"I am {name}.")
        lines = ["call 0 - too long", "call 7 +", "what?", "+", "0.5 fine", "u", "", "-1", "q"]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        done = await system.lightning("rollouts", "rate", "--as", "anna")
        assert done.returncode == 0, done.stderr
        assert "3 to rate as anna" in done.stdout and "it has no call 7" in done.stdout
        found = {name: (await system.call("GET", f"/rollouts/{name}"))[1]["rewards"] for name in "cba"}
    given = {name: [(one["reward"], one["comment"], one["source"]) for one in of] for name, of in found.items()}
    assert given == {"c": [(-1, "too long", "anna"), (1, None, "anna")], "b": [], "a": [(-1, None, "anna")]}
    assert [one["call_id"] is None for one in found["c"]] == [False, True]


async def test_nobody_takes_back_what_another_key_gave(running: Running, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"api_keys": ["a", "b"], "admin_keys": ["admin"]}
    a, admin = ({"Authorization": f"Bearer {key}"} for key in ("a", "admin"))
    async with running(tmp_path, **keys) as system:
        (opened,) = (await system.call("POST", "/rollouts", {}, **a))[1]
        rollout, own = opened["rollout_id"], {"Authorization": f"Bearer {opened['api_key']}"}
        body = {"rollout_id": rollout, "reward": 1, "name": "human"}
        given = (await system.call("POST", "/reward", body, **a))[1]["reward_id"]
        route = f"/rollouts/{rollout}/rewards/{given}"
        assert (await system.call("DELETE", route, **own))[0] == 403
        assert (await system.call("DELETE", route, **admin))[0] == 204


@needs_browser
async def test_a_person_rates_by_keyboard_and_takes_it_back(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        for name in ("first", "second"):
            await completed(system, name, f"I am the {name}.")
        body = {"rollout_id": "second", "reward": 0.125, "name": "judge", "comment": "because", "final": False}
        await system.call("POST", "/reward", body)
        async with browsing(system.url) as (page, wrong):
            await page.get_by_role("link", name="rate").click()
            await page.get_by_label("your name").fill("anna")
            await page.keyboard.press("Enter")
            await expect(page.locator("h1.id")).to_have_text("second")
            for theirs in ("0.125", "because", "Siblings"):  # shown once she has rated
                await expect(page.locator("main")).not_to_contain_text(theirs)
            await page.keyboard.press("j")
            await page.keyboard.press("j")
            await expect(page.get_by_role("form", name="Rate").get_by_role("status")).to_have_text("call 0")
            await page.keyboard.press("-")  # the call
            await expect(page.get_by_role("button", name="undo (z)")).to_be_visible()
            await page.keyboard.press("Escape")
            await expect(page.locator(".rewards")).to_contain_text("human")
            await page.get_by_role("button", name="the rollout instead").click()
            await expect(page.get_by_role("form", name="Rate").get_by_role("status")).to_have_text("the rollout")
            await page.keyboard.press("c")
            await page.keyboard.type("well said")
            await page.keyboard.press("Escape")
            await page.keyboard.press("+")
            await expect(page.locator("h1.id")).to_have_text("first")
            await page.keyboard.press("n")
            await page.keyboard.type("0.5")
            await page.keyboard.press("Enter")
            await expect(page.get_by_text("Nothing is left to rate")).to_be_visible()
            await page.keyboard.press("z")
            await expect(page.locator("h1.id")).to_have_text("first")
            await page.goto(f"{system.url}/#/rate?id=second")
            for theirs in ("0.125", "because"):
                await expect(page.locator(".rewards")).to_contain_text(theirs)
        found = [(await system.call("GET", f"/rollouts/{name}"))[1]["rewards"] for name in ("second", "first")]
        assert await queue(system, "anna") == ["first"]
    assert wrong.seen == []
    _, of_call, own = found[0]
    assert (of_call["reward"], of_call["call_id"] is None) == (-1, False)
    assert (own["reward"], own["comment"], own["source"], own["call_id"]) == (1, "well said", "anna", None)
    assert found[1] == []
