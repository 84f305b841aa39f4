"""Proposals as token trees.

A proposal hangs below the *pending* token, the last one that was emitted, which is not in the cache yet. A chain is
the tree with one branch. This module knows tokens, parents and positions: no probabilities of the target, no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engines.chunk import RowInput
from specdec.engines.contract import FloatArray


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Proposed tokens of one row, parents before children.

    parents[i] is the index of node i's parent, -1 for the pending token. q[i] [V] is the distribution that node i's
    token was drawn from; None says that the tokens were chosen deterministically.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[FloatArray, ...] | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[FloatArray] | None = None) -> "TokenTree":
        """Return the tree with one branch."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), None if q is None else tuple(q))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node has the one before it as parent."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def verify(self, pending: int) -> RowInput:
        """Return what the target is fed to score `pending` and every node."""
        parents = None if self.is_chain else (-1, *(parent + 1 for parent in self.parents))
        return RowInput((pending, *self.tokens), 1 + len(self), parents)
