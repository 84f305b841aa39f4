"""Two drafters: the first proposes where it finds something, the second for all other rows.

Meant for a sure and free draft before one that costs a pass: a long match in the text before a draft model. Which of
them proposes depends on the text so far alone, never on what is about to be drawn (docs/lossless.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.runtime.drafters.base import Drafter
from specdec.runtime.prefixes import Saved
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


@dataclass(frozen=True, slots=True, eq=False)
class SavedBoth:
    """What each drafter saved."""

    first: Saved | None
    second: Saved | None

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return sum(0 if saved is None else saved.nbytes for saved in (self.first, self.second))


class FallbackDrafter:
    """`first`, whose empty proposals say that it finds nothing, and `second` in its place there."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first, self._second = first, second
        self._fell: list[bool] = []  # whether the last proposal is the second drafter's, by row

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`: both follow every row, so either can propose at any time."""
        self._first.admit(row)
        self._second.admit(row)
        self._fell.append(False)

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`."""
        self._first.prefill(index, row)
        self._second.prefill(index, row)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`; the second is not asked when there is nothing left for it."""
        trees = self._first.propose(rows, limits)
        left = [0 if len(tree) else limit for tree, limit in zip(trees, limits, strict=True)]
        fell = self._fell[: len(rows)] = [limit > 0 for limit in left]
        if not any(fell):
            return trees
        others = self._second.propose(rows, left)
        return [other if second else tree for tree, other, second in zip(trees, others, fell, strict=True)]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: of the other's proposal, a drafter hears that nothing of its own was kept."""
        fell = self._fell[index]
        self._first.commit(index, row, () if fell else kept)
        self._second.commit(index, row, kept if fell else ())

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`."""
        self._first.release(index, row)
        self._second.release(index, row)
        self._fell[index] = self._fell[-1]
        self._fell.pop()

    def save(self, index: int, row: Row, count: int) -> SavedBoth:
        """See `Drafter.save`."""
        return SavedBoth(self._first.save(index, row, count), self._second.save(index, row, count))

    def reusable(self, row: Row, saved: SavedBoth, count: int) -> int:
        """See `Drafter.reusable`: what both can go on from."""
        return min(
            self._first.reusable(row, saved.first, count),
            self._second.reusable(row, saved.second, count),
        )

    def restore(self, index: int, row: Row, saved: SavedBoth, count: int) -> None:
        """See `Drafter.restore`."""
        self._first.restore(index, row, saved.first, count)
        self._second.restore(index, row, saved.second, count)
