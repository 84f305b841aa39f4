"""Whose turn it is, and the whole tool on a tiny bundle with stand-ins for the peers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.engines.errors import RequestError
from specdec.runtime import SpeculativeConfig
from specdec.tools import measure
from specdec.tools.figures import Run
from specdec.tools.measure import PassCost, cost_table, interleave, main, pass_costs
from specdec.tools.questions import Question
from support.bundles import shared_bundle
from support.fake_engine import FakeEngine, fake_spec
from support.fake_peers import VERSIONS, genai_folder, gguf_file, peer_python


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    turns = {"rag": "the quick brown fox jumps over the quick brown fox", "writing": "one, two, three"}
    path.write_text(
        "".join(
            json.dumps({"question_id": number, "category": category, "turns": [text, "unused"]}) + "\n"
            for number, (category, text) in enumerate(turns.items(), 1)
        )
    )
    return path


def test_methods_take_turns_and_the_fastest_repeat_counts() -> None:
    calls: list[tuple[str, int, int]] = []

    def method(name: str, seconds: Sequence[float], tokens: int) -> measure.Generate:
        left = iter(seconds)

        def generate(question: Question, ids: Sequence[int], count: int) -> Run:
            calls.append((name, ids[0], count))
            return Run(
                question_id=question.question_id,
                category=question.category,
                method=name,
                token_ids=(7,) * tokens,
                decoded=tokens,
                seconds=next(left),
            )

        return generate

    methods = {
        "a": method("a", [4.0, 3.0, 1.0, 2.0], 6),
        "b": method("b", [1.0, 2.0, 2.0, 1.0], 8),
        "ort-genai": method("ort-genai", [1.0, 1.0, 1.0, 1.0], 6),
        "llama-cpp": method("llama-cpp", [3.0, 2.0, 4.0, 5.0], 6),
    }
    prompts = [(Question(number, "qa", ("text",)), [number]) for number in (1, 2)]
    runs = list(interleave(prompts, methods, 10, 2))
    assert [(run.method, run.question_id, run.seconds) for run in runs] == [
        ("a", 1, 3.0),
        ("b", 1, 1.0),
        ("ort-genai", 1, 1.0),
        ("llama-cpp", 1, 2.0),
        ("a", 2, 1.0),
        ("b", 2, 1.0),
        ("ort-genai", 2, 1.0),
        ("llama-cpp", 2, 4.0),
    ]
    a, b, genai, llama = (
        [(name, number, count) for number in (1, 2)]
        for name, count in (("a", 10), ("b", 10), ("ort-genai", 6), ("llama-cpp", 6))
    )  # peers generate as many as "a"
    assert calls == [
        *(a[0], b[0], genai[0], llama[0]),
        *(b[0], a[0], llama[0], genai[0]),
        *(b[1], a[1], llama[1], genai[1]),
        *(a[1], b[1], genai[1], llama[1]),
    ]


def test_pass_costs_time_every_width_and_batch_in_turns() -> None:
    engine = FakeEngine(fake_spec(8, max_length=1024), order=2, prefilling=True)
    costs = pass_costs(engine)
    kinds = [(batch, width) for batch in (1, 4) for width in (1, 2, 3, 4, 6, 8, 16)]
    assert [(cost.batch, cost.width) for cost in costs] == kinds
    assert engine.widths == [200, *[width for _, width in kinds] * 21]
    assert all(0 < cost.best_ms <= cost.median_ms for cost in costs)


def test_cost_table() -> None:
    costs = [
        PassCost(1, 1, 10.0, 11.04),
        PassCost(1, 16, 100.0, 101.0),
        PassCost(4, 1, 2.06, 3.0),
        PassCost(4, 16, 7, 8),
    ]
    assert cost_table(costs).splitlines() == [
        "ms per pass, tokens a row:     1     16",
        "batch 1, best of 20         10.0  100.0",
        "batch 1, median             11.0  101.0",
        "batch 4, best of 20          2.1    7.0",
        "batch 4, median              3.0    8.0",
    ]


def test_rows_run_at_a_time_and_say_what_they_say_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"question_id": n, "category": "abc"[n % 3], "turns": [f"fox {n}"]}) for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    found = {}
    for rows in (1, 2):
        report = tmp_path / f"{rows}.json"
        options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6", "--json", str(report)]
        assert main([str(shared_bundle()), *options, "--methods", "plain,ngram", "--rows", str(rows)]) == 0
        found[rows] = json.loads(report.read_text())
    assert [len(each["runs"]) for each in found.values()] == [20, 2]
    assert list(found[2]["groups"]) == ["all", "2 rows"]
    (plain, ngram) = (run["token_ids"] for run in found[2]["runs"])
    alone = [run["token_ids"] for run in found[1]["runs"] if run["method"] == "plain"]
    assert plain == ngram == [token for ids in alone for token in ids]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([str(shared_bundle()), "--prompts", "p", "--rows", "2", "--ort-genai", "folder"])
    assert "--rows: peers run one prompt at a time" in capsys.readouterr().err


def test_the_whole_tool(tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(shared_bundle())
    capsys.readouterr()  # what the export of the bundle printed
    report = tmp_path / "report.json"
    options = ["--prompts", str(prompts), "--max-new-tokens", "12", "--threads", "1", "--json", str(report)]
    python, folder, file = peer_python(tmp_path), genai_folder(tmp_path, 400), gguf_file(tmp_path, 400)
    options += ["--ort-genai", str(folder), "--ort-genai-python", python, "--pass-costs"]
    options += ["--llama-cpp", str(file), "--llama-cpp-python", python]
    assert main([bundle, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert len(lines) == 5 + 1 + 4 * 6  # pass costs; all, copy-heavy and two categories with six methods each

    written = json.loads(report.read_text())
    assert written["peers"] == VERSIONS
    assert written["baseline"] in ("plain-fast", "plain")
    assert len(written["pass_costs"]) == 14
    assert list(written["groups"]) == ["all", "copy-heavy", "rag", "writing"]
    figures = {each["method"]: each for each in written["groups"]["all"]}
    assert list(figures) == ["plain-fast", "plain", "ngram", "model", "ort-genai", "llama-cpp"]
    assert [figures[name]["identical_to_plain"] for name in ("plain", "ngram", "model")] == [2, 2, 2]
    assert figures["plain"]["mean_accepted_length"] == 1.0
    assert figures["model"]["acceptance_rate"] == 1.0
    runs = {(run["method"], run["question_id"]): run for run in written["runs"]}
    assert len(runs) == 12
    for number in (1, 2):
        count = len(runs["plain-fast", number]["token_ids"])
        for name in ("ort-genai", "llama-cpp"):
            assert len(runs[name, number]["token_ids"]) == count
            assert runs[name, number]["decoded"] == count - 1
            assert runs[name, number]["seconds"] == count - 1  # by the stand-in's clock
        assert runs["ngram", number]["token_ids"] == runs["plain", number]["token_ids"]


def test_errors_of_the_tool(tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(shared_bundle())
    cases = [
        ([bundle], "nothing to measure: give --prompts FILE, --pass-costs or both"),
        ([bundle, "--pass-costs", "--methods", "ngram,ngram"], "argument --methods: 'ngram,ngram' is not a list of "),
        ([bundle, "--pass-costs", "--repeat", "0"], "argument --repeat: '0' is not a whole number of at least 1"),
        ([bundle, "--pass-costs", "--json", str(tmp_path / "no" / "file")], "--json: there is no folder "),
    ]
    for options, message in cases:
        with pytest.raises(SystemExit) as exit_code:
            main(options)
        assert exit_code.value.code == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert main([bundle, "--prompts", str(prompts), "--methods", "medusa"]) == 2
    assert "this bundle has no drafter 'medusa'" in capsys.readouterr().err
    assert main([str(tmp_path), "--pass-costs"]) == 1
    assert "is not a bundle" in capsys.readouterr().err


def test_a_method_says_its_rule_its_tree_and_its_size() -> None:
    read = measure._config
    assert read("plain", 3) == (SpeculativeConfig(method=None), "")
    assert read("ngram", None) == (SpeculativeConfig(method="ngram"), "")
    assert read("layerskip:8@token/chain/2", 5) == (
        SpeculativeConfig(method="layerskip:8", num_speculative_tokens=2),
        "token",
    )
    assert read("model/dynamic", 5) == (SpeculativeConfig(method="model", num_speculative_tokens=5, tree="dynamic"), "")
    assert read("ngram+eagle/chain/3/0.5", None) == (
        SpeculativeConfig(method="ngram+eagle", num_speculative_tokens=3, confidence_threshold=0.5),
        "",
    )
    wrong_names = (
        "model/chain/x",
        "model/chain/2/3",
        "model/bush/2",
        "model/chain/2/0.5/1",
        "model@",
        "model/chain/2.",
    )
    for wrong in wrong_names:
        with pytest.raises(RequestError):
            read(wrong, None)
