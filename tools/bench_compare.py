"""Is this run worse than an earlier one? Paired over the same prompts, with how sure that is.

Pure: two reports in, findings out. Times of two runs also differ by what the machine did meanwhile, which no resampling
of prompts shows: `plain`'s own change tells it, `speedup` leaves it out, τ of greedy runs has none of it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import msgspec
import numpy as np

from specdec.engines.errors import RequestError
from specdec.tools.bench_report import Report
from specdec.tools.figures import Run, align, peer_of, pick, sums
from specdec.tools.intervals import Interval, Sums, interval, ratios

Compared = Literal["tokens_per_second", "speedup", "mean_accepted_length"]
COMPARED: tuple[Compared, ...] = get_args(Compared)
THRESHOLD = 5.0  # per cent

_SAME = ("prompts_digest", "conversations", "turns", "max_new_tokens", "temperature", "top_k", "top_p", "seed",
         "backend", "provider", "threads", "repeat")  # fmt: skip


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """New over old of one figure of one method, over all prompts. `chance`: of a resample in which it is no worse."""

    figure: str
    method: str
    batch_size: int
    old: float
    new: float
    interval: Interval | None
    chance: float | None
    regressed: bool

    @property
    def ratio(self) -> float:
        """New over old; less is worse."""
        return self.new / self.old


def check_same(old: Report, new: Report, figures: Sequence[Compared]) -> list[str]:
    """Refuse two reports that cannot be compared (`RequestError`); return what differs and may matter."""
    before, after = old.settings, new.settings
    for name in _SAME:
        if getattr(before, name) != getattr(after, name):
            option = "prompts" if name == "prompts_digest" else f"--{name.replace('_', '-')}"
            values = "" if name == "prompts_digest" else f" ({getattr(before, name)}, now {getattr(after, name)})"
            raise RequestError(
                f"the old report was measured with other {option}{values}: use the same, or write it again"
            )
    for what in ("name", "family", "variant", "precision"):
        one, other = getattr(old.bundle, what), getattr(new.bundle, what)
        if one != other:
            raise RequestError(f"the old report is of another bundle: its {what} is {one}, not {other}")
    one, other = (f"{each.machine.cpu.model}, {each.machine.cpu.cores} cores" for each in (old, new))
    if one != other and set(figures) != {"mean_accepted_length"}:
        raise RequestError(
            f"the old report was measured on another machine ({one}; this is {other}): write it again here, or compare "
            "what does not depend on it: --compare-figures mean_accepted_length"
        )
    notes = [] if old.bundle.files == new.bundle.files else ["the bundle's files are not those of the old report"]
    packages = sorted(old.machine.packages.keys() | new.machine.packages.keys())
    for name in packages:
        was, now = (each.machine.packages.get(name, "absent") for each in (old, new))
        notes += [f"{name} is {now}, was {was}"] if was != now else []
    kinds = {(each.method, each.batch_size) for each in old.figures}
    missing = sorted(kinds - {(each.method, each.batch_size) for each in new.figures})
    return [*notes, *(f"{name} at batch size {size} was not measured now" for name, size in missing)]


def compare(old: Report, new: Report, figures: Sequence[Compared], threshold: float) -> list[Change]:
    """Compare what both reports have. A change is a regression when it is worse by more than `threshold` per cent and
    its whole interval is worse than no change; without an interval (one prompt), the threshold alone decides.

    A count of answers that are plain decoding's is a regression when it falls at all.
    """
    changes = []
    for batch in dict.fromkeys(run.batch_size for run in new.runs):
        before, after = (_by_method(report.runs, batch) for report in (old, new))
        was, now = (pick(report.figures, batch) for report in (old, new))
        for method in (name for name in after if name in before and not peer_of(name)):
            for figure in figures:
                changes += _change(figure, method, batch, before, after, threshold)
            same = was[method].identical_to_plain, now[method].identical_to_plain
            if same[0] is not None and same[1] is not None and same[0]:
                changes.append(
                    Change(figure="identical_to_plain", method=method, batch_size=batch, old=same[0], new=same[1],
                           interval=None, chance=None, regressed=same[1] < same[0])
                )  # fmt: skip
    return changes


def _change(
    figure: Compared, method: str, batch: int, before: dict[str, list[Run]], after: dict[str, list[Run]],
    threshold: float,
) -> list[Change]:  # fmt: skip
    pairs: list[tuple[Sums, Sums]] = []
    for runs in (after, before):
        if figure == "mean_accepted_length":
            pairs.append((_rounds(runs[method]), _rounds(runs[method])))
        else:
            pairs.append((sums(runs[method]), sums(runs["plain"])))
    (ours, reference), (ours_before, reference_before) = pairs
    old, new, resampled = _rate(ours_before), _rate(ours), ratios(ours, ours_before)
    if figure == "speedup":
        if method == "plain":
            return []
        old, new = old / _rate(reference_before), new / _rate(reference)
        resampled = resampled / ratios(reference, reference_before)
    if not old:
        return []
    span, worse = interval(resampled), new / old < 1 - threshold / 100
    chance = float((1 + np.count_nonzero(resampled >= 1)) / (1 + len(resampled))) if len(resampled) else None
    regressed = worse and (span is None or span.high < 1)
    return [Change(figure=figure, method=method, batch_size=batch, old=old, new=new, interval=span, chance=chance,
                   regressed=regressed)]  # fmt: skip


def _by_method(runs: Sequence[Run], batch: int) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in sorted((run for run in runs if run.batch_size == batch), key=lambda run: run.unit):
        found.setdefault(run.method, []).append(run)
    assert all(len(one) == len(other) for one, other in pairwise(found.values())), "every method ran on every unit"
    return found


def _rounds(runs: Sequence[Run]) -> Sums:
    """Tokens and rounds of each run."""
    return ([run.decoded for run in runs], [sum(len(answer.history) for answer in run.answers) for run in runs])


def _rate(of: Sums) -> float:
    return sum(of[0]) / sum(of[1])


def to_text(changes: Sequence[Change], notes: Sequence[str], threshold: float) -> str:
    """What changed, a line each, and the verdict."""
    rows = [("figure", "method", "batch", "old", "new", "new/old", "95 %", "p", "")]
    for each in changes:
        span = f"{each.interval.low:.3f}-{each.interval.high:.3f}" if each.interval else "-"
        rows.append(
            (
                each.figure,
                each.method,
                str(each.batch_size),
                f"{each.old:.3f}",
                f"{each.new:.3f}",
                f"{each.ratio:.3f}",
                span,
                "-" if each.chance is None else f"{each.chance:.4f}",
                "REGRESSED" if each.regressed else "",
            )
        )
    worse = [each for each in changes if each.regressed]
    verdict = f"no figure of {len(changes)} regressed by more than {threshold:g} % with significance"
    if worse:
        verdict = f"{len(worse)} of {len(changes)} figures regressed by more than {threshold:g} %, with significance"
    return "\n".join([*(f"note: {note}" for note in notes), align(rows, left=2), verdict])
