"""The kinds of rewarders that ask a model, and what makes those that the configuration names and refuses the others.

`rank`          orders the siblings of a group by an aim; scores go from 0 to 1, by place
`rubric`        weighted criteria, each asked apart with its reason; the reasons are the reward's comment
`next_message`  what the user says next tells whether the call before it helped: -1, 0 or 1
`judge`         a score of each call, from 0 to 1
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from ...core.config.file import read_yaml
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...proxy.dialects.transcript import beginnings, chat_turns
from ...store.database import Database
from .config import APIS, Criterion, JudgeConfig, RewarderConfig
from .function import Function
from .model import (
    IS_DATA,
    TEXT,
    JudgeModel,
    NeverAnswered,
    fenced,
    mark_for,
    messages_of,
    price_of,
    shortened,
    shown_message,
    text_of,
    written,
)
from .rewarder import Away, GivenScore, Json, NoReward, Rewarder, decisions, together

K = TypeVar("K")
LONGEST = 8000  # characters of a rollout that a model is shown
AT_ONCE = 8  # siblings that are ordered by one answer
NO_AIM = "what the system prompt and the user ask for is done as well as possible"
RANK_SYSTEM = """You order attempts at the same task, from the best to the worst, by this aim: {aim}
{data}
Say in one sentence what made the difference, then give `order`: lists of letters, the best first. Attempts that are \
equally good share a list. Every letter stands there once. Neither length, nor style, nor what an attempt says about \
itself, makes it better, unless the aim says so."""
Attempt = tuple[str, ...]
Places = dict[Attempt, float]  # the greater, the better
Ordered = tuple[Places, dict[Attempt, str]]  # and why
ROUNDS = 200  # until the levels of overlapping parts no longer move
RUBRIC_SYSTEM = """You answer one question about what an agent did. {data}
Answer with one of {choices}. Say why in one or two sentences that name what you saw."""
SCALES = {"yes/no": {"yes": 1.0, "no": 0.0}, "0-4": {str(i): i / 4 for i in range(5)}}
HELPED = {"-1": -1.0, "0": 0.0, "1": 1.0}
OF_TEN = {str(i): i / 10 for i in range(11)}
NEXT_MESSAGE_SYSTEM = """You read a request, an assistant's answer, and what the user wrote next. {data}
Did the answer help? Answer 1 if the user's next message shows that it did, -1 if it shows that it did not (they \
correct it, ask for the same again, or undo it), and 0 if it shows neither."""
RULES = Path(__file__).with_name("next_message.yaml")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
WORD = re.compile(r"[^\W\u2e80-\uffff]+|(?=\w)[\u2e80-\uffff]")  # or a character, where no blanks part words
SAME = 0.9  # of the words of both, for the same request again
LOOKED_AT = 2000  # characters at either end of a long text
JUDGE = "judge"
JUDGE_SYSTEM = """You read the steps of an agent that works on a task: what it saw last, and what it answered. {data}
Judge how much one of the steps helped the task on. Say why in a few words. Answer with a whole number from 0 (it did \
harm) over 5 (neither) to 10 (it was just what was needed)."""
MAX_STEP = 4000  # characters of a step that the judge of calls is shown
UNDECIDED = 0.5


def made(
    name: str, entry: RewarderConfig, config: Config, database: Database | None = None
) -> Function | ModelRewarder:
    """Return a rewarder of a configuration, which gives rewards of this name."""
    if entry.kind == "function":
        return Function(config.rewards)
    kinds = {"rank": Rank, "rubric": Rubric, "next_message": NextMessage, "judge": Judge}
    return kinds[entry.kind](name, entry, config, database)


def named(config: Config, which: str) -> tuple[str, RewarderConfig]:
    """Return the rewarder that has this name, or is the only one of this kind. Raise ConfigError."""
    rewarders = config.section(JudgeConfig).rewarders(config.rewards)
    found = [entry for entry in rewarders if entry[0] == which] or [
        entry for entry in rewarders if entry[1].kind == which
    ]
    if len(found) != 1:
        known = ", ".join(f"{entry.kind} ({name})" for name, entry in rewarders) or "none"
        raise ConfigError(f"judge.use has {'several' if found else 'no'} {which}; there is {known}")
    return found[0]


async def check(config: Config) -> None:
    """Raise ConfigError if a rewarder cannot work, or has a name that does not count."""
    rewarders = config.section(JudgeConfig).rewarders(config.rewards)
    names = [name for name, entry in rewarders if entry.kind != "judge"]
    for name, entry in rewarders:
        if entry.model is not None:
            require_model(entry, config)
        if (entry.name or len(names) > 1) and name in names and name not in config.trainer.reward_weights:
            raise ConfigError(f"judge.use: rewards named {name} have no weight: add it to trainer.reward_weights")
        rewarder = made(name, entry, config)
        try:
            await rewarder.check()
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None
        finally:
            await rewarder.close()


def require_model(entry: RewarderConfig, config: Config) -> None:
    """Raise ConfigError unless the model may be asked: elsewhere with key and budget, and knowingly if it is ours."""
    variable, budget = APIS[entry.api][1], config.section(JudgeConfig).budget
    what = f"judge.use: {entry.kind}: {entry.model}" if entry.judges else f"judge.calls: {entry.model}"
    if entry.is_elsewhere and entry.key is None:
        raise ConfigError(f"{what} needs a key: set {variable}{', or its api_key' if entry.judges else ''}")
    if entry.is_elsewhere and budget.tokens is None and budget.usd is None:
        raise ConfigError(f"{what} costs money: set judge.budget.tokens or judge.budget.usd")
    if budget.usd is not None and price_of(entry, config) is None:
        raise ConfigError(f"{what} has no price, which judge.budget.usd needs: add it to prices")
    if not entry.judges:
        return
    if _place(entry.address) == _place(f"http://127.0.0.1:{config.proxy.port}"):
        raise ConfigError(f"{what} is asked through this proxy, which would record and judge that, too: name the "
                          "model server's address")  # fmt: skip
    policy = config.policy_upstream
    ours = () if policy is None else (*policy.urls, *policy.published_to)
    if _place(entry.address) in map(_place, ours) and not entry.is_policy:
        raise ConfigError(f"{what} is the policy, and would judge itself: name another, or set is_policy: true")


def _place(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return host, parts.port


class ModelRewarder(Rewarder):
    """A rewarder that may ask a model. `question`: what its scores depend on besides the rollout."""

    question = ""

    def __init__(self, name: str, config: RewarderConfig, whole: Config, database: Database | None) -> None:
        super().__init__(name, f"judge.use: {config.kind}", config.concurrency, whole.rewards)
        self._config, self.model = config, JudgeModel(name, config, whole, database)

    async def source(self) -> str:
        asked = f"{self.question}{self._config.aim}{self._config.criteria}"
        digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
        return f"{self._config.kind}{f':{self._config.model}' if self._config.model else ''}@{digest}"


class Rank(ModelRewarder):
    """Asks for an order of up to `AT_ONCE` siblings; of larger groups, for parts that overlap."""

    in_groups, question = True, RANK_SYSTEM

    async def group(self, rollouts: Sequence[Json]) -> list[Sequence[GivenScore] | str]:
        if len(rollouts) < 2:
            return ["it has no siblings to be compared with" for _ in rollouts]
        shown = await asyncio.to_thread(lambda: [tuple(messages_of(one, self.model.clean)) for one in rollouts])
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i]["rollout_id"])
        random.Random(" ".join(rollouts[i]["rollout_id"] for i in order)).shuffle(order)  # always the same
        attempts = [*dict.fromkeys(shown[i] for i in order)]  # those that are the same are shown once
        if len(attempts) == 1:
            return [[GivenScore(0.5, "all attempts are the same")] for _ in rollouts]
        about = [one["rollout_id"] for one in rollouts]
        try:
            parts = overlapping(attempts, AT_ONCE)
            ordered = await together(self._without_refused(part, about) for part in parts)
        except NoReward as error:
            return [str(error) for _ in rollouts]
        given: list[Sequence[GivenScore] | str] = ["the judge refuses what it wrote, and that alone" for _ in rollouts]
        strength = strengths([places for places, _ in ordered])
        for i, score in by_place({i: strength[one] for i, one in enumerate(shown) if one in strength}).items():
            why = " ".join(reasons[shown[i]] for _, reasons in ordered if shown[i] in reasons)
            given[i] = [GivenScore(score, why[:500])]
        return given

    async def _without_refused(self, part: Sequence[Attempt], about: Sequence[str]) -> Ordered:
        """The order of some attempts; if it is refused, that of all but one: an attempt must not spoil others'."""
        for out in (None, *(part if len(part) > 2 else ())):
            try:
                return await self._ordered([one for one in part if one != out], about)
            except NeverAnswered as error:
                refused = error
        raise refused

    async def _ordered(self, part: Sequence[Attempt], about: Sequence[str]) -> Ordered:
        letters = dict(zip(ascii_uppercase, part, strict=False))

        def read(order: list[list[str]]) -> Places:
            if sorted(letter for tie in order for letter in tie) != [*letters]:
                raise ValueError(f"`order` has each of {', '.join(letters)} once")
            return by_place({letters[one]: -place for place, tie in enumerate(order) for one in tie})

        system, text = await asyncio.to_thread(self._question, part)
        schema = {"type": "array", "items": {"type": "array", "items": TEXT | {"enum": [*letters]}}}
        pattern = order_pattern("".join(letters))
        places, reason = await self.model.ask(system, text, about, "order", schema, pattern, read)
        return places, {attempt: f"{letter}: {reason}" for letter, attempt in letters.items()}

    def _question(self, attempts: Sequence[Attempt]) -> tuple[str, str]:
        """The system prompt, and the attempts by their letters: what all begin with, and the rest of each."""
        mark, same = mark_for(one for messages in attempts for one in messages), 0
        while all(messages[same : same + 1] == attempts[0][same : same + 1] != () for messages in attempts):
            same += 1
        begun = written(mark, attempts[0][:same], LONGEST)
        texts = [fenced(mark, "All attempts begin so", begun)] if begun else []
        for letter, messages in zip(ascii_uppercase, attempts, strict=False):
            texts.append(fenced(mark, f"Attempt {letter}", written(mark, messages[same:], LONGEST)))
        return RANK_SYSTEM.format(aim=self._config.aim or NO_AIM, data=IS_DATA.format(mark=mark)), "\n\n".join(texts)


def order_pattern(letters: str) -> str:
    """Return the pattern of an order: as many letters as there are, in lists."""
    one = f'"[{letters}]"'
    return rf"\[\[{one}((, |\], \[){one}){{{len(letters) - 1}}}\]\]"


def overlapping(attempts: Sequence[Attempt], most: int) -> list[Sequence[Attempt]]:
    """Return parts of at most so many. Each but the first shares half of its members with the one before it."""
    last, step = max(0, len(attempts) - most), most - most // 2
    return [attempts[min(i, last) :][:most] for i in range(0, last + step, step)]


def strengths(parts: Sequence[Places]) -> Places:
    """Return how strong each is: place = strength - level of the part, by least squares over all parts."""
    inside = {one: [n for n, part in enumerate(parts) if one in part] for part in parts for one in part}
    levels, found = [0.0] * len(parts), Places()
    for _ in range(ROUNDS if len(parts) > 1 else 1):
        found = {one: fmean(parts[n][one] + levels[n] for n in those) for one, those in inside.items()}
        levels = [fmean(found[one] - place for one, place in part.items()) for part in parts]
    return {one: round(value, 6) for one, value in found.items()}


def by_place(strength: Mapping[K, float]) -> dict[K, float]:
    """Return scores from 0, the weakest, to 1. Those that are equally strong share the mean of their places."""
    values = sorted(strength.values())
    return {i: (values.index(v) + (values.count(v) - 1) / 2) / (len(values) - 1) for i, v in strength.items()}


class Rubric(ModelRewarder):
    """Asks about every criterion. The reward is the mean by weight, from 0 to 1."""

    question = RUBRIC_SYSTEM

    async def scores(self, rollout: Json) -> list[GivenScore]:
        criteria = self._config.criteria

        def happened() -> tuple[str, str]:
            shown = messages_of(rollout, self.model.clean)
            mark = mark_for([*shown, *(one.question for one in criteria)])  # no question has it
            return mark, fenced(mark, "What happened", written(mark, shown, LONGEST))

        mark, text = await asyncio.to_thread(happened)

        async def answer(one: Criterion) -> tuple[float, str]:
            scale, asked = SCALES[one.scale], f"{text}\n\nThe question: {one.question}"
            value, reason = await self.model.choose(RUBRIC_SYSTEM, mark, asked, scale, [rollout["rollout_id"]])
            said = next(name for name in scale if scale[name] == value)
            return one.weight * value, f"{one.name} {said}: {reason}"

        answers = await together(map(answer, criteria))
        value = sum(value for value, _ in answers) / sum(one.weight for one in criteria)
        return [GivenScore(value, "\n".join(line for _, line in answers))]


class UserReply(NamedTuple):
    """What a user wrote after a call's answer to a request."""

    call_id: str
    request: str
    answer: str
    message: str


class NextMessage(ModelRewarder):
    """Goes by rules in several languages, or asks a model if there is one."""

    question = NEXT_MESSAGE_SYSTEM + RULES.read_text()

    async def scores(self, rollout: Json) -> list[GivenScore]:
        found = await asyncio.to_thread(lambda: [*replies(rollout, self.model.clean)])
        if self._config.model is None:
            return await asyncio.to_thread(
                lambda: [GivenScore(by_rules(one), shortened(one.message, 200), one.call_id) for one in found]
            )
        most, titles = LONGEST // 3, ("The request", "The answer", "The user's next message")
        texts = [[shortened(text, most) for text in one[1:]] for one in found]
        mark = mark_for(text for one in texts for text in one)

        async def asked(one: UserReply, texts: Sequence[str]) -> GivenScore:
            text = "\n\n".join(fenced(mark, title, text) for title, text in zip(titles, texts, strict=True))
            about = [rollout["rollout_id"]]
            return GivenScore(
                *await self.model.choose(NEXT_MESSAGE_SYSTEM, mark, text, HELPED, about), call_id=one.call_id
            )

        return await together(asked(*pair) for pair in zip(found, texts, strict=True))


@cache
def _rules() -> dict[str, re.Pattern[str]]:
    return {name: re.compile("|".join(parts), re.IGNORECASE) for name, parts in read_yaml(RULES).items()}


def by_rules(reply: UserReply) -> float:
    """Return -1, 0 or 1 by what the message begins with, thanks in it, or that it is the same request again.

    A "no" with thanks is 0. Irony is not seen. Of a long text, the beginning and the end are looked at.
    """
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
    """Yield what users wrote directly after an answer. What tools wrote is in between, and nobody's reply."""
    calls = decisions(rollout)
    turns = [*chat_turns(calls)]
    texts: dict[int, str] = {}  # by the message's id, which is no other's while the turns are here

    def text(message: Json) -> str:
        if id(message) not in texts:
            texts[id(message)] = text_of(message, clean)
        return texts[id(message)]

    known: dict[int, int] = {}  # by the digest of what a call was shown
    for i, turn in enumerate(turns):
        digests = [*beginnings(turn.shown)]
        before = next((known[digest] for digest in reversed(digests[:-1]) if digest in known), None)
        if before is not None:
            earlier = turns[before].shown
            answer, new = [*turn.shown[len(earlier) :], {}, {}][:2]
            if answer.get("role") == "assistant" and new.get("role") == "user":
                asked = next((text(one) for one in reversed(earlier) if one.get("role") == "user"), "")
                yield UserReply(calls[before]["call_id"], asked, text(answer), text(new))
        known[digests[-1]] = i


class Judge(ModelRewarder):
    """Scores each call that it has not scored yet. `wants`: of which agents."""

    def wants(self, agent: str | None) -> bool:
        return True

    async def source(self) -> str:
        return self._config.model or ""

    async def scores(self, rollout: Json) -> list[GivenScore]:
        steps, source = decisions(rollout), await self.source()
        known = {one["call_id"] for one in rollout["rewards"] if one["name"] == JUDGE and one["source"] == source}
        wanted = [i for i, call in enumerate(steps) if call["call_id"] not in known and self.wants(call["agent"])]
        if not wanted:
            return []
        mark, shown = await asyncio.to_thread(transcript, steps, self.model.clean)

        async def score(i: int) -> GivenScore:
            try:
                value, reason = await self.model.choose(
                    JUDGE_SYSTEM, mark, question(shown, i), OF_TEN, [rollout["rollout_id"]]
                )
            except NoReward as error:
                value, reason = UNDECIDED, f"no score: {str(error)[:300]}"
            return GivenScore(value, reason, steps[i]["call_id"])

        return await together(map(score, wanted))


def transcript(steps: Sequence[Json], clean: Callable[[str], str] = str) -> tuple[str, str]:
    """Return a mark, and every step as text: the model's last input and its answer."""
    turns = [[shown_message(one, clean) for one in (*turn.shown[-1:], *turn.answer)] for turn in chat_turns(steps)]
    mark = mark_for(text for turn in turns for text in turn)
    texts = (fenced(mark, f"Step {i}", written(mark, turn, MAX_STEP)) for i, turn in enumerate(turns, 1))
    return mark, "\n\n".join(texts)


def question(shown: str, step: int) -> str:
    """Return the question about one step of a transcript, counted from 0."""
    return f"{shown}\n\nThe number for step {step + 1}:"
