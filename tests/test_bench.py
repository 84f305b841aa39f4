"""`specdec-bench`: whose turn it is, and the whole command on a tiny bundle, with stand-ins for the peers."""

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.engines.contract import ModelSpec
from specdec.engines.costs import PassCost, pass_costs
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime import LLM, SpeculativeConfig
from specdec.runtime.request import Round
from specdec.tools.bench import main
from specdec.tools.bench_load import LoadFigures, arrivals
from specdec.tools.bench_methods import chosen_names, read_method
from specdec.tools.bench_report import DEFINITIONS, cost_table
from specdec.tools.bench_run import Conversation, Generate, Unit, interleave, units
from specdec.tools.bench_tokens import Token, marked
from specdec.tools.figures import Answer, Figures, Run
from specdec.tools.questions import Question
from support.bundles import shared_bundle
from support.fake_engine import FakeEngine, fake_spec
from support.fake_peers import VERSIONS, genai_folder, gguf_file, peer_python

FOX = "the quick brown fox jumps over the quick brown fox"


def question(number: int, category: str = "qa", *turns: str) -> Question:
    return Question(number, category, turns or (f"fox {number}",))


def prompt_file(folder: Path, questions: Sequence[Question]) -> str:
    path = folder / "questions.jsonl"
    lines = [json.dumps({"question_id": q.question_id, "category": q.category, "turns": q.turns}) for q in questions]
    path.write_text("\n".join(lines))
    return str(path)


def no_failure(name: str, reason: EngineError) -> None:
    raise AssertionError(f"{name} failed") from reason


def test_a_peer_that_fails_is_left_out_from_there_on() -> None:
    def method(name: str, failing: int) -> Generate:
        def generate(unit: Unit, count: int) -> Run:
            if unit.number == failing:
                raise EngineError(f"{name} has ended")
            answer = Answer(question_id=unit.number, token_ids=(7,) * count, decoded=count)
            return Run(method=name, unit=unit.number, category="qa", seconds=1.0, answers=(answer,))

        return generate

    work, left_out = units([question(1), question(2), question(3)], 1), list[tuple[str, str]]()
    failing = {"a": 9, "openvino:plain": 1, "llama-cpp": 9}
    methods = {name: method(name, number) for name, number in failing.items()}
    runs = list(interleave(work, methods, 4, 2, lambda name, reason: left_out.append((name, str(reason)))))
    assert [(run.unit, run.method) for run in runs] == [
        *((0, "a"), (0, "openvino:plain"), (0, "llama-cpp")),
        *((1, "a"), (1, "llama-cpp")),
        *((2, "a"), (2, "llama-cpp")),
    ]
    assert left_out == [("openvino:plain", "openvino:plain has ended")]
    with pytest.raises(EngineError, match="ours has ended"):
        list(interleave(work, {"a": method("ours", 2)}, 4, 1, no_failure))


def test_methods_take_turns_and_the_fastest_repeat_counts() -> None:
    calls: list[tuple[str, int, int]] = []

    def method(name: str, seconds: Sequence[float], tokens: int) -> Generate:
        left = iter(seconds)

        def generate(unit: Unit, count: int) -> Run:
            calls.append((name, unit.number, count))
            answer = Answer(question_id=unit.number, token_ids=(7,) * tokens, decoded=tokens)
            return Run(method=name, unit=unit.number, category="qa", seconds=next(left), answers=(answer,))

        return generate

    methods = {
        "a": method("a", [4.0, 3.0, 1.0, 2.0], 6),
        "b": method("b", [1.0, 2.0, 2.0, 1.0], 8),
        "ort-genai": method("ort-genai", [1.0, 1.0, 1.0, 1.0], 6),
        "llama-cpp": method("llama-cpp", [3.0, 2.0, 4.0, 5.0], 6),
    }
    runs = list(interleave(units([question(1), question(2)], 1), methods, 10, 2, no_failure))
    assert [(run.method, run.unit, run.seconds) for run in runs] == [
        ("a", 0, 3.0),
        ("b", 0, 1.0),
        ("ort-genai", 0, 1.0),
        ("llama-cpp", 0, 2.0),
        ("a", 1, 1.0),
        ("b", 1, 1.0),
        ("ort-genai", 1, 1.0),
        ("llama-cpp", 1, 4.0),
    ]
    a, b, genai, llama = (
        [(name, number, count) for number in (0, 1)]
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


def test_batches_hold_prompts_of_all_categories() -> None:
    questions = [question(number, "abc"[number % 3]) for number in range(17)]
    assert [unit.category for unit in units(questions, 1)[:4]] == ["a", "b", "c", "a"]
    two = units(questions, 2)
    assert [(unit.category, unit.rows, len(unit.questions)) for unit in two] == [("all", 2, 9), ("all", 2, 8)]
    assert {each.category for each in two[0].questions} == {"a", "b", "c"}
    assert [len(unit.questions) for unit in units(questions, 8)] == [17]


def test_rows_run_at_a_time_and_say_what_they_say_alone(tmp_path: Path) -> None:
    prompts, report = prompt_file(tmp_path, [question(n, "abc"[n % 3]) for n in range(10)]), tmp_path / "report.json"
    options = ["--prompts", prompts, "--max-new-tokens", "6", "--json", str(report), "--no-memory"]
    assert main([str(shared_bundle()), *options, "--methods", "ngram", "--batch-size", "1,2"]) == 0
    found = json.loads(report.read_text())
    said: dict[tuple[str, int], dict[int, list[int]]] = {}
    for run in found["runs"]:
        for answer in run["answers"]:
            said.setdefault((run["method"], run["batch_size"]), {})[answer["question_id"]] = answer["token_ids"]
    assert list(said) == [("plain", 1), ("ngram", 1), ("plain", 2), ("ngram", 2)]
    assert len(said["plain", 1]) == 10
    assert said["plain", 1] == said["ngram", 1] == said["plain", 2] == said["ngram", 2]
    assert {(each["batch_size"], each["category"]) for each in found["figures"]} == {
        *((1, name) for name in ("all", "a", "b", "c")), (2, "all")
    }  # fmt: skip


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, report = str(shared_bundle()), tmp_path / "report.json"
    prompts = prompt_file(tmp_path, [question(1, "rag", FOX), question(2, "writing", "one, two, three")])
    capsys.readouterr()  # what the export of the bundle printed
    options = ["--prompts", prompts, "--max-new-tokens", "12", "--threads", "1", "--json", str(report)]
    python, folder, file = peer_python(tmp_path), genai_folder(tmp_path, 400), gguf_file(tmp_path, 400)
    options += ["--ort-genai", str(folder), "--ort-genai-python", python, "--pass-costs"]
    options += ["--llama-cpp", str(file), "--llama-cpp-python", python]
    assert main([bundle, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    names = [*(["plain-fast"] if "plain-fast" in printed.out else []), "plain", "ngram", "model", "ngram+model"]
    lines = printed.out.splitlines()
    assert len(lines) == 7 + 1 + 1 + 4 * (len(names) + 2)  # pass costs; all, copy-heavy and two categories

    written = json.loads(report.read_text())
    weights = (shared_bundle() / "target" / "fp32").glob("model.onnx*")
    assert written["peers"] == {name: VERSIONS[name] for name in ("ort-genai", "llama-cpp")}
    assert written["peer_failures"] == []
    assert written["baseline"] in ("plain-fast", "plain")
    assert len(written["pass_costs"]) == 14
    assert written["roofline"]["weight_bytes"] == sum(file.stat().st_size for file in weights)
    assert list(dict.fromkeys(each["category"] for each in written["figures"])) == [
        "all",
        "copy-heavy",
        "rag",
        "writing",
    ]
    figures = {each["method"]: each for each in written["figures"] if each["category"] == "all"}
    assert list(figures) == [*names, "ort-genai", "llama-cpp"]
    assert [figures[name]["identical_to_plain"] for name in names] == [2] * len(names)
    assert figures["plain"]["mean_accepted_length"] == 1.0
    assert figures["model"]["acceptance_rate"] == 1.0
    for each in figures.values():
        assert each["new_tokens"] == each["draft_tokens_accepted"] + each["bonus_tokens"] or each["rounds"] == 0
    assert list(written["methods"]) == names
    if sys.platform == "linux":
        assert all(each["peak_memory_bytes"] > 10 * 2**20 for each in written["methods"].values())
    runs = {(run["method"], run["unit"]): run for run in written["runs"]}
    assert len(runs) == 2 * len(names) + 4
    for number in (0, 1):
        count = len(runs[names[0], number]["answers"][0]["token_ids"])
        for name in ("ort-genai", "llama-cpp"):
            (answer,) = runs[name, number]["answers"]
            assert (len(answer["token_ids"]), answer["decoded"]) == (count, count - 1)
            assert runs[name, number]["seconds"] == count - 1  # by the stand-in's clock
        assert runs["ngram", number]["answers"][0]["token_ids"] == runs["plain", number]["answers"][0]["token_ids"]
    assert str(tmp_path) not in json.dumps({name: written[name] for name in ("bundle", "machine", "methods")})


def test_every_figure_has_a_definition() -> None:
    shares = {"target_ms", "draft_ms", "host_ms"}
    counts = {
        "method",
        "batch_size",
        "category",
        "prompt_tokens",
        "new_tokens",
        "draft_tokens_proposed",
        "bonus_tokens",
    }
    assert {"target_ms", *(set(Figures.__struct_fields__) - counts - shares)} <= set(DEFINITIONS)
    assert all(name in DEFINITIONS["target_ms"] for name in shares - {"target_ms"})
    rates = {"offered_per_second", "requests", "rows", "seconds", "requests_per_second"}
    own = set(LoadFigures.__struct_fields__) - set(Figures.__struct_fields__)
    assert own - rates <= set(DEFINITIONS)


def test_the_next_turn_follows_the_models_own_answer(tmp_path: Path) -> None:
    report, talk = tmp_path / "report.json", question(1, "qa", FOX, "and then?")
    options = ["--prompts", prompt_file(tmp_path, [talk, question(2)]), "--max-new-tokens", "8", "--json", str(report)]
    assert main([str(shared_bundle()), *options, "--methods", "ngram", "--turns", "all", "--no-memory"]) == 0
    found = json.loads(report.read_text())
    first, second = found["runs"][0]["answers"]
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=None)) as llm:
        (answer,) = llm.generate(llm.chat_prompt([{"role": "user", "content": FOX}]))
        said = llm.text.decode(first["token_ids"])
        messages = [("user", FOX), ("assistant", said), ("user", "and then?")]
        prompt = llm.chat_prompt([{"role": role, "content": text} for role, text in messages])
        assert (first["turn"], second["turn"]) == (1, 2)
        assert second["prompt_tokens"] == len(prompt)
        assert answer.token_ids[:8] == tuple(first["token_ids"])
    assert [each["identical_to_plain"] for each in found["figures"] if each["category"] == "all"] == [3, 3]
    assert len(found["runs"][2]["answers"]) == 1  # the other prompt has one turn


def test_without_a_chat_template_turns_are_texts_one_after_the_other() -> None:
    texts: list[tuple[str, bool]] = []

    def encode(text: str, *, special: bool) -> list[int]:
        texts.append((text, special))
        return [1]

    llm: Any = SimpleNamespace(text=SimpleNamespace(has_chat_template=False, encode=encode))
    talk = Conversation(question(1, "qa", "a", "b"))
    talk.prompt(llm)
    talk.answers.append("x")
    talk.prompt(llm)
    assert texts == [("a", True), ("a\n\nx\n\nb", True)]


def test_seeds_are_coupled_and_other_samples_are_not_compared(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--prompts", prompt_file(tmp_path, [question(1), question(2)]), "--max-new-tokens", "8", "--no-memory"]
    options += ["--temperature", "1", "--json", str(report), "--methods", "model,model@block"]
    assert main([str(shared_bundle()), *options]) == 0
    found = json.loads(report.read_text())
    assert {name: each["acceptance"] for name, each in found["methods"].items()} == {
        "plain": "coupled", "model": "coupled", "model@block": "block"
    }  # fmt: skip
    same = {each["method"]: each["identical_to_plain"] for each in found["figures"] if each["category"] == "all"}
    assert same == {"plain": 2, "model": 2, "model@block": None}


def test_load_offers_every_method_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--prompts", prompt_file(tmp_path, [question(n) for n in range(6)]), "--max-new-tokens", "6"]
    options += ["--methods", "ngram", "--load", "200", "--json", str(report), "--no-memory"]
    assert main([str(shared_bundle()), *options]) == 0
    plain, ngram = json.loads(report.read_text())["load"]
    assert [each["method"] for each in (plain, ngram)] == ["plain", "ngram"]
    for each in (plain, ngram):
        assert (each["offered_per_second"], each["requests"]) == (200.0, 6)
        assert each["seconds"] >= arrivals(200.0, 6, 0)[-1]
        assert 0 <= each["queue_ms"]["p50"] <= each["ttft_ms"]["p99"] <= each["latency_ms"]["p99"]
        assert each["tokens_per_second"] > each["requests_per_second"] > 0
    assert "offered/s" in capsys.readouterr().out


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = arrivals(4.0, 4001, 7)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 4, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.07)  # of an exponential distribution they are the same
    assert times == arrivals(4.0, 4001, 7) != arrivals(4.0, 4001, 8)


def test_tokens_are_marked_by_how_they_came_to_be() -> None:
    history = [Round(0, 0, 1.0), Round(2, 2, 2.0), Round(3, 1, 3.0), Round(1, 0, 4.0), Round(3, 3, 5.0)]
    kinds = [[(token.text, token.kind) for token in tokens] for tokens in marked(history, list("abcdefgh"))]
    assert kinds == [
        [("a", "plain")],
        [("b", "accepted"), ("c", "accepted"), ("d", "bonus")],
        [("e", "accepted"), ("f", "corrected")],
        [("g", "corrected")],
        [("h", "accepted")],  # the answer ended within the round
    ]
    assert marked(history[:2], "abcd")[1][1] == Token("c", "accepted", 2, 2)


def test_the_methods_of_a_bundle() -> None:
    manifest = read_manifest(shared_bundle())
    padded = ["plain-fast"] if manifest.target.variants["fp32"].invariance.least_width > 1 else []
    assert chosen_names((), manifest, None, EngineConfig()) == [*padded, "plain", "ngram", "model", "auto"]
    assert chosen_names((), manifest, None, EngineConfig(provider="cuda")) == ["plain", "ngram", "model", "auto"]
    assert chosen_names(("model",), manifest, None, EngineConfig()) == ["plain", "model"]
    assert chosen_names(("model", "plain"), manifest, None, EngineConfig()) == ["model", "plain"]


def test_a_method_says_its_rule_its_tree_and_its_size() -> None:
    assert read_method("plain", 3) == (SpeculativeConfig(method=None), "")
    assert read_method("ngram", None) == (SpeculativeConfig(method="ngram"), "")
    assert read_method("layerskip:8@token/chain/2", 5) == (
        SpeculativeConfig(method="layerskip:8", num_speculative_tokens=2),
        "token",
    )
    assert read_method("model/dynamic", 5) == (
        SpeculativeConfig(method="model", num_speculative_tokens=5, tree="dynamic"),
        "",
    )
    assert read_method("ngram+eagle/chain/3/0.5", None) == (
        SpeculativeConfig(method="ngram+eagle", num_speculative_tokens=3, confidence_threshold=0.5),
        "",
    )
    for wrong in (
        "model/chain/x",
        "model/chain/2/3",
        "model/bush/2",
        "model/chain/2/0.5/1",
        "model@",
        "model/chain/2.",
    ):
        with pytest.raises(RequestError):
            read_method(wrong, None)


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, prompts = str(shared_bundle()), prompt_file(tmp_path, [question(1)])
    cases = [
        (["--methods", "ngram,ngram"], "argument --methods: 'ngram,ngram' is not a list of "),
        (["--warmup", "-1"], "argument --warmup: '-1' is not a whole number of at least 0"),
        (["--repeat", "0"], "argument --repeat: '0' is not a whole number of at least 1"),
        (["--batch-size", "1,x"], "argument --batch-size: 'x' is not a whole number of at least 1"),
        (["--load", "0"], "argument --load: '0' is not a number above 0"),
        (
            ["--compare-figures", "ttft"],
            "argument --compare-figures: 'ttft' cannot be compared: choose from tokens_per",
        ),
        (["--json", str(tmp_path / "no" / "file")], "--json: there is no folder "),
        (["--html", str(tmp_path / "no" / "file")], "--html: there is no folder "),
        (["--batch-size", "2", "--ort-genai", "folder"], "peers answer first turns, one prompt at a time"),
        (["--pass-costs", "--load", "1"], "--pass-costs alone measures no answers: give --prompts FILE as well"),
        (["--rows", "2"], "unrecognized arguments: --rows 2"),
    ]
    for options, message in cases:
        with pytest.raises(SystemExit) as exit_code:
            main([bundle, *options])
        assert exit_code.value.code == 2
        assert f"error: {message}" in capsys.readouterr().err
    found = [
        (["--methods", "medusa"], "this bundle has no drafter 'medusa'"),
        (["--batch-size", "4096"], "--batch-size 4096: this bundle takes 1 to "),
        (["--compare", str(tmp_path / "absent.json")], "absent.json cannot be read: No such file"),
        (["--compare", prompts], "is no report of this version of specdec-bench"),
        (["--categories", "rag"], "no prompt has the category 'rag': choose from qa"),
    ]
    for options, message in found:
        assert main([bundle, "--prompts", prompts, "--no-memory", *options]) == 2
        assert message in capsys.readouterr().err
    assert main([str(tmp_path), "--pass-costs"]) == 1
    assert "is not a bundle" in capsys.readouterr().err


class Sleepy:
    """An engine whose passes take longer than they have to."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return self._engine.step(*arguments, **options)


def sleepy(graph: Path, spec: ModelSpec, config: EngineConfig | None) -> Any:
    return Sleepy(open_engine(graph, spec, config))


def test_a_planted_slowdown_fails_and_an_equal_run_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, prompts = tmp_path / "old.json", prompt_file(tmp_path, [question(1, "rag", FOX), question(2), question(3)])
    options = [str(shared_bundle()), "--prompts", prompts, "--max-new-tokens", "4", "--methods", "ngram/chain/2",
               "--no-memory", "--repeat", "3"]  # fmt: skip
    assert main([*options, "--json", str(old)]) == 0
    capsys.readouterr()
    again = [*options, "--compare", str(old)]
    assert main([*again, "--compare-figures", "mean_accepted_length"]) == 0  # which no clock decides
    assert "no figure of 4 regressed by more than 5 % with significance" in capsys.readouterr().out
    assert main([*again, "--compare-figures", "tokens_per_second"], opener=sleepy) == 1
    said = capsys.readouterr().out
    assert said.count("REGRESSED") == 2
    assert "2 of 4 figures regressed by more than 5 %, with significance" in said
