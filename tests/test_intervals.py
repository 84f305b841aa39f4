"""Intervals and predictions, against values that are known without them."""

import numpy as np
import pytest

from specdec.runtime.request import Round
from specdec.tools.intervals import Interval, Percentiles, interval, percentiles, ratios
from specdec.tools.theory import acceptance, expected_tokens, predicted_speedup


def test_percentiles_lie_between_values() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert percentiles([float(value) for value in range(101)]) == Percentiles(50.0, 95.0, 99.0)


def test_a_constant_ratio_is_certain_however_different_the_prompts_are() -> None:
    """Pairing: every prompt takes half the time, so what is drawn does not matter."""
    tokens, seconds = [10.0, 400.0, 3.0, 70.0], [1.0, 90.0, 0.5, 8.0]
    assert interval(ratios((tokens, [second / 2 for second in seconds]), (tokens, seconds))) == Interval(2.0, 2.0)


def test_one_unit_has_no_interval() -> None:
    assert interval(ratios(([1.0], [1.0]), ([1.0], [2.0]))) is None


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Ratios of means of 40 draws: 95 % of intervals hold the true ratio, 2; of 60, fewer than 51 would be wrong."""
    rng, held = np.random.default_rng(5), 0
    for _ in range(60):
        seconds = rng.gamma(4.0, 1.0, 40)
        fast = seconds / 2 * rng.gamma(20.0, 1 / 20, 40)
        ones = [1.0] * 40
        found = interval(ratios((ones, fast.tolist()), (ones, seconds.tolist())))
        assert found is not None
        held += found.low <= 2.0 <= found.high
    assert 0.85 * 60 < held < 60


def test_alpha_counts_rejections_not_what_was_thrown_away_with_them() -> None:
    assert acceptance([Round(0, 0, 0.0)]) is None
    assert acceptance([Round(4, 0, 0.0), Round(4, 4, 0.0), Round(2, 1, 0.0)]) == 5 / 7
    rng = np.random.default_rng(0)
    kept = [min(4, int(np.argmin([*(rng.random(4) < 0.7), False]))) for _ in range(20000)]
    alpha = acceptance([Round(4, each, 0.0) for each in kept])
    assert alpha == pytest.approx(0.7, abs=0.01)
    proposed = 0.7 * (1 - 0.7**4) / (4 * (1 - 0.7))  # accepted over proposed is this, and no alpha
    assert np.mean(kept) / 4 == pytest.approx(proposed, abs=0.01)


def test_expected_tokens_are_the_formula() -> None:
    assert expected_tokens(0.5, 3) == (1 - 0.5**4) / (1 - 0.5)
    assert expected_tokens(1.0, 3) == 4.0
    assert expected_tokens(0.0, 3) == 1.0


def test_the_predicted_speedup_is_the_formula() -> None:
    history = [Round(3, 3, 0.0), Round(3, 1, 0.0)]  # alpha 4/5
    alpha, v, c = 0.8, 14 / 10, 0.5 / 10
    by_hand = (1 - alpha**4) / (1 - alpha) / (v + 3 * c)
    pass_ms = {1: 10.0, 2: 11.0, 4: 14.0, 8: 20.0}
    assert predicted_speedup(history, 3.0, pass_ms, 1, 10.0) == pytest.approx(by_hand)
    assert predicted_speedup([Round(0, 0, 0.0)], 0.0, pass_ms, 1, 10.0) is None
    wide = predicted_speedup([Round(15, 15, 0.0)], 0.0, pass_ms, 1, 10.0)
    assert wide == pytest.approx(16 * 10 / 32)  # beyond what was measured: 1.5 ms a token, as between 4 and 8
    padded = predicted_speedup([Round(1, 1, 0.0), Round(0, 0, 0.0)], 0.0, pass_ms, 2, 10.0)
    assert padded == pytest.approx((2 + 1) * 10 / (11 + 11))  # no pass is narrower than two
