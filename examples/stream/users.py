"""Scripted users of an agent, who want one kind of answer and, after half of the sessions, another.

`python users.py` holds 600 sessions over OPENAI_BASE_URL and prints the share of accepted answers in each hundred. A
user asks a question, gets an answer, and thanks or complains. Nothing else tells the agent what users want, and a
tenth of the users say the opposite of what they think.
"""

import argparse
import asyncio
import json
import random
import uuid
from pathlib import Path
from typing import Any, TextIO

from openai import AsyncOpenAI

# What users want of an answer, first and then: how many words it has.
RULES = {"at most eight words": range(1, 9), "a single word": range(1, 2)}
NOISE = 0.1  # the share of users who say the opposite of what they think
THANKS, COMPLAINT = "Thanks!", "No, that is not what I wanted."
THINKS_S = 3.0  # before a reply


async def session(client: AsyncOpenAI, rule: str, seed: int, number: int) -> dict[str, Any]:
    """Hold one session. `accepted`: whether the first answer follows the rule, whatever the user says."""
    chance = random.Random(f"{seed}-{number}")
    messages: list[Any] = [{"role": "user", "content": f"What is {chance.randrange(10)}+{chance.randrange(10)}?"}]
    rollout = uuid.uuid4().hex
    agent = client.with_options(default_headers={"X-Rollout-Id": rollout})
    asked = agent.chat.completions.with_raw_response
    raw = await asked.create(model="policy", messages=messages, max_tokens=24)
    answer = raw.parse().choices[0].message.content or ""
    accepted = len(answer.split()) in RULES[rule]
    await asyncio.sleep(THINKS_S)
    says = THANKS if accepted != (chance.random() < NOISE) else COMPLAINT
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": says}]
    await asked.create(model="policy", messages=messages, max_tokens=4)
    return {
        "session": number, "rollout": rollout, "rule": rule, "answer": answer, "accepted": accepted, "said": says,
        "version": int(raw.headers["X-Policy-Version"]),
    }  # fmt: skip


async def sessions(count: int, at_once: int, seed: int, out: TextIO) -> list[dict[str, Any]]:
    """Hold `count` sessions, `at_once` at the same time, and write each. The rule changes after half of them."""
    first, second = RULES
    numbers, held = iter(range(count)), list[dict[str, Any]]()

    async def work() -> None:
        for number in numbers:
            held.append(await session(client, first if number < count // 2 else second, seed, number))
            print(json.dumps(held[-1]), file=out, flush=True)

    async with AsyncOpenAI() as client:
        await asyncio.gather(*(work() for _ in range(at_once)))
    return sorted(held, key=lambda one: int(one["session"]))


def until_three_in_a_row(accepted: list[bool]) -> int | None:
    """Return how many sessions it took until three answers in a row were accepted."""
    return next((end for end in range(3, len(accepted) + 1) if all(accepted[end - 3 : end])), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("lightning-sessions.jsonl"))
    options = parser.parse_args()
    with options.out.open("w") as out:
        held = asyncio.run(sessions(options.sessions, options.at_once, options.seed, out))
    for rule in RULES:
        accepted = [one["accepted"] for one in held if one["rule"] == rule]
        hundreds = [accepted[start : start + 100] for start in range(0, len(accepted), 100)]
        shares = ", ".join(f"{sum(each) / len(each):.0%}" for each in hundreds)
        first = until_three_in_a_row(accepted)
        when = f"three in a row after {first} sessions" if first else "never three in a row"
        print(f"{rule}: {shares} accepted; {when}")


if __name__ == "__main__":
    main()
