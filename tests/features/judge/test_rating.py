"""The queue of a person who rates, rewards that are taken back, and the page's view in a real browser."""

from __future__ import annotations

import io
from typing import Any

import pytest
from playwright.async_api import expect

from support.judging import completed
from support.views import browsing, needs_browser

SETTINGS = {"trainer": {"reward_weights": {"reward": 1.0, "human": 1.0}}}


async def rated(system: Any, rollout: str, value: float, key: Any = (), **more: Any) -> int:
    body = {"rollout_id": rollout, "reward": value, "name": "human", "source": "anna", "final": False, **more}
    return int((await system.post("/reward", body, **dict(key)))["reward_id"])


async def queue(system: Any, person: str = "anna", **key: str) -> list[str]:
    return [one["rollout_id"] for one in (await system.get(f"/people/queue?person={person}", **key))["data"]]


async def test_a_queue_has_what_its_person_has_not_rated_whatever_other_keys_do(start: Any) -> None:
    async with start(**SETTINGS) as system:
        own, plain = [await system.key(name, scope=scope) for name, scope in (("own", "own"), ("plain", "all"))]
        for name in ("rewarded", "middle", "newest", "running"):
            await system.chat(name, **own)
        await system.chat("other", **plain)
        await system.post("/reward", {"rollout_id": "rewarded", "reward": 1}, **own)
        for name, key in (("middle", own), ("newest", own), ("other", plain)):
            await system.post(f"/rollouts/{name}/end", {"status": "completed"}, **key)
        async with system.store() as store:  # far more of others are newer
            await store.database.commit([("UPDATE rollouts SET n = n + 6000 WHERE rollout_id = 'other'", [{}])])
        assert await queue(system, **own) == ["newest", "middle", "rewarded"]
        assert await queue(system, **plain) == ["other", "newest", "middle", "rewarded"]
        await rated(system, "middle", 1, own)
        assert await queue(system, "anna", **own) == ["newest", "rewarded"]
        assert await queue(system, "ben", **own) == ["newest", "middle", "rewarded"]


async def test_a_reward_that_is_taken_back_counts_no_more(start: Any) -> None:
    async with start(**SETTINGS) as system:
        await completed(system, "r", "yes")
        call_id = (await system.get("/rollouts/r"))["calls"][0]["call_id"]
        await rated(system, "r", 0.25, call_id=call_id)
        last = await rated(system, "r", 1)
        other = (await system.post("/reward", {"rollout_id": "r", "reward": 1}))["reward_id"]
        assert (await system.get("/rollouts/r"))["reward"] == 2
        assert (await system.call("DELETE", f"/rollouts/r/rewards/{last}"))[0] == 204
        assert (await system.get("/rollouts/r"))["reward"] == 1
        for gone in (last, other):
            assert (await system.call("DELETE", f"/rollouts/r/rewards/{gone}"))[0] == 404
        assert len((await system.get("/rollouts/r"))["rewards"]) == 2


async def test_nobody_takes_back_what_another_key_gave(start: Any) -> None:
    async with start(api_keys=["a"], admin_keys=["admin"]) as system:
        a, admin = ({"Authorization": f"Bearer {key}"} for key in ("a", "admin"))
        team = await system.key("team")
        (opened,) = await system.post("/rollouts", {}, **a)
        rollout, own = opened["rollout_id"], {"Authorization": f"Bearer {opened['api_key']}"}
        route = f"/rollouts/{rollout}/rewards/{await rated(system, rollout, 1, a)}"
        assert [(await system.call("DELETE", route, **key))[0] for key in (own, team, admin)] == [403, 404, 204]


async def test_a_person_rates_rollouts_and_calls_and_undoes(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as system:
        for name in ("a", "b", "c"):
            await completed(system, name, f"I am {name}.")
        lines = ["call 0 - too long", "call 7 +", "what?", "+", "0.5 fine", "u", "", "-1", "q"]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        done = await system.lightning("rollouts", "rate", "--as", "anna")
        assert done.returncode == 0, done.stderr
        assert "3 rollouts to rate as anna" in done.stdout and "this rollout has no call 7" in done.stdout
        found = {name: (await system.get(f"/rollouts/{name}"))["rewards"] for name in "cba"}
    given = {name: [(one["reward"], one["comment"], one["source"]) for one in of] for name, of in found.items()}
    assert given == {"c": [(-1, "too long", "anna"), (1, None, "anna")], "b": [], "a": [(-1, None, "anna")]}
    assert [one["call_id"] is None for one in found["c"]] == [False, True]


@needs_browser
async def test_a_person_rates_by_keyboard_and_takes_it_back(start: Any) -> None:
    async with start(**SETTINGS) as system:
        for name in ("first", "second"):
            await completed(system, name, f"I am the {name}.")
        body = {"rollout_id": "second", "reward": 0.125, "name": "judge", "comment": "because", "final": False}
        await system.post("/reward", body)
        async with browsing(system.url) as (page, wrong):

            async def press(*keys: str) -> None:
                for key in keys:
                    await page.keyboard.press(key)

            shown, about = page.locator("h1.id"), page.get_by_role("form", name="Rate").get_by_role("status")
            await page.get_by_role("link", name="rate").click()
            await page.get_by_label("your name").fill("anna")
            await press("Enter")
            await expect(shown).to_have_text("second")
            for theirs in ("0.125", "because", "Siblings"):  # shown once she has rated
                await expect(page.locator("main")).not_to_contain_text(theirs)
            await press("j", "j")
            await expect(about).to_have_text("call 0")
            await press("-")  # the call
            await expect(page.get_by_role("button", name="undo (z)")).to_be_visible()
            await page.get_by_role("button", name="the rollout instead").click()
            await expect(about).to_have_text("the rollout")
            await press("c", *"fine", "Escape", "+")
            await expect(shown).to_have_text("first")
            await press("n", *"0.5", "Enter")
            await expect(page.get_by_text("Nothing is left to rate")).to_be_visible()
            await press("z")
            await expect(shown).to_have_text("first")
            await page.goto(f"{system.url}/#/rate?id=second")
            for theirs in ("0.125", "because"):
                await expect(page.locator(".rewards")).to_contain_text(theirs)
        _, *given = (await system.get("/rollouts/second"))["rewards"]
        assert await queue(system, "anna") == ["first"]
    assert wrong == []
    told = [(one["reward"], one["comment"], one["source"], one["call_id"] is None) for one in given]
    assert told == [(-1, None, "anna", False), (1, "fine", "anna", True)]
