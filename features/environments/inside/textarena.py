"""The kind `textarena`: games in which the policy plays one seat, and a program or a model plays every other seat."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .play import HERE, ONLY_RECORDED, Arguments, Json, Scores, Wrong, digest, require_known

if TYPE_CHECKING:
    from ....client import Rollout

REQUIRES = ("textarena==0.7.4", "nltk", "numpy", "openai>=2,<4")
PACKAGES = ("textarena", "openai", "openai.resources")
MOST_PLAYERS = 15
PLAYER = "player-"
PROMPT = (
    "You are a competitive game player. Make sure you read the game instructions carefully, and always follow the "
    "required format."
)  # textarena's own
MOVE = re.compile(r"\[[^\[\]\n]+\]")


def names() -> Iterator[tuple[str, str]]:
    from textarena.envs.registration import ENV_REGISTRY

    for name, spec in sorted(ENV_REGISTRY.items()):
        settings = ", ".join(f"{key}={value}" for key, value in spec.kwargs.items())
        yield name, f"{str(spec.entry_point).rpartition(':')[2]} {settings}"[:100]


def tasks(name: str, given: Arguments) -> Iterator[Json]:
    """Yield games with different seeds.

    `players`: how many (default: the fewest that the game allows). `seat`: the policy's (default: each in turn).
    `opponent`: "random", a model's name, or FILE.py:FUNCTION. `system`: the system prompt (default: textarena's).
    """
    opponent, system = given.take("opponent", "random"), given.take("system", PROMPT)
    players, seat = given.take("players", None), given.take("seat", None)
    players = _taken(name, given.left, range(1, MOST_PLAYERS + 1) if players is None else [players])
    if seat is not None and seat not in range(players):
        raise Wrong(f"seat must be 0 to {players - 1}: this game of {name} has {players} players; got {seat!r}")
    _program(opponent)
    seeds = (n for n in range(given.seed * 1_000_000, (given.seed + 1) * 1_000_000) if given.has(f"{name} {n}"))
    kind = digest(repr((sorted(given.left.items()), players, opponent, system)))
    for n in range(given.tasks):
        own, seed = n % players if seat is None else seat, next(seeds)
        yield {
            "task_id": f"{name}-{seed}-{own}-{kind[:8]}", "game": name, "settings": given.left, "players": players,
            "seed": seed, "seat": own, "opponent": opponent, "system": system,
        }  # fmt: skip


def play(task: Json, run: Rollout) -> Scores:
    """Play the game to its end. Seat N is named `player-N` if the policy plays it, or else `opponent-N`."""
    game = _made(task["game"], task["settings"])
    game.reset(num_players=task["players"], seed=task["seed"])
    program, rng = _program(task["opponent"]), random.Random(task["seed"])
    done = False
    while not done:
        player, seen = game.get_observation()
        if player == task["seat"] or program is None:
            action = _ask(run, player, task, str(seen))
        else:
            action = program(str(seen), player, rng)
        done, _ = game.step(action=action)
    rewards, info = game.close()
    seats = {_agent(player, task): float(reward) for player, reward in rewards.items()}
    own = info[task["seat"]]
    if program is not None and any(info[player].get("invalid_move") for player in info if player != task["seat"]):
        raise RuntimeError("the opponent made an illegal move; set `opponent` to a function that plays by the rules")
    measured = {name: float(own[name]) for name in ("turn_count", "invalid_move") if name in own}
    return Scores({name: reward for name, reward in seats.items() if name.startswith(PLAYER)}, seats | measured)


def _model(player: int, task: Json) -> str:
    """Return the model that plays a seat, if no program does."""
    return str(task["model"] if player == task["seat"] else task["opponent"])


def _agent(player: int, task: Json) -> str:
    return f"{PLAYER if _model(player, task) == task['model'] else 'opponent-'}{player}"


def _ask(run: Rollout, player: int, task: Json, seen: str) -> str:
    """Return a model's move. Moves of models other than the policy are recorded but never trained on."""
    agent, model = _agent(player, task), _model(player, task)
    before = [{"role": "system", "content": task["system"]}] if task["system"] else []
    messages = [*before, {"role": "user", "content": seen}]
    llm = run.as_agent(agent).openai(default_headers={} if agent.startswith(PLAYER) else ONLY_RECORDED)
    answer = llm.chat.completions.create(model=model, messages=messages, **task["sampling"])
    return (answer.choices[0].message.content or "").strip()


def _program(opponent: str) -> Callable[[str, int, random.Random], str] | None:
    """Return the function that plays the other seats; None if a model does."""
    file, colon, name = opponent.rpartition(":")
    if opponent == "random":
        return _random_move
    if not (colon and file.endswith(".py")):
        return None
    if not (HERE / file).is_file() or name not in (found := runpy.run_path(str(HERE / file))):
        raise Wrong(f"opponent: there is no file {HERE / file} with a function {name}")
    return found[name]


def _random_move(seen: str, player: int, rng: random.Random) -> str:
    """A random move from the last line that has moves in brackets, or else the last character of the text."""
    lines = [moves for line in seen.splitlines() if (moves := MOVE.findall(line))]
    return rng.choice(lines[-1]) if lines else seen[-1:]


def _taken(name: str, settings: Json, numbers: Sequence[int]) -> int:
    """Return the first of these numbers of players that the game allows. Raise Wrong if it allows none."""
    for players in numbers:
        try:
            _made(name, settings).reset(num_players=players, seed=0)
        except (AssertionError, ValueError) as error:
            last = error
        else:
            return players
    tried = " to ".join(map(str, sorted({numbers[0], numbers[-1]})))
    raise Wrong(f"{name} cannot be played by {tried} players: {last}")


def _made(name: str, settings: Json) -> Any:
    import nltk
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    require_known(name, ENV_REGISTRY, "game")
    nltk.download = _fetch_nothing
    return textarena.make(name, **settings)


def _fetch_nothing(wanted: str | list[str], **_: Any) -> bool:
    """Stand in for nltk.download, which games call on import. Raises Wrong if data must be downloaded first."""
    import nltk

    for one in [wanted] if isinstance(wanted, str) else wanted:
        if not any(next(Path(path).glob(f"*/{one}*"), None) for path in nltk.data.path):
            where = Path(sys.prefix) / "nltk_data"
            fetch = f"{sys.executable} -m nltk.downloader -d {where} {one}"
            raise Wrong(f"this game needs NLTK's {one}, which is not downloaded automatically; run `{fetch}`")
    return True
