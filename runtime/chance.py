"""Where chance comes from: dice for acceptance by rejection, and noise by position for coupled sampling.

Acceptance asks for chance through `Dice`, so that a test can walk every outcome with exact fractions instead of
sampling. This module knows weights and positions: not whose distribution they are.
"""

from typing import Protocol

import numpy as np

from specdec.engines.contract import FloatArray

_LEAST = np.finfo(np.float64).tiny
_KEPT_POSITIONS = 16  # noise of so many positions is kept: p and q of one position, and a tree's depths, share it


class Dice(Protocol):
    """The two random choices that are made."""

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


class PositionNoise:
    """Exponential noise E [V] for every position, a function of (seed, position) alone.

    argmin E / p is distributed as p, and equals argmax(log p + g) with Gumbel noise g = -log E: two distributions that
    are asked at one position with one seed choose the same token as often as they agree closely. The generator is
    counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the position is its counter.
    """

    def __init__(self, seed: int | None) -> None:
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self._kept: dict[int, FloatArray] = {}

    def ranking(self, p: FloatArray, position: int, count: int) -> list[int]:
        """Ids of the `count` smallest E / p, ascending (fewer when p [V] has fewer positive entries).

        The first is distributed as p; the list as tokens drawn from p one after another without replacement.
        """
        with np.errstate(over="ignore", divide="ignore"):  # of a probability of 0 or next to it: infinitely late
            arrival = self.noise(position, len(p)) / p
        if count == 1:
            return [int(arrival.argmin())] if p.any() else []
        ids = np.flatnonzero(p)
        return [int(token) for token in ids[np.argsort(arrival[ids], kind="stable")[:count]]]

    def noise(self, position: int, size: int) -> FloatArray:
        """The noise of a position [size], above 0; not to be changed."""
        noise = self._kept.get(position)
        if noise is None or len(noise) != size:
            if len(self._kept) >= _KEPT_POSITIONS:
                del self._kept[next(iter(self._kept))]  # the oldest
            # the low words of the counter count the numbers of one position
            bits = np.random.Philox(key=self._key, counter=np.array([0, 0, 0, position], np.uint64))
            noise = np.random.Generator(bits).standard_exponential(size)
            self._kept[position] = np.maximum(noise, _LEAST, out=noise)  # 0 over a probability of 0 is no number
        return noise


def draw_without_replacement(q: FloatArray, count: int, dice: Dice) -> list[int]:
    """Draw up to `count` different ids from q [V], one after another (fewer when q has fewer positive entries)."""
    drawn: list[int] = []
    left = q
    while len(drawn) < count and (not drawn or left.sum() > 0):
        drawn.append(dice.draw(left))
        if len(drawn) < count:
            left = left.copy()
            left[drawn[-1]] = 0
    return drawn
