"""How far to draft, and with what: what a round brings against what it costs, both measured. 0 is plain decoding.

A round of B rows costs a pass of the target, B rows by the widest input, and what drafting takes; it brings B tokens
and the draft tokens that are kept. The plan with most tokens a millisecond is chosen (Leviathan et al.,
arXiv:2211.17192, on the best draft length, for a batch). Nothing here depends on what is about to be drawn, so plans
cost no exactness (docs/lossless.md). What is not tried is slowly forgotten, until what was expected of it at first
makes it worth a trial. This module knows milliseconds and chances: no model, no tokens, no row.
"""

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from threading import Lock
from typing import Any

FORGET = 0.995  # weight that is left of an observation after the next one of its kind
FORGET_ROW = 0.97
ROW_TRUST = 24.0  # observations of its own that weigh as much with a row as those of all rows
STEADY = 15  # observations that a pace is the mean of, without the least and the most of them
DISTURBED = 2  # of these, so many at either end, once there are all
CURVE_TRUST = 10  # observations that a curve measured at load is worth
CELL_TRUST = 4.0  # observations of one size of pass before it may differ from the curve by half of what was seen
UNTRIED = 0.999  # weight that is left of all observations of a kind when there could have been one, and was none
RECALL = 64  # rounds without a draft's passes after which one more of their times is the curve's again

_CURVE = (0, 0)  # in place of a size, for what was known at load


class PassTimes:
    """Milliseconds of a pass by rows and width: a curve over the tokens of a pass, and what passes then really took.

    `curve`: milliseconds by tokens (rows x width). `trust`: how many observations it is worth. A common pace follows
    the machine and the growing cache; single sizes may differ from the curve, and come back to it when they are not
    seen. Several threads may ask and tell.
    """

    def __init__(self, curve: Mapping[int, float], trust: int) -> None:
        self._tokens = sorted(curve)
        self._ms = [curve[count] for count in self._tokens]
        self._pace = 1.0
        self._recent = deque([(_CURVE, 1.0)] * trust, maxlen=STEADY)  # sizes of passes, and the pace that each shows
        self._cells: dict[tuple[int, int], tuple[float, float, int]] = {}  # weight, sum of ratios, when
        self._now = 0
        self._lock = Lock()

    def ms(self, rows: int, width: float) -> float:
        """Expected milliseconds of a pass; a width between two whole ones is between their times."""
        low = int(width)
        first = self._whole(rows, low)
        return first if width == low else first + (width - low) * (self._whole(rows, low + 1) - first)

    def observe(self, rows: int, width: int, ms: float) -> None:
        """Learn what a pass took."""
        key, curve = (rows, width), self._curve(rows * width)
        with self._lock:
            self._now += 1
            self._recent.append((key, ms / (curve * self._ratio(key))))
            self._pace = _steady([pace for _, pace in self._recent])
            if any(other not in (key, _CURVE) for other, _ in self._recent):  # else its ratio and the pace look alike
                weight, total = self._weighed(key)
                self._cells[key] = (weight + 1, total + min(max(ms / (curve * self._pace), 0.5), 2.0), self._now)

    def recall(self) -> None:
        """Forget a little of what passes took of late, when there are none: the curve counts as one more of them."""
        with self._lock:
            self._recent.append((_CURVE, 1.0))
            self._pace = _steady([pace for _, pace in self._recent])

    def _whole(self, rows: int, width: int) -> float:
        return self._curve(rows * width) * self._pace * self._ratio((rows, width))

    def _curve(self, tokens: int) -> float:
        """The curve at `tokens`: linear between its points and beyond them."""
        if len(self._tokens) == 1:
            return self._ms[0] * (0.75 + 0.25 * tokens / self._tokens[0])
        above = min(max(bisect(self._tokens, tokens), 1), len(self._tokens) - 1)
        (x0, x1), (y0, y1) = self._tokens[above - 1 : above + 1], self._ms[above - 1 : above + 1]
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), 1e-6)

    def _ratio(self, key: tuple[int, int]) -> float:
        """How much longer than the curve's a pass of this size takes."""
        weight, total = self._weighed(key)
        return (CELL_TRUST + total) / (CELL_TRUST + weight)

    def _weighed(self, key: tuple[int, int]) -> tuple[float, float]:
        weight, total, when = self._cells.get(key, (0.0, 0.0, self._now))
        left = FORGET ** (self._now - when)
        return weight * left, total * left


def _steady(paces: list[float]) -> float:
    """Their mean, which a few disturbed passes do not change. A median would leave out what passes often wait for."""
    ends = DISTURBED * len(paces) // STEADY
    return fmean(sorted(paces)[ends : len(paces) - ends])


class Mean:
    """A mean that forgets: of shares that were kept, or of counts."""

    __slots__ = ("_forget", "_total", "_weight")

    def __init__(self, forget: float = FORGET) -> None:
        self._total, self._weight, self._forget = 0.0, 0.0, forget

    def add(self, value: float) -> None:
        """Count one observation."""
        self.fade()
        self._total, self._weight = self._total + value, self._weight + 1

    def fade(self, left: float | None = None) -> None:
        """Leave `left` of the weight of all observations; None: as much as an observation leaves."""
        left = self._forget if left is None else left
        self._total, self._weight = left * self._total, left * self._weight

    @property
    def seen(self) -> bool:
        """Whether anything was counted."""
        return self._weight > 0

    def value(self, prior: float, trust: float) -> float:
        """The mean, of which `prior` is worth `trust` observations."""
        return (trust * prior + self._total) / (trust + self._weight)


Means = defaultdict[Hashable, Mean]


def row_means() -> Means:
    """What is learned of one row alone."""
    return defaultdict(lambda: Mean(FORGET_ROW))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to draft in a round.

    `width`: draft tokens of a row whose draft is free. `asked`: for each row, whether the drafter that takes passes
    drafts for it. prices[d]: tokens that its level d + 1 has to bring, over all rows, to be worth its time.
    rates[kind]: tokens a millisecond that the best round of each kind promises, of those that might have been the best;
    this is that of `kind`, the most.
    """

    width: int
    asked: tuple[bool, ...]
    prices: tuple[float, ...]
    rates: Mapping[str, float]

    @property
    def kind(self) -> str:
        """Of its drafts: asked, free, or plain when there are none."""
        return _kind(self.width, self.asked)

    @property
    def rate(self) -> float:
        """Tokens a millisecond that are expected."""
        return self.rates[self.kind]


def _kind(width: int, asked: tuple[bool, ...]) -> str:
    return "asked" if any(asked) else "free" if width else "plain"


class Controller:
    """Plans rounds, and learns from them. One serves all requests of a loaded bundle, in several threads.

    What two threads learn at the same moment may be counted once.

    `times`: of the target's passes. `least_width`: positions of its narrowest pass. `levels`: of a draft's levels, a
    guess until they are known. `watch`: told of every plan.
    """

    def __init__(self, times: PassTimes, least_width: int) -> None:
        self.times, self._least = times, least_width
        self.levels = PassTimes({1: 0.1 * times.ms(1, least_width)}, trust=1)
        self.watch: Callable[[Plan], None] | None = None
        self.rounds: dict[str, int] = {"plain": 0, "free": 0, "asked": 0}
        self._means: Means = defaultdict(Mean)
        self._silent = 0

    def mean(self, key: Hashable, prior: float, trust: float, own: Means | None = None) -> float:
        """The mean of `key`: of all rows, and more and more of the one whose means are `own`."""
        common = self._means[key].value(prior, trust)
        return common if own is None else own[key].value(common, ROW_TRUST)

    def learn(self, key: Hashable, value: float, own: Means | None = None) -> None:
        """Count an observation, for all rows and for its own."""
        self._means[key].add(value)
        if own is not None:
            own[key].add(value)

    def forget(self, key: Hashable, own: Means) -> None:
        """Count that there could have been an observation of one row, and was none."""
        self._means[key].fade(UNTRIED)
        own[key].fade()

    def plan(
        self, ladders: Sequence[Sequence[float]], gains: Sequence[float], depth: float, follow: Sequence[float]
    ) -> Plan:
        """The best round for rows whose free drafts reach depth d + 1 with chance ladders[i][d].

        gains[i]: tokens that a drafter which takes passes would bring the row, 0 where it cannot be asked; `depth`: how
        deep it drafts; follow[d]: chance of its token at depth d + 2 when the one before is kept.
        """
        rows, nobody = len(ladders), (False,) * len(ladders)
        sums = [[0.0, *accumulate(ladder)] for ladder in ladders]
        level = self.levels.ms(rows, 1)
        drafting = depth * level
        deepest = self.times.ms(rows, max(self._least, 1 + depth))
        bound = rows + sum(max(gain, each[-1]) for gain, each in zip(gains, sums, strict=True))
        best: dict[str, tuple[float, int, tuple[bool, ...]]] = {}  # by kind: rate, width and who is asked
        rate = 0.0
        for width in range(max(map(len, sums))):
            ms = self.times.ms(rows, max(self._least, 1 + width))
            if bound / ms <= rate:
                continue  # whatever is kept
            free = [each[min(width, len(each) - 1)] for each in sums]
            found = [((rows + sum(free)) / ms, width, nobody)]
            asked = tuple(gain > kept for gain, kept in zip(gains, free, strict=True))
            if any(asked):
                wide = deepest if all(asked) or width <= depth else ms
                found.append(((rows + sum(map(max, gains, free))) / (wide + drafting), width, asked))
            for option in found:
                kind = _kind(width, option[2])
                if kind not in best or option[0] > best[kind][0]:
                    best[kind] = option
            rate = max(rate, *(option[0] for option in found))
        rate, width, asked = max(best.values(), key=lambda found: (found[0], -found[1]))
        if any(gains) and not any(asked):
            self._silent += 1
            if self._silent % RECALL == 0:
                self.levels.recall()
        due = max(self._least, 1 + width if not all(asked) else 1)
        prices = (
            rate * (self.times.ms(rows, max(due, at + 3)) - self.times.ms(rows, max(due, at + 2)) + level) / chance
            for at, chance in enumerate(follow if any(asked) else ())
        )
        plan = Plan(width, asked, (0.0, *prices), {kind: option[0] for kind, option in best.items()})
        self.rounds[plan.kind] += 1
        if self.watch is not None:
            self.watch(plan)
        return plan

    def report(self) -> dict[str, Any]:
        """What is known by now, in plain figures: rounds by kind, times of passes, means."""
        return {
            "rounds": dict(self.rounds),
            "target_ms": {width: round(self.times.ms(1, width), 3) for width in range(self._least, self._least + 8)},
            "draft_level_ms": round(self.levels.ms(1, 1), 3),
            "means": {str(key): round(mean.value(0.0, 0.0), 3) for key, mean in list(self._means.items()) if mean.seen},
        }
