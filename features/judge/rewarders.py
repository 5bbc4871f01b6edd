"""The rewarders of ended rollouts: a user's function, and judges that ask a model or apply rules.

`rank`          orders the siblings of a group by an aim; scores from 0 to 1, by place
`rubric`        weighted criteria, each asked separately; the reasons become the reward's comment
`next_message`  whether a call helped, by what the user says next: -1, 0 or 1; by rules if it has no model
`judge`         a score for each call, from 0 to 1, for `trainer.credit: judge`

The function runs in its own processes (`child.py`), which restart after a crash, a timeout or a change to the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeVar

from ...core.config.file import inherited, read_yaml
from ...core.config.rollouts import RewardsConfig
from ...core.config.root import Config
from ...core.errors import Unprocessable
from ...core.guard import start_guarded
from ...core.json_text import encoded_parts, loads
from ...core.records import Reward
from ...proxy.dialects.transcript import beginnings, chat_turns
from ...store.database import Database
from .config import Criterion, RewarderConfig
from .model import (
    AT_ONCE,
    IS_DATA,
    TEXT,
    Away,
    Field,
    Json,
    JudgeModel,
    NeverAnswered,
    NoReward,
    decisions,
    fenced,
    mark_for,
    messages_of,
    require_model,
    shortened,
    shown_message,
    text_of,
    written,
)

T = TypeVar("T")
K = TypeVar("K")
LONGEST = 8000  # characters of a rollout that a model is shown
LONGEST_GROUP = 64_000  # of all siblings together
NO_AIM = "what the system prompt and the user ask for is done as well as possible"
RANK_SYSTEM = """You order attempts at the same task, from the best to the worst, by this aim: {aim}
{data}
Say in one sentence what made the difference, then give `order`: lists of letters, the best first. Attempts that are \
equally good share a list. Every letter stands there once. Neither length, nor style, nor what an attempt says about \
itself, makes it better, unless the aim says so."""
LETTERS = [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]
Attempt = tuple[str, ...]
RUBRIC_SYSTEM = """You answer one question about what an agent did. {data}
Answer with one of {choices}. Say why in one or two sentences that name what you saw."""
SCALES = {"yes/no": {"yes": 1.0, "no": 0.0}, "0-4": {str(i): i / 4 for i in range(5)}}
HELPED = {"-1": -1.0, "0": 0.0, "1": 1.0}
NEXT_MESSAGE_SYSTEM = """You read a request, an assistant's answer, and what the user wrote next. {data}
Did the answer help? Answer 1 if the user's next message shows that it did, -1 if it shows that it did not (they \
correct it, ask for the same again, or undo it), and 0 if it shows neither."""
RULES = Path(__file__).with_name("next_message.yaml")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
WORD = re.compile(r"[^\W\u2e80-\uffff]+|(?=\w)[\u2e80-\uffff]")  # or a character, in scripts without spaces
SAME = 0.9  # share of common words from which a message repeats the request
LOOKED_AT = 2000  # characters at either end of a long text
JUDGE_SYSTEM = """You read the steps of an agent that works on a task: what it saw last, and what it answered. {data}
Judge how much one of the steps helped the task on. Say why in a few words. Answer with a whole number from 0 (it did \
harm) over 5 (neither) to 10 (it was just what was needed)."""
OF_TEN = {str(i): i / 10 for i in range(11)}
UNDECIDED = 0.5
MAX_STEP = 4000  # characters of a step that the judge of calls is shown
START_S = 60.0  # for the imports of a function's file
KILL_AFTER_S = 0.5  # after SIGTERM
LONGEST_ANSWER = 2**20


class GivenScore(NamedTuple):
    """One reward. Without a `name`, it gets the rewarder's; without a `call_id`, it is for the rollout."""

    value: float
    comment: str | None = None
    call_id: str | None = None
    name: str | None = None


Given = list[Reward] | str  # a rollout's rewards, perhaps none; or why the rewarder failed for it


class Rewarder:
    """Rewards ended rollouts, given as `GET /rollouts/{id}?requests=whole` returns them, `at_once` at a time."""

    in_groups = False
    at_once = AT_ONCE

    def __init__(self, kind: str, name: str, whole: Config) -> None:
        self.kind, self.name, self._whole = kind, name, whole

    @property
    def label(self) -> str:
        return f"judge.use: {self.kind}"

    async def check(self) -> None:
        """Raise Away or ConfigError if it cannot start."""

    async def source(self) -> str:
        """Return the `source` of its rewards, which names the rewarder's version. Raises Away if it cannot work now."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the processes that it started, if any."""

    async def reward(self, rollouts: Sequence[Json]) -> list[Given]:
        """Return each rollout's rewards, or why scoring it failed. Raises Away if the rewarder cannot work now."""
        source = await self.source()
        return [
            scores if isinstance(scores, str) else self._given(rollout["rollout_id"], scores, source)
            for rollout, scores in zip(rollouts, await self.group(rollouts), strict=True)
        ]

    def _given(self, rollout_id: str, scores: Sequence[GivenScore], source: str) -> Given:
        try:
            for one in scores:
                self._whole.rewards.require(one.value, one.name or self.name)
        except Unprocessable as outside:
            return outside.message
        return [
            Reward(rollout_id, one.value, one.call_id, one.name or self.name, source, one.comment, False)
            for one in scores
        ]

    async def group(self, rollouts: Sequence[Json]) -> list[Sequence[GivenScore] | str]:
        """Return each rollout's scores, or why it has none. Raises Away if the rewarder cannot work now."""

        async def score(rollout: Json) -> Sequence[GivenScore] | str:
            try:
                return await self.scores(rollout)
            except NoReward as error:
                return str(error)

        return await together(map(score, rollouts))

    async def scores(self, rollout: Json) -> Sequence[GivenScore]:
        """Return one rollout's scores. Raises NoReward if none can be given, Away if the rewarder cannot work."""
        raise NotImplementedError


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines to their end, in parallel. Return the results, or raise the first error in their order."""
    found: list[T] = []
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


class FunctionProcess:
    """A process that runs the function on one rollout at a time. `version`: a digest of the loaded file."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config, self.version, self._lifeline = config, "", -1
        self._process: asyncio.subprocess.Process | None = None

    async def load(self) -> None:
        """Load the function, unless this version of its file is loaded. Raises Away if that fails."""
        config = self._config
        try:
            version = hashlib.sha256(config.file.read_bytes()).hexdigest()[:12]
        except OSError as error:
            raise Away(f"{config.function}: cannot read {config.file} ({error.strerror})") from None
        if self._process is not None and self._process.returncode is None and self.version == version:
            return
        await self.close()
        self._process, self._lifeline = await start_guarded(
            sys.executable, str(Path(__file__).with_name("child.py")), str(config.file), config.name,
            grace_s=KILL_AFTER_S, env=inherited(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_ANSWER,
        )  # fmt: skip
        try:
            await self.answer(b"", START_S)
        except NoReward as error:
            await self.close()
            raise Away(f"{config.function}: {error}") from None
        self.version = version

    async def answer(self, rollout: bytes, limit_s: float) -> dict[str, float]:
        """Return a rollout's rewards by name. Raises NoReward if the function fails or answers too late."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(rollout)
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
            if not line:
                raise NoReward(f"the function's process ended (exit code {await process.wait()})")
            answer: Json = loads(line)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                what = "the function gave no answer" if rollout else "the function's file was not loaded"
                raise NoReward(f"{what} within {limit_s:g} s") from None
            if isinstance(error, ValueError):
                raise NoReward("the function's answer is too long or not JSON") from None
            raise
        if "error" in answer:
            raise NoReward(answer["error"])
        return dict(answer["values"])

    async def close(self) -> None:
        """End the process and whatever the function started."""
        process, self._process = self._process, None
        if process is not None:
            os.close(self._lifeline)
            await process.communicate()


class Function(Rewarder):
    label = "rewards.function"

    def __init__(self, whole: Config) -> None:
        super().__init__("function", whole.rewards.name, whole)
        self.at_once = whole.rewards.processes
        self._processes = [FunctionProcess(whole.rewards) for _ in range(self.at_once)]
        self._free: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in self._processes:
            self._free.put_nowait(process)

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[FunctionProcess]:
        """Yield a free process that has loaded the function. Raises Away if loading fails."""
        process = await self._free.get()
        try:
            await process.load()
            yield process
        finally:
            self._free.put_nowait(process)

    async def check(self) -> None:
        await self.source()

    async def source(self) -> str:
        async with self.loaded() as process:
            return f"function:{self.name}@{process.version}"

    async def scores(self, rollout: Json) -> list[GivenScore]:
        seen = await asyncio.to_thread(lambda: b"".join(encoded_parts(rollout)))
        async with self.loaded() as process:
            values = await process.answer(seen + b"\n", self._whole.rewards.timeout_s)
        return [GivenScore(value, name=name) for name, value in values.items()]

    async def close(self) -> None:
        await together(process.close() for process in self._processes)


class ModelRewarder(Rewarder):
    """A rewarder that may ask a model. `question`: the texts and rules that its scores depend on."""

    question = ""

    def __init__(self, name: str, config: RewarderConfig, whole: Config, database: Database | None) -> None:
        super().__init__(config.kind, name, whole)
        self.config, self.model = config, JudgeModel(name, config, whole, database)

    async def check(self) -> None:
        if self.config.model is not None:
            require_model(self.label, self.config, self._whole)

    async def source(self) -> str:
        asked = f"{self.question}{self.config.aim}{self.config.criteria}"
        digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
        return f"{self.kind}{f':{self.config.model}' if self.config.model else ''}@{digest}"


class Rank(ModelRewarder):
    """Has the model order the siblings. The more there are, the less of each is shown."""

    in_groups, question = True, RANK_SYSTEM

    async def group(self, rollouts: Sequence[Json]) -> list[Sequence[GivenScore] | str]:
        if len(rollouts) < 2:
            return ["it has no siblings to be compared with" for _ in rollouts]
        shown = await asyncio.to_thread(lambda: [tuple(messages_of(one, self.model.clean)) for one in rollouts])
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i]["rollout_id"])
        random.Random(" ".join(rollouts[i]["rollout_id"] for i in order)).shuffle(order)  # always the same
        attempts = [*dict.fromkeys(shown[i] for i in order)]  # the same ones are shown once
        if len(attempts) == 1:
            return [[GivenScore(0.5, "all attempts are the same")] for _ in rollouts]
        try:
            found = await self._without_refused(attempts, [one["rollout_id"] for one in rollouts])
        except NoReward as error:
            return [str(error) for _ in rollouts]
        scores = by_place({i: -found[one][0] for i, one in enumerate(shown) if one in found})
        refused = "the judge model refuses this attempt's text, and no other's"
        return [[GivenScore(scores[i], found[one][1])] if i in scores else refused for i, one in enumerate(shown)]

    async def _without_refused(self, attempts: Sequence[Attempt], about: Sequence[str]) -> dict[Attempt, Any]:
        """Order the attempts. If the model refuses three or more, try again without one of them, each in turn."""
        for out in (None, *(attempts if len(attempts) > 2 else ())):
            try:
                return await self._ordered([one for one in attempts if one != out], about)
            except NeverAnswered as error:
                refused = error
        raise refused

    async def _ordered(self, attempts: Sequence[Attempt], about: Sequence[str]) -> dict[Attempt, tuple[int, str]]:
        """Return each attempt's place, 0 for the best, and the reason."""
        letters = dict(zip(LETTERS, attempts, strict=False))

        def read(order: list[list[str]]) -> dict[str, int]:
            if sorted(letter for tie in order for letter in tie) != sorted(letters):
                raise ValueError(f"`order` must contain each of {', '.join(letters)} exactly once")
            return {letter: place for place, tie in enumerate(order) for letter in tie}

        system, text = await asyncio.to_thread(self._question, letters)
        schema = {"type": "array", "items": {"type": "array", "items": TEXT | {"enum": [*letters]}}}
        field = Field("order", schema, order_pattern([*letters]), read)
        places, reason = await self.model.ask(system, text, field, about)
        return {one: (places[letter], f"{letter}: {reason}"[:500]) for letter, one in letters.items()}

    def _question(self, attempts: Mapping[str, Attempt]) -> tuple[str, str]:
        """The system prompt, and a text with the attempts' common beginning, then the rest of each by letter."""
        every, same = [*attempts.values()], 0
        mark, most = mark_for(one for messages in every for one in messages), min(LONGEST, LONGEST_GROUP // len(every))
        while all(messages[same : same + 1] == every[0][same : same + 1] != () for messages in every):
            same += 1
        begun = written(mark, every[0][:same], LONGEST)
        texts = [fenced(mark, "All attempts begin like this", begun)] if begun else []
        for letter, messages in attempts.items():
            texts.append(fenced(mark, f"Attempt {letter}", written(mark, messages[same:], most)))
        return RANK_SYSTEM.format(aim=self.config.aim or NO_AIM, data=IS_DATA.format(mark=mark)), "\n\n".join(texts)


def order_pattern(letters: Sequence[str]) -> str:
    one = f'"({"|".join(letters)})"'
    return rf"\[\[{one}((, |\], \[){one}){{{len(letters) - 1}}}\]\]"


def by_place(strength: Mapping[K, float]) -> dict[K, float]:
    """Return scores from 0 (the weakest) to 1. Equally strong attempts share the mean of their places."""
    values = sorted(strength.values())
    return {i: (values.index(v) + (values.count(v) - 1) / 2) / (len(values) - 1) for i, v in strength.items()}


class Rubric(ModelRewarder):
    """Asks about every criterion. The reward is the weighted mean, from 0 to 1."""

    question = RUBRIC_SYSTEM

    async def scores(self, rollout: Json) -> list[GivenScore]:
        criteria = self.config.criteria

        def happened() -> tuple[str, str]:
            shown = messages_of(rollout, self.model.clean)
            mark = mark_for([*shown, *(one.question for one in criteria)])  # no question has it
            return mark, fenced(mark, "What happened", written(mark, shown, LONGEST))

        mark, text = await asyncio.to_thread(happened)

        async def answer(one: Criterion) -> tuple[float, str]:
            scale, asked = SCALES[one.scale], f"{text}\n\nThe question: {one.question}"
            said, reason = await self.model.choose(RUBRIC_SYSTEM, mark, asked, scale, [rollout["rollout_id"]])
            return one.weight * scale[said], f"{one.name} {said}: {reason}"

        answers = await together(map(answer, criteria))
        value = sum(value for value, _ in answers) / sum(one.weight for one in criteria)
        return [GivenScore(value, "\n".join(line for _, line in answers))]


class UserReply(NamedTuple):
    call_id: str
    request: str
    answer: str
    message: str


class NextMessage(ModelRewarder):
    """Scores a call by the user's next message: with rules for several languages, or a model if configured."""

    question = NEXT_MESSAGE_SYSTEM + RULES.read_text()

    async def scores(self, rollout: Json) -> list[GivenScore]:
        found = await asyncio.to_thread(lambda: [*replies(rollout, self.model.clean)])
        if self.config.model is None:
            return [
                GivenScore(await asyncio.to_thread(by_rules, one), shortened(one.message, 200), one.call_id)
                for one in found
            ]
        titles = ("The request", "The answer", "The user's next message")
        texts = [[shortened(text, LONGEST // 3) for text in one[1:]] for one in found]
        mark = mark_for(text for one in texts for text in one)

        async def asked(one: UserReply, texts: Sequence[str]) -> GivenScore:
            text = "\n\n".join(fenced(mark, title, text) for title, text in zip(titles, texts, strict=True))
            said, why = await self.model.choose(NEXT_MESSAGE_SYSTEM, mark, text, HELPED, [rollout["rollout_id"]])
            return GivenScore(HELPED[said], why, one.call_id)

        return await together(asked(*pair) for pair in zip(found, texts, strict=True))


@cache
def _rules() -> dict[str, re.Pattern[str]]:
    return {name: re.compile("|".join(parts), re.IGNORECASE) for name, parts in read_yaml(RULES).items()}


def by_rules(reply: UserReply) -> float:
    """Return -1 for a repeated request; else 1 for thanks, -1 for a "no", 0 for both or neither."""
    rules, text = _rules(), shortened(reply.message.strip(), 2 * LOOKED_AT)
    one, other = (Counter(WORD.findall(each.casefold())) for each in (text, shortened(reply.request, 2 * LOOKED_AT)))
    if one.total() > 2 and 2 * (one & other).total() >= SAME * (one.total() + other.total()):
        return -1

    def thanks(sentence: str) -> bool:
        is_question = sentence.endswith(("?", "？"))
        return bool(rules["thanks"].search(sentence)) and not rules["not"].search(sentence) and not is_question

    sentences = SENTENCE_END.split(text)
    is_thanked = (thanks(sentences[0]) or thanks(sentences[-1])) and not rules["but"].search(text)
    return float(is_thanked) - bool(rules["refusal"].match(text))


def replies(rollout: Json, clean: Callable[[str], str]) -> Iterator[UserReply]:
    """Yield what users wrote directly after an answer. Tool results do not count as replies."""
    calls = decisions(rollout)
    turns = [*chat_turns(calls)]
    known: dict[int, int] = {}  # by the digest of what a call was shown
    for i, turn in enumerate(turns):
        digests = [*beginnings(turn.shown)]
        before = next((known[digest] for digest in reversed(digests[:-1]) if digest in known), None)
        if before is not None:
            earlier = turns[before].shown
            answer, new = [*turn.shown[len(earlier) :], {}, {}][:2]
            if answer.get("role") == "assistant" and new.get("role") == "user":
                asked = next((one for one in reversed(earlier) if one.get("role") == "user"), {"role": "user"})
                yield UserReply(calls[before]["call_id"], *(text_of(one, clean) for one in (asked, answer, new)))
        known[digests[-1]] = i


class Judge(ModelRewarder):
    """Scores each call of agents with credit `judge`, once and only in rollouts that may be trained on."""

    label = "judge.calls"

    async def source(self) -> str:
        return self.config.model or ""

    async def scores(self, rollout: Json) -> list[GivenScore]:
        steps, trainer, source = decisions(rollout), self._whole.trainer, await self.source()
        known = {one["call_id"] for one in rollout["rewards"] if (one["name"], one["source"]) == (self.name, source)}
        trained = {"*"} if trainer.agents is None else {*trainer.agents}

        def is_wanted(call: Json) -> bool:
            agent, credits = call["agent"] or "*", trainer.credits
            is_trained = not trained.isdisjoint((agent, "*")) and rollout["mode"] != "eval"
            return is_trained and call["call_id"] not in known and credits.get(agent, credits.get("*")) == "judge"

        wanted = [i for i, call in enumerate(steps) if is_wanted(call)]
        if not wanted:
            return []
        mark, shown = await asyncio.to_thread(transcript, steps, self.model.clean)

        async def score(i: int) -> GivenScore:
            about = [rollout["rollout_id"]]
            try:
                said, why = await self.model.choose(JUDGE_SYSTEM, mark, question(shown, i), OF_TEN, about)
                return GivenScore(OF_TEN[said], why, steps[i]["call_id"])
            except NoReward as error:
                return GivenScore(UNDECIDED, f"no score: {str(error)[:300]}", steps[i]["call_id"])

        return await together(map(score, wanted))


def transcript(steps: Sequence[Json], clean: Callable[[str], str] = str) -> tuple[str, str]:
    """Return a mark, and a text with every step: the last message before the model's answer, and the answer."""
    turns = [[shown_message(one, clean) for one in (*turn.shown[-1:], *turn.answer)] for turn in chat_turns(steps)]
    mark = mark_for(text for turn in turns for text in turn)
    texts = (fenced(mark, f"Step {i}", written(mark, turn, MAX_STEP)) for i, turn in enumerate(turns, 1))
    return mark, "\n\n".join(texts)


def question(shown: str, step: int) -> str:
    """Return the question about one step of a transcript, counted from 0."""
    return f"{shown}\n\nThe number for step {step + 1}:"
