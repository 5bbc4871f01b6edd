"""The kinds of rewarders that ask a model, and what makes those that the configuration names and refuses the others.

`rank`          orders the siblings of a group by an aim; scores go from 0 to 1, by place
`rubric`        weighted criteria, each asked apart with its reason; the reasons are the reward's comment
`next_message`  what the user says next tells whether the call before it helped: -1, 0 or 1
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, model_validator

from ...core.config.rollouts import RewardsConfig
from ...core.config.root import Config
from ...core.config.section import Positive, Section
from ...core.errors import ConfigError
from ...core.redact import Redactor
from ...proxy.dialects.transcript import beginnings, chat_turns
from .config import APIS, JudgeConfig, RewarderConfig
from .judge import Judge
from .model import (
    IS_DATA,
    TEXT,
    AsksModel,
    JudgeModel,
    NeverAnswered,
    Said,
    fenced,
    mark_for,
    messages_of,
    object_of,
    shared_beginning,
    shortened,
    text_of,
    written,
)
from .process import Function
from .rewarder import Away, Given, GivenScore, Json, NoReward, Rewarder, decisions, together
from .table import KeptAnswers

NO_AIM = "what the system prompt and the user ask for is done as well as possible"
RANK_SYSTEM = """You order attempts at the same task, from the best to the worst, by this aim: {aim}
{data}
Say in one sentence what made the difference, then give `order`: lists of letters, the best first. Attempts that are \
equally good share a list. Every letter stands there once. Neither length, nor style, nor what an attempt says about \
itself, makes it better, unless the aim says so."""
REASON = r'[^"\\\x00-\x1f]{1,500}'
ROUNDS = 200  # until the levels of overlapping parts no longer move
Places = dict[int, float]
RUBRIC_SYSTEM = """You answer one question about what an agent did. {data}
Answer with one of {choices}. Say why in one or two sentences that name what you saw."""
SCALES = {"yes/no": {"yes": 1.0, "no": 0.0}, "0-4": {str(i): i / 4 for i in range(5)}}
NEXT_MESSAGE_SYSTEM = """You read a request, an assistant's answer, and what the user wrote next. {data}
Did the answer help? Answer 1 if the user's next message shows that it did, -1 if it shows that it did not (they \
correct it, ask for the same again, or undo it), and 0 if it shows neither."""
# English, German, French, Spanish, Portuguese, Italian, Dutch, Chinese, Japanese, Korean.
NO = re.compile(
    r"""((no|nope|nein|non|não|nee|stop)(?=\s*([,.!;:，。！]|$))
        (?![\s,]*(problem|worries|need|rush|thank|danke|merci|gracias|obrigad|grazie|dank|bedankt))
    |wrong|incorrect|undo|revert|(that|this|it)('s|\s+is|\s+was)?\s+(wrong|not\s+(right|correct|what|it|true|working)|incorrect)|not\s+what
    |(that|it)\s+(doesn't|does\s+not|didn't)(?!\s+matter)|falsch|das\s+(ist|war)\s+(falsch|nicht)|stimmt\s+nicht|rückgängig
    |faux|c'est\s+(faux|pas)|ce\s+n'est\s+pas|annule|incorrecto|eso\s+no|está\s+(mal|errado)|deshaz|errado|desfaz
    |sbagliato|annulla|fout|klopt\s+niet)\b
    |不对|不是|错了|不行|撤销|違う|違います|いいえ|間違|元に戻|아니|틀렸|취소""",
    re.IGNORECASE | re.VERBOSE,
)
THANKS = re.compile(
    r"""\b(thanks|thank\s+you|thx|perfect|great|awesome|(that|it)\s+works|exactly|danke|perfekt|super|klasse|genau
    |merci|parfait|génial|gracias|perfecto|genial|obrigad[oa]|perfeito|grazie|perfetto|ottimo|bedankt|dank\s+je|perfect)\b
    |谢谢|太好了|完美|ありがとう|完璧|감사|고마|완벽""",
    re.IGNORECASE | re.VERBOSE,
)
NOT = re.compile(
    r"""\b(not|never|cannot|doubt|far\s+from|\w+n't|nicht|kein\w*|pas|jamais|não|nunca|non|niet|geen)\b|n[’']t\b
    |不(?!错)|没(?!问题|关系|事)|ない|않|안\s|못""",
    re.IGNORECASE | re.VERBOSE,
)
BUT = re.compile(r"\b(but|however|aber|mais|pero|mas|porém|ma|però|maar)\b|但|不过|でも|しかし|하지만", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
SAME, SHORTEST_REQUEST = 0.9, 12
LOOKED_AT = 2000  # characters at either end of a long text


def made(name: str, one: RewarderConfig, config: Config, answers: KeptAnswers, shuffle: str = "") -> Rewarder:
    """Return one rewarder of a configuration, which gives rewards of this name."""
    clean = without_secrets(config)
    model = JudgeModel(one, answers, clean)
    match one.kind:
        case "function":
            return Function(config.rewards)
        case "judge":
            return Judge(config.section(JudgeConfig).calls, clean, answers)
        case "rank":
            return Rank(name, one, model, shuffle)
        case "rubric":
            return Rubric(name, one, model, config.rewards)
        case _:
            return NextMessage(name, one, model)


def without_secrets(config: Config) -> Callable[[str], str]:
    """Return what takes secrets, and what `recording.redact` names, out of a text that a judge reads."""
    return Redactor(config.recording.redact.model_copy(update={"secrets": True}), config.keys()).text


def named(config: Config, which: str) -> tuple[str, RewarderConfig]:
    """Return the rewarder that has this name, or is the only one of this kind. Raise ConfigError."""
    rewarders = config.section(JudgeConfig).rewarders(config.rewards)
    found = [one for one in rewarders if one[0] == which] or [one for one in rewarders if one[1].kind == which]
    if len(found) != 1:
        known = ", ".join(f"{one.kind} ({name})" for name, one in rewarders) or "none"
        raise ConfigError(f"judge.use has {'several' if found else 'no'} {which}; there is {known}")
    return found[0]


async def check(config: Config) -> None:
    """Raise ConfigError if a rewarder cannot work, or has a name that does not count."""
    keys = config.section(JudgeConfig)
    rewarders = keys.rewarders(config.rewards)
    names = [name for name, one in rewarders if one.kind != "judge"]
    for name, one in rewarders:
        if one.asks:
            _require_judge(one, config)
        if (one.name or len(names) > 1) and name in names and name not in config.trainer.reward_weights:
            raise ConfigError(f"judge.use: rewards named {name} have no weight: add it to trainer.reward_weights")
        rewarder = made(name, one, config, KeptAnswers(name, one, keys.budget))
        try:
            await rewarder.check()
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None
        finally:
            await rewarder.close()


def _require_judge(one: RewarderConfig, config: Config) -> None:
    """Raise ConfigError unless the model may be asked: elsewhere with key and budget, and knowingly if it is ours."""
    what, budget = f"judge.use: {one.kind}: {one.model}", config.section(JudgeConfig).budget
    if one.is_elsewhere and one.key is None:
        raise ConfigError(f"{what} needs a key: set {APIS[one.api][1]}, or its api_key")
    if one.is_elsewhere and budget.tokens is None and budget.usd is None:
        raise ConfigError(f"{what} costs money: set judge.budget.tokens or judge.budget.usd")
    if _place(one.address) == _place(f"http://127.0.0.1:{config.proxy.port}"):
        raise ConfigError(f"{what} is asked through this proxy, which would record and judge that, too: name the "
                          "model server's address")  # fmt: skip
    if _is_policy(one, config) and not one.is_policy:
        raise ConfigError(f"{what} is the policy, and would judge itself: name another, or set is_policy: true")


def _is_policy(one: RewarderConfig, config: Config) -> bool:
    policy = config.policy_upstream
    ours = () if policy is None else (*policy.urls, *policy.published_to)
    return _place(one.address) in map(_place, ours)


def _place(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return host, parts.port


def readers(rewarders: Sequence[tuple[str, RewarderConfig]], judge: str | None) -> list[str]:
    """Return for the log which models read rollouts, and where. `judge`: the judge of calls."""
    found = [f"judge.use: {one.kind}: {one.model} at {urlsplit(one.address).hostname} reads rollouts"
             for _, one in rewarders if one.asks]  # fmt: skip
    of_calls = any(one.kind == "judge" for _, one in rewarders)
    return [*found, *([f"judge.use: judge: {judge} reads rollouts"] if of_calls else [])]


class Rank(AsksModel):
    """Asks the model for an order of up to `at_once` siblings; of larger groups, for parts that overlap."""

    in_groups = True
    question = RANK_SYSTEM

    def __init__(self, name: str, config: RewarderConfig, model: JudgeModel, shuffle: str = "") -> None:
        """`shuffle`: another one shows the siblings in another order."""
        super().__init__(name, config, model)
        self._shuffle = shuffle

    async def reward(self, rollouts: Sequence[Json]) -> list[Given]:
        source = await self.source()
        if len(rollouts) < 2:
            return [Given(source, error="it has no siblings to be compared with") for _ in rollouts]

        def read() -> tuple[list[list[Said]], dict[int, int]]:
            shown = [messages_of(one, self._model.clean) for one in rollouts]
            first: dict[tuple[Said, ...], int] = {}  # the judge is shown one of those that are the same
            for i in self.order(rollouts):
                first.setdefault(tuple(shown[i]), i)
            return shown, {i: first[tuple(messages)] for i, messages in enumerate(shown)}

        shown, known = await asyncio.to_thread(read)
        alike = [i for i in self.order(rollouts) if known[i] == i]
        if len(alike) == 1:
            return [Given(source, [GivenScore(0.5, "all attempts are the same")]) for _ in rollouts]
        parts = overlapping(alike, self._config.at_once)
        try:
            found = await together(self._without_refused(part, shown, rollouts) for part in parts)
        except NoReward as error:
            return [Given(source, error=str(error)) for _ in rollouts]
        strength = strengths([places for places, _ in found])
        scores = by_place({i: strength[like] for i, like in known.items() if like in strength})
        reasons = {i: " ".join(said[like] for _, said in found if like in said)[:500] for i, like in known.items()}
        refused = Given(source, error="the judge refuses what it wrote, and that alone")
        return [Given(source, [GivenScore(scores[i], reasons[i])]) if i in scores else refused for i in known]

    def order(self, rollouts: Sequence[Json]) -> list[int]:
        """Return the order in which siblings are shown: shuffled, and always the same."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i]["rollout_id"])
        random.Random(self._shuffle + " ".join(rollouts[i]["rollout_id"] for i in order)).shuffle(order)
        return order

    async def _without_refused(
        self, part: Sequence[int], shown: Sequence[Sequence[Said]], rollouts: Sequence[Json]
    ) -> tuple[Places, dict[int, str]]:
        """The order of some siblings; if it is refused, that of all but one: an attempt must not spoil others'."""
        try:
            return await self._ordered(part, shown, rollouts)
        except NeverAnswered as error:
            if len(part) > 2:
                for out in part:
                    with suppress(NeverAnswered):
                        return await self._ordered([i for i in part if i != out], shown, rollouts)
            raise error

    async def _ordered(
        self, part: Sequence[int], shown: Sequence[Sequence[Said]], rollouts: Sequence[Json]
    ) -> tuple[Places, dict[int, str]]:
        """The place of each of some siblings, from 0 to 1, the best; and the judge's reason, with its own letter."""
        letters = dict(zip(ascii_uppercase, part, strict=False))

        def read(found: Json) -> tuple[Places, dict[int, str]]:
            ties = [[letters.get(one) for one in tie] for tie in found["order"]]
            if sorted(str(i) for tie in ties for i in tie) != sorted(map(str, part)):
                raise ValueError(f"`order` has each of {', '.join(letters)} once")
            places = {i: -float(place) for place, tie in enumerate(ties) for i in tie if i is not None}
            return by_place(places), {i: f"{letter}: {found.get('reason', '')}" for letter, i in letters.items()}

        system, text = await asyncio.to_thread(self._question, letters, shown)
        about = [rollouts[i]["rollout_id"] for i in part]
        tie = {"type": "array", "items": TEXT | {"enum": [*letters]}}
        schema = object_of(reason=TEXT, order={"type": "array", "items": tie})
        return await self._model.structured(system, text, schema, pattern_of(letters), read, about)

    def _question(self, letters: Mapping[str, int], shown: Sequence[Sequence[Said]]) -> tuple[str, str]:
        """The system prompt, and the attempts by their letters: what all begin with, and the rest of each."""
        part, most = [shown[i] for i in letters.values()], self._config.longest
        same, mark = shared_beginning(part), mark_for(one for messages in part for one in messages)
        begun = written(mark, part[0][:same], most)
        rest = {letter: written(mark, shown[i][same:], most) for letter, i in letters.items()}
        texts = [fenced(mark, "All attempts begin so", begun)] if begun else []
        texts += [fenced(mark, f"Attempt {letter}", text) for letter, text in rest.items()]
        return RANK_SYSTEM.format(aim=self._config.aim or NO_AIM, data=IS_DATA.format(mark=mark)), "\n\n".join(texts)


def pattern_of(letters: Collection[str]) -> str:
    """Return the pattern of an answer: a reason, and as many letters as there are, in lists."""
    one = f'"[{"".join(letters)}]"'
    order = rf"\[\[{one}((, |\], \[){one}){{{len(letters) - 1}}}\]\]"
    return rf'\{{"reason": "{REASON}", "order": {order}\}}'


def overlapping(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """Return parts of at most so many. Each but the first shares half of its members with the one before it."""
    if len(order) <= most:
        return [order]
    step = most - most // 2
    return [order[min(i, len(order) - most) :][:most] for i in range(0, len(order) - most + step, step)]


def strengths(parts: Sequence[Places]) -> Places:
    """Return how strong each is: place = strength - level of the part, by least squares over all parts."""
    of = {i: [n for n, part in enumerate(parts) if i in part] for i in sorted({i for part in parts for i in part})}
    levels, found = [0.0] * len(parts), {}
    for _ in range(ROUNDS if len(parts) > 1 else 1):
        found = {i: fmean(parts[n][i] + levels[n] for n in inside) for i, inside in of.items()}
        levels = [fmean(found[i] - place for i, place in part.items()) for part in parts]
    return {i: round(value, 6) for i, value in found.items()}


def by_place(strength: Places) -> Places:
    """Return scores from 0, the weakest, to 1. Those that are equally strong share the mean of their places."""
    values = sorted(strength.values())
    return {i: (values.index(v) + (values.count(v) - 1) / 2) / (len(values) - 1) for i, v in strength.items()}


class Criterion(Section):
    """A question to the model, or a `program` (FILE.py:NAME, beside the rubric) that returns 0 to 1."""

    name: Annotated[str, Field(min_length=1)]
    question: str | None = None
    program: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    scale: Literal["yes/no", "0-4"] = "yes/no"
    weight: Positive = 1.0

    @model_validator(mode="after")
    def _is_one(self) -> Criterion:
        if (self.question is None) == (self.program is None):
            raise ValueError("a criterion has either a question or a program")
        return self


class Criteria(Section):
    criteria: Annotated[list[Criterion], Field(min_length=1)]


def read_criteria(file: Path) -> list[Criterion]:
    """Return the criteria of a rubric's file. Raise ConfigError."""
    try:
        return Criteria.model_validate(yaml.safe_load(file.read_text())).criteria
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}" if mark else type(error).__name__
        raise ConfigError(f"{file}: no YAML: {problem}; put texts with ? or : in quotes") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"{file}: {where or 'criteria'}: {wrong['msg'].removeprefix('Value error, ')}") from None


class Rubric(AsksModel):
    """Asks every criterion of `file`. The reward is the mean by weight, from 0 to 1."""

    def __init__(self, name: str, config: RewarderConfig, model: JudgeModel, rewards: RewardsConfig) -> None:
        super().__init__(name, config, model)
        assert config.file is not None
        file = config.file.expanduser()
        self._criteria = read_criteria(file)
        programs = (file.parent / one.program.rpartition(":")[0] for one in self._criteria if one.program)
        self.question = "".join([RUBRIC_SYSTEM, *(each.read_text() for each in (file, *programs) if each.is_file())])
        self.questions = sum(one.question is not None for one in self._criteria)
        if config.model is None and self.questions:
            raise ConfigError(f"{self.label}: the questions of {file} need a model")
        self._programs = {
            one.name: Function(rewards.model_copy(update={"function": str(file.parent / one.program)}))
            for one in self._criteria if one.program
        }  # fmt: skip

    async def check(self) -> None:
        await together(program.check() for program in self._programs.values())

    async def scores(self, rollout: Json) -> list[GivenScore]:
        mark, happened = await asyncio.to_thread(self._written, rollout)
        answers = await together(self._answer(one, rollout, mark, happened) for one in self._criteria)
        found = zip(self._criteria, answers, strict=True)
        value = sum(one.weight * value for one, (value, _) in found) / sum(one.weight for one in self._criteria)
        return [GivenScore(value, "\n".join(said for _, said in answers))]

    async def close(self) -> None:
        await together([self._model.close(), *(program.close() for program in self._programs.values())])

    def _written(self, rollout: Json) -> tuple[str, str]:
        """A mark, and what happened between its lines; no question has the mark."""
        if not self.questions:
            return "", ""
        shown = messages_of(rollout, self._model.clean)
        mark = mark_for([*shown, [one.question or "" for one in self._criteria]])
        return mark, fenced(mark, "What happened", written(mark, shown, self._config.longest))

    async def _answer(self, one: Criterion, rollout: Json, mark: str, happened: str) -> tuple[float, str]:
        """The value of one criterion, and what is said of it."""
        if one.question is None:
            scores = await self._programs[one.name].scores(rollout)
            if len(scores) != 1 or not 0 <= scores[0].value <= 1:
                raise NoReward(f"{one.name}: its program returns no number from 0 to 1")
            return scores[0].value, f"{one.name}: {scores[0].value:g}"
        scale = SCALES[one.scale]
        system = RUBRIC_SYSTEM.format(data=IS_DATA.format(mark=mark), choices=", ".join(scale))
        text = f"{happened}\n\nThe question: {one.question}"
        answer, reason = await self._model.choose(system, text, [*scale], [rollout["rollout_id"]])
        return scale[answer], f"{one.name} {answer}: {reason[:500]}"


class UserReply(NamedTuple):
    """What a user wrote after a call's answer to a request."""

    call_id: str
    request: str
    answer: str
    message: str


class NextMessage(AsksModel):
    """Goes by rules in several languages, or asks a model if there is one."""

    question = NEXT_MESSAGE_SYSTEM + NO.pattern + THANKS.pattern + NOT.pattern + BUT.pattern

    async def scores(self, rollout: Json) -> list[GivenScore]:
        if not self._config.asks:
            return await asyncio.to_thread(lambda: [_by_rules(reply) for reply in replies(rollout)])
        mark, questions = await asyncio.to_thread(self._questions, rollout)
        system = NEXT_MESSAGE_SYSTEM.format(data=IS_DATA.format(mark=mark))

        async def asked(call_id: str, text: str) -> GivenScore:
            answer, reason = await self._model.choose(system, text, ["-1", "0", "1"], [rollout["rollout_id"]])
            return GivenScore(float(answer), reason[:500], call_id=call_id)

        return await together(asked(call_id, text) for call_id, text in questions)

    def _questions(self, rollout: Json) -> tuple[str, list[tuple[str, str]]]:
        """The mark of the rollout's texts; and for each reply the call that it is about, and the text."""
        known: dict[str, str] = {}  # the request of one reply is the message of the one before

        def shown(text: str) -> str:
            if text not in known:
                known[text] = shortened(self._model.clean(text), self._config.longest // 3)
            return known[text]

        found = [(reply.call_id, [*map(shown, reply[1:])]) for reply in replies(rollout)]
        mark = mark_for(texts for _, texts in found)
        titles = ("The request", "The answer", "The user's next message")

        def written(texts: list[str]) -> str:
            return "\n\n".join(fenced(mark, title, text) for title, text in zip(titles, texts, strict=True))

        return mark, [(call_id, written(texts)) for call_id, texts in found]


def _by_rules(reply: UserReply) -> GivenScore:
    return GivenScore(float(by_rules(reply)), shortened(reply.message, 200), call_id=reply.call_id)


def by_rules(reply: UserReply) -> int:
    """Return -1, 0 or 1 by what the message begins with, thanks in it, or that it is the same request again.

    A "no" with thanks is 0. Irony is not seen. Of a long text, the beginning and the end are looked at.
    """
    text = _ends(reply.message.strip())
    if _same(text, _ends(reply.request.strip())):
        return -1
    sentences = SENTENCE_END.split(text)
    thanks = any(_thanks(one) for one in (sentences[0], sentences[-1])) and not BUT.search(text)
    if NO.match(text):
        return 0 if thanks else -1
    return 1 if thanks else 0


def _thanks(sentence: str) -> bool:
    return bool(THANKS.search(sentence)) and not NOT.search(sentence) and not sentence.endswith(("?", "？"))


def replies(rollout: Json) -> Iterator[UserReply]:
    """Yield what users wrote directly after an answer. What tools wrote is in between, and nobody's reply."""
    calls = decisions(rollout)
    turns = [*chat_turns(calls)]
    texts: dict[int, tuple[Json, str]] = {}  # by the message's id, which is no other's while it is here

    def text(message: Json) -> str:
        if id(message) not in texts:
            texts[id(message)] = message, text_of(message)
        return texts[id(message)][1]

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


def _ends(text: str) -> str:
    return text if len(text) <= 2 * LOOKED_AT else f"{text[:LOOKED_AT]}\n{text[-LOOKED_AT:]}"


def _same(text: str, request: str) -> bool:
    """Whether nearly all characters of both stand in both in the same order (their longest common subsequence).

    The bits of an integer are the cells of a row of the table (Hyyrö 2004): 4,000 characters take some milliseconds.
    """
    one, other = text.casefold(), request.casefold()
    characters = len(one) + len(other)
    if len(one) < SHORTEST_REQUEST or 2 * min(len(one), len(other)) < SAME * characters:
        return False
    places: dict[str, int] = {}
    for i, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << i
    every = row = (1 << len(one)) - 1
    for character in other:
        alike = row & places.get(character, 0)
        row = (row + alike | row - alike) & every
    return 2 * (len(one) - row.bit_count()) >= SAME * characters
