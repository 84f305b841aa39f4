"""Faults of memory: caches, rows of a batch, the layout of a pass. See `faults.py`, which plants them.

Each function returns what to replace: owner, attribute, what takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import Chunk, FloatArray, IntArray
from specdec.runtime import kv
from specdec.runtime.kv import CachedModel

Patch = tuple[object, str, object]  # owner, attribute, what takes its place


def commit_one_too_many() -> list[Patch]:
    """Every commit counts one slot more."""
    commit = CachedModel.commit

    def broken(self: CachedModel, row: int, nodes: Sequence[int]) -> None:
        commit(self, row, nodes)
        self.lens[row] += 1

    return [(CachedModel, "commit", broken)]


def slot_off_by_one() -> list[Patch]:
    """The last slot that is committed holds what came after it."""
    commit = CachedModel.commit

    def broken(self: CachedModel, row: int, nodes: Sequence[int]) -> None:
        commit(self, row, nodes)
        end = int(self.lens[row])
        if self.kv is not None and end < self.kv.capacity:
            self.kv.move_slots(row, np.array([end]), end - 1)

    return [(CachedModel, "commit", broken)]


def path_not_compacted() -> list[Patch]:
    """Accepted nodes of a tree stay where they lay."""

    def broken(self: CachedModel, row: int, nodes: Sequence[int]) -> None:
        self.lens[row] += len(nodes)

    return [(CachedModel, "commit", broken)]


def rows_swapped() -> list[Patch]:
    """Neighbouring rows get each other's logits."""
    step = CachedModel.step

    def broken(self: CachedModel, inputs: Sequence[RowInput]) -> list[FloatArray]:
        scored = step(self, inputs)
        for row in range(1, len(scored)):
            if scored[row].shape == scored[row - 1].shape:
                scored[row - 1], scored[row] = scored[row], scored[row - 1]
        return scored

    return [(CachedModel, "step", broken)]


def row_not_moved() -> list[Patch]:
    """A row takes another one's place without its cache."""

    def broken(self: CachedModel, row: int) -> None:
        self.rows -= 1
        self.lens[row] = self.lens[self.rows]

    return [(CachedModel, "drop_row", broken)]


def _packed(wrong: Callable[[Chunk, Chunk], Chunk]) -> list[Patch]:
    """Passes as wrong(the right one, the one of chains) makes them."""

    def broken(inputs: Sequence[RowInput], past: IntArray, min_width: int, max_length: int) -> Chunk:
        chains = [RowInput(row.tokens, row.logits) for row in inputs]
        return wrong(pack(inputs, past, min_width, max_length), pack(chains, past, min_width, max_length))

    return [(kv, "pack", broken)]


def siblings_seen() -> list[Patch]:
    """Nodes of a tree attend all nodes before them."""
    return _packed(lambda right, chains: replace(right, chunk_mask=chains.chunk_mask))


def positions_in_order() -> list[Patch]:
    """Nodes of a tree have positions by their order, not their depth."""
    return _packed(lambda right, chains: replace(right, position_ids=chains.position_ids))
