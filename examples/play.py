"""One rollout of an example: its agent on the task that `lightning-proxy run` hands over, then the reward.

Run with the example's directory on PYTHONPATH: `agent` and `tasks` are that directory's own.
"""

import json
import os
import urllib.request

import agent
import tasks


def post_reward(reward: float, comment: str) -> None:
    """Tell the proxy what the rollout was worth."""
    body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward, "source": "env", "comment": comment}
    request = urllib.request.Request(
        os.environ["LIGHTNING_URL"] + "/reward",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def main() -> None:
    task = json.loads(os.environ["LIGHTNING_TASK"])
    post_reward(*tasks.score(task, agent.solve(task)))


if __name__ == "__main__":
    main()
