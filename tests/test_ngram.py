"""Prompt lookup: which match, which continuation, how long."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.runtime.drafters.ngram import ACCEPTANCE, PLACES, NgramDrafter, draft_width
from support.rows import make_row

LONGEST = len(ACCEPTANCE) - 1  # longer matches tell no more


def make_drafter(
    num_tokens: int = 7, low: int = 1, high: int = 4, *, threshold: float = 0.0, always: bool = False
) -> NgramDrafter:
    """With threshold 0 nothing but `num_tokens` bounds a draft."""
    return NgramDrafter(num_tokens, low, high, threshold=threshold, always=always)


def draft(tokens: list[int], limit: int = 10, **options: int) -> list[int]:
    drafter = make_drafter(**options)
    row = make_row(tokens)
    drafter.admit(row)
    (tree,) = drafter.propose([row], [limit])
    assert tree.is_chain
    assert tree.q is None
    return list(tree.tokens)


def looked_up(tokens: list[int], low: int, high: int) -> tuple[int, int] | None:
    """(length, place of what follows) by looking at every place of the text; None without a match."""
    for n in range(high, low - 1, -1):
        shortest = [i for i in range(low, len(tokens)) if tokens[i - low : i] == tokens[len(tokens) - low :]]
        places = [
            i
            for i in (shortest[-PLACES:] if low else shortest)
            if i >= n and tokens[i - n : i] == tokens[len(tokens) - n :]
        ]
        if places:
            counts = Counter(tokens[i] for i in places)
            best = max(places, key=lambda i: (counts[tokens[i]], i))
            while n < min(best, LONGEST) and tokens[best - n - 1] == tokens[-n - 1]:
                n += 1
            return n, best
    return None


TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=25)  # grows by these pieces


@settings(max_examples=300)
@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
@example([[0, 1, 0, 2, 0, 1, 0, 2, 0]], 1, 0, False, 0.0)  # 1 and 2 follow 0 twice each: the last wins
@example([[0, 1, 2] * 6], 2, 2, False, 0.0)
def test_drafts_are_those_of_a_search_through_the_whole_text(
    pieces: list[list[int]], low: int, more: int, always: bool, threshold: float
) -> None:
    """After every piece, as in rounds of several tokens."""
    high = low + more
    drafter = make_drafter(5, low, high, threshold=threshold, always=always)
    row = make_row([3])
    drafter.admit(row)
    for piece in pieces:
        row.tokens += piece
        match = looked_up(row.tokens, low, high) or (looked_up(row.tokens, 0, 0) if always else None)
        expected: list[int] = []
        if match:
            text = list(row.tokens)
            for _ in range(draft_width(match[0], 5, threshold)):
                text.append(text[match[1] + len(text) - len(row.tokens)])
            expected = text[len(row.tokens) :]
        assert list(drafter.propose([row], [9])[0].tokens) == expected


def test_the_draft_is_what_followed_the_match() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]) == [5, 6, 7, 8, 9, 1, 2]


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    # "2 3" was followed by 4, "3" alone was last followed by 9
    assert draft([1, 2, 3, 4, 3, 9, 2, 3])[0] == 4


def test_what_followed_more_often_wins_over_what_followed_last() -> None:
    assert draft([1, 5, 1, 5, 1, 6, 1], num_tokens=1) == [5]


def test_the_latest_of_equally_frequent_ones_wins() -> None:
    assert draft([1, 5, 1, 6, 1], num_tokens=1) == [6]


def test_matches_grow_beyond_the_longest_indexed() -> None:
    # eight matching tokens, indexed up to two: a match of eight earns more than one of two
    tokens = [*range(10, 18), 1, 2, 3, 4, 5, 6, 7, *range(10, 18)]
    assert (draft_width(2, 7, 0.7), draft_width(8, 7, 0.7)) == (1, 3)
    assert draft(tokens, low=2, high=2, threshold=0.7) == [1, 2, 3]


def test_a_repetition_is_continued_past_the_end() -> None:
    assert draft([3, 1, 2, 1, 2, 1, 2]) == [1, 2, 1, 2, 1, 2, 1]


def test_no_match_no_draft() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []


def test_shorter_matches_than_asked_for_do_not_count() -> None:
    assert draft([1, 2, 1], low=2) == []


def test_always_fills_with_the_most_frequent_token() -> None:
    assert draft([5, 5, 6, 7], always=True, threshold=0.15) == [5]
    assert draft([1], always=True, threshold=0.15) == [1]


def test_limits_hold() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert len(draft(tokens, limit=2)) == 2
    assert draft(tokens, limit=0) == []
    assert draft(tokens, limit=0, always=True) == []


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("threshold", [0.0, 0.15, 0.3, 1.0])
def test_width_is_the_longest_draft_whose_last_token_is_kept_often_enough(num_tokens: int, threshold: float) -> None:
    for match in range(20):
        chance, expected = ACCEPTANCE[min(match, LONGEST)], 1
        for token in range(1, num_tokens):
            chance *= ACCEPTANCE[min(match + token, LONGEST)]
            if chance >= threshold:
                expected = token + 1
        assert draft_width(match, num_tokens, threshold) == expected


def test_the_dearer_a_position_the_narrower_the_draft() -> None:
    widths = [[draft_width(match, 7, threshold) for match in (0, 1, 2, 3, 4, 9)] for threshold in (0, 0.15, 0.3, 1)]
    assert widths == [[7, 7, 7, 7, 7, 7], [1, 1, 3, 6, 7, 7], [1, 1, 1, 2, 4, 7], [1, 1, 1, 1, 1, 1]]


def test_rows_keep_their_own_text_when_one_leaves() -> None:
    drafter = make_drafter(1)
    rows = [make_row([1, 9, 1]), make_row([1, 8, 1]), make_row([1, 7, 1])]
    for row in rows:
        drafter.admit(row)
    assert [tree.tokens for tree in drafter.propose(rows, [5, 5, 5])] == [(9,), (8,), (7,)]
    drafter.release(0, rows[0])  # the last row takes its place
    assert [tree.tokens for tree in drafter.propose([rows[2], rows[1]], [5, 5])] == [(7,), (8,)]
    late = make_row([1, 6, 1])
    drafter.admit(late)
    assert [tree.tokens for tree in drafter.propose([rows[2], rows[1], late], [5, 5, 5])] == [(7,), (8,), (6,)]


def test_what_was_generated_is_searched_too() -> None:
    drafter = make_drafter(3)
    row = make_row([1, 2])
    drafter.admit(row)
    assert drafter.propose([row], [5])[0].tokens == ()
    row.tokens += [3, 4, 2]
    assert drafter.propose([row], [5])[0].tokens == (3, 4, 2)


def test_a_draft_ends_where_the_grammar_does() -> None:
    class UpToFour:
        """What the row asks a grammar: the answer may hold no token above 4."""

        def valid_prefix(self, generated: list[int], draft: list[int]) -> int:
            assert generated == [1]
            return next((i for i, token in enumerate(draft) if token > 4), len(draft))

    drafter = make_drafter()
    row = make_row([1, 2, 3, 4, 5, 6])
    row.grammar = UpToFour()
    row.tokens.append(1)
    drafter.admit(row)
    assert drafter.propose([row], [5])[0].tokens == (2, 3, 4)


class CountingList(list[int]):
    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_a_round_costs_the_same_in_a_long_text() -> None:
    drafter = make_drafter()
    row = make_row([1])
    row.tokens = CountingList(row.tokens)
    drafter.admit(row)
    costs = []
    for position in range(4000):
        row.tokens.append(position % 50)
        before = row.tokens.reads
        drafter.propose([row], [7])
        costs.append(row.tokens.reads - before)
    assert costs[3950:] == costs[900:950]
    assert 0 < max(costs) < 10 * PLACES
