"""How trees grow, and whole generations with them: rounds, caches and drafts together, enumerated or token for token.

The fake engine's logits depend on every token that is attended, so one wrong slot of a cache changes what follows.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import cache, partial

import numpy as np
import pytest

from specdec.engines.errors import RequestError
from specdec.runtime.drafters.adaptive import AdaptiveDrafter
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.fallback import FallbackDrafter
from specdec.runtime.drafters.growth import DynamicShape, GrowingTree, Shape, StaticShape
from specdec.runtime.drafters.model import ModelDrafter, most_probable_ids
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.request import Row
from specdec.runtime.sampling import softmax
from specdec.runtime.tree import ROOT, TokenTree
from support.drafters import steady_controller
from support.enumeration import Context, ExactPipeline, Joint, ScriptedDice, outcomes, path_text, plain_texts, rng_at
from support.fake_engine import FakeEngine, fake_spec
from support.rows import WatchedModel, greedy, make_row, make_scheduler, run

MEDUSA = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def grow_by_rank(shape: Shape, q: Callable[[Context], np.ndarray], depth: int = 9, nodes: int = 99) -> TokenTree:
    tree = GrowingTree(shape, depth, nodes)
    while tree.frontier:
        tree.extend([q(path_text(tree.tokens, tree.parents, node)) for node in tree.frontier], most_probable_ids)
    return tree.tree(sampled=True)


def flat(context: Context) -> np.ndarray:
    return np.array([0.4, 0.3, 0.2, 0.1])


# --- Shapes


def test_static_shape_is_its_choices() -> None:
    shape = StaticShape(MEDUSA)
    assert (shape.nodes, shape.depth) == (6, 3)
    tree = grow_by_rank(shape, flat)
    assert sorted(tree.text(node) for node in range(len(tree))) == sorted(MEDUSA)  # rank r is token r here
    assert tree.path(2) == (0, 1, 2), "the first branch comes first"


def test_order_of_choices_does_not_matter() -> None:
    expected = grow_by_rank(StaticShape(MEDUSA), flat)
    got = grow_by_rank(StaticShape(MEDUSA[::-1]), flat)
    assert (got.tokens, got.parents) == (expected.tokens, expected.parents)


def test_chain_shape() -> None:
    assert grow_by_rank(StaticShape.chain(3), flat).tokens == (0, 0, 0)
    assert grow_by_rank(StaticShape.chain(3), flat).is_chain
    assert len(grow_by_rank(StaticShape.chain(0), flat)) == 0


@pytest.mark.parametrize("choices", [[[0, 0]], [[1]], [[0], [0, 1]], [[0], [-1]], [[]], [[0], [2]]])
def test_choices_with_a_gap_are_refused(choices: list[list[int]]) -> None:
    with pytest.raises(RequestError, match="without its parent or a sibling of lower rank"):
        StaticShape(choices)


def test_dynamic_shape_by_hand() -> None:
    """Four nodes, two a level: 0.4 and 0.3; of their children 0.4 * 0.4, then 0.4 * 0.3 before 0.3 * 0.4 (a tie)."""
    tree = grow_by_rank(DynamicShape(4), flat)
    assert [tree.text(node) for node in range(4)] == [[0], [0, 0], [0, 1], [1]]
    even = cache(lambda context: np.array([0.5, 0.45, 0.05]))  # three a level: 0.25, then 0.225 twice
    tree = grow_by_rank(DynamicShape(9), even, depth=2)
    assert [tree.text(node) for node in range(6)] == [[0], [0, 0], [0, 1], [1], [1, 0], [2]]


def test_dynamic_shape_stops_where_the_draft_is_unsure() -> None:
    unsure = cache(lambda context: np.full(40, 1 / 40))
    assert len(grow_by_rank(DynamicShape(9), unsure)) == 0
    once = cache(lambda context: np.array([0.7, 0.2, 0.1]) if not context else np.full(3, 1 / 3))
    assert all(len(grow_by_rank(DynamicShape(nodes), once)) <= nodes for nodes in range(1, 30))
    deep = grow_by_rank(DynamicShape(100), once)
    for node in range(len(deep)):
        above = deep.path(node)[:-1]
        assert np.prod([deep.q[step][deep.tokens[step]] for step in above], initial=1) >= 0.05


def test_limits_of_depth_and_nodes() -> None:
    assert max(len(path) for path in map(grow_by_rank(StaticShape(MEDUSA), flat, depth=2).path, range(5))) == 2
    for nodes in range(7):
        assert len(grow_by_rank(StaticShape(MEDUSA), flat, nodes=nodes)) == nodes
        assert len(grow_by_rank(DynamicShape(9), flat, nodes=nodes)) == nodes
    full = GrowingTree(StaticShape(MEDUSA), 9, 2)
    full.extend([flat(())], most_probable_ids)
    assert full.frontier == [], "no pass of the draft for what has no room"
    assert len(grow_by_rank(StaticShape(MEDUSA), flat, depth=0)) == 0
    assert len(grow_by_rank(StaticShape(MEDUSA), flat, nodes=-3)) == 0


def test_a_node_after_which_nothing_is_possible_gets_no_children() -> None:
    after = cache(lambda context: np.zeros(4) if context == (0,) else flat(context))
    tree = grow_by_rank(StaticShape(MEDUSA), after)
    assert sorted(tree.text(node) for node in range(len(tree))) == [[0], [1], [1, 0]]
    assert len(grow_by_rank(StaticShape(MEDUSA), lambda context: np.zeros(4))) == 0


def test_fewer_possible_tokens_than_children() -> None:
    one = cache(lambda context: np.array([0.0, 1.0, 0.0]))
    assert sorted(grow_by_rank(StaticShape(MEDUSA), one).tokens) == [1, 1, 1]


def test_each_node_keeps_the_distribution_that_it_was_drawn_from() -> None:
    q = cache(lambda context: rng_at(1, context).dirichlet(np.ones(4)))
    for shape in (StaticShape(MEDUSA), DynamicShape(7)):
        tree = grow_by_rank(shape, q)
        for node in range(len(tree)):
            assert tree.q[node] is q(tuple(tree.text(node)[:-1]))
    deterministic = GrowingTree(StaticShape.chain(1), 1, 1)
    deterministic.extend([flat(())], most_probable_ids)
    assert deterministic.tree(sampled=False).q is None


# --- Draft models in rounds

VOCAB = 6
SHAPES: dict[str, Shape] = {
    "chain": StaticShape.chain(3),
    "medusa": StaticShape(MEDUSA),
    "stem": StaticShape([[0], [0, 0], [0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 0, 0]]),  # a chain at first
    "second": StaticShape([[0], [1], [1, 0], [1, 1], [1, 1, 0]]),  # nothing below the first child
    "dynamic": DynamicShape(7),
}
MODES: dict[str, dict] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "ranked": {"temperature": 1.0},
    "coupled": {"temperature": 1.0, "acceptance": "coupled"},
}
TERMS = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_new_tokens": 5, "top_k": 4}
PROMPTS = [[1, 2, 3, 1, 2], [5], [4, 3]]


class CheckedDrafter(ModelDrafter):
    """Compares every proposal with the one that grows from the draft engine's definition, history by history."""

    checked = 0

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
            self.checked += len(tree)
        return trees

    def _expected(self, row: Row, limit: int) -> TokenTree:
        room = min(self._model.max_length, row.max_length) - len(row.tokens)
        tree, level = GrowingTree(self._shape, limit, room), len(row.tokens)
        by_rank = self._deterministic or row.params.temperature == 0
        while tree.frontier:
            q = []
            for node in tree.frontier:
                history = [*row.tokens, *path_text(tree.tokens, tree.parents, node)]
                logits = self._model.engine.logits_after(history)[:VOCAB]
                if row.params.temperature == 0:
                    q.append(softmax(row.pipeline.scores(logits, history)))
                else:
                    q.append(row.pipeline.probabilities(logits, history))
            tree.extend(q, most_probable_ids if by_rank else partial(row.draw, position=level))
            level += 1
        return tree.tree(sampled=not by_rank)


def drafter_of(shape: str, mode: str, *, like_target: bool = False, max_rows: int = 4) -> CheckedDrafter:
    engine = FakeEngine(fake_spec(VOCAB), seed=0 if like_target else 7)
    model = WatchedModel(engine, max_rows=max_rows, min_width=1)
    return CheckedDrafter(model, SHAPES[shape], VOCAB, VOCAB, deterministic=mode == "ranked")


def target() -> FakeEngine:
    return FakeEngine(fake_spec(VOCAB), min_width=2)


def rows_of(mode: str, *counts: int, **params: object) -> list[Row]:
    """Rows that leave at different times, unless `counts` (most new tokens of each) says otherwise."""
    options = {"ignore_eos": True, **MODES[mode], **params}
    return [
        make_row(prompt, eos=(2,), seed=seed, max_new_tokens=count, **options)
        for seed, (prompt, count) in enumerate(zip(PROMPTS, counts or (20, 13, 17), strict=True))
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("like_target", [False, True], ids=["other draft", "own draft"])
def test_proposals_are_those_of_the_drafts_definition(shape: str, mode: str, like_target: bool) -> None:
    """In batches, where rows fork, fall back and leave at different times; with terms that depend on the history."""
    drafter = drafter_of(shape, mode, like_target=like_target)
    rows = rows_of(mode, **TERMS)
    run(make_scheduler(target(), drafter, max_rows=2), *rows)
    assert drafter.checked == sum(row.stats.draft_tokens_proposed for row in rows) > 30


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("like_target", [False, True], ids=["other draft", "own draft"])
def test_greedy_trees_give_the_targets_own_text(shape: str, like_target: bool) -> None:
    for params in ({}, {"repetition_penalty": 1.4, "frequency_penalty": 0.3}):
        drafter = drafter_of(shape, "greedy", like_target=like_target)
        rows = rows_of("greedy", **params)
        assert run(make_scheduler(target(), drafter, max_rows=2), *rows) == [
            greedy(target(), list(row.prompt), row.params.max_new_tokens, **params) for row in rows
        ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("like_target", [False, True], ids=["other draft", "own draft"])
def test_coupled_trees_give_the_text_of_plain_decoding(shape: str, like_target: bool) -> None:
    for params in ({}, {**TERMS, "ignore_eos": False}):
        alone = run(make_scheduler(target()), *rows_of("coupled", **params))
        drafter = drafter_of(shape, "coupled", like_target=like_target)
        assert run(make_scheduler(target(), drafter), *rows_of("coupled", **params)) == alone


@pytest.mark.parametrize("mode", ["greedy", "sampled", "coupled"])
@pytest.mark.parametrize("shape", ["chain", "stem"])
def test_the_target_as_its_own_draft_is_accepted_to_the_last_token(shape: str, mode: str) -> None:
    """Whatever the terms: draft and target go through one pipeline, each position with the history of its own path."""
    for params in ({}, TERMS):
        rows = rows_of(mode, 17, 17, 17, **params)
        run(make_scheduler(target(), drafter_of(shape, mode, like_target=True)), *rows)
        assert [row.stats.rounds for row in rows] == [5, 5, 5]  # 4 + 4 + 4 + 4 + 1
        assert [row.stats.draft_tokens_accepted for row in rows] == [12, 12, 12]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_logprobs_of_trees_are_those_of_plain_decoding(mode: str) -> None:
    alone, rows = rows_of(mode, logprobs=2, **TERMS), rows_of(mode, logprobs=2, **TERMS)
    run(make_scheduler(target()), *alone)
    run(make_scheduler(target(), drafter_of("medusa", mode)), *rows)
    assert [row.logprobs for row in rows] == [row.logprobs for row in alone]


def test_accepted_paths_are_compacted() -> None:
    """Otherwise the tests above would not show that caches are moved: branches beside the first one are accepted."""
    moves = []

    class Watched(FakeEngine):
        def allocate(self, rows: int, capacity: int) -> object:
            kv = super().allocate(rows, capacity)
            move = kv.move_slots
            kv.move_slots = lambda row, sources, start: (moves.append(sources.tolist()), move(row, sources, start))
            return kv

    for mode in MODES:
        del moves[:]
        run(make_scheduler(Watched(fake_spec(VOCAB)), drafter_of("medusa", mode)), *rows_of(mode, 55, 55, 55))
        assert any(len(sources) > 1 for sources in moves), mode
        assert any(len(sources) == 1 for sources in moves), mode


# --- Whole generations, enumerated

SMALL, PROMPT = 3, [0, 1, 0]


class SmallEngine(FakeEngine):
    """Its logits are looked up, for the many runs of an enumeration."""

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        return _logits_after(self.seed, tuple(tokens))[: self.spec.vocab_size]


@cache
def _logits_after(seed: int, tokens: Context) -> np.ndarray:
    return FakeEngine(fake_spec(SMALL), seed=seed, sharpness=1.0).logits_after(list(tokens))


GENERATIONS: dict[str, Callable[[], Drafter | None]] = {
    "plain": lambda: None,
    "chain": lambda: small_model(StaticShape.chain(2)),
    "tree": lambda: small_model(StaticShape([[0], [1], [1, 0]])),
    "dynamic tree": lambda: small_model(DynamicShape(3)),
    "ranked tree": lambda: small_model(StaticShape([[0], [1], [0, 0], [1, 0]]), deterministic=True),
    "tree of a narrow draft": lambda: small_model(StaticShape([[0], [1], [0, 0]]), vocab=2),
    "prompt lookup": lambda: NgramDrafter(3, 1, 3, threshold=0.15, always=True),
    "branching prompt lookup": lambda: NgramDrafter(4, 1, 3, threshold=0.15, always=True, branching=True),
    "a controller's plans": lambda: AdaptiveDrafter(
        steady_controller(), NgramDrafter(2, 1, 2, threshold=0.0, always=True), small_model(StaticShape.chain(2)), 2
    ),
    "prompt lookup, else a draft": lambda: FallbackDrafter(
        NgramDrafter(2, 1, 2, threshold=0.15, always=False), small_model(StaticShape.chain(2))
    ),
}


def small_model(shape: Shape, *, vocab: int = SMALL, deterministic: bool = False) -> ModelDrafter:
    model = WatchedModel(SmallEngine(fake_spec(vocab), seed=5), max_rows=2, min_width=1)
    return ModelDrafter(model, shape, SMALL, vocab, deterministic=deterministic)


def small_row(**params: object) -> Row:
    row = make_row(PROMPT, eos=(2,), **{"temperature": 1.0, "max_new_tokens": 4, "repetition_penalty": 1.5, **params})
    row.pipeline = ExactPipeline(row.pipeline)
    return row


@pytest.mark.parametrize("draft", GENERATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 3, "ignore_eos": True},
        {"min_new_tokens": 2, "frequency_penalty": 0.5, "acceptance": "token"},
        # after token 1 a draft that knows only 0 and 1 has nothing to propose
        {"max_new_tokens": 3, "ignore_eos": True, "bad_words": ((1, 0), (1, 1)), "acceptance": "token"},
    ],
    ids=["block", "token, ends", "bad words"],
)
def test_generations_are_distributed_as_plain_decoding(draft: str, params: dict) -> None:
    """All rounds of a request, with the drafter, both caches and the other row of the batch."""
    rounds = set()

    def generate(dice: ScriptedDice) -> Context:
        row = small_row(**params)
        row.dice = dice
        rows = [make_row([2, 0], max_new_tokens=2), row]
        run(make_scheduler(SmallEngine(fake_spec(SMALL)), GENERATIONS[draft](), max_rows=2), *rows)
        rounds.add(row.stats.rounds)
        return tuple(row.tokens[len(PROMPT) :])

    joint: Joint = defaultdict(Fraction)
    for answer, chance in outcomes(generate):
        joint[answer] += chance
    assert joint == plain_texts(small_row(**params), partial(_logits_after, 0))
    assert draft == "plain" or len(rounds) > 1


def test_a_shape_that_asks_for_nothing_is_plain_decoding() -> None:
    row = make_row([1, 2], max_new_tokens=5)
    drafter = ModelDrafter(
        WatchedModel(FakeEngine(fake_spec(VOCAB)), max_rows=1, min_width=1), StaticShape([]), VOCAB, VOCAB
    )
    assert run(make_scheduler(target(), drafter), row) == [greedy(target(), [1, 2], 5)]
    assert row.stats.rounds == 5
    assert GrowingTree(StaticShape([]), 5, 5).tree(sampled=True).children(ROOT) == []
