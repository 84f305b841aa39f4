"""Who is accepted, and what the target emits. Pure: probabilities and dice in, a number and a token out.

The rules speak of distributions only; they do not know where p and q come from, nor caches, nor text. Chance comes in
through `Dice`, so that a test can walk every outcome with exact fractions instead of sampling.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specdec.engines.contract import FloatArray


class Dice(Protocol):
    """The two random choices that acceptance makes."""

    def coin(self, probability: float) -> bool:
        """Return True with this probability (values above 1 count as 1)."""
        ...

    def draw(self, weights: FloatArray) -> int:
        """Return index i with probability weights[i] / sum(weights); the sum is above 0."""
        ...


class RandomDice:
    """Dice from a NumPy generator; u is a float64 in [0, 1) and wins iff u < probability."""

    def __init__(self, seed: int | None) -> None:
        self._rng = np.random.Generator(np.random.Philox(seed))

    def coin(self, probability: float) -> bool:
        """See `Dice.coin`."""
        return bool(self._rng.random() < probability)

    def draw(self, weights: FloatArray) -> int:
        """See `Dice.draw`: inverse of the cumulated weights."""
        mass = np.cumsum(weights)
        index = int(np.searchsorted(mass, self._rng.random() * mass[-1], side="right"))
        return min(index, int(np.searchsorted(mass, mass[-1])))  # rounding must not pass the last positive weight


class Accepted(NamedTuple):
    """`kept` leading draft tokens are kept, then `token` is emitted from the target."""

    kept: int
    token: int


def accept_greedy(draft: Sequence[int], best: Callable[[int], int]) -> Accepted:
    """Keep the draft while it is the target's argmax, then emit the argmax.

    best(i) is the argmax after draft[:i], i up to len(draft); asked for only as far as it is needed.
    """
    for kept, token in enumerate(draft):
        if best(kept) != token:
            return Accepted(kept, best(kept))
    return Accepted(len(draft), best(len(draft)))


def accept_chain(
    draft: Sequence[int], p: Callable[[int], FloatArray], q: Sequence[FloatArray] | None, dice: Dice
) -> Accepted:
    """Token rejection sampling (Leviathan et al., arXiv:2211.17192, algorithm 1): what is emitted is distributed as p.

    draft[i] was drawn from q[i] [V]; q None says that the draft is deterministic (q is one-hot at draft[i]).
    p(i) [V] is the target's distribution after draft[:i], i up to len(draft); asked for once, as far as needed.
    """
    for kept, token in enumerate(draft):
        target = p(kept)
        # q(x) > 0, since x was drawn from q
        if dice.coin(target[token] if q is None else target[token] / q[kept][token]):
            continue
        residual = target.copy()
        if q is None:
            residual[token] = 0
        else:
            residual = np.maximum(target - q[kept], 0)
        # p == q leaves nothing; then the coin cannot lose but by rounding, and p itself is the residual's limit
        return Accepted(kept, dice.draw(residual if residual.sum() > 0 else target))
    return Accepted(len(draft), dice.draw(p(len(draft))))
