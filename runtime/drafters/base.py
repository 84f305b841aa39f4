"""What a drafter must do. A drafter proposes; it never decides what is emitted."""

from collections.abc import Sequence
from typing import Protocol

from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class Drafter(Protocol):
    """Proposes token trees for the active rows; its own state per row follows the target's rows by index."""

    def admit(self, row: Row) -> None:
        """Open state for the next row index; `row.tokens` is its prompt, of which the target holds nothing yet."""
        ...

    def prefill(self, index: int, row: Row) -> None:
        """Learn that the target holds a further part of row `index`'s prompt: `row.held` tokens in all."""
        ...

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """Propose one tree for each of the first rows, at most `limits[i]` tokens deep; an empty tree is fine.

        A row whose prompt the target does not hold yet has the limit 0. What is wrong with one row ends that row alone
        (`Row.guard`). A tree has no more nodes than the row has room in its context. Changes no row but for the chance
        that it takes (`Row.draw`). A tree's `q` is the distribution that its tokens were drawn from, with the request's
        own pipeline, or None when they were chosen deterministically.
        """
        ...

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """Learn that the target kept the path `kept` of row `index`'s last proposal; `row` is up to date."""
        ...

    def release(self, index: int) -> None:
        """Close row `index`, which the target still has; the last row takes its index."""
        ...
