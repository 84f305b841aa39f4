"""The mutants' own tests: the table fits the sources, and the runner tells kills from survivors and from accidents."""

import ast
import sys
from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant, copy_tree, foreign_modules, judge, patched, run_all, run_tests

COIN = "tests/test_chance.py::test_coin_wins_iff_u_is_below"
KILLED = Mutant("kills", "coins", "chance.py", "random() < probability", "random() <= probability", (COIN,))
HARMLESS = Mutant("harmless", "nothing", "chance.py", "random() < probability", "random() < 1 * probability", (COIN,))
LOST = Mutant("lost", "nothing", "chance.py", "this text is not there", "", (COIN,))
BROKEN = Mutant("broken", "the import", "chance.py", "class RandomDice:", "class RandomDice", (COIN,))


def test_names_are_unique_and_faults_are_many() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.file for mutant in MUTANTS} >= {
        *("accept.py", "chance.py", "tree.py", "sampling.py", "scheduler.py", "kv.py"),
        *("drafters/growth.py", "drafters/model.py", "drafters/ngram.py"),
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_fits_its_source(mutant: Mutant) -> None:
    """Its text is there exactly once, and what it becomes is Python still."""
    source = (ROOT / "runtime" / mutant.file).read_text()
    assert ast.dump(ast.parse(patched(source, mutant))) != ast.dump(ast.parse(source))


def test_every_named_test_exists() -> None:
    functions = {}
    for test in {test.partition("[")[0] for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        if file not in functions:
            functions[file] = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert name in functions[file], test
    assert all(mutant.tests for mutant in MUTANTS)


def test_a_text_that_is_not_there_once_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times in runtime"):
        patched("abc", LOST)
    with pytest.raises(ValueError, match="2 times"):
        patched("random() < probability" * 2, KILLED)
    assert patched("u = random() < probability", KILLED) == "u = random() <= probability"


def test_runner_tells_kills_from_survivors_and_from_errors() -> None:
    """Four mutants in subprocesses: one that is killed, one that changes nothing, two that cannot be run."""
    lines: list[str] = []
    assert run_all((KILLED, HARMLESS, LOST, BROKEN), 1, lines.append) == 1
    verdicts = {line.split()[0]: line for line in lines[:4]}
    assert "killed: test_chance.py::test_coin_wins_iff_u_is_below" in verdicts["kills"]
    assert "SURVIVED: every test passed" in verdicts["harmless"]
    assert "ERROR: its text is 0 times" in verdicts["lost"]
    assert "ERROR: pytest ended with" in verdicts["broken"]
    assert lines[4].startswith("1 of 4 mutants killed")
    assert lines[5:] == ["SURVIVED: harmless", "ERROR: lost", "ERROR: broken"]


def test_runner_succeeds_when_all_are_killed() -> None:
    assert run_all((KILLED,), 1, lambda line: None) == 0


def test_tests_that_fail_or_are_missing_without_a_fault_end_the_run() -> None:
    lines: list[str] = []
    assert run_all((KILLED._replace(tests=("tests/test_chance.py::test_that_is_not_there",)),), 1, lines.append) == 1
    assert lines[0].startswith("mutants: error: pytest ended with 4 without any fault")


def test_a_run_that_tests_something_else_than_the_copy_fails(tmp_path: Path) -> None:
    copy = copy_tree(tmp_path)
    assert not list(copy.rglob("__pycache__"))
    (copy / "typing_root" / "specdec").rename(copy / "typing_root" / "other")  # the editable install is found instead
    code, output = run_tests(copy, [COIN])
    assert code == 3
    assert "mutants: error: not the copy was tested but" in output


def test_foreign_modules_are_found() -> None:
    assert foreign_modules(Path("/nowhere"))
    assert foreign_modules(ROOT) == []
    assert any(name.startswith("specdec.") for name in sys.modules)


NAMED = HARMLESS._replace(tests=("t.py::test_a", "t.py::test_b[x y-1]"))


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "", "SURVIVED"),
        (1, "FAILED t.py::test_a[1] - assert\nFAILED t.py::test_b[x y-1] - assert\n", "killed"),
        (1, "FAILED t.py::test_a\nFAILED t.py::test_b[x y-1]\n", "killed"),
        (1, "FAILED t.py::test_a - assert\n", "SURVIVED"),
        (1, "FAILED t.py::test_a - assert\nFAILED t.py::test_b[x y-2] - assert\n", "SURVIVED"),
        (1, "FAILED t.py::test_ab - assert\nFAILED t.py::test_b[x y-1] - assert\n", "SURVIVED"),
        (1, "ERROR t.py::test_a - fixture\nFAILED t.py::test_b[x y-1] - assert\n", "ERROR"),
        (2, "ERROR t.py - SyntaxError\n", "ERROR"),
        (3, "FAILED t.py::test_a\nFAILED t.py::test_b[x y-1]\n", "ERROR"),
        (4, "", "ERROR"),
        (5, "", "ERROR"),
        (-1, "not done after 120 seconds", "ERROR"),
    ],
)
def test_verdicts(code: int, output: str, verdict: str) -> None:
    assert judge(NAMED, code, output)[0] == verdict


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(mutants, "run_all", lambda chosen, jobs: asked.append((len(chosen), jobs)) or 0)
    assert mutants.main(["inverted ratio", "--jobs", "1"]) == 0
    assert mutants.main([]) == 0
    assert asked == [(1, 1), (len(MUTANTS), 2)]
    with pytest.raises(SystemExit):
        mutants.main(["no such"])
    assert "no mutant is called 'no such'" in capsys.readouterr().err


def test_names_are_told_apart_case_by_case() -> None:
    """No mutant names a test function and one of its cases: the plugin could not end both at their first failures."""
    for mutant in MUTANTS:
        functions = Counter(test.partition("[")[0] for test in mutant.tests)
        assert not any("[" not in test and functions[test] > 1 for test in mutant.tests), mutant.name


def test_parts_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Mutant] = []
    monkeypatch.setattr(mutants, "run_all", lambda chosen, jobs: taken.extend(chosen) or 0)
    assert [mutants.main(["--part", f"{8 + part}/8"]) for part in range(8)] == [0] * 8
    assert sorted(taken) == sorted(MUTANTS)
    for wrong in ("1", "1/0", "-1/8", "1/1000"):
        with pytest.raises(SystemExit):
            mutants.main([f"--part={wrong}"])
