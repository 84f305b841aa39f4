"""Where chance comes from: dice for acceptance by rejection, and noise by position for coupled sampling.

Acceptance asks for chance through `Dice`, so that a test can walk every outcome with exact fractions instead of
sampling. This module knows weights and positions: not whose distribution they are.
"""

from typing import Protocol

import numpy as np

from specdec.engines.contract import FloatArray, IntArray

_LEAST = np.finfo(np.float64).tiny
LIKELY = 2.0**-14  # a token below it is rarely chosen; not many are above it


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
    """Exponential noise E for every token of every position, a function of (seed, position, token) alone.

    argmin E / p is distributed as p, and equals argmax(log p + g) with Gumbel noise g = -log E: two distributions that
    are asked at one position with one seed choose the same token as often as they agree closely. Tokens whose p is
    below `likely` run as one, with noise of its own and the sum of their p; their own noise says which of them it is
    where that one wins. The law is p all the same, and noise is made for the few tokens that matter.
    """

    def __init__(self, seed: int | None, likely: float = LIKELY) -> None:
        self._entropy, self._likely = np.random.SeedSequence(seed).entropy, likely

    def ranking(self, p: FloatArray, position: int, count: int) -> list[int]:
        """Ids of the `count` smallest E / p, ascending (fewer when p [V] has fewer positive entries).

        The first is distributed as p; the list as tokens drawn from p one after another without replacement.
        """
        ids, rest = np.flatnonzero(p >= self._likely), p.copy()
        rest[ids] = 0
        noise, mass = self.noise(position, np.concatenate([np.arange(-1, -1 - count, -1), ids])), rest.sum()
        others, arrival = noise[:count], noise[count:] / p[ids]  # of the others as one, each time that one is taken
        if mass > 0 and (len(ids) < count or others[0] / mass < np.partition(arrival, count - 1)[count - 1]):
            late = np.flatnonzero(rest)
            with np.errstate(over="ignore"):  # of a probability next to 0: infinitely late
                late = late[_smallest(self.noise(position, late) / rest[late], count)]
                left = np.maximum(mass - np.cumsum(rest[late]) + rest[late], rest[late])
                ids = np.concatenate([ids, late])
                arrival = np.concatenate([arrival, np.cumsum(others[: len(late)] / left)])
        return [int(token) for token in ids[_smallest(arrival, count)]]

    def lead(self, p: FloatArray, position: int, token: int, other: int) -> float:
        """By how much log p [V] has to change, between `token` and `other`, for `other` to come first after all."""
        pair, rest = np.array([token, other]), p < self._likely
        with np.errstate(divide="ignore"):  # of a token that is impossible
            alone = np.log(self.noise(position, pair)) - np.log(p[pair])
            as_one = np.log(self.noise(position, np.array([-1]))) - np.log(p[rest].sum())
        first, second = alone if rest[pair].all() else np.where(rest[pair], as_one, alone)
        return float(second - first)

    def noise(self, position: int, ids: IntArray) -> FloatArray:
        """The noise of `ids` [n] at a position, above 0 [n]; ids from -1 down are of no token.

        Number id + 1 of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
        begun at a word of (seed, position).
        """
        word = np.random.SeedSequence(self._entropy, spawn_key=(position,)).generate_state(1, np.uint64)
        z = word + (ids + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
        return np.maximum(-np.log(1 - z * 2.0**-53), _LEAST)  # type: ignore[no-any-return]


def _smallest(values: FloatArray, count: int) -> IntArray:
    """Where the `count` smallest of values [n] are, ascending; fewer when n is."""
    if count == 1 and len(values):
        return np.array([values.argmin()])
    return np.argsort(values, kind="stable")[:count]


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
