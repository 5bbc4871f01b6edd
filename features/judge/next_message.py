"""The rewarder `next_message`: what the user says next tells whether the call before it helped: -1, 0 or 1."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import NamedTuple

from ...proxy.dialects.transcript import Digested, beginnings, read
from .model import AsksModel
from .rewarder import GivenScore, Json, decisions, together
from .texts import IS_DATA, fenced, mark_for, shortened, text_of

SYSTEM = """You read a request, an assistant's answer, and what the user wrote next. {data}
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


class UserReply(NamedTuple):
    """What a user wrote after a call's answer to a request."""

    call_id: str
    request: str
    answer: str
    message: str


class NextMessage(AsksModel):
    """Goes by rules in several languages, or asks a model if there is one."""

    question = SYSTEM + NO.pattern + THANKS.pattern + NOT.pattern + BUT.pattern

    async def scores(self, rollout: Json) -> list[GivenScore]:
        if not self._config.asks:
            return await asyncio.to_thread(lambda: [_by_rules(reply) for reply in replies(rollout)])
        mark, questions = await asyncio.to_thread(self._questions, rollout)
        system = SYSTEM.format(data=IS_DATA.format(mark=mark))

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
    turns = read(calls)
    digested = Digested()
    texts: dict[int, tuple[Json, str]] = {}  # by the message's id, which is no other's while it is here

    def text(message: Json) -> str:
        if id(message) not in texts:
            texts[id(message)] = message, text_of(message)
        return texts[id(message)][1]

    known: dict[int, int] = {}  # by the digest of what a call was shown
    for i, turn in enumerate(turns):
        digests = [*beginnings(turn.shown, digested)]
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
