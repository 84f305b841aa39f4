"""How sure a figure is: percentiles, and bootstrap intervals of ratios, paired over prompts.

Resampling (Efron, Annals of Statistics 7, 1979) asks what the figure would have been on other prompts of the same kind.
It knows nothing of a machine that drifts between two runs. This module knows numbers: no method, no prompt.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLES = 4000
CONFIDENCE = 0.95
SEED = 20240501  # of the resampling: the same runs give the same interval

Floats = npt.NDArray[np.float64]
Sums = tuple[Sequence[float], Sequence[float]]  # numerator and denominator, one of each for every unit


class Percentiles(msgspec.Struct, frozen=True):
    """Half, 95 and 99 in a hundred values are at most so large."""

    p50: float
    p95: float
    p99: float


class Interval(msgspec.Struct, frozen=True):
    """Where 95 of 100 resamples lie."""

    low: float
    high: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Percentiles of `values`, linear between two of them; None without any."""
    return Percentiles(*map(float, np.percentile(values, (50, 95, 99)))) if values else None


def ratios(ours: Sums, reference: Sums) -> Floats:
    """Ratio of two ratios of sums, (Σa/Σb) / (Σc/Σd), for resamples of the units [RESAMPLES]; empty for one unit.

    All four belong to the same units in the same order, so what makes a unit long or hard weighs on both sides.
    """
    a, b, c, d = (np.asarray(each, np.float64) for each in (*ours, *reference))
    if len(a) < 2:
        return np.empty(0)
    times = np.random.default_rng(SEED).multinomial(len(a), np.full(len(a), 1 / len(a)), RESAMPLES)
    found = (times @ a) * (times @ d) / ((times @ b) * (times @ c))
    return np.asarray(found, np.float64)


def interval(resampled: Floats) -> Interval | None:
    """The middle `CONFIDENCE` of the resamples; None without any."""
    if not len(resampled):
        return None
    tail = 50 * (1 - CONFIDENCE)
    return Interval(*map(float, np.percentile(resampled, (tail, 100 - tail))))
