"""Rows of tokens laid out as one chunk of the contract: padding, positions, tree masks.

What a caller wants to feed is a `RowInput` per row; `pack` makes the tensors. This module knows layout only: not where
tokens come from, not what becomes of the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.engines.contract import BoolArray, Chunk, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class RowInput:
    """What one row feeds in a pass: `tokens` after its committed ones; logits are wanted of the last `logits` of them.

    `parents` (indices into `tokens`, -1 for the first) is None for a chain. `features` [tokens, F], if the model takes
    them; every row has them then, or none.
    """

    tokens: Sequence[int]
    logits: int
    parents: Sequence[int] | None = None
    features: FloatArray | None = None


def pack(inputs: Sequence[RowInput], past_lens: IntArray, min_width: int, max_length: int) -> Chunk:
    """Lay rows out as one chunk, right-padded to the widest (at least `min_width`).

    past_lens [B]. Padding continues the chain: it sees its row, and nothing of its row sees it. Positions stop at
    `max_length - 1`, which only padding can reach. Where a pass of one token has other bits (`min_width` 2 or more), a
    product of one row may have them too: logits are asked for at two positions at least.
    """
    rows = len(inputs)
    width = max(min_width, *(len(row.tokens) for row in inputs))
    wanted = max(min(min_width, 2), *(row.logits for row in inputs))
    ids = np.zeros((rows, width), np.int64)
    positions = past_lens[:, None] + np.arange(width)  # [B, S]
    mask = np.empty((rows, width, width), np.bool_)
    mask[:] = _triangle(width)
    indices = np.zeros((rows, wanted), np.int64)
    sizes = {row.features.shape[1] for row in inputs if row.features is not None}
    features = np.zeros((rows, width, *sizes), np.float32) if sizes else None
    for b, row in enumerate(inputs):
        count = len(row.tokens)
        ids[b, :count] = row.tokens
        if row.parents is not None:
            ancestors, depths = _ancestors(row.parents)
            mask[b, :count, :count] = ancestors
            positions[b, :count] = past_lens[b] + depths
        indices[b, : row.logits] = np.arange(count - row.logits, count)
        if features is not None and row.features is not None:
            features[b, :count] = row.features
    return Chunk(ids, np.minimum(positions, max_length - 1), past_lens, mask, indices, features)


def nodes_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes of the path that ends at `node`, a root (parent -1) first; none for -1. parents[i] is node i's parent."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


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
