"""What a drafter must do. A drafter proposes; it never decides what is emitted."""

from collections.abc import Sequence
from typing import Any, Protocol

from specdec.runtime.prefixes import Saved
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

    def release(self, index: int, row: Row) -> None:
        """Close row `index` of `row`, which has ended and which the target still has; the last row takes its index."""
        ...

    def save(self, index: int, row: Row, count: int) -> Saved | None:
        """Return what `restore` needs of row `index`, which has ended without an error and is released next.

        Of its first `count` tokens, that is: the target holds them, and `row.tokens` may be fewer than it holds.
        `commit` did not hear of the last round. None when nothing is needed. What is returned never changes.
        """
        ...

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """Return how many of a new row's first `count` tokens the target may start from, for this drafter to go on.

        saved: what `save` returned for a text that begins with the same `count` tokens. Fewer than it returns will do
        as well. Changes nothing.
        """
        ...

    def restore(self, index: int, row: Row, saved: Any, count: int) -> None:
        """Learn that the target holds the first `count` tokens of row `index`, just admitted, without a pass.

        saved: as for `reusable`, which allowed `count`.
        """
        ...


class Stateless:
    """The part of a drafter that saves nothing, since the target's cache and the row's tokens are all it needs."""

    def save(self, index: int, row: Row, count: int) -> Saved | None:
        """See `Drafter.save`."""
        return None

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """See `Drafter.reusable`."""
        return count

    def restore(self, index: int, row: Row, saved: Any, count: int) -> None:
        """See `Drafter.restore`."""
