"""`LLM` on a real bundle with a real graph: the same text and the same bits, however it is computed."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import specdec.runtime as api
from specdec.engines.contract import Chunk
from specdec.engines.errors import BundleError, RequestError
from specdec.engines.ort import OrtEngine
from specdec.engines.ort_kv import OrtKV
from specdec.runtime import (
    LLM,
    AsyncLLM,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    Stream,
    StructuredOutputsParams,
    kv,
)
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.llm import Mode
from specdec.runtime.request import Stats
from specdec.runtime.tree import TokenTree
from support.bundles import LOGITS_SIZE, MAX_LENGTH, TOKENIZER_SIZE, quantized_bundle, shared_bundle
from support.eagles import eagle_bundle
from support.trace import recorded_arrays, recorded_logits

PROMPTS = [
    "the quick brown fox",
    "one, two, three; one, two, three; one,",
    "d",
    "def add(a, b):\n    return a + b\n\ndef add(",
]
METHODS = [None, "ngram", "model", "ngram+model", "layerskip:1"]


def bundle_of(method: str | None) -> Path:
    """A bundle with this drafter; the target is the same in all."""
    return shared_bundle(drafters=("ngram", method)) if method == "layerskip:1" else shared_bundle()


@pytest.fixture(scope="module", params=METHODS, ids=["plain", "ngram", "model", "ngram+model", "layerskip"])
def llm(request: pytest.FixtureRequest) -> LLM:
    """Every text is computed anew: what is reused is in test_prefixes.py."""
    return LLM(
        bundle_of(request.param),
        speculative=SpeculativeConfig(method=request.param, confidence_threshold=0.0),
        prefix_bytes=0,
    )


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(shared_bundle(), speculative=SpeculativeConfig(method=None), prefix_bytes=0)


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 48, "ignore_eos": True, **options})


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_text_and_bits_are_plain_decodings(llm: LLM, plain: LLM, penalty: float) -> None:
    options = params(repetition_penalty=penalty)
    with recorded_logits() as expected:
        texts = [plain.generate(prompt, options)[0].token_ids for prompt in PROMPTS]
    with recorded_logits() as got:
        outputs = [llm.generate(prompt, options)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == texts
    assert got == expected
    assert len(expected) == 4 * 48


def test_a_ragged_batch_gives_each_prompt_its_own_bits(llm: LLM) -> None:
    with recorded_logits() as expected:
        alone = [llm.generate(prompt, params())[0].token_ids for prompt in PROMPTS]
    with recorded_logits() as got:
        together = [output.token_ids for output in llm.generate(PROMPTS, params())]
    assert together == alone
    assert got == expected


@pytest.mark.parametrize("width", [1, 2, 5, 64])
def test_prefill_in_other_chunks_changes_no_bit(llm: LLM, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_logits() as expected:
        llm.generate(PROMPTS[1], params())
    monkeypatch.setattr(kv, "PREFILL_WIDTH", width)
    with recorded_logits() as got:
        llm.generate(PROMPTS[1], params())
    assert got == expected


def test_threads_and_capacity_change_no_bit(plain: LLM) -> None:
    """A long prompt makes the cache grow; what a short one sees must not depend on it."""
    with recorded_logits() as expected:
        plain.generate(PROMPTS[0], params())
    one = LLM(shared_bundle(), engine=EngineConfig(threads=1))
    with recorded_logits() as got:
        one.generate([PROMPTS[0], [5] * 700], params())
    assert expected.items() <= got.items()


def test_sampled_text_repeats_with_a_seed_alone_and_in_a_batch(llm: LLM) -> None:
    options = params(temperature=1.0, top_p=0.95, seed=11)
    alone = [llm.generate(prompt, options)[0].token_ids for prompt in PROMPTS]
    assert [output.token_ids for output in llm.generate(PROMPTS, options)] == alone
    assert llm.generate(PROMPTS[0], params(temperature=1.0, seed=12))[0].token_ids != alone[0]


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    llm = LLM(shared_bundle(), speculative=SpeculativeConfig(method="model", num_speculative_tokens=4))
    stats = llm.generate(PROMPTS[0], params(max_new_tokens=25))[0].stats
    assert (stats.rounds, stats.draft_tokens_proposed, stats.draft_tokens_accepted) == (5, 20, 20)
    assert (stats.proposed_at, stats.accepted_at) == ([5] * 4, [5] * 4)


def test_a_draft_is_asked_where_no_ngram_matches() -> None:
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method="ngram+model", num_speculative_tokens=4)) as llm:
        (scheduler, row) = llm._scheduler(1), llm._row(PROMPTS[1], params(max_new_tokens=30))
        scheduler.submit(row)
        scheduler.step()
        assert not scheduler._drafter._fell[0], "the prompt ends as it has gone on before"  # type: ignore[union-attr]
        (other,) = llm.generate(PROMPTS[2], params(max_new_tokens=5))
        assert (other.stats.draft_tokens_proposed, other.stats.draft_tokens_accepted) == (4, 4)  # the target's own copy
    for method in ("model+ngram", "ngram+ngram", "ngram+eagle", "ngram+"):
        with pytest.raises(RequestError, match=r"no drafter .* choose one of auto, ngram, model, ngram\+model$"):
            LLM(shared_bundle(), speculative=SpeculativeConfig(method=method))


def test_acceptance_is_counted_by_position() -> None:
    stats = Stats()
    for nodes, depth, kept in ((3, 3, 1), (0, 0, 0), (5, 2, 2), (1, 1, 0)):
        stats.count_draft(nodes, depth, kept)
    assert (stats.rounds, stats.draft_tokens_proposed) == (4, 9)
    assert (stats.proposed_at, stats.accepted_at) == ([3, 2, 1], [2, 1, 0])
    assert stats.acceptance_by_position == [2 / 3, 1 / 2, 0]
    assert [tuple(each) for each in stats.history] == [(3, 1, 0.0), (0, 0, 0.0), (2, 2, 0.0), (1, 0, 0.0)]


@pytest.mark.parametrize("method", [None, "ngram", "model", "ngram+model"])
def test_the_history_tells_how_every_token_came_to_be(method: str | None) -> None:
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=method)) as llm:
        for output in llm.generate(PROMPTS, params(max_new_tokens=20)):
            stats, history = output.stats, output.stats.history
            assert len(history) == stats.rounds
            cut = sum(each.kept + 1 for each in history) - stats.new_tokens  # by the end of the answer
            assert 0 <= cut <= history[-1].kept
            assert all(0 <= each.kept <= each.depth for each in history)
            times = [each.ms for each in history]
            assert times == sorted(times)
            assert times[0] <= stats.ttft_ms <= times[-1] if len(times) > 1 else times[0] <= stats.ttft_ms
            assert method or not any(each.depth for each in history)


@pytest.mark.parametrize(
    ("precision", "threshold", "width"),
    [("fp32", None, 6), ("int8", None, 2), ("int4", None, 2), ("fp32", 0.0, 7), ("int8", 0, 7), ("fp32", 1.0, 1)],
)
def test_n_grams_draft_as_wide_as_the_precision_or_the_request_says(
    precision: str, threshold: float | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a match of three tokens: passes over more positions are dearer where weights are quantized."""
    widths: list[int] = []
    propose = NgramDrafter.propose

    def recording(self: NgramDrafter, *args: object) -> list[TokenTree]:
        trees = propose(self, *args)
        widths.append(len(trees[0]))
        return trees

    monkeypatch.setattr(NgramDrafter, "propose", recording)
    bundle = shared_bundle() if precision == "fp32" else quantized_bundle(precision)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=7, confidence_threshold=threshold)
    with LLM(bundle, speculative=config) as llm:
        llm.generate([1, 2, 3, *range(10, 20), 1, 2, 3], params(max_new_tokens=9))
    assert widths[0] == width


def test_a_target_that_drafts_for_itself_is_loaded_once() -> None:
    assert len(LLM(shared_bundle(), speculative=SpeculativeConfig(method="model"))._engines) == 1


def test_more_prompts_than_rows_wait_their_turn(llm: LLM) -> None:
    prompts = [[i, i + 1, i] for i in range(llm.manifest.limits.max_batch * 2 + 3)]
    outputs = llm.generate(prompts, params(max_new_tokens=6))
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert outputs[-1].token_ids == llm.generate([prompts[-1]], params(max_new_tokens=6))[0].token_ids


def test_a_stream_adds_up_to_the_output(llm: LLM) -> None:
    deltas = list(llm.stream(PROMPTS[1], params(logprobs=2)))
    output = deltas[-1].output
    assert output is not None
    assert all(delta.output is None for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == output.text
    assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
    assert output.token_ids == llm.generate(PROMPTS[1], params())[0].token_ids
    assert output.text == llm.text.decode(output.token_ids)
    assert output.stats.rounds == len(deltas)


def test_logprobs_are_bit_identical_to_plain_decodings(llm: LLM, plain: LLM) -> None:
    options = params(logprobs=3)
    got, expected = (x.generate(PROMPTS[1], options)[0].logprobs for x in (llm, plain))
    assert got == expected
    assert got is not None
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 3 for entry in got)


def test_a_stop_string_cuts_the_text_and_ends_it(llm: LLM, plain: LLM) -> None:
    whole = plain.generate(PROMPTS[0], params())[0].text
    stop = whole[12:16]
    output = llm.generate(PROMPTS[0], params(stop=(stop,)))[0]
    assert output.text == whole[: whole.index(stop)]
    assert output.finish_reason == "stop"


def test_the_end_of_the_context_ends_the_text(llm: LLM, plain: LLM) -> None:
    prompt = np.random.default_rng(0).integers(0, TOKENIZER_SIZE, MAX_LENGTH - 11).tolist()
    output = llm.generate([prompt], params(max_new_tokens=100))[0]
    assert len(output.token_ids) == 11
    assert output.finish_reason == "length"
    assert output.token_ids == plain.generate([prompt], params(max_new_tokens=100))[0].token_ids


def test_ids_beyond_the_tokenizer_are_never_emitted(llm: LLM) -> None:
    assert LOGITS_SIZE > TOKENIZER_SIZE == llm.spec.vocab_size
    outputs = llm.generate(PROMPTS, params(temperature=50.0, seed=1, max_new_tokens=100))
    assert max(max(output.token_ids) for output in outputs) < TOKENIZER_SIZE


def test_a_chat_prompt_goes_through_the_template(llm: LLM) -> None:
    tokens = llm.chat_prompt([{"role": "user", "content": "the dog"}])
    assert llm.text._tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.generate(tokens, params())[0].prompt_token_ids == tuple(tokens)


def test_threads_do_not_disturb_each_other(llm: LLM) -> None:
    expected = [llm.generate(prompt, params())[0].token_ids for prompt in PROMPTS]
    got: dict[int, tuple[int, ...]] = {}

    def work(index: int) -> None:
        got[index] = llm.generate(PROMPTS[index], params())[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(PROMPTS))] == expected


def test_exact_runs_no_pass_narrower_than_the_manifest_says(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def watch(llm: LLM) -> set[int]:
        step = llm._target.step
        monkeypatch.setattr(
            llm._target, "step", lambda chunk, *rest: (widths.append(chunk.width), step(chunk, *rest))[1]
        )
        widths.clear()
        llm.generate([7], params(max_new_tokens=5))
        return set(widths)

    def load(mode: Mode | None) -> LLM:
        return LLM(broken, speculative=SpeculativeConfig(method=None), mode=mode)

    edit(lambda m: m["target"]["variants"]["fp32"]["invariance"].update(least_width=2))(broken)
    assert load(None).mode == "exact"
    assert watch(load(None)) == {2}
    assert watch(load("fast")) == {1}
    edit(lambda m: m["target"]["variants"]["fp32"]["invariance"].update(least_width=1))(broken)
    assert watch(load("exact")) == {1}


def test_two_positions_at_least_change_no_bit(llm: LLM, tmp_path: Path) -> None:
    """Where one-token passes differ, exact pads plain decoding and fills n-gram drafts: the text must not know."""

    def widen(manifest: dict) -> None:
        drafts = [drafter["model"] for drafter in manifest["drafters"].values() if "model" in drafter]
        for model in (manifest["target"], *drafts):
            model["variants"]["fp32"]["invariance"].update(least_width=2)

    copy = Path(shutil.copytree(llm.bundle, tmp_path / "bundle"))
    edit(widen)(copy)
    with recorded_logits() as expected:
        llm.generate(PROMPTS, params())
    wide = LLM(copy, speculative=llm.speculative)
    with recorded_logits() as got:
        wide.generate(PROMPTS, params())
    assert got == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([TOKENIZER_SIZE], f"token id {TOKENIZER_SIZE} is outside the vocabulary of {TOKENIZER_SIZE}"),
        ([-1], "token id -1 is outside"),
        ([1] * MAX_LENGTH, f"the prompt has {MAX_LENGTH} tokens; with a context of {MAX_LENGTH}, at most 1023 fit"),
    ],
)
def test_invalid_prompts_are_refused_before_any_work(plain: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plain.generate([prompt])
    with pytest.raises(RequestError, match=message):
        plain.stream(prompt)


def test_texts_and_token_ids_do_not_mix(plain: LLM) -> None:
    with pytest.raises(RequestError, match="a list of prompts holds texts or lists"):
        plain.generate([1, "text"])
    with pytest.raises(RequestError, match="holds integers, not 'x'"):
        plain.generate([[1, "x"]])
    assert plain.generate(np.array([1, 2]), params())[0].token_ids == plain.generate([1, 2], params())[0].token_ids


def test_answers_are_plain_integers(llm: LLM) -> None:
    [output] = llm.generate([np.array([40, 41, 42, 43] * 4)], params())
    assert json.loads(json.dumps(output.token_ids)) == list(output.token_ids)


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    each = [params(temperature=1.0, seed=5, max_new_tokens=9), params(max_new_tokens=4)]
    outputs = llm.generate(PROMPTS[:2], each)
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, each, strict=False)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        llm.generate(PROMPTS[:2], each[:1])


def test_no_prompts_no_outputs(plain: LLM) -> None:
    assert plain.generate([]) == []


def test_one_invalid_prompt_refuses_the_batch(plain: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        plain.generate(["fine", ""])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": SpeculativeConfig(method="eagle")}, "no drafter 'eagle': choose one of auto, ngram, model"),
        (
            {"speculative": SpeculativeConfig(method="model", tree=[[rank] for rank in range(64)])},
            "64 is more than this bundle's 63",
        ),
        ({"speculative": SpeculativeConfig(method="ngram", tree=[[0], [1]])}, "with ngram use tree='dynamic'"),
        ({"speculative": SpeculativeConfig(num_speculative_tokens=64)}, "64 is more than this bundle's 63"),
        ({"variant": "int3"}, "no variant 'int3': choose one of fp32"),
    ],
)
def test_options_that_the_bundle_lacks_are_named(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(shared_bundle(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"tree": "wide"}, "tree must be chain, dynamic, measured or a list of paths, not 'wide'"),
        ({"tree": [[0], [1, 0]]}, r"the tree has the path \[1, 0\] without its parent"),
        ({"tree": None}, "tree must be chain, dynamic, measured or a list of paths of ranks, not None"),
        ({"tree": [1, 2]}, "list of paths of ranks"),
        ({"tree": [["a"]]}, "list of paths of ranks"),
        ({"tree": []}, "list of paths of ranks"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens must be a whole number, not 2.5"),
        ({"tree": [[1]]}, r"the path \[1\] without its parent or a sibling of lower rank"),
        ({"tree": [[0]], "num_speculative_tokens": 3}, "both size the tree: give one"),
        ({"draft_sample_method": "beam"}, "draft_sample_method must be probabilistic or greedy, not 'beam'"),
        ({"prompt_lookup_min": 0}, "must be at least 1 and in order, not 0 and 4"),
        ({"prompt_lookup_min": 5}, "in order, not 5 and 4"),
        ({"confidence_threshold": 1.5}, "confidence_threshold must be a number from 0 to 1, not 1.5"),
        ({"confidence_threshold": float("nan")}, "a number from 0 to 1, not nan"),
        ({"confidence_threshold": True}, "a number from 0 to 1, not True"),
        ({"confidence_threshold": "low"}, "a number from 0 to 1, not 'low'"),
    ],
)
def test_invalid_speculation_is_refused(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SpeculativeConfig(**options)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))


def edit(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(bundle: Path) -> None:
        manifest = json.loads((bundle / "specdec.json").read_text())
        change(manifest)
        (bundle / "specdec.json").write_text(json.dumps(manifest))

    return apply


def flip(bundle: Path) -> None:
    data = bytearray((bundle / "target/fp32/model.onnx.data").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "target/fp32/model.onnx.data").write_bytes(data)


def truncate(bundle: Path) -> None:
    path = bundle / "target/fp32/model.onnx.data"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"model\.onnx\.data is damaged: its SHA-256"),
        (truncate, r"model\.onnx\.data is damaged: \d+ bytes instead of \d+"),
        (lambda bundle: (bundle / "tokenizer.json").unlink(), r"incomplete: tokenizer\.json is missing"),
        (lambda bundle: (bundle / "specdec.json").unlink(), "is not a bundle"),
        (lambda bundle: (bundle / "specdec.json").write_text("{"), "damaged: not JSON"),
        (edit(lambda m: m.update(schema_version=99)), "schema_version 99 is not supported"),
        (edit(lambda m: m.update(contract_version=0)), "contract_version 0 is not supported"),
        (edit(lambda m: m.update(extra=1)), "unknown field `extra`"),
        (edit(lambda m: m["target"]["spec"].pop("head_dim")), "missing required field `head_dim`"),
        (edit(lambda m: m["files"].pop("tokenizer.json")), r"needs tokenizer\.json and does not list it"),
        (edit(lambda m: m["target"]["variants"]["fp32"].update(graph="../../x.onnx")), "does not list it"),
        (edit(lambda m: m["files"].update({"../x": {"sha256": "0" * 64, "bytes": 1}})), "outside the bundle"),
    ],
    ids=[
        "flipped",
        "truncated",
        "missing",
        "no manifest",
        "not json",
        "schema",
        "contract",
        "unknown",
        "lacking",
        "unlisted",
        "other graph",
        "escape",
    ],
)
def test_a_damaged_bundle_is_refused_in_one_line(broken: Path, damage: Callable[[Path], None], message: str) -> None:
    LLM(broken).close()
    damage(broken)
    with pytest.raises(BundleError, match=message) as caught:
        LLM(broken)
    assert "\n" not in str(caught.value)


def test_exact_is_refused_where_the_gate_failed(broken: Path) -> None:
    edit(lambda m: m["target"]["variants"]["fp32"]["invariance"].update(exact=False))(broken)
    assert LLM(broken).mode == "fast"
    with pytest.raises(RequestError, match="failed its invariance gate"):
        LLM(broken, mode="exact")


STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TREES = [
    ("model", "dynamic"),
    ("ngram", "dynamic"),
    ("model", STATIC),
    ("layerskip:1", "dynamic"),
    ("layerskip:1", STATIC),
]


@pytest.mark.parametrize(("method", "tree"), TREES, ids=["dynamic", "ngram", "static", "layerskip", "layerskip static"])
def test_trees_give_the_targets_text_and_nearly_its_logits(plain: LLM, method: str, tree: object) -> None:
    """Lossless in law: a branch that is moved together in the cache has other last bits, and no others."""
    llm = LLM(bundle_of(method), speculative=SpeculativeConfig(method=method, tree=tree))
    assert llm.mode == "fast"
    with recorded_arrays() as expected:
        texts = [plain.generate(prompt, params())[0].token_ids for prompt in PROMPTS]
    with recorded_arrays() as got:
        outputs = llm.generate(PROMPTS, params())
    assert [output.token_ids for output in outputs] == texts
    assert got.keys() == expected.keys()
    assert max(float(np.abs(got[text] - expected[text]).max()) for text in got) < 1e-4
    assert sum(output.stats.draft_tokens_accepted for output in outputs) > 0


def test_trees_are_refused_where_bits_are_promised() -> None:
    with pytest.raises(RequestError, match="trees that branch are lossless in law, not in bits"):
        LLM(shared_bundle(), speculative=SpeculativeConfig(method="model", tree="dynamic"), mode="exact")
    chain = SpeculativeConfig(method="model", tree=[[0], [0, 0]])
    assert LLM(shared_bundle(), speculative=chain, mode="exact").mode == "exact"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_coupled_seed_gives_one_text_and_one_set_of_logprobs(temperature: float) -> None:
    """Plain, three drafters, three draft lengths, alone and in a batch: tokens, logits and log-probabilities."""
    options = params(temperature=temperature, seed=11, acceptance="coupled", top_p=0.95, logprobs=3)
    configs = [SpeculativeConfig(method=None)]
    methods = [method for method in METHODS if method]
    configs += [SpeculativeConfig(method=method, num_speculative_tokens=n) for method in methods for n in (1, 3, 6)]
    answers, bits = [], []
    for config in configs:
        with LLM(bundle_of(config.method), speculative=config) as llm:
            for batch in ([[prompt] for prompt in PROMPTS], [PROMPTS]):
                with recorded_logits() as seen:
                    outputs = [output for prompts in batch for output in llm.generate(prompts, options)]
                answers.append([(output.token_ids, output.logprobs) for output in outputs])
                bits.append(seen)
    assert all(answer == answers[0] for answer in answers)
    assert all(seen == bits[0] for seen in bits)
    assert len({tokens for tokens, _ in answers[0]}) == len(PROMPTS)


def test_structured_output_with_every_method(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
              "required": ["n", "ok"], "additionalProperties": False}  # fmt: skip
    options = SamplingParams(
        max_new_tokens=60, temperature=1.0, seed=1, structured_outputs=StructuredOutputsParams(json=schema)
    )
    for output in llm.generate(PROMPTS, options):
        answer = json.loads(output.text)
        assert list(answer) == ["n", "ok"]
        assert isinstance(answer["ok"], bool)
        assert answer["n"] <= 99
        assert output.finish_reason == "stop"


def test_structured_output_is_the_same_greedy_text_with_and_without_drafts(llm: LLM, plain: LLM) -> None:
    options = SamplingParams(max_new_tokens=60, structured_outputs=StructuredOutputsParams(regex="([a-c]+ ){8}end"))
    got, expected = llm.generate(PROMPTS, options), plain.generate(PROMPTS, options)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


def test_bad_words_are_not_said(llm: LLM) -> None:
    """ " fox" is what the bias asks for, in one token or several."""
    biased = dict.fromkeys(llm.text.encode(" fox", special=False), 30.0)
    assert " fox" in llm.generate(PROMPTS[0], params(logit_bias=biased, frequency_penalty=1.0))[0].text
    banned = llm.generate(PROMPTS[0], params(logit_bias=biased, frequency_penalty=1.0, bad_words=("fox",)))[0]
    assert " fox" not in banned.text


def test_the_watcher_sees_every_emitted_token(plain: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(shared_bundle(), watch=lambda before, logits: seen.append((len(before), int(logits.argmax()))))
    output = llm.generate(PROMPTS[0], params())[0]
    start = len(output.prompt_token_ids)
    assert seen == [(start + i, token) for i, token in enumerate(output.token_ids)]


def test_the_public_names_are_these() -> None:
    names = ["LLM", "AsyncLLM", "Delta", "EngineConfig", "Logprob", "Metrics", "RequestOutput", "SamplingParams",
             "SpeculativeConfig", "Stats", "Stream", "StructuredOutputsParams"]  # fmt: skip
    assert sorted(api.__all__) == sorted(names)
    assert [name for name in vars(LLM) if not name.startswith("_")] == [
        "spec", "generate", "stream", "chat_prompt", "close",
    ]  # fmt: skip
    assert [name for name in vars(AsyncLLM) if not name.startswith("_")] == [
        "submit", "generate", "alive", "drain", "aclose",
    ]  # fmt: skip
    assert [name for name in vars(Stream) if not name.startswith("_")] == ["cancel", "result", "aclose"]


OVERFLOWN = 97  # a token whose numbers overflow


def overflowing(step: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """`OrtEngine.step` as it is where a row's numbers overflow: NaN in its slots, its hidden states and its logits."""

    def run(engine: OrtEngine, chunk: Chunk, buffers: OrtKV, first_row: int = 0) -> np.ndarray:
        logits = step(engine, chunk, buffers, first_row)
        for row in np.flatnonzero((chunk.input_ids == OVERFLOWN).any(axis=1)):
            past = int(chunk.past_lens[row])
            for index in range(2 * buffers.layers):
                buffers._memory.read(index)[first_row + row, :, past : past + chunk.width] = np.nan
            logits[row] = np.nan
            if engine.spec.taps:
                buffers.hidden[row] = np.nan
        return logits

    return run


@pytest.mark.parametrize("ends", ["error", "abort"])
@pytest.mark.parametrize("method", [*METHODS, "eagle"])
def test_what_overflowed_spoils_no_later_request(
    method: str | None, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A masked slot counts 0 times what is in it, which is NaN for NaN: rows are used again, by target and drafts."""
    bundle = eagle_bundle() if method == "eagle" else bundle_of(method)  # before anything overflows
    monkeypatch.setattr(OrtEngine, "step", overflowing(OrtEngine.step))
    prompts = [(5, 6, 7), (8,) * 30 + (OVERFLOWN,) * 130 + (9,), (40, 41), (7, 5, 40, 9), (42,)]
    options = params(logit_bias={OVERFLOWN: -1e6}, max_new_tokens=12)
    with LLM(bundle, speculative=SpeculativeConfig(method=method, confidence_threshold=0.0), prefix_bytes=0) as llm:
        alone = [llm.generate(prompt, options)[0].token_ids for prompt in (prompts[0], *prompts[2:])]
        scheduler, rows = llm._scheduler(2), [llm._row(prompt, options) for prompt in prompts]
        for row in rows:
            scheduler.submit(row)
        while scheduler.busy:
            scheduler.step()
            if ends == "abort" and rows[1].held:
                rows[1].aborted = True
    assert [row.finish_reason for row in rows] == ["length", ends, "length", "length", "length"]
    assert [row.output().token_ids for row in (rows[0], *rows[2:])] == alone
