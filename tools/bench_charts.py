"""Charts as inline SVG: across in per cent and down in pixels, so that they fit a phone and text keeps its size.

Colours are classes (`h0`, `h1`, ...) that the page defines for light and dark; every series also has its own mark and
its numbers beside it. This module knows numbers and shapes: nothing of decoding.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

BAR, GAP, PLOT = 12, 5, 190  # pixels: a bar, between bars, the height of a plot
LEFT, RIGHT, TOP = 9.0, 95.0, 14  # per cent and pixels that points lie between
MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5l5.5,5.5l-5.5,5.5l-5.5,-5.5z",
    "M0,-5l5,9h-10z",
    "M0,5l5,-9h-10z",
    "M-1.5,-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "M-5,-2h10v4h-10z",
    "M-2,-5h4v10h-4z",
)


class Bar(NamedTuple):
    """A bar from 0 to `value`; `low` to `high` is its interval. `hue` is its series, `title` what it says in words."""

    value: float
    hue: int
    label: str
    title: str
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """A series of points; None where it has none."""

    name: str
    hue: int
    values: Sequence[float | None]


def tag(name: str, content: str | Markup = "", **attributes: object) -> Markup:
    """An element; `_` in attributes' names stands for `-`, and a last one (`class_`) for nothing."""
    pairs = (Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(pairs), content)


def bars(items: Sequence[Bar], most: float, *, reference: float | None = None) -> Markup:
    """Horizontal bars on a scale that ends at `most`, and a line at `reference`. Hidden from readers of a table."""
    height = len(items) * (BAR + GAP) + GAP
    parts = []
    if reference is not None:
        x = _share(reference, most)
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=height, class_="reference"))
    for row, item in enumerate(items):
        y = GAP + row * (BAR + GAP)
        title = tag("title", item.title)
        parts.append(
            tag("rect", title, x=0, y=y, width=_share(item.value, most), height=BAR, rx=2, class_=f"h{item.hue}")
        )
        if item.low is not None and item.high is not None:
            middle, (low, high) = y + BAR / 2, (_share(end, most) for end in (item.low, item.high))
            parts.append(tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker"))
            parts += [tag("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, class_="whisker") for x in (low, high)]
        end = max(item.value, item.high or 0)
        parts.append(tag("text", item.label, x=_share(end, most), y=y + BAR / 2, dx=7, dy="0.35em", class_="value"))
    return _svg(height, parts)


def stacked(values: Sequence[tuple[float, str, str]], most: float) -> Markup:
    """One bar of parts, (value, class, title) each, on a scale that ends at `most`."""
    parts, at = [], 0.0
    for value, kind, title in values:
        parts.append(tag("rect", tag("title", title), x=_share(at, most), y=2, width=_share(value, most), height=22,
                         class_=f"part {kind}"))  # fmt: skip
        at += value
    return _svg(26, parts)


def span(start: float, end: float, hue: int, scale: tuple[float, float], *, reference: float, title: str) -> Markup:
    """Two values and the way between, on a scale from one value to another: `start` hollow, `end` filled."""
    least, most = scale
    x, first, last = (_share(value - least, most - least) for value in (reference, start, end))
    return _svg(24, [
        tag("line", x1=x, x2=x, y1=0, y2=24, class_="reference"),
        tag("line", x1=first, x2=last, y1=12, y2=12, class_=f"way s{hue}"),
        _mark(first, 12, hue, f"{title}, predicted", hollow=True),
        _mark(last, 12, hue, f"{title}, observed"),
    ])  # fmt: skip


def plot(
    series: Sequence[Line], across: Sequence[float], axis: str, form: Callable[[float], str], *, even: bool = True
) -> Markup:
    """Points joined by lines, from 0 up, above the numbers `across`, of which `axis` says what they are.

    `even`: the same distance between all of them, else what their difference is.
    """
    most = nice(max((value for line in series for value in line.values if value is not None), default=1.0))
    at = range(len(across)) if even else across
    wide = (at[-1] - at[0]) or 1
    places = [LEFT + (RIGHT - LEFT) * (each - at[0]) / wide for each in at]

    def down(value: float) -> float:
        return round(PLOT - (PLOT - TOP) * value / most, 2)

    parts = []
    for quarter in range(5):
        value, y = most * quarter / 4, down(most * quarter / 4)
        parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", form(value), x=0, y=y - 4, class_="tick"))
    for number, x in zip(across, places, strict=True):
        parts.append(tag("text", f"{number:g}", x=f"{x:.2f}%", y=PLOT + 16, class_="tick middle"))
    parts.append(tag("text", axis, x="50%", y=PLOT + 34, class_="tick middle"))
    for line in series:
        points = [(x, down(value), value) for x, value in zip(places, line.values, strict=True) if value is not None]
        for (x1, y1, _), (x2, y2, _) in pairwise(points):
            parts.append(tag("line", x1=f"{x1:.2f}%", x2=f"{x2:.2f}%", y1=y1, y2=y2, class_=f"way s{line.hue}"))
        parts += [_mark(f"{x:.2f}%", y, line.hue, f"{line.name}: {form(value)}") for x, y, value in points]
    return _svg(PLOT + 40, parts)


def swatch(hue: int, *, mark: bool = False) -> Markup:
    """A sample of a series for a legend: its mark, or its bar."""
    shape = tag("path", d=MARKS[hue % len(MARKS)]) if mark else tag("rect", x=-5, y=-5, width=10, height=10, rx=2)
    return tag("svg", tag("g", shape, class_=f"h{hue}"), width=13, height=13, viewBox="-6.5 -6.5 13 13",
               aria_hidden="true")  # fmt: skip


def nice(value: float) -> float:
    """The least of 1, 2, 4, 8 times a power of ten that is not below `value`: its quarters are short numbers."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value > 0:
        power /= 10
    return next((power * lead for lead in (1, 2, 4, 8, 10) if power * lead >= value * 0.9999), 1.0)


def _mark(x: str, y: float, hue: int, title: str, *, hollow: bool = False) -> Markup:
    path = tag("path", tag("title", title), d=MARKS[hue % len(MARKS)], class_=f"hollow s{hue}" if hollow else f"h{hue}")
    return tag("svg", path, x=x, y=y, overflow="visible", width=1, height=1)


def _share(value: float, most: float) -> str:
    return f"{100 * value / most:.2f}%"


def _svg(height: float, parts: Sequence[Markup]) -> Markup:
    return tag("svg", Markup("").join(parts), width="100%", height=height, aria_hidden="true", class_="chart")
