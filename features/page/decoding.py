"""Finds the text of each token, by a tokenizer that decodes whole sequences alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

Ids = tuple[int, ...]
Decode = Callable[[Sequence[int]], Awaitable[str]]
Encode = Callable[[str], Awaitable[list[int]]]

MARK = "␞␟␞"  # stands between tokens that are decoded together
BROKEN = "�"  # what decodes to it is a part of a character
LONGEST = 6  # tokens that may share characters; a character has at most four bytes
MOST = 4096  # different runs of them that are decoded: most texts have fewer, and noise would have five for each token


class Undecodable(Exception):
    """The tokenizer's texts cannot be told apart."""


async def token_texts(token_ids: Sequence[int], decode: Decode, encode: Encode) -> list[str | None]:
    """Return each token's text. None: the token before it begins a character that this one ends, and has its text.

    Example: if "€" is three tokens, ids of "5 €" have the texts "5", " ", "€", None, None. Raise Undecodable.
    """
    mark = await encode(MARK)
    alone = [(token,) for token in dict.fromkeys(token_ids)]
    known = await _decoded(alone, mark, decode)
    windows = [*islice(dict.fromkeys(_windows(token_ids, known)), MOST)]
    known |= await _decoded(windows, mark, decode) if windows else {}
    texts: list[str | None] = []
    while len(texts) < len(token_ids):
        window = _whole(token_ids[len(texts) : len(texts) + LONGEST], known)
        texts += [known[window], *[None] * (len(window) - 1)]
    return texts


async def _decoded(parts: Sequence[Ids], mark: Sequence[int], decode: Decode) -> dict[Ids, str]:
    """The text of each part, as it is inside a sequence: tokenizers may leave out a first blank."""
    first, twice = await decode(mark), await decode([*mark, *mark])
    between = twice[len(first) :]
    marked = await decode([*mark, *(token for part in parts for token in (*part, *mark))])
    texts = marked[len(first) :].split(between)
    if not between or len(texts) != len(parts) + 1:
        raise Undecodable
    return dict(zip(parts, texts, strict=False))


def _windows(token_ids: Sequence[int], known: dict[Ids, str]) -> Iterator[Ids]:
    """The tokens that may be a character together: several, none of them whole."""
    for start in range(len(token_ids)):
        for end in range(start + 1, min(start + LONGEST, len(token_ids)) + 1):
            if BROKEN not in known[(token_ids[end - 1],)]:
                break
            if end > start + 1:
                yield tuple(token_ids[start:end])


def _whole(token_ids: Sequence[int], known: dict[Ids, str]) -> Ids:
    """The fewest of the first tokens that have whole characters together, or the first alone."""
    tokens = tuple(token_ids)
    windows = (tokens[:n] for n in range(1, len(tokens) + 1))
    return next((one for one in windows if BROKEN not in known.get(one, BROKEN)), tokens[:1])
