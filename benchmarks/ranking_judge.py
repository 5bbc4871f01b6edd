"""A judge that is no model: it knows the sums of examples/addition, and orders answers as well as it is told to.

`serve --agreement 0.8` speaks OpenAI's and Anthropic's APIs. Then, for each seed:

    export LIGHTNING_REWARDS__USE='[{kind: rank, name: order, model: openai/script, api_base: "http://127.0.0.1:8300/v1"}]'
    export LIGHTNING_TRAINER__REWARD_WEIGHTS='{order: 1}'
    lightning-proxy demo --steps 40 --seed 0 --dir /tmp/ranked
    python benchmarks/ranking_judge.py curve /tmp/ranked/lightning.db

The policy learns from the order alone. The agent's own rewards are recorded beside it, and `curve` prints these.
A rubric whose questions are those of CRITERIA is answered, too: rightly with the chance `--agreement`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sqlite3
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "addition"))
from demo_agent import score

NOISE = [0.02 * 1.15**i for i in range(60)]  # standard deviations that are tried
SUM = re.compile(r"What is (\d+)\+(\d+)\?")
ASKED = "\n\nThe question: "
CRITERIA = {
    "Is the sum right?": lambda text, right: str(right) in re.findall(r"\d+", text),
    "Is the answer a number and nothing else?": lambda text, _: text.strip().isdecimal(),
}


def alike(truth: Sequence[float], said: Sequence[float]) -> float:
    """The share of pairs, of those that differ in truth, that are ordered as in truth."""
    pairs = [(a - b, c - d) for (a, c), (b, d) in combinations(zip(truth, said, strict=True), 2) if a != b]
    return sum(one * other > 0 for one, other in pairs) / len(pairs) if pairs else 1.0


def judged(truth: Sequence[float], agreement: float, seed: str) -> list[float]:
    """What the judge makes of the truth: noise, so strong that the agreement is as near as can be to the wanted one."""
    drawn = random.Random(seed)
    noise = [drawn.gauss(0, 1) for _ in truth]
    tried = ([value + scale * one for value, one in zip(truth, noise, strict=True)] for scale in NOISE)
    return min(tried, key=lambda said: abs(alike(truth, said) - agreement))


def answer(system: str, text: str, agreement: float) -> dict[str, Any]:
    """Return the judge's answer to a question of the rewarder `rank` or `rubric`."""
    return (said if ASKED in text else ordered)(system, text, agreement)


def said(_: str, text: str, agreement: float) -> dict[str, Any]:
    """Return yes or no."""
    happened, question = text.rsplit(ASKED, 1)
    (a, b), written = map(int, SUM.findall(happened)[0]), happened.rpartition("assistant: ")[2]
    is_so = CRITERIA[question](written.rpartition("\n<<")[0], a + b)
    is_wrong = random.Random(hashlib.sha256(text.encode()).hexdigest()).random() > agreement
    return {"reason": "a script says so", "answer": "no" if is_so == is_wrong else "yes"}


def ordered(system: str, text: str, agreement: float) -> dict[str, Any]:
    """Return the order of the attempts."""
    (mark,) = re.findall(r"lines that begin with (<<\S+)", system)
    found = re.findall(rf"^{re.escape(mark)} (.*?)>>\n(.*?)\n{re.escape(mark)} end>>$", text, re.DOTALL | re.MULTILINE)
    a, b = map(int, SUM.findall(found[0][1])[0])
    attempts = {title.removeprefix("Attempt "): said for title, said in found if title.startswith("Attempt ")}
    truth = [score(said.partition("assistant: ")[2], a + b) for said in attempts.values()]
    values = dict(zip(attempts, judged(truth, agreement, hashlib.sha256(text.encode()).hexdigest()), strict=True))
    order = sorted(attempts, key=lambda title: -values[title])
    return {"reason": "a script says so", "order": [[title] for title in order]}


def application(agreement: float) -> web.Application:
    """Return the server."""

    async def chat(request: web.Request) -> web.Response:
        system, asked, *_ = (await request.json())["messages"]
        said = json.dumps(answer(system["content"], asked["content"], agreement))
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(asked["content"]) // 4, "completion_tokens": len(said) // 4}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def messages(request: web.Request) -> web.Response:
        body = await request.json()
        asked = body["messages"][0]["content"]
        given = {"type": "tool_use", "id": "t", "name": "answer", "input": answer(body["system"], asked, agreement)}
        usage = {"input_tokens": len(asked) // 4, "output_tokens": 20}
        return web.json_response({"type": "message", "role": "assistant", "content": [given], "usage": usage})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/messages", messages)
    return app


def curve(store: Path) -> list[tuple[str, int, int, float]]:
    """Return the mean of the agent's own rewards by mode and policy version: (mode, version, rollouts, mean)."""
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
        return connection.execute(
            "SELECT mode, policy_version, COUNT(*), AVG(value) FROM rewards JOIN rollouts USING (rollout_id) "
            "WHERE name = 'reward' AND source = 'env' GROUP BY mode, policy_version ORDER BY mode, policy_version"
        ).fetchall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="answer as a judge")
    serve.add_argument("--agreement", type=float, default=0.8)
    serve.add_argument("--port", type=int, default=8300)
    commands.add_parser("curve", help="print what was learned").add_argument("store", type=Path)
    options = parser.parse_args()
    if options.command == "serve":
        web.run_app(application(options.agreement), host="127.0.0.1", port=options.port)
        return
    for mode, version, rollouts, mean in curve(options.store):
        print(f"{mode} version {version}: {mean:.3f} of {rollouts} rollouts")


if __name__ == "__main__":
    main()
