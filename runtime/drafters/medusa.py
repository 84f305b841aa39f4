"""Medusa: heads on the target's last hidden state draft several tokens ahead, each on its own.

After Cai et al. (arXiv:2401.10774), verified losslessly. The state at token t predicts t + 1, and head d on it t + 2 +
d. The last token in the target's cache is the one before the pending one, so of its state head 0 drafts the first
token, which hangs below the pending one, head 1 the next, whatever the first is: one small pass a round for all rows.
With the most probable tokens as a chain it is blockwise parallel decoding (Stern et al., arXiv:1811.03115).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from specdec.engines.base import Heads
from specdec.engines.contract import FloatArray, IntArray
from specdec.engines.errors import EngineError
from specdec.runtime.drafters.base import Stateless
from specdec.runtime.drafters.growth import GrowingTree, Shape
from specdec.runtime.drafters.model import distribution, most_probable_ids
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class MedusaDrafter(Stateless):
    """Drafts trees of `shape`, at most as deep as there are heads, from the hidden states that `target` keeps.

    `ids` [Vd]: the target's ids that the heads' logits are of (None: all); no other is drafted. `min_rows`: fewest rows
    of a pass; 2 keeps the bits of heads whose one-row kernels differ. `deterministic`: children are the most probable
    tokens, not drawn ones (a greedy request's always are). A row of which the target holds nothing gets no draft.
    """

    def __init__(
        self,
        target: CachedModel,
        heads: Heads,
        shape: Shape,
        ids: IntArray | None = None,
        *,
        min_rows: int = 1,
        deterministic: bool = False,
    ) -> None:
        spec = target.engine.spec
        self._target, self._heads, self._shape = target, heads, shape
        ids = np.arange(heads.spec.logits_size) if ids is None else ids
        self._ids = ids[ids < spec.vocab_size]  # the rest is padding of the checkpoint; ids ascend
        self._vocab_size, self._final = spec.vocab_size, spec.tap("final")
        self._min_rows, self._deterministic = min_rows, deterministic

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: the target keeps the state that it left."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int], prices: Sequence[float] = ()) -> list[TokenTree]:
        """See `PricedDrafter.propose`: one pass of the heads for all rows."""
        trees, states = list[GrowingTree](), dict[int, FloatArray]()  # [H] by row that is drafted for
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            new = self._target.take_hidden(index)[-1:, self._final]  # every round commits a token at least
            depth = min(limit, self._heads.spec.heads) if len(new) else 0
            trees.append(GrowingTree(self._shape, depth, row.max_length - len(row.tokens)))
            if trees[index].frontier:
                states[index] = new[0]
        scored = dict(zip(states, self._score(list(states.values())), strict=True))  # [heads, Vd] by row
        for level, price in zip(range(self._heads.spec.heads), chain(prices, repeat(0.0)), strict=False):
            if sum(tree.promise for tree in trees) < price:
                break
            for index, logits in scored.items():
                if trees[index].frontier:
                    with rows[index].guard():
                        self._grow(rows[index], trees[index], logits[level])
                    if rows[index].error:
                        trees[index] = GrowingTree(self._shape, 0, 0)
        return [tree.tree(sampled=not self._by_rank(row)) for row, tree in zip(rows, trees, strict=True)]

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: the target keeps the states of what it committed until the next proposal."""

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`: nothing is held."""

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """See `Drafter.reusable`: a token of the prompt is left to a pass, whose hidden state drafts."""
        return min(count, len(row.prompt) - 2)

    def _by_rank(self, row: Row) -> bool:
        return self._deterministic or row.params.temperature == 0

    def _score(self, states: Sequence[FloatArray]) -> FloatArray:
        """Logits [len(states), heads, Vd] of `states` [H]. Raises `EngineError` when one is not a number."""
        if not states:
            return np.empty((0, 0, 0), np.float32)
        padded = [*states, *[states[0]] * (self._min_rows - len(states))]
        logits = self._heads.logits(np.stack(padded))
        if not np.isfinite(logits.max(axis=-1)).all():  # a NaN is its maximum
            raise EngineError("the Medusa heads returned logits that are not numbers: export the bundle again")
        return logits[: len(states)]

    def _grow(self, row: Row, tree: GrowingTree, logits: FloatArray) -> None:
        """Grow a row's tree by level d; logits [Vd] are those of head d."""
        known = np.full(self._vocab_size, -np.inf, np.float32)
        known[self._ids] = logits[: len(self._ids)]
        histories = [row.tokens + tree.text(node) for node in tree.frontier]
        asked = histories[:1] if row.pipeline.ignores_history else histories
        q = [distribution(row, known, history) for history in asked]
        q *= len(histories) // len(asked)
        choose = most_probable_ids if self._by_rank(row) else partial(row.draw, position=len(histories[0]))
        tree.extend(q, choose)
