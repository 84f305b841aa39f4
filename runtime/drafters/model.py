"""A draft model: its own engine and cache, under the target's rollback rule.

A tree grows level by level. As long as it is a chain, its tokens are committed to the cache one by one; beyond the
first fork every pass feeds all nodes behind it anew, since a chunk's mask covers that chunk only. After a round the
cache is cut back to the tokens that were kept; the next proposal first feeds what it has not seen. Tokens are drawn
from q, the request's own pipeline on the draft's logits, and q is handed on as it was drawn from.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from specdec.engines.chunk import RowInput
from specdec.engines.contract import FloatArray, IntArray
from specdec.engines.errors import DeadEndError
from specdec.runtime.drafters.growth import GrowingTree, Shape
from specdec.runtime.kv import CachedModel
from specdec.runtime.prefixes import Saved
from specdec.runtime.request import Row
from specdec.runtime.sampling import most_probable, softmax
from specdec.runtime.tree import ROOT, TokenTree

CATCH_UP = 8  # unseen tokens beyond which a row takes them in on its own, not in the pass that drafts for all


class ModelDrafter:
    """Drafts trees of `shape` with `model`.

    `deterministic`: children are the most probable tokens, not drawn ones (a greedy request's always are).
    `vocab_size`: ids of the target. `drafted`: those that the draft's logits are of, in their order: no other has a
    probability. A number: ids below it mean the same in both models, and where the text holds another one, the draft
    model is given id 0 in its place (a draft may be poor, it cannot be wrong).
    A row that outgrows the draft's context is no longer drafted for.
    """

    def __init__(
        self,
        model: CachedModel,
        shape: Shape,
        vocab_size: int,
        drafted: int | IntArray,
        *,
        deterministic: bool = False,
    ) -> None:
        self._model = model
        self._shape = shape
        self._deterministic = deterministic
        self._vocab_size = vocab_size
        self._fed = min(drafted, vocab_size) if isinstance(drafted, int) else vocab_size  # ids below it can be fed
        self._ids: slice | IntArray = slice(self._fed)
        self._count = self._fed
        if not isinstance(drafted, int):
            self._count = int(np.searchsorted(drafted, vocab_size))  # what is beyond is padding of the checkpoint
            self._ids = drafted[: self._count]
        self._drafted: list[int] = []  # leading nodes of the last proposal that are in the cache, by row

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        self._model.add_row()
        self._drafted.append(0)

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: holds what the target does."""
        if self._fits(row):
            self._take_in(index, row, row.held - int(self._model.lens[index]))

    def propose(self, rows: Sequence[Row], limits: Sequence[int], prices: Sequence[float] = ()) -> list[TokenTree]:
        """See `PricedDrafter.propose`: one pass per level, all rows together."""
        trees = [GrowingTree(self._shape, limit, self._room(row)) for row, limit in zip(rows, limits, strict=True)]
        self._drafted[: len(rows)] = [0] * len(rows)
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            if tree.frontier:
                self._catch_up(index, row)
        for price in chain(prices, repeat(0.0)):
            promise = sum(tree.promise for tree in trees)
            if promise <= 0 or promise < price:
                break
            feeds = [self._feed(index, row, tree) for index, (row, tree) in enumerate(zip(rows, trees, strict=True))]
            for index, logits in enumerate(self._model.step(feeds)):
                if trees[index].frontier:
                    with rows[index].guard():
                        self._model.check(index, logits)
                        self._grow(index, rows[index], trees[index], feeds[index], logits)
                    if rows[index].error:
                        trees[index] = GrowingTree(self._shape, 0, 0)
        return [tree.tree(sampled=not self._by_rank(row)) for row, tree in zip(rows, trees, strict=True)]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: gives back the slots of tokens that were not kept."""
        drafted = self._drafted[index]  # these are a chain: the proposal's first nodes
        self._model.lens[index] -= drafted - sum(place == node for place, node in enumerate(kept[:drafted]))
        self._drafted[index] = 0
        assert self._model.lens[index] < len(row.tokens), "the draft's cache holds no more than the target's"

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`."""
        self._model.drop_row(index, spoiled=row.spoiled)
        self._drafted[index] = self._drafted[-1]
        self._drafted.pop()

    def save(self, index: int, row: Row, count: int) -> Saved | None:
        """See `Drafter.save`: this model's cache. What was drafted and not kept lies behind `count`."""
        return self._saved(index, count)

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """See `Drafter.reusable`: what this model lacks it takes in by a pass."""
        return count

    def restore(self, index: int, row: Row, saved: Any, count: int) -> None:
        """See `Drafter.restore`."""
        if saved is not None and self._fits(row):
            self._model.load(index, saved, min(count, saved.shape[2]), len(row.prompt))

    def _saved(self, index: int, count: int) -> np.ndarray | None:
        """What the cache holds of the first `count` slots of row `index`; None when that is nothing."""
        held = min(int(self._model.lens[index]), count)
        return self._model.save(index, held) if held > 0 else None

    def _by_rank(self, row: Row) -> bool:
        return self._deterministic or row.params.temperature == 0

    def _room(self, row: Row) -> int:
        """How many nodes a row's tree may have."""
        return min(self._model.max_length, row.max_length) - len(row.tokens)

    def _fits(self, row: Row) -> bool:
        return len(row.tokens) <= self._model.max_length

    def _catch_up(self, index: int, row: Row) -> None:
        """Take in what the row has gained while others drafted for it, if that is much."""
        if self._fits(row) and (unseen := len(self._unseen(index, row))) > CATCH_UP:
            self._take_in(index, row, unseen - 1)

    def _take_in(self, index: int, row: Row, count: int) -> None:
        """Bring the next `count` tokens of the row into the cache, in passes of this row alone."""
        self._model.prefill(index, self._known(self._unseen(index, row)[:count]))

    def _unseen(self, index: int, row: Row) -> list[int]:
        """The row's tokens that are not in the cache."""
        return row.tokens[int(self._model.lens[index]) :]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._fed else 0 for token in tokens]

    def _feed(self, index: int, row: Row, tree: GrowingTree) -> RowInput:
        """What the model has to see to give logits after the frontier's nodes."""
        if not tree.frontier:
            return RowInput((), 0)
        if tree.frontier == [ROOT]:
            return RowInput(self._known(self._unseen(index, row)), 1)
        first = self._drafted[index]
        parents = [parent - first if parent >= first else -1 for parent in tree.parents[first:]]
        return RowInput(self._known(tree.tokens[first:]), len(tree) - tree.frontier[0], parents)

    def _grow(self, index: int, row: Row, tree: GrowingTree, feed: RowInput, logits: FloatArray) -> None:
        """Extend a row's tree by a level; logits: those of the last nodes, from the frontier's first one on."""
        first = tree.frontier[0]
        if first == ROOT:
            self._model.commit(index, range(len(feed.tokens)))
        elif len(feed.tokens) == 1 and first == self._drafted[index]:  # a chain so far
            self._model.commit(index, range(1))
            self._drafted[index] += 1
        histories = [row.tokens + tree.text(node) for node in tree.frontier]
        q = [
            self._distribution(row, logits[node - first], history)
            for node, history in zip(tree.frontier, histories, strict=True)
        ]
        choose = most_probable_ids if self._by_rank(row) else partial(row.draw, position=len(histories[0]))
        tree.extend(q, choose)

    def _distribution(self, row: Row, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """The draft's distribution [V] after `history`."""
        known = np.full(self._vocab_size, -np.inf, np.float32)  # ids that the draft does not know are never drawn
        known[self._ids] = logits[: self._count]
        return distribution(row, known, history)


def distribution(row: Row, known: FloatArray, history: Sequence[int]) -> FloatArray:
    """What a draft's logits are to a request: its distribution [V] after `history` (greedy ones: at temperature 1).

    known [V]: -inf for ids that the draft does not know. All zero when the request allows none of the others.
    """
    try:
        if row.params.temperature == 0:
            return softmax(row.pipeline.scores(known, history))
        return row.pipeline.probabilities(known, history)
    except DeadEndError:  # the target, which knows more ids, decides whether it is one
        return np.zeros(len(known))


def most_probable_ids(q: FloatArray, count: int) -> list[int]:
    """Up to `count` most probable ids of q [V] that are possible at all."""
    return [int(token) for token in most_probable(q, count) if q[token] > 0]
