"""The benchmarks' own instruments: what they count, and that they run."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
from contextlib import closing
from importlib import import_module
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
HEAD = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices": []}\n\n'


def length(body: bytes, claimed: int | None = None) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % (claimed or len(body)) + body


def chunked(*parts: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


async def run(script: str, *arguments: str) -> tuple[int | None, str]:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / script), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_an_answer_counts_where_it_is_whole_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load: Any = import_module("load")
    choice, events = b'{"choices": [{"finish_reason": "stop"}]}', [EVENT] * 41
    for stream, answer, counts in (
        (False, length(choice), True),
        (False, chunked(choice[:13], choice[13:]), True),
        (True, chunked(b"da", b"ta" + EVENT[4:], *events[2:], b"data: [DONE]\n\n"), True),
        (False, length(choice, claimed=100), False),
        (False, length(b'{"error": {}}'), False),
        (False, HEAD.replace(b"200 OK", b"503 No") + length(choice)[len(HEAD) :], False),
        (True, chunked(*events[2:], b"data: [DONE]\n\n"), False),
        (True, chunked(*events), False),
        (True, chunked(*events, b"data: [DONE]\n\n")[:-5], False),
    ):
        client = load.Client(repeat((b"", b"")), stream)
        client.connection_made(Mock())
        client.ask(until=0.0)
        client.data_received(answer)
        client.connection_lost(None)
        assert (len(client.results), len(client.failed)) == (counts, not counts), answer[:200]


async def test_the_benchmark_of_the_proxy_runs_and_the_soak_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--quick", "--seconds", "0.05", "--streams", "20", "--json", str(file), "--only")
    status, out = await run("proxy.py", *options)
    assert status == 0
    assert "| JSON | 1 KB | 1 |" in out and "20 streams open at once" in out
    figures = json.loads(file.read_text())
    assert {row["target"] for row in figures["rows"]} == {"direct", "forwarder", "forwarder that commits", "ours"}
    status, out = await run("soak.py", "--minutes", "0.05", "--rate", "50", "--every", "1")
    assert status == 0
    assert "lost: 0 answers, 0 rewards" in out


def test_the_soak_sees_what_is_not_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    soak: Any = import_module("soak")
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("CREATE TABLE calls AS SELECT 'a' AS call_id, 'ok' AS status UNION SELECT 'b', 'incomplete'")
        db.execute("CREATE TABLE rewards (value)")
    assert soak.missing(tmp_path / "store.db", soak.Seen(whole=["a", "b", "c"], rewards=1)) == (2, 1)


def test_the_credit_benchmark_shows_what_uniform_cannot_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    credit: Any = import_module("credit")
    monkeypatch.setattr(credit, "RATES", (30, 100))
    monkeypatch.setattr(credit, "SEEDS", range(3))
    problems = {problem.title.partition(":")[0]: problem for problem in (*credit.PROBLEMS, *credit.TWO_AGENTS)}

    def scores(settings: dict[str, object], problem: str) -> list[float]:
        cell = credit.at_best_rate(problems[problem], settings, credit.Way())
        return [fmean(of) for of in zip(*cell.seeds, strict=True)]

    for name, low, high in (("uniform", 0, 0.6), ("discounted, 0.9", 0.9, 1), ("anchor, 0.9", 0.9, 1)):
        assert low <= scores(credit.STRATEGIES[name], "equal sums, sooner is better")[0] <= high, name
    judged = scores(credit.JUDGES["judge, 0 (scripted)"], "delayed reward")[0]
    assert judged > scores(credit.STRATEGIES["discounted, 0"], "delayed reward")[0] + 0.1
    own, team = credit.AGENTS["uniform, by agent (own)"], credit.AGENTS["uniform, all as one"]
    assert scores(own, "each is rewarded")[0] > scores(team, "each is rewarded")[0] + 0.1


async def test_the_training_benchmarks_find_one_gradient_whatever_the_way_and_measure_a_step(tmp_path: Path) -> None:
    small = ("--rounds", "1", "--layers", "2", "--work", "3,3,200,20,20", "--vocabulary", "1000")
    code, out = await run("train.py", *small, "--budget", "400", "--json", str(tmp_path / "figures.json"))
    assert code == 0, out
    figures = json.loads((tmp_path / "figures.json").read_text())
    ways = figures["ways"]
    assert max(figures["differing"]) < 1e-4
    assert ways["lightning-proxy"]["tokens"] < ways["TRL, a row per rollout"]["tokens"]
    assert out.count("\n| ") == 1 + len(ways)
    shape = ("--model", "smollm2-135m", "--layers", "1", "--work", "2,2,16,8,8")
    code, out = await run("gpu_step.py", *shape, "--rounds", "1")
    assert code == 0 and out.count("\n| smollm2-135m:") == 2, out
    assert "A pass over the tree of " in out and float(re.findall(r"differ from float32's by (\S+)", out)[0]) < 0.1


async def test_the_benchmark_of_the_store_asks_every_route_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "new" / "store.md"
    code, out = await run("store.py", "--small", "--page", str(page))
    assert code == 0, out
    text = page.read_text()
    assert text.splitlines()[-1] in out and "`GET /rollouts/long/transitions`" in text
    assert not re.findall(r"\(\d{3}\)` ?\|", text)
    whens = ("a request", "a call", "a second", "a poll", "a step")
    assert [when for when in whens if f"| {when} |" not in text] == []


async def test_the_benchmark_of_several_proxies_prints_a_row_for_each_way() -> None:
    code, out = await run("several.py", "--rounds", "1", "--seconds", "0.2", "--prompts", "1000", "--connections", "8")
    rows = [line for line in out.splitlines() if line.startswith("|")][2:]
    ways = [["SQLite", "1"], ["SQLite", "2"], ["PostgreSQL", "1"], ["PostgreSQL", "2"], ["PostgreSQL", "4"]]
    assert (code, [[cell.strip() for cell in row.split("|")[2:4]] for row in rows]) == (0, ways)


@pytest.mark.vllm
@pytest.mark.timeout(1200)
async def test_the_demo_and_trl_take_steps_and_all_their_time_is_shown(tmp_path: Path) -> None:
    from support.models import save_spelling_model  # imports torch

    page, model = tmp_path / "loop.md", tmp_path / "speller"
    await asyncio.to_thread(save_spelling_model, model, letters="0123456789ab")  # some of its answers are right
    options = ("--dir", str(tmp_path / "demo"), "--model", str(model), "--page", str(page))
    code, out = await run("loop.py", "--quick", *options)
    assert code == 0, out
    steps = json.loads((tmp_path / "demo" / "steps.json").read_text())
    ours, trl = (one["rollouts"] for one in steps.values())
    assert trl == [64, 128] and len(ours) == 2
    assert not any(count % 64 for count in ours), "64 from which nothing can be learned are no step"
    for one in steps.values():
        assert all(0 <= reward < 0.3 for reward in one["rewards"]), "both begin with the base model"
        begin, end = one["ready_s"]
        assert min(one["parts"][0].values()) >= 0
        assert sum(one["parts"][0].values()) == pytest.approx(end - begin)
    assert page.read_text().count("\n| ") == 6 + 4 + 2 + 10 + 4 * 2, "rows of the tables, and their heads"


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_ratios_are_1_with_unchanged_weights_however_a_real_vllm_samples(tmp_path: Path) -> None:
    from support.models import save_spelling_model  # imports torch

    model = await asyncio.to_thread(save_spelling_model, tmp_path / "speller")
    code, out = await run("sampling.py", "--model", str(model), "--answers", "3", "--tokens", "32")
    assert code == 0, out
    assert out.count("\n| ") >= 24
