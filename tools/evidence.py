"""How far counts are from a known distribution, and what chance alone can explain: no SciPy, no asymptotics.

Two bounds decide, and both hold for every sample size and every distribution, however rare some outcomes are:

- relative entropy. For n samples of k outcomes, P(n KL(p̂, p) ≥ x) ≤ exp(-x) (e x / (k - 1))^(k - 1) for x > k - 1
  (Agrawal, "Finite-sample concentration of the multinomial in relative entropy", arXiv:1904.02291).
- total variation. P(TV(p̂, p) > ½ √(k / n) + √(ln(1 / δ) / 2n)) ≤ δ (mean of the distance; McDiarmid's inequality).

Pearson's χ² is shown beside them because everybody knows it. It decides nothing: its tail is an approximation, too
coarse at the tiny levels that a false alarm shall have. This module knows outcomes and counts, nothing of texts.
"""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=Hashable)
_ROUNDING = 1e-6  # nats of entropy that sums and products of floats may be off; decides where one outcome is possible
_LEAST_EXPECTED = 5.0  # cells of the χ² statistic that expect less are merged


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How `samples` outcomes fit a distribution of `cells` possible ones.

    `variation`: TV(p̂, p); `entropy`: samples times KL(p̂, p), in nats, of what is possible. Either is rejected above its
    bound. `impossible`: samples of probability 0. `chi_square_p` is for the eye (0 with impossible ones).
    """

    samples: int
    cells: int
    variation: float
    variation_bound: float
    entropy: float
    entropy_bound: float
    impossible: int
    chi_square_p: float

    @property
    def passed(self) -> bool:
        """Whether chance explains the counts."""
        within = self.variation <= self.variation_bound and self.entropy <= self.entropy_bound + _ROUNDING
        return within and not self.impossible


def fit(counts: Mapping[T, int], law: Mapping[T, float], false_alarm: float) -> Fit:
    """Compare `counts` with `law`, which holds every outcome of positive probability.

    `false_alarm`: probability that a sound sampler may be rejected with; half of it goes to each bound.
    """
    samples, level = sum(counts.values()), false_alarm / 2
    seen = [(count, samples * law[cell]) for cell, count in counts.items() if count and cell in law]
    entropy = sum(count * math.log(count / expected) for count, expected in seen)
    impossible = sum(count for cell, count in counts.items() if cell not in law)
    distance = sum(abs(counts.get(cell, 0) / samples - p) for cell, p in law.items()) + impossible / samples
    return Fit(
        samples=samples,
        cells=len(law),
        variation=distance / 2,
        variation_bound=variation_bound(samples, len(law), level),
        entropy=entropy,
        entropy_bound=entropy_bound(len(law), level),
        impossible=impossible,
        chi_square_p=0.0 if impossible else chi_square_p(counts, law),
    )


def variation_bound(samples: int, cells: int, level: float) -> float:
    """Total variation that p̂ exceeds with probability `level` at most."""
    return 0.5 * math.sqrt(cells / samples) + math.sqrt(math.log(1 / level) / (2 * samples))


def entropy_tail(entropy: float, cells: int) -> float:
    """Bound on the probability that samples times relative entropy reach `entropy` (nats)."""
    free = cells - 1
    if entropy <= free:
        return 1.0
    return math.exp(free - entropy + free * math.log(entropy / free)) if free else 0.0


def entropy_bound(cells: int, level: float) -> float:
    """What samples times relative entropy exceed with probability `level` at most: where `entropy_tail` is `level`."""
    low, high = float(cells - 1), cells - 1 + 1.0
    while entropy_tail(high, cells) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_tail(middle, cells) > level else (low, middle)
    return high


def chi_square_p(counts: Mapping[T, int], law: Mapping[T, float]) -> float:
    """p-value of Pearson's statistic; cells that expect fewer than 5 samples are merged, rarest first."""
    samples = sum(counts.values())
    cells = sorted((samples * p, counts.get(cell, 0)) for cell, p in law.items())
    merged: list[tuple[float, int]] = []
    expected, found = 0.0, 0
    for more, also in cells:
        expected, found = expected + more, found + also
        if expected >= _LEAST_EXPECTED:
            merged.append((expected, found))
            expected, found = 0.0, 0
    if expected and merged:  # cannot be: the largest cells come last; but rounding
        merged[-1] = merged[-1][0] + expected, merged[-1][1] + found
    statistic = sum((count - mean) ** 2 / mean for mean, count in merged)
    return chi_square_tail(statistic, len(merged) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(χ² with `freedom` degrees of freedom > statistic): the regularized incomplete gamma function Q(f/2, s/2).

    Series and continued fraction as in Numerical Recipes, section 6.2 (modified Lentz).
    """
    a, x = freedom / 2, statistic / 2
    if freedom <= 0 or x <= 0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, 10_000):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1 - front * total)
    b, d = x + 1 - a, 1 / (x + 1 - a)
    c, value = 1e300, d
    for n in range(1, 10_000):
        numerator, b = n * (a - n), b + 2
        d = 1 / (numerator * d + b)
        c = b + numerator / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value
