"""What a drafter must do. A drafter proposes; it never decides what is emitted."""

from collections.abc import Sequence
from typing import Protocol

from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class Drafter(Protocol):
    """Proposes token trees for the active rows; its own state per row follows the target's rows by index."""

    def admit(self, row: Row) -> None:
        """Open state for the next row index; `row.tokens` is its prompt."""
        ...

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """Propose one tree per row, at most `limits[i]` tokens deep; an empty tree is a fine proposal.

        A tree has no more nodes than the row has room in its context. Changes no row but for the chance it takes
        (`Row.draw`). A tree's `q` is the distribution that its tokens were drawn from, with the request's own pipeline,
        or None when they were chosen deterministically.
        """
        ...

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """Learn that the target kept the path `kept` of row `index`'s last proposal; `row` is up to date."""
        ...

    def release(self, index: int) -> None:
        """Close row `index`, which the target still has; the last row takes its index."""
        ...
