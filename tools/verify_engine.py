"""Is the engine on this machine what the manifest says it is? Its bits, and its noise where bits differ.

A manifest tells what the exporting machine measured; kernels are chosen by instruction set. So the invariance gate's
scorings are repeated here, with the engine and the number of threads that the user asked for. This module knows
engines and scorings: no drafts, no texts that anybody reads.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter

import msgspec

from specdec.engines.base import Engine
from specdec.engines.errors import GateError
from specdec.engines.invariance import (
    FEW_SCORINGS,
    SCORINGS,
    Base,
    check_invariance,
    kernel_noise,
    probe_rows,
    probe_text,
    tree_noise,
)
from specdec.engines.manifest import Invariance, Variant

_TREES = 4


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured here, beside what the manifest says.

    `problem`: why it failed, None when it did not. `kernel_noise`: how far a logit moves with the width of a pass (0:
    not at all). `tree_noise`: how far in trees that branch (None: not measured).
    """

    device: str
    precision: str
    threads: int | None
    exported: Invariance
    exact: bool
    least_width: int
    scorings: int
    kernel_noise: float
    tree_noise: float | None
    problem: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether what the manifest promises holds here."""
        return self.problem is None

    def noise(self, *, tree: bool) -> float:
        """How far a logit may be off for reasons of arithmetic alone."""
        return max(self.kernel_noise, (self.tree_noise or 0.0) if tree else 0.0)


def check_engine(
    opened: Callable[[], Engine],
    variant: Variant,
    words: Sequence[int],
    *,
    threads: int | None,
    again: Callable[[int], Engine] | None,
    trees: bool,
    promised: bool,
) -> EngineResult:
    """Repeat the gate's scorings on the engine that `opened` gives, and measure its noise.

    words: token ids of some text. `again` opens the engine with another number of threads, whose bits have to be the
    same: it is closed before `opened` is called. None: only a few scorings, with the one engine. `promised`: whether
    mode `exact` is wanted.
    """
    started, exported = perf_counter(), variant.invariance
    promised = promised and exported.exact
    base: Base | None = None
    other = 2 if threads == 1 else 1
    if again is not None:
        with closing(again(other)) as first:
            base = Base(first, probe_rows(probe_text(words, first.spec)))
    engine = opened()
    rows = probe_rows(probe_text(words, engine.spec))
    found: Invariance | None = None
    problem = None
    try:
        if base is None:
            found = check_invariance(engine, Base(engine, rows), FEW_SCORINGS)
        else:
            found = check_invariance(engine, base, SCORINGS, f"against {other} thread(s): ")
    except GateError as exc:
        if promised:
            problem = f"{exc}; export the bundle on this kind of machine, or use mode fast"
    if found is not None and promised and found.least_width > exported.least_width:
        problem = (
            f"a pass of one token gives other bits here (up to {found.one_token_max_abs_diff:.3g}), which it did not "
            "where the bundle was exported; export it on this kind of machine, or use mode fast"
        )
    return EngineResult(
        device=engine.capabilities.device,
        precision=variant.precision,
        threads=threads,
        exported=exported,
        exact=found is not None,
        least_width=found.least_width if found is not None else 1,
        scorings=found.scorings if found is not None else 0,
        kernel_noise=found.one_token_max_abs_diff if found is not None else kernel_noise(engine, rows[:2]),
        tree_noise=tree_noise(engine, rows[0], trees=_TREES).max_abs_diff if trees else None,
        problem=problem,
        seconds=perf_counter() - started,
    )
