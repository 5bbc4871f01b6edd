"""CONTRACT.md, section 4: a trainer that is killed at any moment goes on from there, and agents notice nothing."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract.model import TRAINER, Faulty, ModelVllm, ask, by_weights, play, versions
from contract.system import Forked, Proxy, in_this_process
from support.models import save_small_model

KILLED = -signal.SIGKILL
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(params=["merged", "lora"])
def proxy(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Proxy]:
    policy = {"model": str(model), "publish": request.param, "keep_versions": 2}
    trainer = TRAINER | {"keep_checkpoints": 2, "collapse": {"action": "off"}}
    with in_this_process(tmp_path, ModelVllm(model), policy=policy, trainer=trainer) as one:
        yield one


class Agent(threading.Thread):
    """Asks again and again, in a new rollout each time, and remembers what was not answered."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self.proxy, self.wrong, self.stopped = proxy, list[str](), threading.Event()

    def run(self) -> None:
        for turn in itertools.count():
            answer = ask(self.proxy, f"agent-{turn}", "agents", mode="eval")
            if answer.status != 200:
                self.wrong.append(f"{answer.status} {answer.body!r}")
            if self.stopped.wait(0.1):
                return


Kill = Callable[[Proxy, int], bool]


def before_a_change(proxy: Proxy, number: int) -> bool:
    """Let a trainer be killed before its nth change of a file; False if it makes fewer."""
    done = Forked(proxy, "train", "--once", killed_at=number).wait()
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode == KILLED


def at_a_request(proxy: Proxy, number: int) -> bool:
    """Let a trainer be killed at its nth request to load, name or verify weights; False if it makes fewer."""
    return killed_when(proxy, lambda asked: len(asked) == number)


def killed_when(proxy: Proxy, due: Callable[[list[str]], bool]) -> bool:
    """Let a trainer be killed when it is `due` by what it asked the model's server for; False if it never is."""
    assert proxy.vllm is not None
    asked: list[str] = []
    trainer = Forked(proxy, "train", "--once")

    def before(path: str) -> None:
        if asked or path != COMPLETIONS:  # which the proxy asks for, too
            asked.append(path)
        if due(asked):
            trainer.signal(signal.SIGKILL)

    proxy.vllm.before = before
    done = trainer.wait()
    proxy.vllm.before = lambda path: None
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode == KILLED


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kill", "every"),
    [
        pytest.param(before_a_change, 7, id="a change"),
        pytest.param(at_a_request, 3, id="a request"),
        pytest.param(before_a_change, 1, id="each change", marks=pytest.mark.long),
        pytest.param(at_a_request, 1, id="each request", marks=pytest.mark.long),
    ],
)
def test_after_a_kill_each_rollout_is_trained_on_once_and_a_version_is_one_set_of_weights(
    proxy: Proxy, kill: Kill, every: int
) -> None:
    agent = Agent(proxy)
    agent.start()
    kills = 0
    for step in itertools.count(1):
        names = play(proxy, f"r{step}")
        killed = kill(proxy, 1 + every * (step - 1))
        done = proxy.run("train", "--once")
        assert done.returncode == 0, done.stderr
        found = [proxy.rollout(name) for name in names]
        assert {(rollout["step"], rollout["dropped"]) for rollout in found} == {(step, None)}
        (last, *earlier) = proxy.get("/policy/steps?limit=1000")["data"]
        assert (last["step"], last["metrics"]["rollouts_trained"], len(earlier)) == (step, len(names), step - 1)
        assert "publish_s" in last["metrics"]
        live = proxy.get("/policy")["live_version"]
        assert (versions(proxy)[live]["step"], versions(proxy)[live]["verified"]) == (step, True)
        assert {version["status"] for version in versions(proxy).values()} <= {"live", "ready", "failed"}
        assert ask(proxy, f"after-{step}", "after", mode="eval").headers["x-policy-version"] == str(live)
        if not killed:
            break
        kills += 1
    agent.stopped.set()
    agent.join()
    assert kills >= 2 and agent.wrong == []
    weights = by_weights(proxy)
    assert {len(prints) for prints in weights.values()} == {1}, weights
    assert len(set.union(*weights.values())) == len(weights) > 1


def test_weights_that_a_killed_trainer_did_not_verify_are_verified_by_the_next_one(proxy: Proxy) -> None:
    names = play(proxy, "first")
    assert isinstance(proxy.vllm, ModelVllm)
    proxy.vllm.fault = Faulty.STALE
    assert killed_when(proxy, lambda asked: asked[-1:] == [COMPLETIONS])
    assert not versions(proxy)[1]["verified"]
    assert proxy.run("train", "--once").returncode == 1
    assert proxy.get("/policy")["live_version"] == 0
    assert "live" not in {version["status"] for number, version in versions(proxy).items() if number}
    proxy.vllm.fault = None
    assert proxy.run("train", "--once").returncode == 0
    live = versions(proxy)[proxy.get("/policy")["live_version"]]
    assert (live["step"], live["verified"], {proxy.rollout(name)["step"] for name in names}) == (1, True, {1})
