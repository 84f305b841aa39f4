"""Real models, end to end: exported by the command, every drafter, compared bit by bit and with PyTorch."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specdec.engines.manifest import read_manifest
from specdec.engines.prompts import PROMPTS
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig, StructuredOutputsParams, kv
from specdec.tools import reuse, verify
from specdec.tools.models import model_path
from specdec.tools.questions import read_questions, select
from support.trace import recorded_arrays, recorded_logits

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1200)]

NEW_TOKENS = int(os.environ.get("SPECDEC_NEW_TOKENS", "48"))


def export(checkpoint: Path, bundle: Path, *drafters: str) -> None:
    options = [option for drafter in drafters for option in ("--drafter", drafter)]
    command = [sys.executable, "-m", "specdec.export.cli", str(checkpoint), "-o", str(bundle), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = model_path("smollm2")
    bundle = tmp_path_factory.mktemp("smollm2") / "bundle"
    export(checkpoint, bundle, "ngram", f"model:{checkpoint}")
    return bundle


def load(bundle: Path, method: str | None, **options: object) -> LLM:
    """Drafts are of full length, and every text is computed anew."""
    config = SpeculativeConfig(method=method, confidence_threshold=0.0)
    return LLM(bundle, speculative=config, verify=False, prefix_bytes=0, **options)


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> LLM:
    return load(smollm2, None)


@pytest.fixture(scope="module")
def chats(plain: LLM) -> list[list[int]]:
    """Our own prompts, or the first `SPECDEC_PROMPT_COUNT` (20) of a Spec-Bench file named by `SPECDEC_PROMPTS`."""
    texts = [prompt.text for prompt in PROMPTS]
    if file := os.environ.get("SPECDEC_PROMPTS"):
        count = int(os.environ.get("SPECDEC_PROMPT_COUNT", "20"))
        texts = [question.turns[0] for question in select(read_questions(Path(file)), [], 2, count)]
    return [plain.chat_prompt([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def expected(plain: LLM, chats: list[list[int]]) -> tuple[list[tuple[int, ...]], dict]:
    """Plain decoding's tokens, one prompt at a time, and the bits of the logits behind each."""
    with recorded_logits() as bits:
        return [plain.generate([chat], params())[0].token_ids for chat in chats], bits


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW_TOKENS, **options})


def test_the_gates_were_passed_and_written_down(smollm2: Path) -> None:
    variant = read_manifest(smollm2).target.variants["fp32"]
    assert variant.invariance.exact
    assert (variant.invariance.least_width, variant.invariance.one_token_max_abs_diff) == (1, 0.0)
    assert 0 < variant.parity.max_abs_error <= variant.parity.tolerance < 1e-3


@pytest.mark.parametrize("method", ["ngram", "model"])
def test_speculation_changes_no_token_and_no_bit(
    smollm2: Path, chats: list[list[int]], expected: tuple, method: str
) -> None:
    tokens, bits = expected
    llm = load(smollm2, method)
    with recorded_logits() as got:
        outputs = [llm.generate([chat], params())[0] for chat in chats]
    assert [output.token_ids for output in outputs] == tokens
    assert got == bits
    if method == "model":  # the target drafts for itself: only the end of the text cuts a draft
        for output in outputs:
            whole, last = divmod(len(output.token_ids), 5)
            assert output.stats.rounds == whole + (last > 0)
            assert output.stats.bonus_tokens >= whole
    else:
        assert sum(output.stats.draft_tokens_accepted for output in outputs) > 0


def test_a_batch_of_four_gives_each_prompt_its_own_bits(smollm2: Path, chats: list[list[int]], expected: tuple) -> None:
    tokens, bits = expected
    for method in (None, "ngram", "model"):
        with recorded_logits() as got:
            outputs = load(smollm2, method).generate(chats[:4], params())
        assert [output.token_ids for output in outputs] == tokens[:4]
        assert len(got) == sum(map(len, tokens[:4]))
        assert got.items() <= bits.items()


def test_a_coupled_seed_gives_one_text_and_one_set_of_bits(smollm2: Path, chats: list[list[int]]) -> None:
    """Plain, two drafters, draft lengths 1, 3 and 6, alone and four together; no tolerance."""
    options = params(max_new_tokens=24, temperature=1.0, seed=7, acceptance="coupled", logprobs=2)
    configs = [SpeculativeConfig(method=None)]
    configs += [
        SpeculativeConfig(method=method, num_speculative_tokens=n) for method in ("ngram", "model") for n in (1, 3, 6)
    ]
    answers, bits = [], []
    for config in configs:
        llm = LLM(smollm2, speculative=config, verify=False)
        for batch in ([[chat] for chat in chats[:4]], [chats[:4]]):
            with recorded_logits() as seen:
                outputs = [output for prompts in batch for output in llm.generate(prompts, options)]
            answers.append([(output.token_ids, output.logprobs) for output in outputs])
            bits.append(seen)
    assert all(answer == answers[0] for answer in answers)
    assert all(seen == bits[0] for seen in bits)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("method", "count"), [("ngram", 50), ("model", 10)])
def test_all_sampled_answers_are_of_the_schema(smollm2: Path, method: str, count: int) -> None:
    llm = load(smollm2, method)
    chat = llm.chat_prompt([{"role": "user", "content": "Invent a person: name, age and favourite colour, as JSON."}])
    form = StructuredOutputsParams(json=SCHEMA)
    options = [
        SamplingParams(max_new_tokens=80, temperature=1.0, structured_outputs=form, seed=seed) for seed in range(count)
    ]
    rounds = tokens = 0
    for output in llm.generate([chat] * count, options):
        answer = json.loads(output.text)
        assert list(answer) == ["name", "age", "colour"]
        assert len(answer["name"]) <= 12
        assert 1 <= answer["age"] <= 99
        assert answer["colour"] in ("red", "green", "blue")
        assert output.finish_reason == "stop"
        rounds, tokens = rounds + output.stats.rounds, tokens + output.stats.new_tokens
    print(f"{method}: mean accepted length {tokens / rounds:.2f} over {tokens} tokens")
    assert tokens > rounds


@pytest.mark.parametrize("method", ["ngram", "model"])
def test_trees_differ_from_plain_decoding_in_last_bits_alone(
    smollm2: Path, chats: list[list[int]], expected: tuple, method: str
) -> None:
    """A text that parts from plain decoding's does so at a near-tie of the argmax."""
    tokens, _ = expected
    llm = LLM(smollm2, speculative=SpeculativeConfig(method=method, tree="dynamic"), verify=False)
    with recorded_arrays() as seen:
        outputs = [llm.generate([chat], params())[0] for chat in chats[:4]]
    for chat, output, plain_text in zip(chats, outputs, tokens, strict=False):
        parted = [i for i, pair in enumerate(zip(output.token_ids, plain_text, strict=False)) if len(set(pair)) > 1]
        if parted:
            best = np.sort(seen[(*chat, *output.token_ids[: parted[0]])])[-2:]
            assert best[1] - best[0] < 1e-3
    assert sum(output.stats.draft_tokens_accepted for output in outputs) > 0


def test_the_verifier_passes(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(smollm2), "--samples", "600", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["problems"], report["engine"]["exact"]) == ([], True)
    assert all(one["power"] for one in report["distribution"])
    assert all(one["bits"] == one["bits_equal"] for one in report["texts"] if one["exact"])


@pytest.mark.long
@pytest.mark.parametrize("fault", ["block-break-at-first-loss", "kv-path-not-compacted"])
def test_the_verifier_notices_faults(smollm2: Path, fault: str) -> None:
    assert verify.main([str(smollm2), "--plant", fault]) == 1


@pytest.mark.parametrize("width", [2, 7])
def test_other_prompt_splits_change_no_bit(
    plain: LLM, chats: list[list[int]], expected: tuple, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "PREFILL_WIDTH", width)
    with recorded_logits() as got:
        plain.generate([chats[0]], params(max_new_tokens=8))
    assert len(got) == 8
    assert got.items() <= expected[1].items()


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(smollm2: Path, chats: list[list[int]]) -> None:
    llm = load(smollm2, "ngram")
    options = params(temperature=0.8, top_p=0.95, seed=7, max_new_tokens=24)
    alone = [llm.generate([chat], options)[0].token_ids for chat in chats[:3]]
    assert [output.token_ids for output in llm.generate(chats[:3], options)] == alone


def triage(logits: np.ndarray, reference: np.ndarray, tokens: Sequence[int]) -> int | None:
    """Position of the first token that is not the reference's argmax, unless it is a tie.

    A tie: the reference's margin for its own choice is below the difference that the two computations show there.
    """
    for position, token in enumerate(tokens):
        best = int(reference[position].argmax())
        if best != token:
            margin = reference[position, best] - reference[position, token]
            return None if margin <= 2 * np.abs(logits[position] - reference[position]).max() else position
    return None


def torch_logits(checkpoint: Path, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[np.ndarray]:
    """PyTorch's logits [count, V] of the last `count` tokens of each text."""
    import torch

    from specdec.export.sources import open_checkpoint

    model = open_checkpoint(str(checkpoint)).load(torch.float32)
    with torch.inference_mode():
        return [
            model(torch.tensor([text])).logits[0, -count - 1 : -1].numpy()
            for text, count in zip(texts, counts, strict=True)
        ]


def compare_with_torch(llm: LLM, checkpoint: Path, prompts: Sequence[list[int]], options: SamplingParams) -> None:
    """Every generated token is PyTorch's greedy choice on the same text, or a tie."""
    with recorded_arrays() as arrays:
        outputs = [llm.generate([prompt], options)[0] for prompt in prompts]
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    references = torch_logits(checkpoint, texts, [len(output.token_ids) for output in outputs])
    for text, output, reference in zip(texts, outputs, references, strict=True):
        start = len(output.prompt_token_ids)
        own = np.stack([arrays[tuple(text[: start + i])] for i in range(len(output.token_ids))])
        assert np.abs(own - reference[:, : own.shape[1]]).max() < 2e-3
        assert triage(own, reference[:, : own.shape[1]], output.token_ids) is None


def test_plain_greedy_is_transformers_greedy(plain: LLM, chats: list[list[int]]) -> None:
    compare_with_torch(plain, model_path("smollm2"), chats, params())


@pytest.mark.long
def test_another_export_is_byte_identical_and_stays_within_its_memory(smollm2: Path, tmp_path: Path) -> None:
    """Peak of the whole export: twice the weights in fp32, and 1.5 GB."""
    code = (
        "import sys\n"
        "from specdec.export.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    arguments = [str(model_path("smollm2")), "-o", str(tmp_path / "again"), "--quiet", "--json"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    report, peak_kib = result.stdout.splitlines()
    weights = 134_515_008 * 4
    assert json.loads(report)["manifest"]["target"]["spec"]["num_layers"] == 30
    assert int(peak_kib) * 1024 <= 2 * weights + 1.5e9
    first, again = (read_manifest(bundle).files for bundle in (smollm2, tmp_path / "again"))
    assert first == again


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("gemma") / "bundle"
    export(model_path("gemma3-270m"), bundle, "ngram")
    return bundle


@pytest.mark.long
def test_gemma_beyond_its_window(gemma: Path) -> None:
    """More than 700 tokens of prompt: the sliding layers see 512 of them, the full ones all."""
    llm = load(gemma, "ngram")
    sentence = "The ferry leaves the harbour at noon and comes back before the evening bell. "
    facts = " ".join(f"Boat {i} has {i * 7 % 23} oars." for i in range(75))
    prompt = llm.text.encode(sentence + facts + " " + sentence + "Boat 1 has", special=True)
    assert len(prompt) > 700
    compare_with_torch(llm, model_path("gemma3-270m"), [prompt], params(max_new_tokens=24))


@pytest.mark.long
def test_gemma_speculates_without_changing_a_bit(gemma: Path) -> None:
    prompt = "One, two, three, four. One, two, three, four. One, two,"
    with recorded_logits() as bits:
        text = load(gemma, None).generate(prompt, params(max_new_tokens=32))[0].token_ids
    with recorded_logits() as got:
        output = load(gemma, "ngram").generate(prompt, params(max_new_tokens=32))[0]
    assert (output.token_ids, got) == (text, bits)
    assert output.stats.draft_tokens_accepted > 0


@pytest.mark.parametrize("method", [None, "ngram+model"])
def test_a_second_turn_after_a_thousand_tokens_starts_at_once(
    smollm2: Path, method: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tokens from the same bits, in a quarter of the time at most."""
    options = ["--method", method] if method else []
    assert reuse.main([str(smollm2), "--history", "1000", "--repeat", "1", *options]) == 0
    report = capsys.readouterr().out
    prompt, reused = map(int, re.findall(r"second turn of (\d+) tokens, (\d+) of them reused", report)[0])
    assert prompt > 1000
    assert reused > prompt - 50
    assert "answers of" in report
    assert "identical to the bit" in report
    assert float(re.findall(r"with it \d+: (\d\.\d+)", report)[0]) <= 0.25
