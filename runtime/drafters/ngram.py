"""Prompt lookup: the draft is what followed the last earlier occurrence of the text's own end.

Source: Saxena, "Prompt Lookup Decoding" (2023); names of the options as in vLLM. No model, no training; the drafts are
deterministic (q is one-hot). Only tokens of the same request are searched.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class NgramDrafter:
    """Drafts chains of up to `num_tokens` from the longest match of `min_match` to `max_match` tokens.

    The draft grows with the match: n matching tokens earn `draft_width(n, num_tokens)`. With `branching`, shorter
    matches that go on differently add branches, as far as `num_tokens` nodes go. With `always`, a row without a match
    gets the text's most frequent token, for engines that carry a second position at no extra cost (`exact`).
    """

    def __init__(
        self, num_tokens: int, min_match: int, max_match: int, *, always: bool, branching: bool = False
    ) -> None:
        self._num_tokens = num_tokens
        self._lengths = range(max_match, min_match - 1, -1)  # longest first
        self._always = always
        self._branching = branching
        self._indexes: list[_Index] = []

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        self._indexes.append(_Index(self._lengths))

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`."""
        each = zip(self._indexes, rows, limits, strict=True)
        return [self._draft(index, row, limit) for index, row, limit in each]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: nothing to learn, the row's tokens say it."""

    def release(self, index: int) -> None:
        """See `Drafter.release`."""
        self._indexes[index] = self._indexes[-1]
        self._indexes.pop()

    def _draft(self, index: "_Index", row: Row, limit: int) -> TokenTree:
        tokens = row.tokens
        index.extend(tokens)
        if limit <= 0:
            return TokenTree()
        matches = list(islice(index.find(tokens, enough=self._num_tokens // 2 + 1), None if self._branching else 1))
        if not matches:
            return TokenTree.chain(row.permitted([index.most_frequent]) if self._always else ())
        drafts = [
            row.permitted(_continuation(tokens, source, min(draft_width(match, self._num_tokens), limit)))
            for match, source in matches
        ]
        if not self._branching:
            return TokenTree.chain(drafts[0])
        return TokenTree.merge(drafts, min(self._num_tokens, row.max_length - len(tokens)))


def _continuation(tokens: Sequence[int], source: int, width: int) -> list[int]:
    """What follows `source`; past the end the draft goes on from itself: a repetition."""
    draft: list[int] = []
    for position in range(source, source + width):
        draft.append(tokens[position] if position < len(tokens) else draft[position - len(tokens)])
    return draft


def draft_width(match: int, num_tokens: int) -> int:
    """Tokens to draft after `match` matching tokens: a short match earns a short draft."""
    return min(num_tokens, 2 * match - 1)


class _Index:
    """Where each n-gram of one row's text occurred last, except at its very end."""

    def __init__(self, lengths: range) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self._indexed = 0  # n-grams that end before this position are in
        self._counts: dict[int, int] = {}
        self.most_frequent = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in the n-grams that have a token after them by now."""
        for end in range(self._indexed, len(tokens) - 1):
            for n, ends in self._ends.items():
                if end + 1 >= n:
                    ends[tuple(tokens[end + 1 - n : end + 1])] = end + 1
            token = tokens[end]
            self._counts[token] = count = self._counts.get(token, 0) + 1
            if count >= self._counts.get(self.most_frequent, 0):
                self.most_frequent = token
        self._indexed = max(self._indexed, len(tokens) - 1)

    def find(self, tokens: list[int], enough: int) -> Iterator[tuple[int, int]]:
        """Yield (length, position of what follows) of matches of the text's end: one for each place, longest first.

        A match of `enough` tokens is not looked into further.
        """
        found: set[int] = set()  # positions
        for n, ends in self._ends.items():
            after = ends.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if after is None or after in found:
                continue
            match = n
            while match < min(after, enough) and tokens[after - match - 1] == tokens[-match - 1]:
                match += 1
            found.add(after)
            yield match, after
