"""`specdec-verify`: passes a good bundle, notices every planted fault, and says honestly what it knows.

Statistics against SciPy and by enumeration; tables against the real engine; triage on constructed logits.
"""

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from scipy import stats

from specdec.engines.base import Engine
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import Chunk, FloatArray, ModelSpec
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import encode, read_manifest
from specdec.engines.scoring import same_bits, score
from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig, Stats
from specdec.runtime import scheduler as scheduler_module
from specdec.runtime.chance import PositionNoise
from specdec.runtime.sampling import Logprob
from specdec.tools import verify
from specdec.tools.evidence import Fit, chi_square_p, chi_square_tail, entropy_bound, entropy_tail, fit, variation_bound
from specdec.tools.faults import FAULTS, planted
from specdec.tools.tables import Table, TableEngine
from specdec.tools.tables_bundle import bundle_view
from specdec.tools.verify_engine import EngineResult, check_engine
from specdec.tools.verify_ground import Ground, Setting
from specdec.tools.verify_law import Case, plan, run
from specdec.tools.verify_report import Report, to_text, verdict
from specdec.tools.verify_text import Run, TextResult, Texts, is_tie, text_runs
from support.bundles import shared_bundle
from support.engines import TOKENS, Faulty, open_tiny

FEW = ("--quick", "--samples", "40", "--limit", "2", "--max-new-tokens", "6")
PROMPT = (40, 41, 42, 43, 40, 41)


# Evidence


@pytest.mark.parametrize("freedom", [1, 2, 5, 26, 80, 300])
def test_the_chi_square_tail_is_scipys(freedom: int) -> None:
    for share in (0.01, 0.3, 0.9, 1.0, 1.2, 2.0, 5.0):
        expected = stats.chi2.sf(share * freedom, freedom)
        assert chi_square_tail(share * freedom, freedom) == pytest.approx(expected, rel=1e-9)


def test_chi_square_merges_rare_cells_and_keeps_the_mean() -> None:
    law = {"a": 0.9, "b": 0.06, "c": 0.03, "d": 0.01}
    counts = {"a": 85, "b": 9, "c": 4, "d": 2}
    # of 100 samples "d" and "c" expect 4 together, "b" fills the cell: 10
    statistic = (85 - 90) ** 2 / 90 + (15 - 10) ** 2 / 10
    assert chi_square_p(counts, law) == pytest.approx(stats.chi2.sf(statistic, 1))
    assert chi_square_p({"a": 10}, {"a": 1.0}) == 1.0


def test_the_bound_on_total_variation() -> None:
    assert variation_bound(1000, 27, 1e-8) == pytest.approx(0.5 * math.sqrt(0.027) + math.sqrt(math.log(1e8) / 2000))


@pytest.mark.parametrize("law", [(0.5, 0.5), (0.93, 0.07), (0.6, 0.3, 0.1), (0.98, 0.01, 0.01)])
@pytest.mark.parametrize("samples", [1, 4, 11])
def test_no_bound_is_exceeded_more_often_than_it_says(law: tuple[float, ...], samples: int) -> None:
    """Every outcome of a small multinomial, with its exact probability."""
    outcomes = []
    for counts in itertools.product(range(samples + 1), repeat=len(law)):
        if sum(counts) == samples:
            chance = math.factorial(samples) * math.prod(
                p**n / math.factorial(n) for p, n in zip(law, counts, strict=True)
            )
            outcomes.append((chance, fit(dict(enumerate(counts)), dict(enumerate(law)), 0.1)))
    assert sum(chance for chance, _ in outcomes) == pytest.approx(1)
    for level in (0.5, 0.1, 1e-2, 1e-4):
        bound = entropy_bound(len(law), level)
        assert sum(chance for chance, found in outcomes if found.entropy > bound) <= level
        assert sum(chance for chance, found in outcomes if entropy_tail(found.entropy, len(law)) <= level) <= level
    assert sum(chance for chance, found in outcomes if not found.passed) <= 0.1


def test_the_entropy_tail() -> None:
    assert entropy_tail(1.0, 3) == 1.0
    assert entropy_tail(30.0, 3) == pytest.approx(math.exp(-30) * (math.e * 15) ** 2)
    assert entropy_tail(0.0, 1) == 1.0
    for cells in (1, 2, 27):
        for level in (0.3, 1e-8):
            bound = entropy_bound(cells, level)
            assert entropy_tail(bound * (1 - 1e-9) - 1e-12, cells) > level >= entropy_tail(bound, cells)


def test_a_fit_fails_for_what_is_impossible_and_for_what_is_too_frequent() -> None:
    law = {"a": 0.5, "b": 0.5}
    assert fit({"a": 480, "b": 520}, law, 1e-6).passed
    assert fit({"a": 1000}, {"a": 1 - 1e-15}, 1e-6).passed  # rounding
    assert not fit({"a": 300, "b": 700}, law, 1e-6).passed
    other = fit({"a": 499, "b": 500, "c": 1}, law, 1e-6)
    assert (other.passed, other.impossible, other.chi_square_p) == (False, 1, 0.0)


def test_a_sound_sampler_passes_and_one_that_is_off_by_a_tenth_does_not() -> None:
    rng, p = np.random.default_rng(5), np.array([0.4, 0.3, 0.2, 0.1])
    law = {index: float(value) for index, value in enumerate(p)}
    off = p + np.array([0.1, -0.1, 0, 0])
    for weights, passes in ((p, True), (off, False)):
        assert fit(Counter(rng.choice(4, 2000, p=weights).tolist()), law, 1e-7).passed is passes


# Tables


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_tiny()


def scored(engine: Engine, text: Sequence[int]) -> FloatArray:
    (logits,) = score(engine, engine.allocate(1, 128), [text], [len(text)])
    return logits[-1, : engine.spec.vocab_size]


TEXTS = [tuple(TOKENS[:20]), (*TOKENS[:20], 7), tuple(TOKENS[:9]), tuple(TOKENS[5:40]), (3,), *(
    (*TOKENS[:20], first, second) for first in (1, 2, 3) for second in (4, 5, 6)
)]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_holds_the_engines_bits(engine: Engine, order: int) -> None:
    table = Table(engine)
    table.prepare(TEXTS[: len(TEXTS) // 2 : order])
    for text in TEXTS[::order]:
        assert same_bits(table.logits(text), scored(engine, text))
    assert table.computed == len(TEXTS)


def test_a_table_of_few_tokens_has_ids_of_its_own(engine: Engine) -> None:
    ids = [-1, *range(40, 60)]
    logits = Table(engine, ids).logits((1, 2, 3))
    assert logits[0] == -np.inf
    assert same_bits(logits[1:], scored(engine, (40, 41, 42))[40:60])


def table_step(
    engine: TableEngine, tokens: Sequence[int], parents: Sequence[int] | None, past: int, kv: object
) -> None:
    row = RowInput(tokens, len(tokens), parents)
    engine.step(pack([row], np.array([past]), 2, engine.spec.max_length), kv)


def test_a_tables_cache_holds_texts(engine: Engine) -> None:
    tables = TableEngine(Table(engine, [-1, *range(40, 60)]))
    kv = tables.allocate(2, 16)
    table_step(tables, (1, 2, 3, 4), (-1, 0, 0, 2), 0, kv)  # 1 -> 2, 1 -> 3 -> 4
    assert {(1, 2), (1, 3), (1, 3, 4)} <= tables.table._known.keys()
    kv.move_slots(0, np.array([2, 3]), 1)
    table_step(tables, (5,), None, 3, kv)
    assert (1, 3, 4, 5) in tables.table._known
    kv.move_row(0, 1, 3)
    kv.resize(3, 32, 3)
    assert kv.read(1, 3).ravel().tolist() == [1, 3, 4]
    kv.write(2, kv.read(1, 3)[:, :, :2])
    assert kv.read(2, 3).ravel().tolist() == [1, 3, -1]
    assert (kv.rows, kv.capacity) == (3, 32)


def test_a_table_refuses_what_no_text_can_be(engine: Engine) -> None:
    tables = TableEngine(Table(engine, [-1, *range(40, 60)]))
    kv = tables.allocate(1, 16)
    with pytest.raises(EngineError, match="slot 0, which was never written"):
        table_step(tables, (1,), None, 3, kv)
    table_step(tables, (1,), None, 0, kv)  # padded to two
    with pytest.raises(EngineError, match="attends holds padding"):
        table_step(tables, (2,), None, 2, kv)
    right = pack([RowInput((1, 2), 1)], np.array([0]), 2, 64)
    with pytest.raises(EngineError, match="a token after 1 others was given position 5"):
        tables.step(changed(right, position_ids=np.array([[0, 5]])), kv)
    with pytest.raises(EngineError, match="attends later ones"):
        tables.step(changed(right, chunk_mask=np.ones((1, 2, 2), bool), logit_indices=np.array([[0]])), kv)


def changed(chunk: Chunk, **changes: np.ndarray) -> Chunk:
    fields = {name: getattr(chunk, name) for name in chunk.__slots__}
    return Chunk(**(fields | changes))


@pytest.mark.parametrize("method", [None, "ngram", "model"])
def test_the_runtime_on_tables_gives_the_bundles_tokens(engine: Engine, method: str | None) -> None:
    bundle, params = shared_bundle(), SamplingParams(max_new_tokens=10, ignore_eos=True)
    fixed = SpeculativeConfig(method=method, confidence_threshold=0.0)
    with LLM(bundle, speculative=fixed, verify=False) as llm:
        expected = llm.generate([PROMPT, PROMPT[1:]], params)
    with bundle_view(llm.manifest, "fp32", size=None, end=2, max_batch=2) as folder:
        table = TableEngine(Table(engine))
        view = LLM(folder, speculative=fixed, verify=False, opener=lambda *graph: table)
        found = view.generate([PROMPT, PROMPT[1:]], params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.stats.rounds for output in found] == [output.stats.rounds for output in expected]


# Distribution tests


@pytest.fixture(scope="module")
def ground(engine: Engine) -> Iterator[Ground]:
    bundle = shared_bundle()
    ground = Ground(bundle, read_manifest(bundle), "fp32", lambda graph, spec: engine, TOKENS)
    yield ground
    ground.close()


def test_the_text_gives_every_drafter_something_to_guess(ground: Ground) -> None:
    prompt = ground.prompt(full=True)
    assert prompt[:2] == prompt[-2:]  # what n-grams find
    assert [ground.ids[token] for token in ground.prompt(full=False)] == list(prompt)
    assert set(ground.disturbed) == {"model"}  # the target drafts for itself
    assert ground.boost < 0


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_the_law_is_the_product_of_the_pipelines_distributions(
    ground: Ground, engine: Engine, full: bool, ends: bool
) -> None:
    setting = Setting(0.8, 3, 3, terms=True, ends=ends)
    law, prompt = ground.law(setting, full=full), ground.prompt(full=full)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    lengths = {len(answer) for answer in law}
    assert lengths == ({1, 2, 3} if ends and 1 in lengths else {2, 3} if ends else {3})
    with ground.llm(None, "chain", "none", 1, full) as llm:
        seen = {output.token_ids for output in llm.generate([prompt] * 60, ground.params(setting, seed=None))}
    assert seen <= law.keys()


def test_the_plan_covers_every_drafter_rule_and_tree() -> None:
    manifest = read_manifest(shared_bundle())
    cases = plan(manifest, ["ngram", "model"], ["block", "token", "coupled"], [1, 4], 1000, trees=True)
    sampled = {(case.method, case.rule, case.tree, case.drafts) for case in cases if case.setting.temperature}
    for tree in ("chain", "dynamic"):
        assert {(None, "coupled", "chain", "none")} <= sampled
        for rule in ("token", "coupled"):
            assert {("ngram", rule, tree, "looked up"), ("model", rule, tree, "sampled")} <= sampled
        assert ("model", "token", tree, "ranked") in sampled
    assert {("ngram", "block", "chain", "looked up"), ("model", "block", "chain", "sampled")} <= sampled
    assert {case.batch for case in cases} == {1, 4}
    assert {case.setting.temperature for case in cases} == {0, 0.7, 1.0}
    assert {case.method for case in cases if case.full} == {"ngram", "model"}
    chains = plan(manifest, ["model"], ["block"], [1], 10, trees=False)
    assert {(case.tree, case.rule, case.batch) for case in chains} == {("chain", "block", 1)}


CASE = Case(
    method="model", rule="token", tree="chain", drafts="sampled", setting=Setting(1.0, 3, 3, terms=False, ends=False),
    batch=4, samples=200,
)  # fmt: skip


def test_a_case_that_never_rejects_has_no_power(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list(range(200))
    assert run(ground, CASE, 1e-6, seeds).power
    monkeypatch.setattr(ground, "disturbed", {})
    ground.llm.cache_clear()
    result = run(ground, CASE, 1e-6, seeds)
    ground.llm.cache_clear()
    assert result.passed
    assert not result.power
    assert (result.accepted, result.tau) == (result.proposed, 3.0)
    report = made_report(distribution=(result,), planned=2)
    assert "1 distribution tests passed (1 without power)" in verdict(report)
    assert "no power" in to_text(report)


def test_a_result_holds_what_the_runtime_did(ground: Ground) -> None:
    result = run(ground, CASE, 1e-6, list(range(200)))
    assert result.fit is not None
    assert (result.passed, result.bits, result.fit.samples, result.fit.cells) == (True, 600, 200, 27)
    assert 0 < result.accepted < result.proposed
    assert 1 < result.tau < 3
    again = run(ground, CASE, 1e-6, list(range(200)))
    assert (again.fit, again.tau) == (result.fit, result.tau)


# Texts: triage


def spec(vocab: int) -> ModelSpec:
    return ModelSpec(
        num_layers=1, num_kv_heads=1, head_dim=1, hidden_size=1, logits_size=vocab, vocab_size=vocab, max_length=64
    )


class Told:
    """Stands for an `LLM` that answers as it is told, from given logits."""

    def __init__(self, mode: str, answer: tuple[int, ...], logits: list[list[float]], logprob: float = 0.0) -> None:
        self.mode, self.answer, self.logits, self.logprob = mode, answer, logits, logprob
        self.watch = None

    def generate(self, prompts: list[list[int]], params: object) -> list[RequestOutput]:
        count = (params[0] if isinstance(params, list) else params).max_new_tokens
        tokens = self.answer[:count]
        for index in range(len(tokens)):
            self.watch([*prompts[0], *tokens[:index]], np.array(self.logits[index], np.float32))
        told = Stats(new_tokens=len(tokens), rounds=len(tokens))
        logprobs = tuple(Logprob(token, self.logprob, ()) for token in tokens)
        return [RequestOutput(tuple(prompts[0]), tokens, "", "length", logprobs, told)]


def compared(mode: str, plain: Told, other: Told, noise: Sequence[float], kind: str = "greedy") -> TextResult:
    asked: list[tuple[tuple[int, ...], bool]] = []

    def estimates(text: tuple[int, ...], tree: bool) -> Iterator[float]:
        asked.append((text, tree))
        yield from noise

    texts = Texts(
        lambda run: other if run.method else plain, SimpleNamespace(spec=spec(4)), estimates, {kind: [[1, 2]]},
        {kind: 3}, 0,
    )  # fmt: skip
    return texts.run(Run(kind=kind, method="ngram", tree="dynamic"))


LOGITS = [[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 1.75, 0.0], [3.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("noise", "ties", "problem"),
    [
        ([0.126], 1, None),  # each of the two may move by so much: 0.25 can close
        ([0.125], 0, "prompt 1: token 2 is 2 instead of 1, 0.25 worse; the engine's noise is 0.125"),
        ([0.0], 0, "prompt 1: token 2 is 2 instead of 1, 0.25 worse; the engine's noise is 0"),
        ([0.01, 0.2], 1, None),  # measured again on the very text
        ([0.01, 0.02], 0, "prompt 1: token 2 is 2 instead of 1, 0.25 worse; the engine's noise is 0.02"),
    ],
)
def test_a_first_difference_is_a_tie_or_a_fault(noise: list[float], ties: int, problem: str | None) -> None:
    plain, other = Told("exact", (1, 1, 0), LOGITS), Told("fast", (1, 2, 3), LOGITS)
    result = compared("fast", plain, other, noise)
    assert (result.exact, result.identical, result.ties, result.problem) == (False, 0, ties, problem)


def test_in_mode_exact_there_are_no_ties() -> None:
    plain, other = Told("exact", (1, 1, 0), LOGITS), Told("exact", (1, 2, 0), LOGITS)
    assert compared("exact", plain, other, [9.0]).problem == "prompt 1: token 2 is 2 instead of 1"


def test_in_mode_exact_one_bit_is_a_fault() -> None:
    moved = [list(row) for row in LOGITS]
    moved[2][3] = 1e-30
    plain, other = Told("exact", (1, 1, 0), LOGITS), Told("exact", (1, 1, 0), moved)
    result = compared("exact", plain, other, [9.0])
    assert (result.problem, result.bits, result.bits_equal) == ("the bits of 1 of 3 logits differ", 3, 2)
    assert compared("exact", plain, Told("exact", (1, 1, 0), LOGITS), [0.0]).passed
    assert compared("fast", plain, Told("fast", (1, 1, 0), moved), [0.0]).passed


def test_in_mode_exact_log_probabilities_are_compared() -> None:
    plain, other = Told("exact", (1, 1, 0), LOGITS), Told("exact", (1, 1, 0), LOGITS, logprob=-0.5)
    assert compared("exact", plain, other, [0.0]).problem == "log-probabilities differ"


def test_a_text_that_ends_early_is_a_fault() -> None:
    plain, other = Told("exact", (1, 1, 0), LOGITS), Told("fast", (1, 1), LOGITS)
    assert compared("fast", plain, other, [9.0]).problem == "prompt 1: 2 tokens instead of 3"


def test_coupled_differences_are_judged_with_their_noise() -> None:
    """Gaps are of logit + Gumbel noise, -log of the noise: the token that wins with it is 0 worse than itself."""
    flat = [[0.0] * 4] * 3
    arrivals = [PositionNoise(0).noise(position, np.arange(4)) for position in (2, 3, 4)]
    best = tuple(int(one.argmin()) for one in arrivals)
    second = int(arrivals[1].argsort()[1])
    gap = float(np.log(arrivals[1][second] / arrivals[1][best[1]]))
    plain, other = Told("exact", best, flat), Told("fast", (best[0], second, best[2]), flat)
    assert compared("fast", plain, other, [gap * 0.51], "coupled").ties == 1
    assert "worse" in str(compared("fast", plain, other, [gap * 0.49], "coupled").problem)


def test_a_tie_is_closer_than_twice_the_noise() -> None:
    assert is_tie(0.19, 0.1)
    assert not is_tie(0.2, 0.1)
    assert not is_tie(0.0, 0.0)  # equal bits give equal tokens


def test_a_broken_run_is_a_fault_and_a_wrong_request_is_not() -> None:
    class Broken(Told):
        def generate(self, prompts: list[list[int]], params: object) -> list[RequestOutput]:
            raise self.error

    plain, other = Told("exact", (1, 1, 0), LOGITS), Broken("exact", (), [])
    other.error = AssertionError("the cache\nis wrong")
    assert compared("exact", plain, other, []).problem == "the runtime broke: AssertionError: the cache is wrong"
    other.error = RequestError("too long")
    with pytest.raises(RequestError):
        compared("exact", plain, other, [])


def test_the_runs_cover_every_drafter_batch_and_draft_length() -> None:
    runs = text_runs(["ngram", "model"], [1, 4], 63, trees=True, coupled=True)
    for method in ("ngram", "model"):
        own = [run for run in runs if run.method == method]
        assert {(run.tree, run.batch) for run in own if run.kind == "greedy"} == {
            ("chain", 1), ("chain", 4), ("dynamic", 4),
        }  # fmt: skip
        assert {run.draft_tokens for run in own if run.kind == "coupled"} == {1, 3, 6}
        assert {run.batch for run in own if run.kind == "coupled"} == {1, 4}
    assert {run.kind for run in runs if run.rescored} == {"greedy", "coupled"}
    assert {run.draft_tokens for run in text_runs(["ngram"], [1], 2, trees=False, coupled=True)} == {None, 1}


# The engine


class OneTokenNoise(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.width == 1) * np.float32(0.25)


class WidthNoise(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.width == 3) * np.float32(0.5)


def checked(engine: Engine, *, exact: bool = True, promised: bool = True) -> EngineResult:
    variant = read_manifest(shared_bundle()).target.variants["fp32"]
    variant = msgspec.structs.replace(variant, invariance=msgspec.structs.replace(variant.invariance, exact=exact))
    return check_engine(lambda: engine, variant, TOKENS, threads=None, again=None, trees=True, promised=promised)


def test_a_sound_engine_passes_and_its_noise_is_told(engine: Engine) -> None:
    result = checked(engine)
    assert (result.passed, result.exact, result.least_width, result.kernel_noise) == (True, True, 1, 0.0)
    assert result.tree_noise is not None
    assert 0 < result.tree_noise < 1e-4
    assert result.noise(tree=True) == result.tree_noise
    assert result.noise(tree=False) == 0.0


def test_bits_that_the_manifest_promises_and_this_machine_does_not_give(engine: Engine) -> None:
    broken = checked(WidthNoise(engine))
    assert broken.problem is not None
    assert broken.problem.startswith("invariance gate failed: bits differ")
    assert "export the bundle on this kind of machine" in broken.problem
    assert (broken.exact, checked(WidthNoise(engine), promised=False).passed) == (False, True)
    narrow = checked(OneTokenNoise(engine))
    assert "a pass of one token gives other bits here (up to 0.25)" in str(narrow.problem)


def test_where_no_bits_were_promised_the_noise_is_measured() -> None:
    class Noisy(Faulty):
        def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
            return logits + np.float32(1e-3 * (chunk.width % 5))

    result = checked(Noisy(open_tiny()), exact=False)
    assert (result.passed, result.exact) == (True, False)
    assert 3e-3 < result.kernel_noise < 5e-3


def test_the_other_number_of_threads_is_compared(engine: Engine) -> None:
    variant = read_manifest(shared_bundle()).target.variants["fp32"]
    opened: list[int] = []

    def again(threads: int) -> Engine:
        opened.append(threads)
        return open_tiny(threads)

    result = check_engine(lambda: engine, variant, TOKENS, threads=1, again=again, trees=False, promised=True)
    assert (result.passed, result.scorings, opened, result.tree_noise) == (True, 16, [2], None)


# The command


def call(capsys: pytest.CaptureFixture[str], *arguments: str, bundle: Path | None = None) -> tuple[int, str, str]:
    bundle = bundle or shared_bundle()
    capsys.readouterr()  # what making it said
    try:
        code = verify.main([str(bundle), *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_good_bundle_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *FEW)
    first, second, *_ = out.splitlines()
    assert (code, err) == (0, "")
    assert first.startswith("Lossless: 42 distribution tests passed")  # ngram, model, and both together
    assert second.startswith("Relative to the engine that verifies, which is its own reference: fp32 (fp32) on ONNX")
    assert "FAILED" not in out
    assert "a sound runtime fails here with probability 1e-06 at most" in out


def test_the_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--method", "ngram", "--acceptance", "token", "--no-trees", "--batch-size", "2", "--seed", "5")
    code, out, err = call(capsys, *FEW, *options, "--json")
    report = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(report) == {
        "passed", "verdict", "problems", "bundle", "variant", "mode", "methods", "planted", "cpu", "specdec", "seed",
        "false_alarm", "planned", "engine", "distribution", "texts", "seconds",
    }  # fmt: skip
    assert (report["passed"], report["problems"], report["planted"]) == (True, [], None)
    assert report["planned"] == 1 + len(report["distribution"]) + len(report["texts"])
    assert (report["mode"], report["methods"], report["seed"], report["false_alarm"]) == ("exact", ["ngram"], 5, 1e-6)
    assert report["engine"]["passed"]
    for one in report["distribution"]:
        assert (one["passed"], one["case"]["method"], one["case"]["rule"], one["case"]["batch"]) == (
            True, "ngram", "token", 2,
        )  # fmt: skip
        assert set(one["fit"]) == set(Fit.__struct_fields__)
    assert {(one["run"]["kind"], one["bits_equal"] == one["bits"]) for one in report["texts"]} == {("greedy", True)}


def test_a_run_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*FEW, "--method", "model", "--acceptance", "block", "--no-trees", "--json")
    first, again = (json.loads(call(capsys, *options)[1])["distribution"] for _ in range(2))
    assert [one["fit"] for one in first] == [one["fit"] for one in again]


def test_prompts_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one, two\n\nthe fox\nthe dog\n")
    (tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "category": "a", "turns": ["one", "two"]}\n')
    options = (*FEW, "--method", "ngram", "--acceptance", "block", "--no-trees", "--json")
    for name, count in (("prompts.txt", 2), ("prompts.jsonl", 1)):
        report = json.loads(call(capsys, *options, "--prompts", str(tmp_path / name))[1])
        assert {one["prompts"] for one in report["texts"]} == {count}


def test_a_bundle_without_drafters_says_what_was_not_tested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), bundle, symlinks=True)
    manifest = msgspec.structs.replace(read_manifest(bundle), drafters={})
    (bundle / "specdec.json").write_bytes(encode(manifest))
    code, out, _ = call(capsys, *FEW, bundle=bundle)
    assert code == 0
    assert out.startswith("Nothing speculates in this bundle: no drafter was tested. Of plain decoding, ")


@pytest.mark.slow
def test_mode_fast_triages(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2 has no grouped heads: its passes of one token take other kernels."""
    options = (*FEW, "--fast", "--json", "--method", "ngram")
    code, out, _ = call(capsys, *options, bundle=shared_bundle("gpt2", ("ngram",)))
    report = json.loads(out)
    assert (code, report["mode"], report["engine"]["least_width"]) == (0, "fast", 2)
    assert report["engine"]["kernel_noise"] > 0
    assert not any(one["exact"] for one in report["texts"])


def test_a_lossy_rule_is_not_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--quick", "--samples", "400", "--method", "model", "--no-trees", "--acceptance", "lossy-typical")
    code, out, _ = call(capsys, *options)
    assert code == 1
    assert out.startswith("NOT lossless: distribution: model (sampled), chain, lossy-typical")


QUICK_TO_SEE = {
    "always-accept": 150, "inverted-ratio": 150, "bonus-from-wrong-row": 150, "residual-from-p": 600, "raw-q": 500,
    "lossy-typical-as-block": 500, "greedy-accepts-second-best": 40, "noise-depends-on-draft": 200,
    "kv-commit-one-too-many": 40, "kv-slot-off-by-one": 40, "kv-path-not-compacted": 40, "batch-rows-swapped": 40,
    "batch-row-not-moved": 40, "tree-siblings-seen": 40, "tree-positions-in-order": 40, "dropped-after-drawing": 500,
}  # fmt: skip


def faults() -> list[object]:
    return [
        pytest.param(name, QUICK_TO_SEE.get(name), marks=() if name in QUICK_TO_SEE else pytest.mark.slow)
        for name in FAULTS
    ]


@pytest.mark.parametrize(("name", "samples"), faults())
def test_a_planted_fault_is_noticed(capsys: pytest.CaptureFixture[str], name: str, samples: int | None) -> None:
    method = "ngram" if name in ("residual-from-p", "noise-depends-on-draft") else "model"
    options = ("--samples", str(samples), "--method", method) if samples else ()
    code, out, _ = call(capsys, *options, "--plant", name)
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == f"A FAULT WAS PLANTED: {name} ({FAULTS[name].breaks})"
    assert lines[1].startswith("The fault was noticed after ")
    assert lines[3].startswith("NOT lossless: ")


def test_a_fault_that_is_not_noticed_is_said_so() -> None:
    report = made_report(planned=1)
    report = msgspec.structs.replace(report, planted=verify.Planted("x", "nothing"))
    assert "NOT NOTICED" in to_text(report)


def test_a_fault_is_gone_afterwards() -> None:
    before = vars(scheduler_module)["accept_tokens"]
    with planted("residual-from-p"):
        assert vars(scheduler_module)["accept_tokens"] is not before
    assert vars(scheduler_module)["accept_tokens"] is before


def test_the_command_stops_at_the_first_failure_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*FEW, "--method", "ngram", "--plant", "kv-slot-off-by-one", "--json")
    first = json.loads(call(capsys, *options)[1])
    every = json.loads(call(capsys, *options, "--keep-going")[1])
    assert len(first["problems"]) == 1
    assert 1 + len(first["distribution"]) + len(first["texts"]) < first["planned"]
    assert len(every["problems"]) > 1
    assert 1 + len(every["distribution"]) + len(every["texts"]) == every["planned"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "eagle"], "no drafter 'eagle': choose one of ngram, model"),
        (["--variant", "int3"], "no variant 'int3'"),
        (["--acceptance", "hopeful"], "invalid choice: 'hopeful'"),
        (["--plant", "gremlin"], "invalid choice: 'gremlin' (choose from 'always-accept'"),
        (["--samples", "0"], "--samples must be at least 1, not 0"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--batch-size", "9"], "--batch-size 9: this bundle takes 1 to 8"),
        (["--prompts", "/nowhere/prompts.txt"], "cannot be read"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--sample", "3"], "unrecognized arguments: --sample 3"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = call(capsys, *options)
    assert (code, out) == (2, "")
    assert err.startswith("specdec-verify: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_bundle_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capsys, bundle=tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert "is not a bundle" in err


def test_help_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "break the runtime on purpose" in " ".join(out.split())
    for name in FAULTS:
        assert f"  {name} " in out


def made_report(**parts: object) -> Report:
    bundle = shared_bundle()
    measured = EngineResult(
        device="an engine", precision="fp32", threads=None,
        exported=read_manifest(bundle).target.variants["fp32"].invariance, exact=True, least_width=1, scorings=1,
        kernel_noise=0.0, tree_noise=None, problem=None, seconds=0.0,
    )  # fmt: skip
    return Report(
        bundle=str(bundle), variant="fp32", mode="exact", methods=("model",), planted=None,
        cpu=verify.cpu(), specdec="0", seed=0, false_alarm=1e-6, engine=measured, **parts,
    )  # fmt: skip
