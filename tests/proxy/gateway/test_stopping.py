"""A proxy that is asked to stop takes no more calls and finishes those under way."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from support.served import Proxy, proxy_in_front

PAUSE_S = 0.8  # between the tokens of an answer, of which there are five


async def answer(proxy: Proxy, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    """An answer that has begun."""
    body = {"model": "policy", "stream": True, "pause_s": PAUSE_S, "messages": [{"role": "user", "content": "hi"}]}
    begun = await session.post(f"{proxy.url}/v1/chat/completions", json=body)
    await begun.content.readany()
    return begun


async def refused(proxy: Proxy) -> None:
    """Ask for readiness until nobody listens any more."""
    while True:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"{proxy.url}/readyz"):
                    await asyncio.sleep(0.02)
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError:  # the connection was there just before
                continue


def ask_to_stop(proxy: Proxy, number: signal.Signals) -> None:
    assert proxy.process is not None
    proxy.process.send_signal(number)


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
async def test_nobody_gets_in_while_answers_under_way_reach_their_end(
    tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", workers=workers, stop_timeout_s=60)
        await proxy.start()
        begun = await answer(proxy, session)
        ask_to_stop(proxy, number)
        await refused(proxy)
        assert not begun.content.at_eof()
        assert (await begun.read()).endswith(b"data: [DONE]\n\n")
        assert proxy.process is not None and await proxy.process.wait() == 0
        assert proxy.rows("SELECT status FROM calls") == [("ok",)]


async def test_an_answer_that_takes_longer_is_said_and_cut_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", stop_timeout_s=0.2)
        await proxy.start()
        begun = await answer(proxy, session)
        ask_to_stop(proxy, signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await begun.read()
        assert proxy.process is not None and await proxy.process.wait() == 0
        assert proxy.rows("SELECT status FROM calls") == [("cancelled",)]
    told = capfd.readouterr().err
    assert "stopping: 1 call is under way, for at most 0.2 s more" in told
    assert "Traceback" not in told  # it is recorded, and no fault of the proxy


@pytest.mark.parametrize(("workers", "status"), [(1, "cancelled"), (2, "incomplete")])
async def test_a_second_ctrl_c_ends_it_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, status: str
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", workers=workers, stop_timeout_s=600)
        await proxy.start()
        begun = await answer(proxy, session)
        for _ in range(2):
            ask_to_stop(proxy, signal.SIGINT)
            await refused(proxy)
        with pytest.raises(aiohttp.ClientError):
            await begun.read()
        assert proxy.process is not None and await proxy.process.wait() == 0
        await proxy.start()
        await proxy.end(signal.SIGTERM)
        assert proxy.rows("SELECT status FROM calls") == [(status,)]
    assert "Traceback" not in capfd.readouterr().err
