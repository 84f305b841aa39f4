"""The page: well-formed, complete in itself, right about what it says first; opened in a browser where there is one."""

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from specdec.runtime.request import Round
from specdec.tools.bench_charts import Bar, Line, bars, nice, plot
from specdec.tools.bench_html import printable, to_html, verdict
from specdec.tools.bench_report import machine
from specdec.tools.figures import pick, summarize
from specdec.tools.intervals import Interval
from support.reports import a_report, a_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
)


def elements(page: str) -> list[ElementTree.Element]:
    """All elements of a page that is well-formed XML."""
    return list(ElementTree.fromstring(page.encode("utf-8")).iter())


def words(page: str) -> str:
    return " ".join("".join(ElementTree.fromstring(page.encode()).itertext()).split())


def test_the_page_is_well_formed_and_refers_to_nothing_outside() -> None:
    page = to_html(a_report())
    found = elements(page)
    names = {each.tag for each in found}
    assert {"h1", "svg", "table", "style"} <= names
    assert not names & {"script", "img", "iframe", "object", "embed", "base", "form"}
    references = [value for each in found for name, value in each.attrib.items() if name in ("href", "src", "srcset")]
    assert references == ["data:,"]  # no icon, so that none is fetched
    style = next(each.text or "" for each in found if each.tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert not [name for each in found for name in each.attrib if name.startswith("on")]


def test_everything_that_was_measured_is_on_the_page() -> None:
    page = to_html(a_report())
    said = words(page)
    for heading in ("Speedup by kind of prompt", "One answer, token by token", "How deep drafts are kept",
                    "Where a round's time goes", "What wider passes cost", "Predicted, and observed",
                    "Speed by batch size", "Under load", "What each figure means"):  # fmt: skip
        assert heading in said
    kinds = [each.get("class", "") for each in elements(page) if each.get("title", "").startswith("round ")]
    assert len(kinds) == 12
    assert [sum(kind in each for each in kinds) for kind in ("accepted", "corrected", "bonus")] == [7, 4, 1]
    assert machine().cpu.model in said
    assert "at least, ms" in said
    assert "7.97" in said  # (150 MB + 204 slots of 46 KB) at 20 GB/s: a row of four tokens


def test_what_was_not_measured_is_left_out() -> None:
    runs = [a_run("plain", 0, 1, 1.0, (Round(0, 0, 1.0),))]
    bare = a_report(figures=tuple(summarize(runs)), load=(), pass_costs=(), sample=None, peers={}, runs=tuple(runs))
    said = words(to_html(bare))
    assert "Plain decodes 1.00 tokens a second." in said
    for heading in (
        "Speedup by kind",
        "One answer",
        "How deep",
        "What wider",
        "at least, ms",
        "Predicted,",
        "Speed by batch",
        "Under load",
    ):
        assert heading not in said
    with pytest.raises(ValueError, match="a page needs figures of answers"):
        to_html(a_report(figures=()))


@pytest.mark.parametrize(
    ("speedup", "interval", "same", "says"),
    [
        (1.5, Interval(1.2, 1.8), 6, "<b>ngram</b> decodes <b>1.50 ×</b> as fast as plain decoding (95 % interval 1.20 "
         "to 1.80); all of its 6 answers are the same, token for token."),
        (1.5, None, None, "<b>ngram</b> decodes <b>1.50 ×</b> as fast as plain decoding."),
        (1.1, Interval(0.9, 1.3), 5, "No drafter is reliably faster than plain decoding: the best, <b>ngram</b>, is at "
         "<b>1.10 ×</b> (95 % interval 0.90 to 1.30); 5 of its 6 answers are plain decoding's, token for token."),
        (0.8, Interval(0.7, 0.9), None, "Speculation does not pay here: the best drafter, <b>ngram</b>, decodes "
         "<b>0.80 ×</b> as fast as plain decoding (95 % interval 0.70 to 0.90)."),
    ],
)  # fmt: skip
def test_the_verdict_comes_first_and_claims_no_more_than_is_known(
    speedup: float, interval: Interval | None, same: int | None, says: str
) -> None:
    figures = pick(a_report().figures, 1)
    best = msgspec.structs.replace(
        figures["ngram"], speedup=speedup, speedup_interval=interval, identical_to_plain=same
    )
    assert str(verdict(best, figures)).replace("&#39;", "'") == says


def test_what_cannot_be_shown_is_replaced() -> None:
    assert printable("a\x00\x1b\ud800b\n\té") == "a\ufffd\ufffd\ufffdb\n\té"


@pytest.mark.parametrize(("value", "end"), [(0.4, 0.4), (0.41, 0.8), (1, 1), (1.1, 2), (3, 4), (79, 80), (81, 100),
                                            (0.03, 0.04), (0.0, 1.0)])  # fmt: skip
def test_scales_end_at_short_numbers(value: float, end: float) -> None:
    assert nice(value) == pytest.approx(end)


def test_charts_say_their_numbers() -> None:
    chart = str(bars([Bar(1.5, 1, "1.50", "ngram: 1.5", 1.2, 1.8)], 2.0, reference=1.0))
    assert re.findall(r'<rect x="0" y="5" width="([^"]+)"', chart) == ["75.00%"]
    assert re.findall(r'<line x1="([^"]+)" x2="([^"]+)" y1="0"', chart) == [("50.00%", "50.00%")]
    assert "<title>ngram: 1.5</title>" in chart
    assert ">1.50</text>" in chart
    drawn = str(plot([Line("a", 1, [1.0, None, 3.0])], (1, 2, 4), "width", lambda v: f"{v:g}", even=False))
    assert re.findall(r'<svg x="([\d.]+)%" y="([\d.]+)"', drawn) == [("9.00", "146.0"), ("95.00", "58.0")]
    assert ElementTree.fromstring(drawn).tag == "svg"


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium is not installed")
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_it_opens_in_a_browser_without_an_error(tmp_path: Path, scheme: int) -> None:
    page, profile = tmp_path / "page.html", tmp_path / "profile"
    page.write_text(to_html(a_report()), encoding="utf-8")
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.stdout.count('class="t ') > 12
    broken = tmp_path / "broken.html"
    broken.write_text("<p>x</p><script>missing()</script>")
    told = subprocess.run(
        [*command, "--dump-dom", broken.as_uri()], capture_output=True, text=True, timeout=250, check=False
    )
    assert "CONSOLE" in told.stderr  # so the check above can fail
