"""The kind `reasoning_gym`: questions from its generators, each answered in one call and scored by `score_answer`."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from .play import HELD_OUT, Arguments, Json, Scores, Wrong, digest, require_known

if TYPE_CHECKING:
    from ....client import Rollout

REQUIRES = ("reasoning-gym==0.1.25", "openai>=2,<4")
PACKAGES = ("reasoning_gym", "openai", "openai.resources")
DRAWS = (2, 20)  # questions drawn per task: at first, and if too many are equal; a few generators are slow


def names() -> Iterator[tuple[str, str]]:
    from reasoning_gym.factory import DATASETS

    for name, (generator, _) in sorted(DATASETS.items()):
        about = generator.__doc__ or getattr(inspect.getmodule(generator), "__doc__", None) or ""
        yield name, about.strip().partition("\n")[0]


def tasks(name: str, given: Arguments) -> Iterator[Json]:
    """Yield tasks with different questions.

    `system`: one of reasoning-gym's system prompts; "" for none, and then the whole answer is scored. `shots`: how many
    solved questions come first, none of which is a task.
    """
    from reasoning_gym.utils import SYSTEM_PROMPTS

    system, shots = given.take("system", "default"), given.take("shots", 0)
    if shots < 0:
        raise Wrong(f"shots must be 0 or more, got {shots}")
    if system:
        require_known(system, SYSTEM_PROMPTS, "system prompt")
    before = [{"role": "system", "content": SYSTEM_PROMPTS[system]}] if system else []
    for draws in DRAWS:
        settings = {**given.left, "seed": given.seed, "size": draws * (given.tasks + shots) * HELD_OUT}
        questions = _questions(_generator(name, settings))
        shown = [*before, *(message for _, entry in islice(questions, shots) for message in _solved(entry, system))]
        own = list(islice((one for one in questions if given.has(one[1]["question"])), given.tasks))
        if len(own) == given.tasks:
            break
    for index, entry in own:
        yield {
            "task_id": f"{name}-{digest(entry['question'])}",
            "messages": [*shown, {"role": "user", "content": entry["question"]}],
            "index": index, "generator": name, "settings": settings, "tagged": bool(system),
        }  # fmt: skip


def _solved(entry: Json, system: str) -> list[Json]:
    if entry["answer"] is None:
        raise Wrong("shots must be 0: this generator stores no answers, because many are right")
    solved = f"<answer>{entry['answer']}</answer>" if system else entry["answer"]
    return [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": solved}]


def play(task: Json, run: Rollout) -> Scores:
    """Call the model once and score its answer. Measures `format` (it has the tags) and `unscored` (scoring failed)."""
    from reasoning_gym.utils import extract_answer

    generator = _generator(task["generator"], task["settings"])
    entry = _entry(generator, task["index"])
    if entry["question"] != task["messages"][-1]["content"]:
        raise RuntimeError(f"{task['generator']} no longer generates this task's question: make the tasks again")
    asked = run.openai().chat.completions.create(model=task["model"], messages=task["messages"], **task["sampling"])
    answer = (asked.choices[0].message.content or "").strip()
    found = extract_answer(answer) if task["tagged"] else answer
    measured = {"format": float(found is not None)} if task["tagged"] else {}
    try:
        return Scores({"": float(generator.score_answer(found, entry))}, measured)
    except Exception:  # some generators raise if an answer has an unexpected form
        return Scores({"": 0.0}, measured | {"unscored": 1.0})


def _generator(name: str, settings: Json) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    require_known(name, DATASETS, "generator")
    known = sorted({field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"})
    if unknown := sorted(settings.keys() - {*known, "seed", "size"}):
        raise Wrong(f"--environment-args has unknown keys: {', '.join(unknown)}; {name} takes {', '.join(known)}")
    return reasoning_gym.create_dataset(name, **settings)


def _entry(generator: Any, index: int) -> Json:
    random.seed(index)  # some generators draw from it
    return generator[index]


def _questions(generator: Any) -> Iterator[tuple[int, Json]]:
    seen = set()
    for index in range(len(generator)):
        entry = _entry(generator, index)
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield index, entry
