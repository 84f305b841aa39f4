"""What HTTP costs: both sides answer, and are compared pass by pass."""

import json
import re
from pathlib import Path

import pytest

from specdec.tools import bench_http
from support.bundles import shared_bundle

NUMBER = r"(\d+\.\d+)"


def test_both_sides_answer_the_same_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "writing", "turns": [f"the quick brown fox {n}"]} for n in range(3)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--prompts", str(questions), "--tokens", "5", "--clients", "2", "--repeat", "2"]
    assert bench_http.main([str(shared_bundle()), *options]) == 0
    said = capsys.readouterr().out
    line = rf"2 clients, tokens/s: AsyncLLM {NUMBER}, specdec-serve {NUMBER}: {NUMBER}"
    found = re.fullmatch(rf"{line} \(pass by pass {NUMBER} {NUMBER}\)\n", said)
    assert found, said
    alone, served, ratio, *passes = map(float, found.groups())
    assert min(alone, served, *passes) > 0
    assert ratio == pytest.approx(served / alone, rel=0.05)


def test_a_folder_that_is_no_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["the quick"]}) + "\n")
    assert bench_http.main([str(tmp_path), "--prompts", str(questions)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
