"""Prompt lookup: the draft is what followed the text's own end before: most often, and last among equals.

Source: Saxena, "Prompt Lookup Decoding" (2023); names of the options as in vLLM. No model, no training; the drafts are
deterministic (q is one-hot). Only tokens of the same request are searched.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from specdec.runtime.drafters.base import Stateless
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree

# How often the target itself goes on as a match of 0, 1, 2, ... tokens does (0: with the text's most frequent token;
# the last is of all longer ones). Measured on answers of SmolLM2-135M, see docs/performance.md.
ACCEPTANCE = (0.03, 0.22, 0.46, 0.62, 0.68, 0.71, 0.80, 0.80, 0.80, 0.94)

PLACES = 16  # of the last ones with the same shortest match, so many are looked at

Gram = tuple[int, ...]


class NgramDrafter(Stateless):
    """Drafts chains of up to `num_tokens` from the longest match of `min_match` to `max_match` tokens.

    `threshold` says what chance of being kept earns a place in the pass: see `draft_width`. With `branching`, shorter
    matches that go on differently add branches, as far as `num_tokens` nodes go. With `always`, a row without a match
    gets the text's most frequent token, for engines that carry a second position at no extra cost (`exact`).
    """

    def __init__(
        self,
        num_tokens: int,
        min_match: int,
        max_match: int,
        *,
        threshold: float,
        always: bool,
        branching: bool = False,
    ) -> None:
        self._num_tokens = num_tokens
        self._lengths, self._always = (min_match, max_match), always
        self._threshold = threshold
        self._branching = branching
        self._indexes: list[_Index] = []

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        self._indexes.append(_Index(*self._lengths, always=self._always))

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: the tokens are all it needs."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`."""
        return [
            self._draft(self._indexes[index], row, limit)
            for index, (row, limit) in enumerate(zip(rows, limits, strict=True))
        ]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: nothing to learn, the row's tokens say it."""

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`."""
        self._indexes[index] = self._indexes[-1]
        self._indexes.pop()

    def match(self, index: int, row: Row) -> int | None:
        """Tokens of the match that the next proposal for row `index` is based on (0: none), None: there is nothing."""
        self._indexes[index].extend(row.tokens)
        return next((match for match, _ in self._indexes[index].find(row.tokens)), None)

    def _draft(self, index: "_Index", row: Row, limit: int) -> TokenTree:
        tokens = row.tokens
        index.extend(tokens)
        if limit <= 0:
            return TokenTree()
        drafts = [
            row.permitted(_continuation(tokens, source, min(self._width(match), limit)))
            for match, source in islice(index.find(tokens), None if self._branching else 1)
        ]
        if not self._branching:
            return TokenTree.chain(drafts[0] if drafts else ())
        return TokenTree.merge(drafts, min(self._num_tokens, row.max_length - len(tokens)))

    def _width(self, match: int) -> int:
        return draft_width(match, self._num_tokens, self._threshold)


def _continuation(tokens: Sequence[int], source: int, width: int) -> list[int]:
    """What follows `source`; past the end the draft goes on from itself: a repetition."""
    draft: list[int] = []
    for position in range(source, source + width):
        draft.append(tokens[position] if position < len(tokens) else draft[position - len(tokens)])
    return draft


def draft_width(match: int, num_tokens: int, threshold: float) -> int:
    """Tokens to draft after `match` matching tokens, 1 to `num_tokens`.

    The first is drafted whatever its chance: a second position costs next to nothing on every engine. A further one
    has to be kept, with all before it, at least as often as `threshold`: the share of a one-token pass that a position
    adds, times the speed that speculation has reached (Leviathan et al., arXiv:2211.17192, on the best draft length).
    A token that is kept makes the match one longer.
    """
    chance, width = _acceptance(match), 1
    while width < num_tokens and (chance := chance * _acceptance(match + width)) >= threshold:
        width += 1
    return width


def _acceptance(match: int) -> float:
    return ACCEPTANCE[min(match, len(ACCEPTANCE) - 1)]


class _Index:
    """Where the shortest matches that count have been in one row's text; longer ones are found from there.

    A token more costs one entry, however long matches are; a search looks at the last `PLACES` of them.
    """

    def __init__(self, shortest: int, longest: int, *, always: bool) -> None:
        self._shortest, self._longest, self._always = shortest, longest, always
        self._places: defaultdict[Gram, list[int]] = defaultdict(list)  # positions of what follows
        self._counts: Counter[int] = Counter()
        self._common = 0  # last position of the most frequent token
        self._indexed = 0  # tokens that are in

    def extend(self, tokens: list[int]) -> None:
        """Take in every n-gram that has a token after it by now."""
        n = self._shortest
        for position in range(max(self._indexed, n), len(tokens)):
            self._places[tuple(tokens[position - n : position])].append(position)
        if self._always:
            for position in range(self._indexed, len(tokens)):
                self._counts[tokens[position]] += 1
                if self._counts[tokens[position]] >= self._counts[tokens[self._common]]:
                    self._common = position
        self._indexed = len(tokens)

    def find(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (length, position of what follows) of matches of the text's end: one for each place, longest first.

        A match is not looked into further than its length tells anything.
        """
        places = self._places.get(tuple(tokens[-self._shortest :]), [])[-PLACES:]
        lengths = [self._matching(tokens, place, self._shortest, self._longest) for place in places]
        found: set[int] = set()
        for n in sorted(set(lengths), reverse=True):
            among = [place for place, length in zip(places, lengths, strict=True) if length >= n]
            counts = Counter(tokens[place] for place in among)
            best = max(among, key=lambda place: (counts[tokens[place]], place))
            if best not in found:
                found.add(best)
                yield self._matching(tokens, best, n, len(ACCEPTANCE) - 1), best
        if self._always and self._common not in found:
            yield self._matching(tokens, self._common, 0, len(ACCEPTANCE) - 1), self._common

    def _matching(self, tokens: list[int], place: int, known: int, most: int) -> int:
        """How many tokens before `place` are those of the text's end, `known` of them for sure; up to `most`."""
        while known < min(place, most) and tokens[place - known - 1] == tokens[-known - 1]:
            known += 1
        return known
