"""N-grams where the text repeats itself, another drafter where that brings more, as far as either pays; or neither.

What pays is the controller's to say. This module asks it, hands its plan on, and tells it what was kept. It knows no
cost and no model.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from time import perf_counter
from typing import Any, Protocol

from specdec.runtime.controller import Controller, Means, row_means
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.ngram import ACCEPTANCE, NgramDrafter
from specdec.runtime.prefixes import Saved
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree

NGRAM_TRUST = 20.0  # observations that the measured chances of n-grams are worth
GAIN, FOLLOW, PRIOR_TRUST = 1.0, 0.5, 8.0  # of a drafter of which nothing is known yet: it is tried


class PricedDrafter(Drafter, Protocol):
    """A drafter that grows chains level by level, in passes of its own."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int], prices: Sequence[float] = ()) -> list[TokenTree]:
        """See `Drafter.propose`; prices[d]: tokens that depth d + 1 has to promise, over all rows, or none grows on."""
        ...


@dataclass(slots=True)
class _State:
    """Of one row: what is known of it, and what was proposed last."""

    means: Means = field(default_factory=row_means)
    match: int | None = None
    asked: bool = False
    depth: int = 0


class AdaptiveDrafter:
    """`free` costs nothing, `costly` passes of its own; either may be missing. At most `most` tokens a round."""

    def __init__(
        self, controller: Controller, free: NgramDrafter | None, costly: PricedDrafter | None, most: int
    ) -> None:
        self._controller = controller
        self._free, self._costly, self._most = free, costly, most
        self._states: list[_State] = []

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`: both follow every row, so either can propose at any time."""
        for drafter in self._both():
            drafter.admit(row)
        self._states.append(_State())

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`."""
        for drafter in self._both():
            drafter.prefill(index, row)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`, as the controller plans it."""
        limits = [min(limit, self._most) for limit in limits]
        states = self._states[: len(rows)]
        for index, (state, row) in enumerate(zip(states, rows, strict=True)):
            state.match = self._free.match(index, row) if self._free else None
        ladders = [self._ladder(*each) for each in zip(states, rows, limits, strict=True)]
        gains = [self._gain(*each) for each in zip(states, rows, limits, strict=True)]
        follow = [self._mean(("follow", depth), FOLLOW) for depth in range(1, self._most)] if any(gains) else []
        plan = self._controller.plan(ladders, gains, self._mean("depth", 1.0), follow)
        trees = [TokenTree.chain(())] * len(rows)
        if self._free and plan.width:
            free = [0 if asked else min(plan.width, limit) for asked, limit in zip(plan.asked, limits, strict=True)]
            trees = self._free.propose(rows, free)
        if self._costly and any(plan.asked):
            asked = [limit if asked else 0 for asked, limit in zip(plan.asked, limits, strict=True)]
            started = perf_counter()
            others = self._costly.propose(rows, asked, plan.prices)
            levels = max(tree.depth for tree in others)
            if levels:
                self._controller.levels.observe(len(rows), 1, 1000 * (perf_counter() - started) / levels)
                self._controller.learn("depth", levels)
            trees = [other if asked else tree for tree, other, asked in zip(trees, others, plan.asked, strict=True)]
        for state, row, tree, was_asked in zip(states, rows, trees, plan.asked, strict=True):
            state.asked, state.depth = was_asked, tree.depth
            if not was_asked:
                self._controller.forget(("gain", _sampled(row)), state.means)
                if state.match is not None:
                    self._controller.forget(_match_key(row, state.match + tree.depth), state.means)
        return trees

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: of the other's proposal, a drafter hears that nothing of its own was kept."""
        state = self._states[index]
        if self._free:
            self._free.commit(index, row, () if state.asked else kept)
        if self._costly:
            self._costly.commit(index, row, kept if state.asked else ())
        if state.asked:
            self._controller.learn(("gain", _sampled(row)), len(kept), state.means)
            for depth in range(1, min(len(kept) + 1, state.depth)):
                self._controller.learn(("follow", depth), depth < len(kept))
        elif state.match is not None:
            for depth in range(min(len(kept) + 1, state.depth)):
                self._controller.learn(_match_key(row, state.match + depth), depth < len(kept), state.means)

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`."""
        for drafter in self._both():
            drafter.release(index, row)
        self._states[index] = self._states[-1]
        self._states.pop()

    def save(self, index: int, row: Row, count: int) -> Saved | None:
        """See `Drafter.save`: n-grams need the tokens alone."""
        return self._costly.save(index, row, count) if self._costly else None

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """See `Drafter.reusable`."""
        return self._costly.reusable(row, saved, count) if self._costly else count

    def restore(self, index: int, row: Row, saved: Any, count: int) -> None:
        """See `Drafter.restore`."""
        if self._costly:
            self._costly.restore(index, row, saved, count)

    def _both(self) -> list[Drafter]:
        return [drafter for drafter in (self._free, self._costly) if drafter is not None]

    def _ladder(self, state: _State, row: Row, limit: int) -> list[float]:
        """Chances that an n-gram draft is kept to depth 1, 2, ..."""
        if state.match is None:
            return []
        matches = range(state.match, state.match + limit)
        chances = [
            self._controller.mean(_match_key(row, match), ACCEPTANCE[_known(match)], NGRAM_TRUST, state.means)
            for match in matches
        ]
        return list(accumulate(chances, mul))

    def _gain(self, state: _State, row: Row, limit: int) -> float:
        """Tokens that the costly drafter brings the row."""
        if self._costly is None or limit <= 0:
            return 0.0
        return self._controller.mean(("gain", _sampled(row)), GAIN, PRIOR_TRUST, state.means)

    def _mean(self, key: Hashable, prior: float) -> float:
        return self._controller.mean(key, prior, PRIOR_TRUST)


def _known(match: int) -> int:
    return min(match, len(ACCEPTANCE) - 1)


def _match_key(row: Row, match: int) -> Hashable:
    return "match", _known(match), _sampled(row)


def _sampled(row: Row) -> bool:
    return row.params.temperature > 0
