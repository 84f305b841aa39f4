"""What documentation shows of results: one function a table, from reports to Markdown.

Pure. Which page shows which table of which results is written in the page (`performance.py`). This module knows the
reports of `specdec-bench`, of `specdec.tools.damage` and of `specdec.tools.soak`; it measures and judges nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from specdec.engines.errors import RequestError
from specdec.tools.bench_html import best_drafter, verdict
from specdec.tools.bench_report import SHOWN, Report, cell
from specdec.tools.damage import Report as DamageReport
from specdec.tools.figures import ALL, COPYING, PLAIN, Figures, peer_of, pick, pipe_table
from specdec.tools.soak_clients import Report as SoakReport

Result = Report | DamageReport | SoakReport
R = TypeVar("R", bound=Result)
NONE = "-"


def machine(results: Sequence[Result]) -> str:
    """Where and when the reports were measured, with what: a line for each that differs from those before."""
    lines = []
    for report in only(Report, results):
        own = report.machine
        memory = f", {own.memory_bytes / 2**30:.0f} GiB of memory" if own.memory_bytes else ""
        packages = ", ".join(
            f"{name} {own.packages[name]}" for name in ("onnxruntime", "numpy") if name in own.packages
        )
        lines.append(
            f"{report.date}: {report.bundle.name} on {own.cpu.cores} cores of an {own.cpu.model} "
            f"({', '.join(own.cpu.features)}){memory}; {report.settings.threads} threads, {packages}."
        )
    return "\n".join(dict.fromkeys(lines))


def asked(results: Sequence[Result]) -> str:
    """What the methods were asked, of which precisions."""
    found: dict[str, list[str]] = {}
    for report in only(Report, results):
        of = report.settings
        how = "greedy" if of.temperature == 0 else f"temperature {of.temperature:g}, seed {of.seed}"
        what = f"{of.conversations} prompts of `{of.prompts}`, {of.max_new_tokens} tokens each, {how}"
        found.setdefault(what, []).append(report.bundle.precision)
    return "\n".join(f"- {what}: {', '.join(dict.fromkeys(precisions))}" for what, precisions in found.items())


def verdicts(results: Sequence[Result]) -> str:
    """The answer to what everybody asks first, for each report."""
    lines = []
    for report in only(Report, results):
        overall = pick(report.figures, 1)
        said = re.sub("</?b>", "**", str(verdict(best_drafter(overall), overall)))
        lines.append(f"- {name_of(report)}: {said}")
    return "\n".join(lines)


def speed(results: Sequence[Result]) -> str:
    """Every method of every report, over all prompts, one at a time."""
    rows = [("", "method", "tokens/s", "× plain (95 %)", "predicted", "τ",
             f"kept at {', '.join(str(1 + at) for at in range(SHOWN))}", "draft, ms a round", "host, ms a round",
             f"as {PLAIN}")]  # fmt: skip
    for report in only(Report, results):
        label, best = name_of(report), best_drafter(own_figures(report))
        for name, each in own_figures(report).items():
            rows.append(
                (
                    label,
                    f"`{name}`",
                    f"{each.tokens_per_second:.1f}",
                    gain(each, bold=each is best),
                    cell(each.predicted_speedup, ".2f"),
                    cell(each.mean_accepted_length, ".2f"),
                    " ".join(f"{share:.2f}" for share in each.acceptance_by_position[:SHOWN]) or NONE,
                    cell(each.draft_ms, ".1f"),
                    cell(each.host_ms, ".1f"),
                    as_plain(each),
                )
            )
            label = ""
    return pipe_table(rows)


def gains(results: Sequence[Result]) -> str:
    """Speed of plain decoding of every method and report."""
    reports = only(Report, results)
    names = dict.fromkeys(name for report in reports for name in own_figures(report) if name != report.baseline)
    rows = [("", *(name_of(report) for report in reports))]
    for name in names:
        found = [own_figures(report).get(name) for report in reports]
        rows.append((f"`{name}`", *(gain(each) if each else NONE for each in found)))
    return pipe_table(rows)


def categories(results: Sequence[Result]) -> str:
    """Speed of plain decoding by category, of the drafters that the controller plans."""
    reports = only(Report, results)
    columns = [
        (report, name) for report in reports for name in own_figures(report) if name != PLAIN and "/" not in name
    ]
    rows = [("", *(f"{name_of(report)}, `{name}`" for report, name in columns))]
    for category in dict.fromkeys(each.category for each in reports[0].figures):
        if category not in (ALL, COPYING):
            found = [pick(report.figures, 1, category).get(name) for report, name in columns]
            rows.append((category.replace("_", " "), *(cell(each.speedup if each else None, ".2f") for each in found)))
    return pipe_table(rows)


def pass_costs(results: Sequence[Result]) -> str:
    """Milliseconds of single passes by rows and width, the best of several, and the least that they could be."""
    reports = only(Report, results)
    widths = list(dict.fromkeys(cost.width for report in reports for cost in report.pass_costs))
    rows = [("tokens a row", *map(str, widths))]
    for report in reports:
        for batch in dict.fromkeys(cost.batch for cost in report.pass_costs):
            best = {cost.width: cost.best_ms for cost in report.pass_costs if cost.batch == batch}
            label = f"{name_of(report)}, {batch} row{'s' if batch > 1 else ''}"
            rows.append((label, *(cell(best.get(width), ".1f") for width in widths)))
            if report.roofline:
                limits = [report.roofline.limit_ms(batch, width) if width in best else None for width in widths]
                rows.append(("at least", *(cell(limit, ".1f") for limit in limits)))
    return pipe_table(rows)


def memory(results: Sequence[Result]) -> str:
    """Peak resident memory of a process of its own, by method."""
    reports = only(Report, results)
    names = dict.fromkeys(name for report in reports for name, facts in report.methods.items()
                          if facts.peak_memory_bytes)  # fmt: skip
    rows = [("MiB", *(f"`{name}`" for name in names))]
    for report in reports:
        peaks = [report.methods[name].peak_memory_bytes if name in report.methods else None for name in names]
        rows.append((name_of(report), *(cell(peak and peak / 2**20, ",.0f") for peak in peaks)))
    return pipe_table(rows)


def batches(results: Sequence[Result]) -> str:
    """Tokens a second of plain decoding by rows at a time, and the other methods as shares of it."""
    reports = only(Report, results)
    sizes = list(dict.fromkeys(size for report in reports for size in report.settings.batch_size))
    rows = [("rows at a time", "", *map(str, sizes))]
    for report in reports:
        at = {size: pick(report.figures, size) for size in sizes}
        label = name_of(report)
        for name in own_figures(report):
            plain, found = name == report.baseline, [at[size].get(name) for size in sizes]
            values = [(each.tokens_per_second if plain else each.speedup) if each else None for each in found]
            what = f"`{name}`, tokens/s" if plain else f"`{name}`, × plain"
            rows.append((label, what, *(cell(value, ".0f" if plain else ".2f") for value in values)))
            label = ""
    return pipe_table(rows)


def soak(results: Sequence[Result]) -> str:
    """What became of the requests of a long run, in two sentences."""
    (report,) = only(SoakReport, results)
    total, planted = sum(report.outcomes.values()), report.outcomes.get("failed as planted", 0)
    return (
        f"{report.seconds / 60:.0f} minutes, {total:,} requests, {report.tokens:,} tokens of whole answers; "
        f"{report.faults} passes failed on purpose, and {planted} requests with them. Requests that were lost or got "
        f"another answer than the same request alone: {len(report.wrong)}. Resident memory: "
        f"{report.memory[-1] / 2**20:,.0f} MiB at the end, {report.growth:+.1%} from the second quarter to the last."
    )


def only(kind: type[R], results: Sequence[Result], *, others: bool = False) -> list[R]:
    """The results of one kind. Raises `RequestError` when there is none, or (unless `others` may be there) another."""
    found: list[R] = [each for each in results if isinstance(each, kind)]
    if not found or (len(found) < len(results) and not others):
        raise RequestError(f"the table takes reports of {kind.__module__}, and of nothing else")
    return found


def own_figures(report: Report) -> Mapping[str, Figures]:
    """Figures of our own methods, over all prompts, of the report's first batch size."""
    size = report.settings.batch_size[0]
    return {name: each for name, each in pick(report.figures, size).items() if not peer_of(name)}


def name_of(report: Report) -> str:
    """Precision, and temperature where there is one."""
    heat = report.settings.temperature
    return report.bundle.precision + (f", temperature {heat:g}" if heat else "")


def gain(each: Figures, *, bold: bool = False) -> str:
    """Speed of plain decoding, with its interval."""
    span = each.speedup_interval
    text = cell(each.speedup, ".2f")
    text = f"**{text}**" if bold else text
    return f"{text} ({span.low:.2f} to {span.high:.2f})" if span else text


def as_plain(each: Figures) -> str:
    """Answers that are plain decoding's."""
    return NONE if each.identical_to_plain is None else f"{each.identical_to_plain} of {each.answers}"
