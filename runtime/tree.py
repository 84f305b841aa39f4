"""Proposals as token trees, and their layout as one chunk of the engine contract.

A proposal hangs below the *pending* token, the last one that was emitted, which is not in the cache yet. A chain is
the tree with one branch. This module knows tokens, parents and positions: no probabilities of the target, no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.engines.contract import BoolArray, Chunk, FloatArray, IntArray


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


@dataclass(frozen=True, slots=True)
class RowInput:
    """What one row feeds in a pass: `tokens` after its committed ones; logits are wanted of the last `logits` of them.

    `parents` (indices into `tokens`, -1 for the first) is None for a chain.
    """

    tokens: Sequence[int]
    logits: int
    parents: Sequence[int] | None = None

    @classmethod
    def verify(cls, pending: int, tree: TokenTree) -> "RowInput":
        """Return the input that scores the pending token and every node of `tree`."""
        parents = None if tree.is_chain else (-1, *(parent + 1 for parent in tree.parents))
        return cls((pending, *tree.tokens), 1 + len(tree), parents)


def pack(inputs: Sequence[RowInput], past_lens: IntArray, min_width: int, max_length: int) -> Chunk:
    """Lay rows out as one chunk, right-padded to the widest (at least `min_width`).

    past_lens [B]. Padding continues the chain: it sees its row, and nothing of its row sees it. Positions stop at
    `max_length - 1`, which only padding can reach.
    """
    rows = len(inputs)
    width = max(min_width, *(len(row.tokens) for row in inputs))
    wanted = max(1, *(row.logits for row in inputs))
    ids = np.zeros((rows, width), np.int64)
    positions = past_lens[:, None] + np.arange(width)  # [B, S]
    mask = np.empty((rows, width, width), np.bool_)
    mask[:] = _triangle(width)
    indices = np.zeros((rows, wanted), np.int64)
    for b, row in enumerate(inputs):
        count = len(row.tokens)
        ids[b, :count] = row.tokens
        if row.parents is not None:
            ancestors, depths = _ancestors(row.parents)
            mask[b, :count, :count] = ancestors
            positions[b, :count] = past_lens[b] + depths
        indices[b, : row.logits] = np.arange(count - row.logits, count)
    return Chunk(ids, np.minimum(positions, max_length - 1), past_lens, mask, indices)


@lru_cache(maxsize=64)
def _triangle(width: int) -> BoolArray:
    return np.tril(np.ones((width, width), np.bool_))


def _ancestors(parents: Sequence[int]) -> tuple[BoolArray, IntArray]:
    """Return who sees whom (itself and its ancestors) [n, n], and the depth of every node [n]."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(f"node {node} comes before its parent {parent}")
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask, mask.sum(axis=1) - 1
