"""EAGLE: one layer drafts from the target's hidden states, and from its own where the target has none yet.

After Li et al., arXiv:2401.15077 (features), arXiv:2406.16858 (dynamic trees) and arXiv:2503.01840 (several taps). The
draft's cache holds pairs: pair i joins the features of token i with token i + 1 and predicts token i + 2. So a text of
n tokens has n - 1 pairs, and the target, which holds all but the pending token, has the features of each. Deeper pairs
are fed with the state that the draft left at their parent; none of those survives its round, since the target's own
features come with what it accepts. How trees grow and tokens are drawn is the draft model's (`model`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.engines.chunk import RowInput
from specdec.engines.contract import FloatArray, IntArray, tap_columns
from specdec.runtime.drafters.growth import GrowingTree, Shape
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import ROOT


@dataclass(frozen=True, slots=True, eq=False)
class SavedPairs:
    """kv: the draft's cache of the first pairs (None: of none); features [n, F] of the next ones."""

    kv: np.ndarray | None
    features: FloatArray

    @property
    def pairs(self) -> int:
        """Pairs in the cache."""
        return 0 if self.kv is None else int(self.kv.shape[2])

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return self.features.nbytes + (0 if self.kv is None else self.kv.nbytes)


class EagleDrafter(ModelDrafter):
    """Drafts for `target`, which keeps its hidden states, with `model`.

    `taps`: those of the target's taps that `model` reads, in its order. `ids` [Vd]: the target's id of each of its
    logits, ascending; None: they are the target's own. A text of one token has no pair: nothing is proposed.
    """

    def __init__(
        self,
        model: CachedModel,
        target: CachedModel,
        shape: Shape,
        taps: Sequence[str],
        ids: IntArray | None,
        *,
        deterministic: bool = False,
    ) -> None:
        spec, own = target.engine.spec, model.engine.spec
        super().__init__(
            model, shape, spec.vocab_size, spec.vocab_size if ids is None else ids, deterministic=deterministic
        )
        self._target = target
        self._columns = tap_columns(spec.taps, spec.hidden_size, taps)  # of the target's states
        self._own_size = own.tapped_size
        self._features: list[FloatArray] = []  # by row, [n, F]: of the pairs that are not in the cache
        self._states: list[dict[int, FloatArray]] = []  # by row: what the draft left at a node, [H]

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        super().admit(row)
        self._states.append({})
        self._features.append(np.zeros((0, self._model.engine.spec.features), np.float32))

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: holds all pairs but the last one, which the next proposal feeds."""
        self._learn(index, row)
        self._take_in(index, row, max(len(self._features[index]) - 1, 0))

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: pairs of what was drafted go. The target keeps its states until they are to be fed."""
        self._model.lens[index] -= self._drafted[index]
        self._drafted[index] = 0
        if not self._fits(row):
            self._learn(index, row)

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`."""
        super().release(index, row)
        self._features[index], self._states[index] = self._features[-1], self._states[-1]
        self._features.pop()
        self._states.pop()

    def save(self, index: int, row: Row, count: int) -> SavedPairs:
        """See `Drafter.save`: pairs in the cache, and the features that are to be fed, of `count` tokens together."""
        self.commit(index, row, ())
        self._learn(index, row)
        kv = self._saved(index, count)
        left = count if kv is None else count - kv.shape[2]
        return SavedPairs(kv, self._features[index][:left].copy())

    def reusable(self, row: Row, saved: SavedPairs, count: int) -> int:
        """See `Drafter.reusable`: a pair holds the next token, which has to be common as well.

        So the features of the last common token come from a pass of the target, and those before it were saved.
        """
        return min(count - 1, saved.pairs + len(saved.features)) if self._fits(row) else count

    def restore(self, index: int, row: Row, saved: SavedPairs, count: int) -> None:
        """See `Drafter.restore`: as many pairs as the target holds tokens, in the cache or by their features."""
        if self._fits(row):
            if saved.kv is not None:
                self._model.load(index, saved.kv, min(count, saved.pairs), len(row.prompt))
            self._features[index] = saved.features[: max(count - saved.pairs, 0)]

    def _room(self, row: Row) -> int:
        return super()._room(row) if len(row.tokens) > 1 else 0

    def _unseen(self, index: int, row: Row) -> list[int]:
        return row.tokens[int(self._model.lens[index]) + 1 :]

    def _learn(self, index: int, row: Row) -> None:
        """Add the features of what the target has committed since; a text beyond the draft's context needs none."""
        states = self._target.take_hidden(index)[:, self._columns]
        features = np.zeros((len(states), self._model.engine.spec.features), np.float32)
        features[:, : states.shape[1]] = states
        self._features[index] = np.concatenate([self._features[index], features]) if self._fits(row) else features[:0]

    def _take_in(self, index: int, row: Row, count: int) -> None:
        self._learn(index, row)
        features, self._features[index] = np.split(self._features[index], [count])
        self._model.prefill(index, self._unseen(index, row)[:count], features)

    def _feed(self, index: int, row: Row, tree: GrowingTree) -> RowInput:
        fed = super()._feed(index, row, tree)
        if not tree.frontier:
            return fed
        if tree.frontier == [ROOT]:
            self._learn(index, row)
            return replace(fed, features=self._features[index])
        features = np.zeros((len(fed.tokens), self._model.engine.spec.features), np.float32)
        for place, parent in enumerate(tree.parents[len(tree) - len(fed.tokens) :]):
            features[place, -self._own_size :] = self._states[index][parent]
        return replace(fed, features=features)

    def _grow(self, index: int, row: Row, tree: GrowingTree, feed: RowInput, logits: FloatArray) -> None:
        left, first = self._model.hidden[index], len(tree) - len(feed.tokens)  # [S, H], and the first node that was fed
        if tree.frontier == [ROOT]:
            self._states[index] = {ROOT: left[len(feed.tokens) - 1].copy()}
            self._features[index] = self._features[index][:0]
        else:
            self._states[index].update({node: left[node - first].copy() for node in tree.frontier})
        super()._grow(index, row, tree, feed, logits)
