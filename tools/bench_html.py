"""The report as one page of HTML: what a reader should see first, and the charts and tables that show it.

Pure: a report in, text out. The page's words and looks are in `bench.html.jinja`. It refers to nothing outside itself,
runs no script, and is well-formed XML, so that it can be checked.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specdec.tools.bench_charts import Bar, Line, bars, plot, span, stacked, swatch
from specdec.tools.bench_report import Report
from specdec.tools.bench_tokens import KINDS
from specdec.tools.figures import ALL, FAST, PLAIN, Figures, peer_of, pick

HUES = 8  # colours for methods; 0 is plain decoding's
DEEPEST = 8  # positions of a draft that are shown
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # most of them no XML


class Row(NamedTuple):
    """A label, a chart beside it, and a remark."""

    label: str
    note: str
    chart: Markup


class Series(NamedTuple):
    """A method and its colour."""

    name: str
    hue: int


def to_html(report: Report) -> str:
    """Render the page. Raises `ValueError` for a report without figures."""
    if not report.figures:
        raise ValueError("a page needs figures of answers")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "bytes": _bytes}
    environment.globals |= {"swatch": swatch, "kinds": KINDS}
    return printable(environment.get_template("bench.html.jinja").render(**view(report)))


def view(report: Report) -> dict[str, Any]:
    """What the template shows."""
    batch = report.figures[0].batch_size
    overall = pick(report.figures, batch)
    series = _series(list(overall))
    best = best_drafter(overall)
    return {
        "report": report,
        "overall": overall,
        "batch": batch,
        "series": series,
        "best": best,
        "reference": overall.get(report.baseline or ""),
        "verdict": verdict(best, overall),
        "speeds": _speeds(overall, series),
        "categories": _categories(report, batch, series),
        "acceptance": _acceptance(overall, series),
        "times": _times(overall),
        "predictions": _predictions(overall, series),
        "widths": _widths(report),
        "timed": _timed(report),
        "batches": _batches(report, series),
        "groups": _grouped(report.figures),
    }


def verdict(best: Figures | None, overall: Mapping[str, Figures]) -> Markup:
    """The answer to what everybody asks first, in one sentence."""
    if best is None or best.speedup is None:
        fastest = max(overall.values(), key=lambda each: each.tokens_per_second)
        return Markup("{} decodes {} tokens a second.").format(
            fastest.method.capitalize(), _number(fastest.tokens_per_second)
        )
    sure = best.speedup_interval
    interval = f" (95 % interval {sure.low:.2f} to {sure.high:.2f})" if sure else ""
    if sure and sure.high < 1:
        head = Markup("Speculation does not pay here: the best drafter, <b>{}</b>, decodes <b>{:.2f} ×</b> as fast as "
                      "plain decoding{}")  # fmt: skip
    elif best.speedup < 1 or (sure and sure.low <= 1):
        head = Markup("No drafter is reliably faster than plain decoding: the best, <b>{}</b>, is at <b>{:.2f} ×</b>{}")
    else:
        head = Markup("<b>{}</b> decodes <b>{:.2f} ×</b> as fast as plain decoding{}")
    return head.format(best.method, best.speedup, interval) + _sameness(best)


def _sameness(best: Figures) -> str:
    same = best.identical_to_plain
    if same is None:
        return "."
    if same == best.answers:
        return f"; {'its answer is' if same == 1 else f'all of its {same} answers are'} the same, token for token."
    return f"; {same} of its {best.answers} answers are plain decoding's, token for token."


def printable(text: str) -> str:
    """`text` with a replacement character where nothing can be shown."""
    return _UNPRINTABLE.sub("\ufffd", text)


def best_drafter(overall: Mapping[str, Figures]) -> Figures | None:
    """The fastest of our methods that draft."""
    drafting = [each for name, each in overall.items() if name not in (FAST, PLAIN) and not peer_of(name)]
    return max(drafting, key=lambda each: each.tokens_per_second, default=None)


def _series(methods: Sequence[str]) -> dict[str, int]:
    """A colour for each method."""
    others = [name for name in methods if name not in (FAST, PLAIN)]
    return dict.fromkeys(methods, 0) | {name: 1 + at % (HUES - 1) for at, name in enumerate(others)}


def _speeds(overall: Mapping[str, Figures], series: Mapping[str, int]) -> list[Row]:
    most = 1.3 * max(each.tokens_per_second for each in overall.values())
    return [
        Row(name, "", bars([Bar(each.tokens_per_second, series[name], _number(each.tokens_per_second),
                                f"{name}: {_number(each.tokens_per_second)} tokens/s")], most))
        for name, each in overall.items()
    ]  # fmt: skip


def _categories(report: Report, batch: int, series: Mapping[str, int]) -> list[Row]:
    """Speedup of every method but the reference, by category."""
    figures = [each for each in report.figures if each.batch_size == batch and each.method != report.baseline]
    ends = [each.speedup_interval.high if each.speedup_interval else each.speedup or 0 for each in figures]
    most = 1.22 * max([1.0, *ends])
    rows = []
    for category in dict.fromkeys(each.category for each in figures):
        items = []
        for each in (one for one in figures if one.category == category and one.speedup is not None):
            sure, speedup = each.speedup_interval, each.speedup or 0
            words = f", 95 % interval {sure.low:.2f} to {sure.high:.2f}" if sure else ""
            items.append(Bar(speedup, series[each.method], f"{speedup:.2f}", f"{each.method}: {speedup:.2f}{words}",
                             *((sure.low, sure.high) if sure else ())))  # fmt: skip
        if items:
            answers = next(each.answers for each in figures if each.category == category)
            rows.append(Row(category.replace("_", " "), str(answers), bars(items, most, reference=1.0)))
    return rows


def _acceptance(overall: Mapping[str, Figures], series: Mapping[str, int]) -> Markup | None:
    drafted = {name: each.acceptance_by_position[:DEEPEST] for name, each in overall.items()}
    lines = [Line(name, series[name], shares) for name, shares in drafted.items() if shares]
    deepest = max((len(line.values) for line in lines), default=0)
    if not deepest:
        return None
    full = [line._replace(values=[*line.values, *[None] * (deepest - len(line.values))]) for line in lines]
    return plot(full, range(1, deepest + 1), "position in the draft", lambda v: f"{100 * v:.0f} %")


def _times(overall: Mapping[str, Figures]) -> list[Row]:
    """Milliseconds of a round in its parts, and what that makes a token."""
    known = {name: each for name, each in overall.items() if each.target_ms is not None}
    totals = {name: _round_ms(each) for name, each in known.items()}
    most = max(totals.values(), default=0.0) or 1.0
    rows = []
    for name, each in known.items():
        parts = [(getattr(each, f"{kind}_ms"), kind) for kind in ("target", "draft", "host")]
        length = each.mean_accepted_length or 1.0
        note = f"{totals[name]:.1f} ms ÷ {length:.2f} tokens = {totals[name] / length:.1f} ms a token"
        rows.append(Row(name, note, stacked([(ms, kind, f"{kind}: {ms:.2f} ms") for ms, kind in parts], most)))
    return rows


def _round_ms(each: Figures) -> float:
    return (each.target_ms or 0) + (each.draft_ms or 0) + (each.host_ms or 0)


def _predictions(overall: Mapping[str, Figures], series: Mapping[str, int]) -> list[Row]:
    known = [each for each in overall.values() if each.predicted_speedup is not None and each.speedup is not None]
    values = [1.0, *(value for each in known for value in (each.predicted_speedup, each.speedup) if value is not None)]
    room = 0.15 * (max(values) - min(values)) or 0.1
    scale = min(values) - room, max(values) + room
    return [
        Row(each.method, f"{each.predicted_speedup:.2f} → {each.speedup:.2f}",
            span(each.predicted_speedup or 0, each.speedup or 0, series[each.method], scale, reference=1.0,
                 title=each.method))
        for each in known
    ]  # fmt: skip


def _widths(report: Report) -> Markup | None:
    """What a pass costs by its width, in narrowest passes of the same batch size."""
    if not report.pass_costs:
        return None
    widths = sorted({cost.width for cost in report.pass_costs})
    lines = []
    for name, hue in _timed(report).items():
        of = {cost.width: cost.best_ms for cost in report.pass_costs if _rows(cost.batch) == name}
        lines.append(Line(name, hue, [of[width] / of[widths[0]] for width in widths]))
    return plot(lines, widths, "tokens a row in a pass", lambda v: f"{v:.3g} ×", even=False)


def _timed(report: Report) -> dict[str, int]:
    """The batch sizes whose passes were timed, and their colours."""
    return {_rows(batch): 1 + at for at, batch in enumerate(sorted({cost.batch for cost in report.pass_costs}))}


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _batches(report: Report, series: Mapping[str, int]) -> Markup | None:
    """Tokens a second by batch size, where several were measured."""
    sizes = list(dict.fromkeys(each.batch_size for each in report.figures))
    if len(sizes) < 2:
        return None
    found = {size: pick(report.figures, size) for size in sizes}
    lines = [
        Line(name, hue, [found[size][name].tokens_per_second if name in found[size] else None for size in sizes])
        for name, hue in series.items()
    ]
    return plot(lines, sizes, "prompts at a time", lambda v: f"{v:.3g}")


def _grouped(figures: Sequence[Figures]) -> list[tuple[str, list[Figures]]]:
    """All figures for the table, by batch size and category."""
    groups: dict[str, list[Figures]] = {}
    for each in figures:
        name = each.category if each.batch_size == 1 else f"batch {each.batch_size}"
        if each.category != ALL and each.batch_size > 1:
            name += f", {each.category}"
        groups.setdefault(name, []).append(each)
    return list(groups.items())


def _number(value: float | None, digits: int = 3) -> str:
    """A short number: as many digits as tell something."""
    if value is None:
        return "–"
    if abs(value) < 1:
        return f"{value:.{digits - 1}f}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def _bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:.1f} GiB"
