"""Two drafters in turn: who is asked, who hears what was kept, and rows that come and go."""

from collections.abc import Sequence

from specdec.runtime.drafters.fallback import FallbackDrafter
from specdec.runtime.drafters.growth import StaticShape
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree
from support.fake_engine import FakeEngine, fake_spec
from support.rows import WatchedModel, greedy, make_row, make_scheduler, run

VOCAB = 8


class Scripted:
    """Proposes `drafts[row's first token]`, and writes down what it is asked and told."""

    def __init__(self, drafts: dict[int, tuple[int, ...]]) -> None:
        self.drafts = drafts
        self.rows: list[Row] = []
        self.asked: list[list[int]] = []
        self.told: list[tuple[int, tuple[int, ...]]] = []

    def admit(self, row: Row) -> None:
        self.rows.append(row)

    def prefill(self, index: int, row: Row) -> None:
        assert self.rows[index] is row

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        assert list(rows) == self.rows
        self.asked.append(list(limits))
        return [TokenTree.chain(self.drafts[row.tokens[0]][:limit]) for row, limit in zip(rows, limits, strict=True)]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        assert self.rows[index] is row
        self.told.append((row.tokens[0], tuple(kept)))

    def release(self, index: int, row: Row) -> None:
        assert self.rows[index] is row
        self.rows[index] = self.rows[-1]
        self.rows.pop()


def test_the_second_proposes_where_the_first_finds_nothing() -> None:
    first, second = Scripted({1: (5, 6), 2: (), 3: ()}), Scripted({1: (7,), 2: (4, 4), 3: ()})
    both, rows = FallbackDrafter(first, second), [make_row([token, 0], max_new_tokens=9) for token in (1, 2, 3)]
    for row in rows:
        both.admit(row)
    trees = both.propose(rows, [4, 4, 0])
    assert [tree.tokens for tree in trees] == [(5, 6), (4, 4), ()]
    assert all(tree.linear for tree in trees)
    assert (first.asked, second.asked) == ([[4, 4, 0]], [[0, 4, 0]])
    both.commit(0, rows[0], (0,))
    both.commit(1, rows[1], (0, 1))
    assert (first.told, second.told) == ([(1, (0,)), (2, ())], [(1, ()), (2, (0, 1))])
    both.release(1, rows[1])
    assert first.rows == second.rows == [rows[0], rows[2]]
    both.commit(1, rows[2], ())  # which had nothing of the second's
    assert (first.told[-1], second.told[-1]) == ((3, ()), (3, ()))
    both.commit(1, rows[2], (0,))
    assert (first.told[-1], second.told[-1]) == ((3, (0,)), (3, ()))
    both.propose([rows[0], rows[2]], [0, 0])
    assert len(second.asked) == 1, "nothing is left for the second, so it is not asked"


def test_greedy_rows_with_lookup_before_a_draft_give_the_targets_own_text() -> None:
    """Rows fall back and return, join and leave; the draft's cache has to be right whenever it is asked again."""
    for seed in (0, 7):  # the target as its own draft, and another model
        draft = WatchedModel(FakeEngine(fake_spec(VOCAB), seed=seed, order=2), max_rows=2, min_width=1)
        second = ModelDrafter(draft, StaticShape.chain(3), VOCAB, VOCAB)
        drafter = FallbackDrafter(NgramDrafter(3, 2, 3, threshold=0.15, always=False), second)
        engine = FakeEngine(fake_spec(VOCAB), order=2, min_width=2)
        rows = [make_row([token, 3, token], max_new_tokens=count) for token, count in ((1, 40), (2, 11), (5, 25))]
        answers = run(make_scheduler(engine, drafter, max_rows=2), *rows)
        assert answers == [greedy(engine, list(row.prompt), row.params.max_new_tokens) for row in rows]
        assert sum(row.stats.draft_tokens_accepted for row in rows) > 20
