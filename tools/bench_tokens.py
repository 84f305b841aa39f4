"""One answer, token by token: which tokens a drafter proposed, and which the target added itself, and why.

Pure: rounds and pieces of text in, marked tokens out.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from specdec.runtime.request import Origin, Round

KINDS: dict[Origin, str] = {
    "accepted": "drafted, and what the target says as well",
    "corrected": "the target's own, in place of a drafted token that it did not say",
    "bonus": "the target's own, after a draft that was kept to its end",
    "plain": "the target's own, in a round without a draft",
}


class Token(msgspec.Struct, frozen=True):
    """A token of an answer. `place`: in its round, from 1; `depth`: drafted tokens of that round."""

    text: str
    kind: Origin
    place: int
    depth: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to look at, round by round."""

    method: str
    question_id: int | str
    category: str
    prompt: str
    rounds: tuple[tuple[Token, ...], ...]
    accepted_length: float

    def count(self, kind: Origin) -> int:
        """Tokens of a kind."""
        return sum(token.kind == kind for tokens in self.rounds for token in tokens)


def marked(history: Sequence[Round], pieces: Sequence[str]) -> tuple[tuple[Token, ...], ...]:
    """Mark an answer's tokens by the rounds that they came from; `pieces`: the text of each.

    The answer may end within its last round: what follows there was never emitted.
    """
    left = iter(pieces)
    return tuple(tuple(_of_round(each, islice(left, each.kept + 1))) for each in history)


def _of_round(each: Round, pieces: Iterator[str]) -> Iterator[Token]:
    for place, (text, origin) in enumerate(zip(pieces, each.origins(), strict=False), 1):  # the end may cut a round
        yield Token(text, origin, place, each.depth)
