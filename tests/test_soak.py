"""The soak test sees what is wrong, and nothing where all is right."""

import asyncio
import json
from collections import Counter
from itertools import count
from pathlib import Path

import msgspec
import pytest

from specdec.engines.prompts import PROMPTS
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM
from specdec.runtime.scheduler import Scheduler
from specdec.tools import soak
from specdec.tools.soak import Faults, armed, cases, main, verdict
from specdec.tools.soak_clients import Case, Report
from support.bundles import shared_bundle

ROUNDS = 150  # of asking, all clients together


@pytest.fixture(scope="module")
def known() -> list[Case]:
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(shared_bundle(), speculative=SpeculativeConfig(method=None), verify=False, prefix_bytes=0) as alone,
    ):
        patch.setattr(soak, "PROMPTS", PROMPTS[:3])
        return cases(alone)


def load(known: list[Case], fault_every: int = 0) -> Report:
    report, faults, asked = Report(), Faults(fault_every, 0), count()
    with LLM(shared_bundle(), opener=faults.open, verify=False) as llm, armed(faults, report):
        asyncio.run(soak.soak(llm, known, report, clients=8, rows=3, seed=0, going_on=lambda: next(asked) < ROUNDS))
    return report


def test_all_is_right_and_planted_failures_are_told_from_others(known: list[Case]) -> None:
    report = load(known, fault_every=200)
    assert report.wrong == []
    assert sum(report.outcomes.values()) == ROUNDS
    assert report.faults > 0
    assert report.outcomes["failed as planted"] > 0
    assert {"answered", "cancelled", "left", "refused: invalid"} <= report.outcomes.keys()
    assert "nothing lost, mixed up or wrong" in verdict(report)


def test_without_faults_nothing_fails(known: list[Case]) -> None:
    report = load(known)
    assert (report.wrong, report.faults, report.outcomes["failed as planted"]) == ([], 0, 0)


def test_an_answer_of_another_request_is_seen(known: list[Case]) -> None:
    shifted = [msgspec.structs.replace(case, alone=other.alone)
               for case, other in zip(known, [*known[5:], *known[:5]], strict=True)]  # fmt: skip
    report = load(shifted)
    assert len(report.wrong) > report.outcomes["answered"] / 2
    assert f"{len(report.wrong)} WRONG" in verdict(report)


def test_an_error_that_nobody_planted_is_seen(known: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    accept, calls = Scheduler._take, count()

    def failing(self: Scheduler, *inputs: object) -> None:
        if next(calls) % 40 == 39:
            raise ZeroDivisionError("of the scheduler")
        accept(self, *inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_take", failing)
    report = load(known)
    assert set(report.wrong) == {"an error that nobody planted: ZeroDivisionError: of the scheduler"}
    assert (report.outcomes["failed"], report.outcomes["failed as planted"]) == (len(report.wrong), 0)


def test_growth_is_of_the_second_quarter_and_the_last() -> None:
    assert Report(memory=[1, 9, 100, 100, 100, 100, 110, 110]).growth == pytest.approx(0.1)
    assert Report(memory=[100] * 400).growth == 0
    assert Report(memory=[1, 2, 3]).growth == 0, "too short to say"
    assert "+10.0%" in verdict(Report(outcomes=Counter(answered=1), memory=[2**20 * 100] * 6 + [2**20 * 110] * 2))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PROMPTS", PROMPTS[:2])
    file = tmp_path / "soak.json"
    options = [str(shared_bundle()), "--minutes", "0.02", "--clients", "4", "--rows", "2", "--json", str(file)]
    assert main(options) == 0, capsys.readouterr().out
    assert "nothing lost, mixed up or wrong" in capsys.readouterr().out
    assert sum(json.loads(file.read_bytes())["outcomes"].values()) > 0
    monkeypatch.setattr(soak, "GROWTH", -1.0)
    assert main(options) == 1, "memory that grows is a failure"
    assert main([*options, "--method", "nonsense"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([*options[:-1], str(tmp_path / "no" / "soak.json")])
    assert "--json: there is no folder " in capsys.readouterr().err
