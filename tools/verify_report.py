"""What `specdec-verify` found, for people and for programs: the verdict in words, then a table for each check.

This module knows results: it runs nothing.
"""

from collections.abc import Iterator, Sequence

import msgspec

from specdec.tools.figures import align
from specdec.tools.probes import Cpu
from specdec.tools.verify_engine import EngineResult
from specdec.tools.verify_law import LawResult
from specdec.tools.verify_text import TextResult

Result = EngineResult | LawResult | TextResult
_LAW_COLUMNS = ("drafter", "drafts", "tree", "rule", "T", "batch", "samples", "TV", "bound", "entropy", "bound",
                "chi2 p", "tau", "")  # fmt: skip
_TEXT_COLUMNS = ("answers", "by", "tree", "draft", "batch", "prompts", "tokens", "same", "ties", "equal bits", "tau",
                 "")  # fmt: skip


class Planted(msgspec.Struct, frozen=True):
    """The fault that was planted: its name, and what it breaks."""

    name: str
    breaks: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found. Checks that were not reached, after a failed one, are missing.

    `false_alarm`: probability at most that a sound runtime fails, over all of `distribution` together. `seconds` to the
    end of the last check; the first failed one is what `problems` begins with.
    """

    bundle: str
    variant: str
    mode: str
    methods: tuple[str, ...]
    planted: Planted | None
    cpu: Cpu
    specdec: str
    seed: int
    false_alarm: float
    planned: int
    engine: EngineResult | None = None
    distribution: tuple[LawResult, ...] = ()
    texts: tuple[TextResult, ...] = ()
    seconds: float = 0.0

    @property
    def results(self) -> tuple[Result, ...]:
        """All results in the order in which they were found."""
        return (*((self.engine,) if self.engine else ()), *self.distribution, *self.texts)

    @property
    def problems(self) -> list[str]:
        """What failed, and in which check."""
        return [f"{name_of(result)}: {result.problem}" for result in self.results if result.problem]

    @property
    def passed(self) -> bool:
        """Whether every planned check was done and passed."""
        return not self.problems and len(self.results) == self.planned

    @property
    def powerless(self) -> list[LawResult]:
        """Distribution tests in which drafts were not both accepted and rejected."""
        return [result for result in self.distribution if result.passed and not result.power]


def name_of(result: Result) -> str:
    """A check in words."""
    match result:
        case EngineResult():
            return "engine"
        case LawResult(case=case):
            kind = "greedy" if not case.setting.temperature else f"{case.rule}, temperature {case.setting.temperature}"
            whole = ", whole vocabulary" if case.full else ""
            who = f"{case.method} ({case.drafts}), {case.tree}" if case.method else "plain decoding"
            return f"distribution: {who}, {kind}, batch {case.batch}{whole}"
        case TextResult(run=run):
            who = run.method or ("plain decoding, rescored" if run.rescored else "plain decoding")
            draft = f", {run.draft_tokens} draft tokens" if run.draft_tokens else ""
            return f"{run.kind} text: {who}, {run.tree}{draft}, batch {run.batch}"


def to_json(report: Report) -> bytes:
    """The report as one JSON object."""
    own = msgspec.to_builtins(report)
    head = {"passed": report.passed, "verdict": verdict(report), "problems": report.problems}
    for kind in ("distribution", "texts"):
        for one, result in zip(own[kind], getattr(report, kind), strict=True):
            one["passed"] = result.passed
    if report.engine:
        own["engine"]["passed"] = report.engine.passed
    return msgspec.json.encode(head | own)


def verdict(report: Report) -> str:
    """The finding in a sentence."""
    if report.problems:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        return f"NOT lossless: {report.problems[0]}{more}"
    if not report.passed:
        return "Not finished: checks are missing"
    same = sum(result.identical for result in report.texts)
    ties = sum(result.ties for result in report.texts)
    texts = f"{same} texts are plain decoding's own" + (f", {ties} part from it at a tie" if ties else "")
    if not report.methods:
        return f"Nothing speculates in this bundle: no drafter was tested. Of plain decoding, {texts}"
    sampled = sum(bool(result.case.setting.temperature) for result in report.distribution)
    weak = f" ({len(report.powerless)} without power)" if report.powerless else ""
    return f"Lossless: {sampled} distribution tests passed{weak}, {texts}"


def to_text(report: Report) -> str:
    """The report for people."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    if report.planted:
        yield f"A FAULT WAS PLANTED: {report.planted.name} ({report.planted.breaks})"
        found = f"noticed after {report.seconds:.1f} s" if report.problems else "NOT NOTICED"
        yield f"The fault was {found}. What follows is of the broken runtime, not of the bundle."
        yield ""
    yield f"{verdict(report)}."
    yield from (f"  failed: {problem}" for problem in report.problems[1:])
    engine = report.engine
    if engine:
        yield (
            "Relative to the engine that verifies, which is its own reference: "
            f"{report.variant} ({engine.precision}) on {engine.device}."
        )
    if report.planned > len(report.results):
        yield f"{report.planned - len(report.results)} of {report.planned} checks were left out after the failed one."
    yield ""
    yield f"bundle   {report.bundle}, drafters: {', '.join(report.methods) or 'none'}, mode {report.mode}"
    yield f"machine  {report.cpu.model}, {report.cpu.cores} cores"
    yield f"run      specdec {report.specdec}, seed {report.seed}, {report.seconds:.0f} s"
    if engine:
        yield from _engine(engine)
    if report.distribution:
        yield from _distribution(report)
    if report.texts:
        yield from _texts(report.texts)


def _engine(found: EngineResult) -> Iterator[str]:
    yield ""
    yield f"Engine on this machine ({found.seconds:.0f} s)"
    threads = f"{found.threads} thread(s)" if found.threads else "all cores"
    if found.exact:
        narrow = "any pass" if found.least_width == 1 else "passes of two positions or more"
        yield f"  {found.scorings} scorings, {threads}: the same bits in {narrow}"
    else:
        yield f"  bits depend on how a text is cut and batched ({threads})"
    yield f"  noise of a logit: {found.kernel_noise:.2g} by width of the pass" + (
        f", {found.tree_noise:.2g} in trees that branch" if found.tree_noise is not None else ""
    )
    if found.problem:
        yield f"  FAILED: {found.problem}"


def _distribution(report: Report) -> Iterator[str]:
    results = report.distribution
    yield ""
    seconds = sum(result.seconds for result in results)
    yield f"Distribution of short answers, the whole runtime on tables of the engine's logits ({seconds:.0f} s)"
    if all(result.passed for result in results):
        yield f"  Each of {sum(one.bits for one in results)} tokens was chosen from the bits of its own text's logits."
    bounds = [result.fit.variation_bound for result in results if result.fit and result.case.setting.temperature]
    if bounds:
        yield f"  All tests together, a sound runtime fails here with probability {report.false_alarm:.0e} at most."
        yield f"  A total variation of more than {2 * min(bounds):.2f} to {2 * max(bounds):.2f} would escape as rarely."
    rows: list[tuple[str, ...]] = [_LAW_COLUMNS]
    for result in results:
        case = result.case
        rows.append(
            (
                case.method or "plain",
                case.drafts + (" *" if result.disturbed else ""),
                case.tree if case.method else "-",
                case.rule if case.setting.temperature else "greedy",
                f"{case.setting.temperature}" + ("+" if case.setting.terms else ""),
                str(case.batch),
                f"{case.samples}" + (" V" if case.full else ""),
                *_figures(result),
                "FAILED" if not result.passed else ("" if result.power else "no power"),
            )
        )
    yield from _table(rows)
    yield "  TV: total variation; entropy: samples times relative entropy, in nats; chi2 p decides nothing"
    yield "  T+: with penalties that depend on the draft; V: on the whole vocabulary, others on the likely tokens"
    if any(result.disturbed for result in results):
        yield "  *: the draft's logits are disturbed, or it would almost always be accepted (or almost never)"
    if report.powerless:
        yield "  no power: drafts were not both accepted and rejected, so this test proves little"


def _figures(result: LawResult) -> tuple[str, ...]:
    fit, tau = result.fit, f"{result.tau:.2f}"
    if fit is None or not result.case.setting.temperature:
        return "-", "-", "-", "-", "-", tau
    return (
        f"{fit.variation:.3f}",
        f"{fit.variation_bound:.3f}",
        f"{fit.entropy:.1f}",
        f"{fit.entropy_bound:.1f}",
        f"{fit.chi_square_p:.2g}",
        tau,
    )


def _texts(results: Sequence[TextResult]) -> Iterator[str]:
    yield ""
    seconds = sum(result.seconds for result in results)
    yield f"Texts on the real engine, against plain decoding one prompt at a time ({seconds:.0f} s)"
    rows = [_TEXT_COLUMNS]
    for result in results:
        run = result.run
        rows.append(
            (
                run.kind,
                run.method or ("one pass each" if run.rescored else "plain"),
                run.tree if run.method else "-",
                "-" if not run.method else str(run.draft_tokens or "default"),
                str(run.batch),
                str(result.prompts),
                str(result.tokens),
                str(result.identical),
                str(result.ties),
                f"{result.bits_equal} of {result.bits}" if result.exact else "not promised",
                f"{result.tau:.2f}" if result.tau else "-",
                "" if result.passed else "FAILED",
            )
        )
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Left-aligned columns under a head."""
    yield from (f"  {line}" for line in align(rows, left=len(rows[0])).splitlines())
