"""What counts as worse, on reports whose differences are planted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.engines.errors import RequestError
from specdec.runtime.request import Round
from specdec.tools.bench_compare import COMPARED, THRESHOLD, Change, check_same, compare, to_text
from specdec.tools.bench_report import Report, read_report, to_json
from specdec.tools.figures import Run, summarize
from support.reports import a_report

OLD = a_report()


def changed(*methods: str, factors: Sequence[float], batch: int = 1) -> Report:
    """The report with the times of `methods` multiplied, unit by unit."""

    def slowed(run: Run) -> Run:
        if run.method not in methods or run.batch_size != batch:
            return run
        return msgspec.structs.replace(run, seconds=run.seconds * factors[run.unit % len(factors)])

    runs = tuple(map(slowed, OLD.runs))
    return a_report(runs=runs, figures=tuple(summarize(runs)))


def regressed(new: Report, *figures: Any, threshold: float = THRESHOLD) -> list[tuple[str, str, int]]:
    changes = compare(OLD, new, figures or COMPARED, threshold)
    return [(each.figure, each.method, each.batch_size) for each in changes if each.regressed]


def test_the_same_run_is_no_regression_and_every_change_is_exactly_none() -> None:
    changes = compare(OLD, OLD, COMPARED, THRESHOLD)
    assert [each for each in changes if each.regressed] == []
    assert {each.ratio for each in changes} == {1.0}
    assert {each.interval.low for each in changes if each.interval} == {1.0}
    methods = len({run.method for run in OLD.runs})
    assert len(changes) == 2 * (3 * methods - 1 + methods)  # plain has no speedup; counts of the same answers


def test_a_slower_method_regresses_in_speed_and_in_speedup() -> None:
    assert regressed(changed("ngram", factors=[1.1])) == [("tokens_per_second", "ngram", 1), ("speedup", "ngram", 1)]
    assert regressed(changed("ngram", factors=[1.1], batch=4), "speedup") == [("speedup", "ngram", 4)]
    (change,) = (each for each in compare(OLD, changed("ngram", factors=[1.25]), ("speedup",), THRESHOLD)
                 if (each.method, each.batch_size, each.figure) == ("ngram", 1, "speedup"))  # fmt: skip
    assert change.ratio == pytest.approx(0.8)
    assert change.interval is not None
    assert change.interval.low == pytest.approx(0.8)
    assert change.chance == pytest.approx(0, abs=0.001)


def test_a_slower_machine_leaves_speedups_alone() -> None:
    slow = changed(*{run.method for run in OLD.runs}, factors=[1.5])
    assert {figure for figure, *_ in regressed(slow)} == {"tokens_per_second"}
    assert regressed(slow, "speedup", "mean_accepted_length") == []


def test_small_changes_and_uncertain_ones_are_no_regressions() -> None:
    assert regressed(changed("ngram", factors=[1.03])) == []
    assert regressed(changed("ngram", factors=[1.03]), threshold=1.0) != []
    one_prompt = changed("ngram", factors=[2.2, 0.9, 0.9, 0.9, 0.9, 0.9])  # 11 % slower in all, by one prompt in six
    assert regressed(one_prompt) == []
    assert regressed(changed("ngram", factors=[0.5])) == []


def test_fewer_tokens_a_round_and_fewer_equal_answers_are_regressions() -> None:
    def worse(run: Run) -> Run:
        if run.method != "ngram" or run.batch_size != 1:
            return run
        (answer,) = run.answers
        alone = tuple(Round(1, 0, float(at)) for at in range(1, 13))
        cut = msgspec.structs.replace(answer, history=alone, token_ids=(7, *answer.token_ids[1:]))
        return msgspec.structs.replace(run, answers=(cut,))

    runs = tuple(map(worse, OLD.runs))
    new = a_report(runs=runs, figures=tuple(summarize(runs)))
    assert regressed(new) == [("mean_accepted_length", "ngram", 1), ("identical_to_plain", "ngram", 1)]


def test_one_prompt_has_no_interval_and_the_threshold_decides() -> None:
    def first(report: Report) -> Report:
        runs = tuple(run for run in report.runs if run.unit == 0)
        return a_report(runs=runs, figures=tuple(summarize(runs)))

    slow = first(changed("ngram", factors=[1.1]))
    found = [each for each in compare(first(OLD), slow, ("speedup",), THRESHOLD) if each.regressed]
    assert [(each.method, each.interval, each.chance) for each in found] == [("ngram", None, None)]
    assert not any(each.regressed for each in compare(first(OLD), slow, ("speedup",), 20.0))


def settings(**changes: Any) -> Report:
    return a_report(settings=msgspec.structs.replace(OLD.settings, **changes))


def test_what_cannot_be_compared_is_refused() -> None:
    other_bundle = a_report(bundle=msgspec.structs.replace(OLD.bundle, precision="int8"))
    cpu = msgspec.structs.replace(OLD.machine.cpu, model="another processor")
    other_machine = a_report(machine=msgspec.structs.replace(OLD.machine, cpu=cpu))
    cases = (
        (settings(max_new_tokens=64), r"measured with other --max-new-tokens \(12, now 64\): use the same"),
        (settings(prompts_digest="1"), "measured with other prompts: use the same"),
        (settings(temperature=1.0), "--temperature"),
        (other_bundle, "the old report is of another bundle: its precision is fp32, not int8"),
        (other_machine, "another machine .* --compare-figures mean_accepted_length"),
    )
    for new, message in cases:
        with pytest.raises(RequestError, match=message):
            check_same(OLD, new, COMPARED)
    assert check_same(OLD, other_machine, ("mean_accepted_length",)) == []
    assert check_same(OLD, OLD, COMPARED) == []


def test_what_may_matter_is_noted() -> None:
    packages = {**OLD.machine.packages, "numpy": "0.1"}
    new = a_report(
        bundle=msgspec.structs.replace(OLD.bundle, files="0" * 16),
        machine=msgspec.structs.replace(OLD.machine, packages=packages),
        figures=tuple(each for each in OLD.figures if each.batch_size == 1),
    )
    first, second, *missing = check_same(OLD, new, COMPARED)
    assert first == "the bundle's files are not those of the old report"
    assert second == f"numpy is 0.1, was {OLD.machine.packages['numpy']}"
    assert missing[1] == "ngram at batch size 4 was not measured now"


def test_the_text_names_what_regressed() -> None:
    change = Change(figure="speedup", method="ngram", batch_size=1, old=2.0, new=1.0, interval=None, chance=None,
                    regressed=True)  # fmt: skip
    fine = msgspec.structs.replace(change, new=2.5, regressed=False)
    lines = to_text([change, fine], ["numpy is 2, was 1"], 5.0).splitlines()
    assert lines[0] == "note: numpy is 2, was 1"
    assert lines[2].split() == ["speedup", "ngram", "1", "2.000", "1.000", "0.500", "-", "-", "REGRESSED"]
    assert "REGRESSED" not in lines[3]
    assert lines[-1] == "1 of 2 figures regressed by more than 5 %, with significance"
    assert to_text([fine], [], 5.0).endswith("no figure of 1 regressed by more than 5 % with significance")


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, report = tmp_path / "report.json", a_report(settings=msgspec.structs.replace(OLD.settings, prompts="x"))
    fit = msgspec.structs.replace(report, runs=(), figures=(), sample=None, methods={})
    path.write_bytes(to_json(fit))
    assert read_report(path) == fit
    path.write_bytes(to_json(fit).replace(b'"schema_version": 1', b'"schema_version": 2'))
    with pytest.raises(RequestError, match="is no report of this version of specdec-bench"):
        read_report(path)
    path.write_text("[]")
    with pytest.raises(RequestError, match="is no report of specdec-bench"):
        read_report(path)
