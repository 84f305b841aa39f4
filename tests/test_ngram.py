"""Prompt lookup: which match, which continuation, how long."""

import pytest

from specdec.runtime.drafters.ngram import NgramDrafter, draft_width
from support.rows import make_row


def draft(
    tokens: list[int], limit: int = 10, num_tokens: int = 7, low: int = 1, high: int = 4, **kw: bool
) -> list[int]:
    drafter = NgramDrafter(num_tokens, low, high, always=kw.get("always", False))
    row = make_row(tokens)
    drafter.admit(row)
    (tree,) = drafter.propose([row], [limit])
    assert tree.is_chain
    assert tree.q is None
    return list(tree.tokens)


def test_the_draft_is_what_followed_the_match() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]) == [5, 6, 7, 8, 9, 1, 2]


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    # "2 3" was followed by 4, "3" alone was last followed by 9
    assert draft([1, 2, 3, 4, 3, 9, 2, 3])[0] == 4


def test_the_latest_of_equal_matches_wins() -> None:
    assert draft([1, 5, 1, 6, 1], num_tokens=1) == [6]


def test_matches_grow_beyond_the_longest_indexed() -> None:
    # eight matching tokens, indexed up to two
    tokens = [*range(10, 18), 1, 2, 3, 4, 5, 6, 7, *range(10, 18)]
    assert draft(tokens, low=2, high=2) == [1, 2, 3, 4, 5, 6, 7]


def test_a_repetition_is_continued_past_the_end() -> None:
    assert draft([3, 1, 2, 1, 2, 1, 2]) == [1, 2, 1, 2, 1, 2, 1]


def test_no_match_no_draft() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []


def test_shorter_matches_than_asked_for_do_not_count() -> None:
    assert draft([1, 2, 1], low=2) == []


def test_always_fills_with_the_most_frequent_token() -> None:
    assert draft([5, 5, 6, 7], always=True) == [5]


def test_limits_hold() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert len(draft(tokens, limit=2)) == 2
    assert draft(tokens, limit=0) == []
    assert draft(tokens, limit=0, always=True) == []


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 15])
def test_width_grows_with_the_match_up_to_the_limit(num_tokens: int) -> None:
    widths = [draft_width(match, num_tokens) for match in range(1, 20)]
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert widths[-1] == num_tokens


def test_rows_keep_their_own_text_when_one_leaves() -> None:
    drafter = NgramDrafter(1, 1, 4, always=False)
    rows = [make_row([1, 9, 1]), make_row([1, 8, 1]), make_row([1, 7, 1])]
    for row in rows:
        drafter.admit(row)
    assert [tree.tokens for tree in drafter.propose(rows, [5, 5, 5])] == [(9,), (8,), (7,)]
    drafter.release(0)  # the last row takes its place
    assert [tree.tokens for tree in drafter.propose([rows[2], rows[1]], [5, 5])] == [(7,), (8,)]


def test_what_was_generated_is_searched_too() -> None:
    drafter = NgramDrafter(3, 1, 4, always=False)
    row = make_row([1, 2])
    drafter.admit(row)
    assert drafter.propose([row], [5])[0].tokens == ()
    row.tokens += [3, 4, 2]
    assert drafter.propose([row], [5])[0].tokens == (3,)
