"""Prompt lookup: the draft is what followed the text's own end before: most often, and last among equals.

Source: Saxena, "Prompt Lookup Decoding" (2023); names of the options as in vLLM. No model, no training; the drafts are
deterministic (q is one-hot). Only tokens of the same request are searched.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from specdec.runtime.drafters.base import Stateless
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree

# How often the target itself goes on as a match of 0, 1, 2, ... tokens does (0: with the text's most frequent token;
# the last is of all longer ones). Measured on answers of SmolLM2-135M, see docs/performance.md.
ACCEPTANCE = (0.03, 0.22, 0.46, 0.62, 0.68, 0.71, 0.80, 0.80, 0.80, 0.94)

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
        self._lengths = (*range(max_match, min_match - 1, -1), *((0,) if always else ()))  # longest first
        self._threshold = threshold
        self._branching = branching
        self._indexes: list[_Index] = []

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        self._indexes.append(_Index(self._lengths))

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
    """What followed each n-gram of one row's text most often, and last among equals. Constant time for each token."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._after: dict[int, dict[Gram, int]] = {n: {} for n in lengths}  # n-gram -> position of what follows it
        self._counts: Counter[Gram] = Counter()  # of n-grams with what followed them
        self._indexed = 0  # tokens that are in

    def extend(self, tokens: list[int]) -> None:
        """Take in every n-gram that has a token after it by now."""
        for position in range(self._indexed, len(tokens)):
            for n, after in self._after.items():
                if n > position:
                    continue
                gram, token = tuple(tokens[position - n : position]), tokens[position]
                self._counts[(*gram, token)] += 1
                best = after.get(gram)
                if best is None or self._counts[(*gram, token)] >= self._counts[(*gram, tokens[best])]:
                    after[gram] = position
        self._indexed = len(tokens)

    def find(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (length, position of what follows) of matches of the text's end: one for each place, longest first.

        A match is not looked into further than its length tells anything.
        """
        found: set[int] = set()  # positions
        for n, grams in self._after.items():
            after = grams.get(tuple(tokens[max(len(tokens) - n, 0) :]))
            if after is None or after in found:
                continue
            match = n
            while match < min(after, len(ACCEPTANCE) - 1) and tokens[after - match - 1] == tokens[-match - 1]:
                match += 1
            found.add(after)
            yield match, after
