"""`specdec-generate` as scripts use it: text, JSON, exit codes, one-line errors."""

import io
import json
import re
from pathlib import Path

import pytest

from specdec.runtime import LLM, SamplingParams
from specdec.runtime.cli import main
from support.bundles import shared_bundle

PROMPT = "one, two, three; one, two,"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    bundle = str(shared_bundle())
    capsys.readouterr()  # of the export, where this is the first test that needs the bundle
    try:
        code = main([bundle, *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(shared_bundle()) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=20))[0].text


def test_streams_the_text(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    assert run(capsys, "-p", PROMPT, "--raw", "--max-new-tokens", "20") == (0, expected + "\n", "")


def test_a_trace_has_a_plan_for_every_round(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "plans.jsonl"
    _, out, _ = run(capsys, "-p", PROMPT, "--json", "--trace", str(trace))
    plans = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(plans) == json.loads(out)["stats"]["rounds"]
    assert all(plan["rates"][plan["kind"]] == max(plan["rates"].values()) for plan in plans)
    for options, said in ((("--no-speculation", "--trace", str(trace)), "nothing is planned"),
                          (("--trace", str(tmp_path / "no" / "plans.jsonl")), "there is no folder")):  # fmt: skip
        code, _, err = run(capsys, "-p", PROMPT, *options)
        assert code == 2
        assert said in err


def test_json_holds_text_tokens_reason_and_figures(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    code, out, err = run(capsys, "-p", PROMPT, "--raw", "--max-new-tokens", "20", "--json")
    report = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(report) == {"text", "token_ids", "finish_reason", "stats"}
    assert report["text"] == expected
    assert list(report["stats"]) == [
        "prompt_tokens", "reused_tokens", "new_tokens", "rounds", "draft_tokens_proposed", "draft_tokens_accepted",
        "bonus_tokens", "mean_accepted_length", "acceptance_rate", "ttft_ms", "tokens_per_second", "prefill_ms",
        "target_ms", "draft_ms", "host_ms", "acceptance", "lossless", "acceptance_by_position",
    ]  # fmt: skip
    assert report["stats"]["new_tokens"] == len(report["token_ids"]) == 20


@pytest.mark.parametrize("method", [["--no-speculation"], ["--method", "ngram"], ["--method", "model"], ["--fast"]])
def test_every_method_gives_the_same_text(capsys: pytest.CaptureFixture[str], expected: str, method: list[str]) -> None:
    code, out, _ = run(capsys, "-p", PROMPT, "--raw", "--max-new-tokens", "20", *method)
    assert (code, out) == (0, expected + "\n")


def test_chat_is_the_default_where_there_is_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    _, default, _ = run(capsys, "-p", PROMPT, "--json")
    _, chat, _ = run(capsys, "-p", PROMPT, "--json", "--chat")
    _, raw, _ = run(capsys, "-p", PROMPT, "--json", "--raw")
    counts = [json.loads(out)["stats"]["prompt_tokens"] for out in (default, chat, raw)]
    assert counts[0] == counts[1] > counts[2]


def test_the_prompt_comes_from_standard_input(
    capsys: pytest.CaptureFixture[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert run(capsys, "-p", "-", "--raw", "--max-new-tokens", "20")[1] == expected + "\n"


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--temperature",
        "1",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.1",
    ]
    with LLM(shared_bundle()) as llm:
        params = SamplingParams(temperature=1, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=5)
        text = llm.generate(PROMPT, params)[0].text
    assert run(capsys, "-p", PROMPT, "--raw", "--seed", "5", *options)[1] == text + "\n"


def test_structured_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')
    grammar.write_text('start: "yes" | "no"')
    ask = ("-p", PROMPT, "--temperature", "1", "--seed", "3", "--max-new-tokens", "40")
    assert json.loads(run(capsys, *ask, "--json-schema", str(schema))[1])["a"] in (1, 2)
    assert run(capsys, *ask, "--grammar", str(grammar))[1] in ("yes\n", "no\n")
    assert re.fullmatch("[ab]{3}\n", run(capsys, *ask, "--regex", "[ab]{3}")[1])


def test_a_coupled_seed_gives_the_same_text_however_it_is_drafted(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("-p", PROMPT, "--temperature", "1", "--seed", "3", "--max-new-tokens", "20", "--acceptance", "coupled")
    ways = [["--no-speculation"], ["--method", "ngram"], ["--method", "model", "--num-speculative-tokens", "2"]]
    texts = {run(capsys, *ask, *way)[1] for way in [*ways, ["--method", "model", "--tree", "dynamic"]]}
    assert len(texts) == 1


def test_lossy_acceptance_is_named_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("-p", PROMPT, "--temperature", "1", "--max-new-tokens", "5", "--acceptance", "lossy-typical")
    code, out, err = run(capsys, *ask, "--json")
    stats = json.loads(out)["stats"]
    assert (code, stats["acceptance"], stats["lossless"]) == (0, "lossy-typical", False)
    assert err == "specdec-generate: note: lossy-typical is lossy: this is not the target's own distribution\n"
    assert run(capsys, "-p", PROMPT, "--max-new-tokens", "5")[2] == ""


def test_terms_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--presence-penalty", "2", "--frequency-penalty", "1", "--min-new-tokens", "15", "--bad-word", "the")
    with LLM(shared_bundle()) as llm:
        terms = {"presence_penalty": 2, "frequency_penalty": 1, "min_new_tokens": 15, "bad_words": ("the",)}
        text = llm.generate(PROMPT, SamplingParams(max_new_tokens=20, **terms))[0].text
        assert text != llm.generate(PROMPT, SamplingParams(max_new_tokens=20))[0].text
    assert run(capsys, "-p", PROMPT, "--raw", "--max-new-tokens", "20", *options)[1] == text + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "no-such-file"], "no-such-file cannot be read"),
        (["--regex", "(", "--temperature", "1"], "structured outputs: "),
        (["--regex", "a", "--grammar", "b"], "not allowed with argument"),
        (["--acceptance", "typical"], "invalid choice: 'typical'"),
        (["--min-new-tokens", "200"], "min_new_tokens must be at most max_new_tokens (128), not 200"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or more, at most 1e6, not -1.0"),
        (["--top-p", "2"], "top_p must be between 0 (the most probable token) and 1 (off), not 2.0"),
        (["--max-new-tokens", "x"], "argument --max-new-tokens: invalid int value: 'x'"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens must be at least 1"),
        (["--method", "eagle"], "no drafter 'eagle'"),
        (["--variant", "int3"], "no variant 'int3'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--max-new", "3"], "unrecognized arguments: --max-new 3"),
        (["--chat", "--raw"], "not allowed with argument"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = run(capsys, "-p", "x", *options)
    assert (code, out) == (2, "")
    assert err.startswith("specdec-generate: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_prompt_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "arguments are required: -p/--prompt" in err


def test_a_missing_bundle_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "nothing"), "-p", "x"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is not a bundle" in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "nothing"), "-p", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "examples:" in out
