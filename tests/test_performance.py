"""The documentation's figures are what the committed results say, and nothing else."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.engines.damage import Damage
from specdec.engines.errors import RequestError
from specdec.tools.bench_report import Report, to_json
from specdec.tools.damage import Cost
from specdec.tools.damage import Report as DamageReport
from specdec.tools.figures import pick
from specdec.tools.peers import PeerFailure
from specdec.tools.performance import TABLES, main, read_result, render, shown, to_bytes, update
from specdec.tools.soak_clients import Report as SoakReport
from support.reports import EVIL, a_report

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "# A page\n\n<!-- results: speed one -->\nold\n<!-- end -->\n\nProse.\n"


def written(**changes: Any) -> Report:
    """What `specdec-bench --json` writes, with runs, a category and the path of its prompts."""
    of = a_report()
    figures, runs = ([each for each in some if EVIL not in (each.method, each.category)]
                     for some in (of.figures, of.runs))  # fmt: skip
    prompts = msgspec.structs.replace(of.settings, prompts="/home/someone/question.jsonl")
    methods = {name: facts for name, facts in of.methods.items() if name != EVIL}
    fields = {"figures": tuple(figures), "runs": tuple(runs), "settings": prompts, "methods": methods, "sample": None}
    return msgspec.structs.replace(of, **fields | changes)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_bytes(to_json(written()))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def peer_report(speed: float, *, failures: int = 0, **modes: float) -> Report:
    """A report of two own methods and modes of llama-cpp, by their speeds."""
    report = a_report(peers={"llama-cpp": "0.3.36-77-abc"})
    plain = pick(report.figures, 1)["plain"]
    replace = msgspec.structs.replace
    best = max({"plain": speed, **modes}.values())
    found = [replace(plain, speedup_peers={"llama-cpp": plain.tokens_per_second / best}),
             replace(plain, method="ngram", tokens_per_second=2 * plain.tokens_per_second, speedup=2.0,
                     speedup_peers={"llama-cpp": 2 * plain.tokens_per_second / best})]  # fmt: skip
    for mode, value in {"plain": speed, **modes}.items():
        found.append(replace(plain, method=f"llama-cpp:{mode}", tokens_per_second=value, identical_to_plain=2,
                             speedup=value / plain.tokens_per_second))  # fmt: skip
    failed = tuple(PeerFailure("llama-cpp", f"mode-{at}", "ended") for at in range(failures))
    return replace(report, figures=tuple(found), peer_failures=failed)


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[row].strip("|").split("|")]


def test_the_documentation_is_what_its_results_say() -> None:
    assert update(DOCS) == {}


def test_every_table_is_shown_somewhere() -> None:
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"<!-- results: (\S+)", page.read_text())}
    assert named == set(TABLES)


def test_kept_results_name_no_folder_of_a_machine() -> None:
    for path in (DOCS / "results").glob("*.json"):
        assert re.findall(r'"(?:/|~|\w:)[^"]*"', path.read_text()) == [], path


def test_a_newer_result_in_the_old_ones_place_changes_its_tables_alone(docs: Path) -> None:
    assert main(["--docs", str(docs)]) == 0
    page = (docs / "page.md").read_text()
    assert page.startswith("# A page\n\n<!-- results: speed one -->\n\n| ")
    assert page.endswith("\n\n<!-- end -->\n\nProse.\n")
    plain = pick(a_report().figures, 1)["plain"].tokens_per_second
    assert cells(page, 6)[:3] == ["fp32", "`plain`", f"{plain:.1f}"]
    faster = [msgspec.structs.replace(each, tokens_per_second=1234.56) for each in written().figures]
    (docs / "results" / "one.json").write_bytes(to_json(written(figures=tuple(faster))))
    assert main(["--docs", str(docs), "--check"]) == 1
    assert (docs / "page.md").read_text() == page
    assert main(["--docs", str(docs)]) == 0
    assert cells((docs / "page.md").read_text(), 6)[2] == "1234.6"
    assert main(["--docs", str(docs), "--check"]) == 0


def test_what_is_kept_is_small_and_kept_once(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(written().settings, batch_size=(1,))
    report = written(settings=settings, peers={})
    path = tmp_path / "one.json"
    path.write_bytes(to_json(report))
    kept = read_result(path)
    assert isinstance(kept, Report)
    assert (kept.runs, kept.sample, kept.definitions, kept.settings.prompts) == ((), None, {}, "question.jsonl")
    assert {each.category for each in kept.figures} == {"all", "copy-heavy", "qa", "rag"}
    assert len(path.read_bytes()) > 3 * len(to_bytes(kept))
    path.write_bytes(to_bytes(kept))
    assert to_bytes(read_result(path)) == path.read_bytes()
    path.write_bytes(to_json(written(settings=settings)))  # with a peer: no categories
    kept = read_result(path)
    assert isinstance(kept, Report)
    assert {each.category for each in kept.figures} == {"all"}


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<!-- results: sped one -->\n<!-- end -->\n", "there is no table 'sped': choose from asked, batches"),
        ("<!-- results: speed one two -->\n<!-- end -->\n", "table speed shows two: there is no docs/results/two.json"),
        ("<!-- results: soak one -->\n<!-- end -->\n", "the table takes reports of specdec.tools.soak_clients"),
        ("nothing is shown\n", "no page shows one: name it in a mark, or remove docs/results/one.json"),
    ],
)
def test_a_page_that_cannot_be_made_says_why(
    docs: Path, page: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "page.md").write_text(page)
    assert main(["--docs", str(docs)]) == 2
    assert problem in capsys.readouterr().err
    assert (docs / "page.md").read_text() == page


@pytest.mark.parametrize("content", ["{}", "[1]", '{"figures": 3}', "no JSON"])
def test_a_file_that_is_no_result_is_refused(docs: Path, content: str) -> None:
    (docs / "results" / "one.json").write_text(content)
    with pytest.raises(RequestError, match=r"one\.json is no result of"):
        update(docs)


def test_without_results_it_says_where_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--docs", str(tmp_path)]) == 2
    assert "run it where the sources are, or give --docs" in capsys.readouterr().err


def test_a_peer_is_taken_from_the_run_in_which_fewest_of_its_modes_failed() -> None:
    broken, whole = peer_report(90.0, failures=2, lookup=99.0), peer_report(48.0, lookup=36.0)
    table = TABLES["peers"]([broken, whole])
    plain = pick(whole.figures, 1)["plain"].tokens_per_second
    assert cells(table, 4)[1:6] == [
        "llama-cpp 0.3.36", "`plain`", "48.0", f"{48 / plain:.2f}", f"{48 / plain:.2f}"
    ]  # fmt: skip
    assert f"`ngram` decodes at {2 * plain / 48:.2f} of llama-cpp." in TABLES["standing"]([broken, whole])
    again = TABLES["peers"]([peer_report(50.0, lookup=60.0), whole])  # both whole: the first one counts
    assert cells(again, 4)[2:4] == ["`lookup`", "60.0"]


def test_damage_stands_beside_the_speed_of_its_precision() -> None:
    def cost(role: str, precision: str | None, kl: float, bundle: str = "b") -> Cost:
        quality = Damage(mean_kl=kl, top1_agreement=0.5, perplexity=2.0, reference_perplexity=2.0, tokens=9)
        return Cost(bundle=bundle, role=role, precision=precision, size=10**6, damage=quality, pass_costs=[])

    engines = [cost("target", "fp32", 0.0, "ref"), cost("target", "int8", 0.25), cost("llama-cpp 1", None, 0.75)]
    report = DamageReport(reference="ref", texts=1, seed=0, engines=engines, pairs=[])
    assert [cells(TABLES["damage"]([report]), row)[:4] for row in (2, 3)] == [
        ["int8", "specdec", "1", "0.2500"], ["", "llama-cpp 1", "1", "0.7500"]
    ]  # fmt: skip
    speeds = peer_report(48.0)
    int8 = msgspec.structs.replace(speeds, bundle=msgspec.structs.replace(speeds.bundle, precision="int8"))
    assert [cells(TABLES["peers"]([int8, report]), row)[-1] for row in (2, 3, 4)] == ["0.2500", "0.2500", "0.7500"]
    assert [cells(TABLES["peers"]([speeds, report]), row)[-1] for row in (2, 3, 4)] == ["-", "-", "-"]


def test_a_long_run_is_told_with_what_went_wrong() -> None:
    report = SoakReport(seconds=120.0, outcomes={"answered": 7, "failed as planted": 2}, tokens=1000, faults=1,
                        wrong=["one"], memory=[2**20] * 8)  # fmt: skip
    said = TABLES["soak"]([report])
    assert said.startswith("2 minutes, 9 requests, 1,000 tokens")
    assert "another answer than the same request alone: 1." in said


def test_marks_name_results_after_the_table() -> None:
    assert shown(PAGE) == {"one"}
    assert render("no marks\n", {}) == "no marks\n"
