"""A planner and an executor, each an agent with a prompt of its own, and the board that they play on.

OPENAI_BASE_URL says which endpoint serves them. EXECUTOR_MODEL is the model that the executor asks for: by default the
one that the planner trains.
"""

import json
import os
import urllib.request

from openai import OpenAI

ROOMS = 12  # a route is so many rooms long; every room is a letter


def say(agent: str, model: str, prompt: str) -> str:
    """One agent's turn; its name in the header is all that sets it apart."""
    completion = OpenAI(default_headers={"X-Agent-Name": agent}).chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=ROOMS,
        temperature=1,
    )
    return completion.choices[0].message.content or ""


def play(coins: str) -> tuple[str, str]:
    """The route that the planner wrote, and the rooms that the executor then went to."""
    route = say("planner", "policy", f"The rooms {' '.join(coins)} hold coins. Write a route of {ROOMS} letters.")
    executor = os.environ.get("EXECUTOR_MODEL", "policy")
    return route, say("executor", executor, f"Walk this route and write each room that you enter: {route}")


def found(path: str, coins: str) -> float:
    """The share of a path's rooms that hold a coin."""
    rooms = path.replace(" ", "")[:ROOMS]
    return sum(room in coins for room in rooms) / ROOMS


def post_reward(reward: float, comment: str) -> None:
    """Tell the proxy what the rollout was worth, to both agents together."""
    body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward, "source": "env", "comment": comment}
    request = urllib.request.Request(
        os.environ["LIGHTNING_URL"] + "/reward",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def main() -> None:
    coins = json.loads(os.environ["LIGHTNING_TASK"])["coins"]
    route, walk = play(coins)
    reward = (found(route, coins) + found(walk, coins)) / 2
    post_reward(reward, comment=f"planned {route!r}, went {walk!r}"[:200])


if __name__ == "__main__":
    main()
