"""Drafts of Medusa heads: which state, which head and which history they come from, and what is emitted with them.

On the fake engine a hidden state is the text that it stands for, so that heads say something else wherever they are
given another token's state; on real bundles PyTorch says what they should have been given.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from specdec.engines.contract import FloatArray, HeadsSpec
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.ort import OrtEngine
from specdec.engines.ort_heads import OrtHeads
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig
from specdec.runtime.drafters.growth import DynamicShape, GrowingTree, Shape, StaticShape, choose_tree
from specdec.runtime.drafters.medusa import MedusaDrafter
from specdec.runtime.drafters.model import most_probable_ids
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.sampling import softmax
from specdec.runtime.tree import TokenTree
from specdec.tools.tables import Table, TableEngine
from specdec.tools.tables_bundle import bundle_view
from specdec.tools.tables_heads import HeadTable, TableHeads
from specdec.tools.verify import main as verify
from support.enumeration import Context, ExactPipeline, Joint, ScriptedDice, outcomes, path_text, plain_texts, rng_at
from support.fake_engine import FakeEngine, fake_spec
from support.heads import ANSWER, PROMPTS, final_states, medusa_bundle, medusa_checkpoint, torch_target
from support.rows import greedy, make_row, make_scheduler, run
from support.trace import recorded_logits

HEADS, VOCAB = 3, 6
IDS = np.array([0, 2, 3, 5])
CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
SHAPES: dict[str, Shape] = {
    "chain": StaticShape.chain(5),  # longer than there are heads
    "choices": StaticShape(CHOICES),
    "dynamic": DynamicShape(7),
}
MODES: dict[str, dict] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "ranked": {"temperature": 1.0},
    "coupled": {"temperature": 1.0, "acceptance": "coupled"},
}
TERMS = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_new_tokens": 5, "top_k": 4}


# Trees for measured accuracies


def worth(paths: Sequence[Sequence[int]], accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens that a tree is expected to keep."""
    return sum(float(np.prod([accuracies[depth][rank] for depth, rank in enumerate(path)])) for path in paths)


def every_tree(nodes: int, depth: int, ranks: int) -> set[frozenset[Context]]:
    """All trees of so many nodes in which a node has its parent and its siblings of lower rank."""
    trees = {frozenset[Context]()}
    for _ in range(nodes):
        grown = set()
        for tree in trees:
            for path in (path for length in range(1, depth + 1) for path in product(range(ranks), repeat=length)):
                *parent, rank = path
                above = not parent or tuple(parent) in tree
                if path not in tree and above and (rank == 0 or (*parent, rank - 1) in tree):
                    grown.add(tree | {path})
        trees = grown
    return trees


@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_tree_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    accuracies = [sorted(rng.uniform(0.05, 0.6, 3), reverse=True) for _ in range(3)]
    for nodes in (1, 2, 4, 5):
        chosen = choose_tree(accuracies, nodes)
        assert len(chosen) == nodes
        StaticShape(chosen)  # a whole tree
        best = max(worth(sorted(tree), accuracies) for tree in every_tree(nodes, 3, 3))
        assert worth(chosen, accuracies) == pytest.approx(best)


def test_a_tree_ends_where_nothing_was_measured() -> None:
    assert choose_tree([[0.5, 0.1], [0.3]], 99) == [[0], [0, 0], [1], [1, 0]]
    assert choose_tree([[0.0, 0.0]], 9) == [[0], [1]]
    assert choose_tree([], 9) == []
    with pytest.raises(RequestError, match="measured is for Medusa heads whose accuracies were measured"):
        SpeculativeConfig(tree="measured").check("model", 9, measured=False)


# Proposals on the fake engine


class FakeHeads:
    """Heads whose logits are a hash of the text that the state stands for, and of the head."""

    def __init__(self, engine: FakeEngine, size: int = VOCAB, *, knows: bool = False) -> None:
        self.spec = HeadsSpec(heads=HEADS, hidden_size=1, logits_size=size)
        self.engine, self.knows, self.rows = engine, knows, list[int]()

    def of(self, text: Context) -> FloatArray:
        """Logits [heads, size] from the state at the end of `text`."""
        if self.knows:  # what the target would say: it goes on greedily first
            texts = [list(text)]
            for _ in range(HEADS):
                texts.append([*texts[-1], *greedy(self.engine, texts[-1], 1)])
            return np.stack([self.engine.logits_after(one)[: self.spec.logits_size] for one in texts[1:]])
        return rng_at(9, text).standard_normal((HEADS, self.spec.logits_size)).astype(np.float32) * 2

    def logits(self, features: FloatArray) -> FloatArray:
        texts = list(self.engine.texts)
        self.rows.append(len(features))
        return np.stack([self.of(texts[int(number)]) for number in features[:, 0]])

    def close(self) -> None:
        pass


class CheckedDrafter(MedusaDrafter):
    """Compares every proposal with the one that grows from the heads' definition, history by history."""

    checked = 0
    fake: FakeHeads
    own_ids: np.ndarray

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        dice = [deepcopy(row.dice) for row in rows]
        trees = super().propose(rows, limits)
        for row, tree, limit, own in zip(rows, trees, limits, dice, strict=True):
            drawn, row.dice = row.dice, own
            expected = self._expected(row, limit)
            row.dice = drawn
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            assert (tree.q is None) == (expected.q is None)
            assert all(np.array_equal(got, q) for got, q in zip(tree.q or (), expected.q or (), strict=True))
            assert set(tree.tokens) <= set(self.own_ids.tolist())
            self.checked += len(tree)
        return trees

    def _expected(self, row: Row, limit: int) -> TokenTree:
        seen = tuple(row.tokens[:-1])  # all but the pending token
        depth = min(limit, HEADS) if seen else 0
        tree, level = GrowingTree(self._shape, depth, row.max_length - len(row.tokens)), 0
        by_rank = self._deterministic or row.params.temperature == 0
        while tree.frontier:
            logits = np.full(VOCAB, -np.inf, np.float32)
            logits[self.own_ids] = self.fake.of(seen)[level]
            q = []
            for node in tree.frontier:
                history = [*row.tokens, *path_text(tree.tokens, tree.parents, node)]
                if row.params.temperature == 0:
                    q.append(softmax(row.pipeline.scores(logits, history)))
                else:
                    q.append(row.pipeline.probabilities(logits, history))
            position = len(row.tokens) + level
            tree.extend(q, most_probable_ids if by_rank else partial(row.draw, position=position))
            level += 1
        return tree.tree(sampled=not by_rank)


def target() -> FakeEngine:
    return FakeEngine(fake_spec(VOCAB, taps=("final",)), min_width=2)


def checked(shape: Shape, mode: str, made: list[CheckedDrafter], *, reduced: bool = False, knows: bool = False) -> Any:
    """What makes a drafter on the target's hidden states; it is put into `made`."""

    def make(model: CachedModel) -> CheckedDrafter:
        heads = FakeHeads(model.engine, len(IDS) if reduced else VOCAB, knows=knows)  # type: ignore[arg-type]
        ids = IDS if reduced else None
        made.append(CheckedDrafter(model, heads, shape, ids, min_rows=2, deterministic=mode == "ranked"))
        made[-1].fake, made[-1].own_ids = heads, IDS if reduced else np.arange(VOCAB)
        return made[-1]

    return make


def rows_of(mode: str, *counts: int, **params: object) -> list[Row]:
    """Rows that leave at different times; the second has nothing in the cache at first."""
    options = {"ignore_eos": True, **MODES[mode], **params}
    return [
        make_row(prompt, eos=(2,), seed=seed, max_new_tokens=count, **options)
        for seed, (prompt, count) in enumerate(zip([[1, 2, 3, 1, 2], [5], [4, 3]], counts or (20, 13, 17), strict=True))
    ]


@pytest.mark.parametrize("reduced", [False, True], ids=["all ids", "reduced"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_proposals_are_those_of_the_heads_definition(shape: str, mode: str, reduced: bool) -> None:
    for params in ({}, TERMS):
        made: list[CheckedDrafter] = []
        rows = rows_of(mode, **params)
        run(make_scheduler(target(), checked(SHAPES[shape], mode, made, reduced=reduced), max_rows=2), *rows)
        assert made[0].checked == sum(row.stats.draft_tokens_proposed for row in rows) > 30
        assert set(made[0].fake.rows) == {2}, "one pass of the heads for all rows, of two rows at least"


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_and_coupled_texts_are_plain_decodings(shape: str) -> None:
    for mode, params in (("greedy", {}), ("greedy", {"repetition_penalty": 1.4}), ("coupled", TERMS)):
        for knows in (False, True):
            alone = run(make_scheduler(FakeEngine(fake_spec(VOCAB))), *rows_of(mode, **params))
            rows = rows_of(mode, **params)
            assert run(make_scheduler(target(), checked(SHAPES[shape], mode, [], knows=knows)), *rows) == alone


@pytest.mark.parametrize("shape", ["chain", "choices"])
def test_heads_that_know_the_target_are_accepted_to_the_last_token(shape: str) -> None:
    """Off by one in the state, the head or the place of a draft, and hardly any token would be."""
    rows = rows_of("greedy", 17, 18, 17)
    run(make_scheduler(target(), checked(SHAPES[shape], "greedy", [], knows=True)), *rows)
    assert [row.stats.rounds for row in rows] == [5, 6, 5]  # 4 + 4 + 4 + 4 + 1; 1 + 4 + ... without a state at first
    assert [row.stats.draft_tokens_accepted for row in rows] == [12, 12, 12]


def test_heads_that_are_not_numbers_are_an_error() -> None:
    class Broken(FakeHeads):
        def logits(self, features: FloatArray) -> FloatArray:
            return np.full((len(features), HEADS, VOCAB), np.nan, np.float32)

    scheduler = make_scheduler(target(), lambda model: MedusaDrafter(model, Broken(model.engine), SHAPES["chain"]))
    with pytest.raises(EngineError, match="Medusa heads returned logits that are not numbers"):
        run(scheduler, make_row([1, 2, 3], max_new_tokens=4))


# Whole generations, enumerated

SMALL, PROMPT = 3, [0, 1, 0]
GENERATIONS: dict[str, tuple[Shape, dict]] = {
    "chain": (StaticShape.chain(2), {}),
    "tree": (StaticShape([[0], [1], [1, 0]]), {}),
    "dynamic tree": (DynamicShape(3), {}),
    "blockwise": (StaticShape.chain(2), {"deterministic": True}),
    "reduced tree": (StaticShape([[0], [1], [0, 0]]), {"ids": np.array([0, 2])}),
}


@cache
def small_logits(text: Context) -> np.ndarray:
    return FakeEngine(fake_spec(SMALL), sharpness=1.0).logits_after(list(text))


class SmallEngine(FakeEngine):
    """Its logits are looked up, for the many runs of an enumeration."""

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        return small_logits(tuple(tokens))


def small_row(**params: object) -> Row:
    row = make_row(PROMPT, eos=(2,), **{"temperature": 1.0, "max_new_tokens": 4, "repetition_penalty": 1.5, **params})
    row.pipeline = ExactPipeline(row.pipeline)  # type: ignore[assignment]
    return row


@pytest.mark.parametrize("draft", GENERATIONS)
@pytest.mark.parametrize(
    "params",
    [{"max_new_tokens": 3, "ignore_eos": True}, {"min_new_tokens": 2, "frequency_penalty": 0.5, "acceptance": "token"}],
    ids=["block", "token, ends"],
)
def test_generations_are_distributed_as_plain_decoding(draft: str, params: dict) -> None:
    shape, options = GENERATIONS[draft]
    rounds = set()

    def make(model: CachedModel) -> MedusaDrafter:
        size = len(options["ids"]) if "ids" in options else SMALL
        return MedusaDrafter(model, FakeHeads(model.engine, size), shape, **options)  # type: ignore[arg-type]

    def generate(dice: ScriptedDice) -> Context:
        row = small_row(**params)
        row.dice = dice  # type: ignore[assignment]
        rows = [make_row([2, 0], max_new_tokens=2), row]
        run(make_scheduler(SmallEngine(fake_spec(SMALL, taps=("final",))), make, max_rows=2), *rows)
        rounds.add(row.stats.rounds)
        return tuple(row.tokens[len(PROMPT) :])

    joint: Joint = defaultdict(Fraction)
    for answer, chance in outcomes(generate):
        joint[answer] += chance
    assert joint == plain_texts(small_row(**params), small_logits)
    assert len(rounds) > 1


# Real bundles

TREES: dict[str, dict] = {
    "chain": {},
    "dynamic": {"tree": "dynamic"},
    "choices": {"tree": CHOICES},
    "measured": {"tree": "measured", "num_speculative_tokens": 6},
    "blockwise": {"method": "blockwise"},
}
BUNDLES: dict[str, Callable[[], Any]] = {
    "fp32": medusa_bundle,
    "int8": partial(medusa_bundle, "int8", draft_vocab_size=300, shared_head=True),
}


def load(bundle: str, **options: Any) -> LLM:
    """Drafts of full length."""
    options = {"method": "medusa", "confidence_threshold": 0.0, **options}
    return LLM(BUNDLES[bundle](), speculative=SpeculativeConfig(**options), verify=False)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": ANSWER, "ignore_eos": True, **options})


@pytest.mark.parametrize("precision", BUNDLES)
def test_greedy_texts_and_bits_are_plain_decodings(precision: str) -> None:
    with load(precision, method=None) as llm, recorded_logits() as expected:
        texts = [output.token_ids for output in llm.generate(PROMPTS, params())]
    for name, options in TREES.items():
        with load(precision, **options) as llm, recorded_logits() as found:
            outputs = llm.generate(PROMPTS, params())
            assert llm.mode == ("exact" if name in ("chain", "blockwise") else "fast")
        assert [output.token_ids for output in outputs] == texts, name
        assert sum(output.stats.draft_tokens_accepted for output in outputs) > 20, name
        if llm.mode == "exact":
            assert found == expected


def test_heads_that_know_the_answers_are_accepted() -> None:
    """They were fitted on PyTorch's states: head i at token t to the token t + 2 + i."""
    for options in ({}, {"method": "blockwise"}):
        with load("fp32", **options) as llm:
            stats = [output.stats for output in llm.generate(PROMPTS, params())]
        assert [one.rounds for one in stats] == [10, 10, 11, 10]  # of 40 tokens; one without a state at first


def test_the_heads_are_given_the_state_before_the_pending_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's, of the very text; rows join, leave and change places meanwhile."""
    given: list[np.ndarray] = []
    wanted: list[tuple[int, ...]] = []
    logits, propose = OrtHeads.logits, MedusaDrafter.propose

    def recording(self: OrtHeads, features: FloatArray) -> FloatArray:
        given.extend(features.copy())
        return logits(self, features)

    def proposing(self: MedusaDrafter, rows: Sequence[Row], limits: Sequence[int], *prices: Any) -> list[TokenTree]:
        before = len(given)
        trees = propose(self, rows, limits, *prices)
        drafted = [row for row, limit in zip(rows, limits, strict=True) if limit > 0 and len(row.tokens) > 1]
        wanted.extend(tuple(row.tokens[:-1]) for row in drafted)
        del given[before + len(drafted) :]  # padding to two rows
        return trees

    monkeypatch.setattr(OrtHeads, "logits", recording)
    monkeypatch.setattr(MedusaDrafter, "propose", proposing)
    each = [params(max_new_tokens=count, temperature=1.0, seed=count) for count in (3, 30, 11, 1, 17, 8, 2, 21, 5, 9)]
    prompts = [PROMPTS[index % 4] + [20 + index] * (index // 4) for index in range(len(each))]
    for options in ({}, {"tree": CHOICES}):
        with load("fp32", **options) as llm:
            llm.generate(prompts, each)
    assert len(given) == len(wanted) > 60
    model = torch_target(medusa_checkpoint())
    for text, state in zip(wanted, given, strict=True):
        assert np.abs(final_states(model, text)[-1].numpy() - state).max() < 1e-4


def test_rows_of_a_batch_are_drafted_for_as_alone() -> None:
    each = [params(max_new_tokens=count, temperature=0.3, seed=count) for count in (30, 7, 19, 40)]
    for options in ({}, {"method": "blockwise"}):
        with load("fp32", **options) as llm:
            alone = [llm.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, each, strict=True)]
            together = llm.generate(PROMPTS, each)
        assert [output.token_ids for output in together] == [output.token_ids for output in alone]
        assert [output.stats.rounds for output in together] == [output.stats.rounds for output in alone]


def test_what_a_bundle_with_heads_cannot_draft_is_refused() -> None:
    with pytest.raises(RequestError, match="blockwise drafts chains: for trees use method medusa"):
        load("fp32", method="blockwise", tree="dynamic")
    with pytest.raises(RequestError, match="measured is for Medusa heads"):
        load("fp32", method="ngram", tree="measured")
    with pytest.raises(RequestError, match="choose one of auto, ngram, medusa, blockwise"):
        load("fp32", method="eagle")


# specdec-verify


@pytest.mark.parametrize("method", ["medusa", "blockwise"])
def test_the_heads_on_tables_draft_the_bundles_tokens(method: str) -> None:
    bundle, speculative = medusa_bundle(), SpeculativeConfig(method=method, confidence_threshold=0.0)
    manifest = read_manifest(bundle)
    record = manifest.drafters["medusa"]
    with LLM(bundle, speculative=speculative, verify=False) as llm:
        expected = llm.generate(PROMPTS, params())
    table = Table(OrtEngine(bundle / manifest.target.variants["fp32"].graph, manifest.target.spec))
    engine = TableEngine(table)
    heads = TableHeads(HeadTable(OrtHeads(bundle / record.graph, record.spec), None, table), engine.book)  # type: ignore[union-attr]
    with bundle_view(manifest, "fp32", size=None, end=2, max_batch=4) as folder:
        view = LLM(
            folder,
            speculative=speculative,
            verify=False,
            opener=lambda *graph: engine,
            heads_opener=lambda *graph: heads,
        )
        found = view.generate(PROMPTS, params())
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.stats.rounds for output in found] == [output.stats.rounds for output in expected]


def test_specdec_verify_passes(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--quick", "--samples", "40", "--limit", "1", "--acceptance", "token", "--batch-size", "2"]
    assert verify([str(BUNDLES["int8"]()), *size, "--method", "medusa", "--method", "blockwise"]) == 0
    report = capsys.readouterr().out
    assert "drafters: medusa, blockwise" in report
