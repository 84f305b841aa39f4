"""Acceptance is proved by exact enumeration: every outcome of every coin and draw, with fractions, no tolerance.

The first part enumerates the rules on random context-dependent models; the second part `scheduler.accept` with the
whole logits pipeline in the loop; the third part what is known of the lengths; then lossy acceptance and rounding.
`tests/mutants.py` shows that these tests notice faults. Length: every rule has its table of cases here.
"""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from specdec.engines.errors import DeadEndError
from specdec.runtime.accept import Accepted, accept_block, accept_matching, accept_tokens, accept_typical
from specdec.runtime.chance import Dice, RandomDice, draw_without_replacement
from specdec.runtime.drafters.growth import DynamicShape, Shape, StaticShape
from specdec.runtime.drafters.model import most_probable_ids
from specdec.runtime.params import ACCEPTANCE_RULES, SamplingParams, is_lossless
from specdec.runtime.request import Row
from specdec.runtime.sampling import LogitsPipeline
from specdec.runtime.scheduler import accept
from specdec.runtime.tree import ROOT, TokenTree
from support.enumeration import (
    KINDS,
    Context,
    Distribution,
    ExactPipeline,
    Joint,
    Model,
    Propose,
    Rule,
    ScriptedDice,
    block_of,
    distribution,
    emitted,
    grow,
    growth,
    mean_accepted,
    outcomes,
    pair,
    plain,
    random_model,
    rng_at,
)
from support.fake_engine import FakeEngine, fake_spec
from support.rows import make_row

SHAPES = {
    "chain": [[0], [0, 0], [0, 0, 0]],
    "pair": [[0], [1]],
    "triple": [[0], [1], [2]],
    "fork below": [[0], [0, 0], [0, 1]],
    "medusa": [[0], [1], [0, 0], [0, 1], [1, 0]],
    "second branch deeper": [[0], [1], [1, 0], [1, 0, 0]],
    "three levels": [[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0]],
}


def depth_of(shape: str) -> int:
    return max(map(len, SHAPES[shape]))


# --- Rules on random models


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "vocab"), [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3)])
def test_sampled_chain(rule: Rule, kind: str, depth: int, vocab: int) -> None:
    for seed in range(3):
        target, draft = pair(kind, seed, vocab)
        assert emitted(growth(StaticShape.chain(depth), draft), rule, target, depth + 1) == plain(target, depth + 1)


@pytest.mark.parametrize("kind", ["full", "zeros"])
@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_sampled_chain_of_four_tokens(rule: Rule, kind: str) -> None:
    target, draft = pair(kind, 0, 2)
    assert emitted(growth(StaticShape.chain(4), draft), rule, target, 5) == plain(target, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_deterministic_chain(kind: str, vocab: int) -> None:
    for seed in range(4):
        target, draft = pair(kind, seed, vocab)
        for depth in (1, 2, 3):
            likely = growth(StaticShape.chain(depth), draft, by_rank=True)
            assert emitted(likely, accept_tokens, target, depth + 1) == plain(target, depth + 1)
            rng = np.random.default_rng(seed)
            any_text = TokenTree.chain([int(token) for token in rng.integers(0, vocab, depth)])
            assert emitted(lambda dice, tree=any_text: tree, accept_tokens, target, depth + 1) == plain(
                target, depth + 1
            )


def mixed(shape: str, draft: Model, seed: int) -> Propose:
    """A tree whose children are drawn or chosen, sibling by sibling; a chosen one may repeat a drawn one."""
    paths = sorted((tuple(path) for path in SHAPES[shape]), key=lambda path: (len(path), path))

    def propose(dice: ScriptedDice) -> TokenTree:
        tokens, parents, q = [], [], []
        nodes = {(): ROOT}
        left: dict[int, Distribution] = {}  # what siblings were not drawn yet
        for path in paths:
            parent = nodes[path[:-1]]
            context = tuple(TokenTree(tuple(tokens), tuple(parents)).text(parent))
            rng = rng_at(seed, path)
            weights = left.get(parent, draft(context))
            siblings = [tokens[node] for node, above in enumerate(parents) if above == parent and q[node] is None]
            if rng.integers(2) and weights.any():
                (token,) = draw_without_replacement(weights, 1, dice)
                left[parent] = weights.copy()
                left[parent][token] = Fraction(0)
                q.append(draft(context))
            else:
                token = int(rng.choice([token for token in range(len(weights)) if token not in siblings]))
                q.append(None)
            nodes[path] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        linear = max(path[-1] for path in paths) == 0
        return TokenTree(tuple(tokens), tuple(parents), tuple(q), linear)

    return propose


@pytest.mark.parametrize("kind", ["full", "zeros", "equal", "disjoint"])
@pytest.mark.parametrize("shape", ["chain", "pair", "triple", "fork below", "medusa"])
def test_mixed_siblings(shape: str, kind: str) -> None:
    length = depth_of(shape) + 1
    for seed in range(6):
        target, draft = pair(kind, seed, 3)
        assert emitted(mixed(shape, draft, seed), accept_tokens, target, length) == plain(target, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_drawn_without_replacement(shape: str, kind: str) -> None:
    length = depth_of(shape) + 1
    for seed, vocab in ((0, 2), (1, 3), (2, 3)):
        target, draft = pair(kind, seed, vocab)
        assert emitted(growth(StaticShape(SHAPES[shape]), draft), accept_tokens, target, length) == plain(
            target, length
        )


@pytest.mark.parametrize("kind", ["full", "zeros"])
@pytest.mark.parametrize("shape", ["pair", "triple", "fork below"])
def test_tree_drawn_without_replacement_of_four_tokens(shape: str, kind: str) -> None:
    length = depth_of(shape) + 1
    target, draft = pair(kind, 4, 4)
    propose = growth(StaticShape(SHAPES[shape]), draft)
    assert emitted(propose, accept_tokens, target, length) == plain(target, length)


class Exactly:
    """A request whose pipeline gives the fractions of a model; stands in for a row."""

    def __init__(self, target: Model, acceptance: str, dice: Dice, ends: frozenset[int] = frozenset()) -> None:
        self.params = SamplingParams(temperature=1.0, acceptance=acceptance)
        self.tokens, self.dice, self.pipeline = [], dice, self
        self._target, self._ends = target, ends

    def probabilities(self, logits: np.ndarray, history: list[int]) -> Distribution:
        return self._target(tuple(history))

    def ends_in(self, draft: list[int]) -> bool:
        return not self._ends.isdisjoint(draft)


def dispatched(acceptance: str, target: Model, vocab: int) -> Rule:
    """What the scheduler makes of a rule's name."""

    def rule(tree: TokenTree, p: object, dice: Dice) -> Accepted:
        return accept(Exactly(target, acceptance, dice), tree, np.zeros((1 + len(tree), vocab)))

    return rule


def by_context(table: dict[Context, list[int]]) -> Model:
    """Weights by the longest key that begins the context."""

    def model(context: Context) -> Distribution:
        weights = next(table[context[:n]] for n in range(len(context), -1, -1) if context[:n] in table)
        return np.array([Fraction(weight, sum(weights)) for weight in weights], object)

    return model


@pytest.mark.parametrize("acceptance", ["block", "token"])
def test_the_rule_does_not_depend_on_what_the_tree_became(acceptance: str) -> None:
    """Trees that come out as a chain only after some draws: a rule of their own would bias the text."""
    second = [[95, 5, 0], [30, 30, 40], [30, 30, 40]]
    target = by_context({(): [20, 40, 40]} | {(x,): w for x, w in enumerate(second)} | {(x, y): [30, 40, 30]
                        for x in range(3) for y in range(3)})  # fmt: skip
    draft = by_context({(): [50, 50, 0]} | {(x, 0): [1, 0, 0] for x in range(3)})
    shape = StaticShape([[0], [0, 0], [0, 0, 0], [0, 0, 1]])
    assert emitted(growth(shape, draft), dispatched(acceptance, target, 3), target, 4) == plain(target, 4)

    target = by_context({(): [40, 30, 30], (0,): [99, 1, 0], (1,): [10, 20, 70], (2,): [10, 20, 70]}
                        | {(x, y): [30, 40, 30] for x in range(3) for y in range(3)})  # fmt: skip
    draft = by_context({(): [96, 2, 2]} | {(x,): [90, 5, 5] for x in range(3)} | {(x, y): [50, 49, 1]
                       for x in range(3) for y in range(3)})  # fmt: skip
    propose = growth(DynamicShape(4), draft)
    assert emitted(propose, dispatched(acceptance, target, 3), target, 3) == plain(target, 3)


@pytest.mark.parametrize("acceptance", ["block", "token", "coupled"])
def test_a_dead_end_is_an_error_only_where_the_text_goes(acceptance: str) -> None:
    """The draft likes a token that leads nowhere; the target comes there as seldom as without a draft."""
    first = by_context({(): [1, 30, 69]})
    draft = by_context({(): [8, 1, 1]})

    def target(context: Context) -> Distribution:
        if context[:1] == (0,):
            raise DeadEndError("nowhere to go")
        return first(context)

    def rule(tree: TokenTree, p: object, dice: Dice) -> Accepted:
        if acceptance == "coupled":
            request = Exactly(target, acceptance, dice)
            request.draw = lambda p, count, position: [dice.draw(p)]
            decide = lambda: accept(request, tree, np.zeros((1 + len(tree), 3)))  # noqa: E731
        else:
            decide = lambda: dispatched(acceptance, target, 3)(tree, p, dice)  # noqa: E731
        try:
            accepted = decide()
        except DeadEndError:
            return Accepted((), 0)  # token 0 was kept, and nothing can follow
        assert not accepted.path or tree.tokens[accepted.path[0]] != 0
        return accepted

    for depth in (1, 2, 3):
        assert emitted(growth(StaticShape.chain(depth), draft), rule, first, 1) == plain(first, 1)


@pytest.mark.parametrize("acceptance", ["block", "token"])
def test_nothing_is_asked_behind_an_end_token(acceptance: str) -> None:
    target = by_context({(): [30, 30, 40]})

    def beyond(context: Context) -> Distribution:
        assert 0 not in context
        return target(context)

    def rule(tree: TokenTree, p: object, dice: Dice) -> Accepted:
        return accept(Exactly(beyond, acceptance, dice, ends=frozenset({0})), tree, np.zeros((1 + len(tree), 3)))

    def until_end(joint: Joint) -> Joint:
        cut: Joint = defaultdict(Fraction)
        for text, chance in joint.items():
            cut[text[: text.index(0) + 1] if 0 in text else text] += chance
        return cut

    draft = by_context({(): [60, 30, 10]})
    for propose in (growth(StaticShape.chain(3), draft), growth(StaticShape(SHAPES["medusa"]), draft)):
        assert until_end(emitted(propose, rule, target, 3)) == until_end(plain(target, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_of_the_most_probable_tokens(shape: str, kind: str) -> None:
    length = depth_of(shape) + 1
    for seed, vocab in ((0, 2), (1, 3), (2, 3), (3, 4)):
        target, draft = pair(kind, seed, vocab)
        propose = growth(StaticShape(SHAPES[shape]), draft, by_rank=True)
        assert emitted(propose, accept_tokens, target, length) == plain(target, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_tree_that_grows_where_the_draft_is_confident(nodes: int, kind: str) -> None:
    for seed, by_rank in ((0, False), (1, False), (0, True), (1, True)):
        target, draft = pair(kind, seed, 3)
        propose = growth(DynamicShape(nodes), draft, depth=3, by_rank=by_rank)
        assert emitted(propose, accept_tokens, target, 4) == plain(target, 4)


def test_tree_that_does_not_grow_below_unlikely_tokens() -> None:
    """Tokens of 1 in 40 are below the confidence at which growth stops: shapes differ by what was drawn."""
    target = cache(lambda context: distribution(*rng_at(1, context).permutation([20, 19, 1])))
    draft = cache(lambda context: distribution(*rng_at(2, context).permutation([30, 9, 1])))
    for nodes in (2, 3, 4, 5, 6):
        propose = growth(DynamicShape(nodes), draft, depth=3)
        assert len({tree.parents for tree, _ in outcomes(propose)}) > 1
        assert emitted(propose, accept_tokens, target, 4) == plain(target, 4)


def test_block_verification_of_chains_that_end_where_the_draft_is_unsure() -> None:
    """How long the draft gets may depend on what was drawn and kept."""
    draft = cache(lambda context: distribution(*rng_at(2, context).permutation([30, 9, 1])))
    propose = growth(DynamicShape(2), draft, depth=3)
    assert {len(tree) for tree, _ in outcomes(propose)} == {1, 2}
    assert all(tree.is_chain for tree, _ in outcomes(propose))
    for seed in range(4):
        target = random_model(seed, 3, zeros=seed % 2 == 1)
        assert emitted(propose, accept_block, target, 3) == plain(target, 3)


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_tree_that_the_end_of_the_context_cuts(nodes: int) -> None:
    target, draft = pair("zeros", 5, 3)
    propose = growth(StaticShape(SHAPES["three levels"]), draft, depth=2, nodes=nodes)
    assert {len(tree) for tree, _ in outcomes(propose)} <= set(range(nodes + 1))
    assert emitted(propose, accept_tokens, target, 3) == plain(target, 3)


def test_no_draft_is_plain_sampling() -> None:
    target = random_model(0, 3, zeros=False)
    assert emitted(lambda dice: TokenTree(), accept_tokens, target, 1) == plain(target, 1)


def test_block_verification_refuses_what_was_not_drawn() -> None:
    target = random_model(0, 3, zeros=False)
    with pytest.raises(ValueError, match="deterministic"):
        emitted(lambda dice: TokenTree.chain([1]), accept_block, target, 1)


# --- Greedy


def argmax_text(target: Model, length: int) -> Context:
    text: Context = ()
    for _ in range(length):
        text = (*text, int(target(text).argmax()))
    return text


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_keeps_the_path_of_argmaxes(shape: str) -> None:
    kept = set()
    for seed in range(300):
        target, draft = pair("full", seed, 4)
        tree = grow(StaticShape(SHAPES[shape]), draft, RandomDice(seed), by_rank=bool(seed % 2))
        got = accept_matching(tree, lambda node, tree=tree, target=target: int(target(tuple(tree.text(node))).argmax()))
        block = block_of(tree, got)
        assert block == argmax_text(target, len(block))
        assert all(
            tree.tokens[child] != block[-1] for child in tree.children(got.path[-1] if got.path else ROOT)
        )  # it could not have gone on
        kept.add(len(got.path))
    assert kept == set(range(depth_of(shape) + 1))


def test_greedy_asks_no_further_than_the_first_mismatch() -> None:
    asked: list[int] = []
    accept_matching(TokenTree.chain([1, 0]), lambda node: asked.append(node) or 0)
    assert asked == [ROOT]


# --- The whole pipeline in the loop: scheduler.accept

PROMPT, ANSWER = [2, 2], [0]  # an answer has begun, so that "prompt" and "history" differ


class Alternating:
    """A grammar: no token twice in a row, and token 0 only after an even number of tokens."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def allowed(self, generated: list[int]) -> np.ndarray:
        allowed = np.ones(self._vocab, bool)
        allowed[list(generated[-1:])] = False
        allowed[0] &= len(generated) % 2 == 0
        return allowed

    def valid_prefix(self, generated: list[int], draft: list[int]) -> int:
        raise NotImplementedError


# name: parameters, then what the pipeline is told besides
TERMS: dict[str, tuple[dict, dict]] = {
    "none": ({}, {}),
    "filters": ({"temperature": 0.7, "top_k": 2, "top_p": 0.9, "min_p": 0.05}, {}),
    "repetition": ({"repetition_penalty": 2.0}, {}),
    "presence": ({"presence_penalty": 1.5}, {}),
    "frequency": ({"frequency_penalty": -1.0}, {}),
    "bad words": ({}, {"bad_words": [(1, 2), (0, 0), (2, 0, 1)]}),
    "least length": ({"min_new_tokens": 3}, {"eos_token_ids": [1]}),
    "allowed tokens": ({"allowed_token_ids": (0, 2)}, {}),
    "grammar": ({}, {"grammar": Alternating(3)}),
    "all": (
        {"temperature": 1.3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5,
         "logit_bias": {0: 1.0}, "min_new_tokens": 2, "top_p": 0.95},
        {"bad_words": [(1, 2)], "eos_token_ids": [2]},
    ),
}  # fmt: skip


class Request:
    """A real row between two rounds; its target and draft are hashes of the history."""

    def __init__(self, terms: str, *, seed: int = 0, exact: bool = True, vocab: int = 3, **params: object) -> None:
        options, told = TERMS[terms]
        row = make_row(PROMPT, **{"temperature": 1.0, "max_new_tokens": 9, **options, **params})
        row.tokens += ANSWER
        pipeline = LogitsPipeline(row.params, len(PROMPT), **told)
        row.pipeline = ExactPipeline(pipeline) if exact else pipeline
        self.row: Row = row
        self.target_logits = self._logits(seed, vocab)
        self.draft_logits = self._logits(100 + seed, vocab)

    def p(self, context: Context) -> Distribution:
        """The reference: what plain decoding samples from, history token by token."""
        history = [*PROMPT, *ANSWER, *context]
        return self.row.pipeline.probabilities(self.target_logits(context), history)

    def q(self, context: Context) -> Distribution:
        return self.row.pipeline.probabilities(self.draft_logits(context), [*PROMPT, *ANSWER, *context])

    def rule(self, tree: TokenTree, p: object, dice: ScriptedDice) -> Accepted:
        """The scheduler's own dispatch, given only logits."""
        self.row.dice = dice
        logits = np.array([self.target_logits(tuple(tree.text(node))) for node in range(-1, len(tree))])
        return accept(self.row, tree, logits)

    @staticmethod
    def _logits(seed: int, vocab: int) -> Model:
        engine = FakeEngine(fake_spec(vocab), seed=seed, sharpness=1.0)
        return cache(lambda context: engine.logits_after([*PROMPT, *ANSWER, *context]))


DRAFTS: dict[str, tuple[Shape, bool]] = {
    "chain": (StaticShape.chain(2), False),
    "deterministic chain": (StaticShape.chain(2), True),
    "tree": (StaticShape(SHAPES["medusa"]), False),
    "deterministic tree": (StaticShape(SHAPES["medusa"]), True),
    "dynamic tree": (DynamicShape(4), False),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("terms", TERMS)
def test_requests_are_distributed_as_plain_decoding(terms: str, draft: str) -> None:
    shape, by_rank = DRAFTS[draft]
    for rule in ("block", "token"):
        request = Request(terms, acceptance=rule)
        propose = growth(shape, request.q, depth=2, by_rank=by_rank)
        assert emitted(propose, request.rule, request.p, 3) == plain(request.p, 3)


@pytest.mark.parametrize("terms", ["none", "all"])
@pytest.mark.parametrize("shape", ["chain", "medusa"])
def test_requests_with_mixed_drafts(shape: str, terms: str) -> None:
    """Drawn and deterministic tokens in one proposal: no block verification, even of a chain."""
    for seed in range(4):
        request = Request(terms, seed=seed, acceptance="block")
        propose = mixed(shape, request.q, seed)
        assert emitted(propose, request.rule, request.p, 3) == plain(request.p, 3)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("terms", ["none", "filters", "all"])
def test_requests_in_floating_point(terms: str, draft: str) -> None:
    """As above without the detour over fractions: the floats that run, to their rounding."""
    shape, by_rank = DRAFTS[draft]
    for rule in ("block", "token"):
        request = Request(terms, exact=False, acceptance=rule)
        propose = growth(shape, request.q, depth=2, by_rank=by_rank)
        got, expected = emitted(propose, request.rule, request.p, 3), plain(request.p, 3)
        assert all(abs(got.get(text, 0) - expected.get(text, 0)) < 1e-12 for text in got.keys() | expected.keys())


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("terms", TERMS)
def test_greedy_requests_give_the_argmaxes_of_plain_decoding(terms: str, draft: str) -> None:
    shape, by_rank = DRAFTS[draft]
    for seed in range(100):
        request = Request(terms, seed=seed, temperature=0.0)
        tree = grow(shape, request.q, RandomDice(seed), by_rank=by_rank)
        history, block = [*PROMPT, *ANSWER], block_of(tree, request.rule(tree, None, RandomDice(0)))
        for token in block:
            context = tuple(history[len(PROMPT) + len(ANSWER) :])
            assert token == request.row.pipeline.best(request.target_logits(context), history)
            history.append(token)


def test_block_verification_is_for_sampled_chains_and_else_the_rule_is_token() -> None:
    """Enumerated lengths tell which rule has run."""
    request = Request("none", acceptance="block")
    for draft, (shape, by_rank) in DRAFTS.items():
        propose = growth(shape, request.q, depth=2, by_rank=by_rank)
        mean = mean_accepted(propose, request.rule, request.p)
        by_token = mean_accepted(propose, accept_tokens, request.p)
        if draft == "chain":
            assert mean == mean_accepted(propose, accept_block, request.p) > by_token
        else:
            assert mean == by_token


def test_history_matters_in_every_case_that_is_about_it() -> None:
    """Otherwise the cases above would prove nothing: p without the draft's tokens in the history is another p."""
    for terms in TERMS:
        request = Request(terms)
        differs = any(
            (request.row.pipeline.probabilities(request.target_logits(context), [*PROMPT, *ANSWER]) != p).any()
            for context in ((0,), (1,), (2,), (1, 2), (0, 1))
            if (p := request.p(context)) is not None
        )
        assert differs == (terms not in ("none", "filters", "allowed tokens"))


# --- How many are accepted


def total_variation(p: Distribution, q: Distribution) -> Fraction:
    return sum(abs(p - q)) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_token_is_accepted_as_often_as_the_distributions_overlap(kind: str) -> None:
    for seed in range(20):
        target, draft = pair(kind, seed, 4)
        for rule in (accept_tokens, accept_block):
            mean = mean_accepted(growth(StaticShape.chain(1), draft), rule, target)
            assert mean == 1 - total_variation(target(()), draft(()))


@pytest.mark.parametrize("kind", KINDS)
def test_block_verification_never_accepts_fewer(kind: str) -> None:
    gains = []
    for seed in range(12):
        target, draft = pair(kind, seed, 3)
        for depth in (1, 2, 3) if seed < 4 else (2,):
            propose = growth(StaticShape.chain(depth), draft)
            block, token = mean_accepted(propose, accept_block, target), mean_accepted(propose, accept_tokens, target)
            assert block >= token
            gains.append(block > token)
    assert any(gains) == (kind not in ("equal", "disjoint"))


def test_block_verification_on_the_papers_example() -> None:
    """Sun et al., section 2: two tokens, two independent positions, 10/9 by token and 11/9 by block."""
    target, draft = (lambda context: distribution(1, 2)), (lambda context: distribution(2, 1))
    propose = growth(StaticShape.chain(2), draft)
    assert mean_accepted(propose, accept_tokens, target) == Fraction(10, 9)
    assert mean_accepted(propose, accept_block, target) == Fraction(11, 9)


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_a_draft_equal_to_the_target_is_always_accepted(rule: Rule) -> None:
    for seed in range(6):
        target, draft = pair("equal", seed, 3)
        assert mean_accepted(growth(StaticShape.chain(3), draft), rule, target) == 3


@pytest.mark.parametrize("terms", TERMS)
def test_the_target_as_its_own_draft_is_always_accepted_whatever_the_terms(terms: str) -> None:
    request = Request(terms)
    assert mean_accepted(growth(StaticShape.chain(2), request.p), request.rule, request.p) == 2


def test_more_siblings_accept_more() -> None:
    for seed in range(4):
        target, draft = pair("full", seed, 4)
        one, two, three, four = (
            mean_accepted(growth(StaticShape([[rank] for rank in range(count)]), draft), accept_tokens, target)
            for count in (1, 2, 3, 4)
        )
        assert one < two <= three <= four == 1 or total_variation(target(()), draft(())) == 0


# --- Lossy acceptance


def typical(p: list[float], token: int, **options: float) -> bool:
    tree = TokenTree.chain([token])
    target = np.array(p)
    return len(accept_typical(tree, lambda node: target, RandomDice(0), **options).path) == 1


def test_typical_acceptance_by_hand() -> None:
    """(1/2, 1/4, 1/8, 1/8) has 1.75 bits of entropy: exp(-entropy) is 2 ** -1.75 = 0.29730."""
    p = [0.5, 0.25, 0.125, 0.125]
    assert [typical(p, token, epsilon=1, delta=0.420) for token in range(4)] == [True, True, True, True]  # > 0.12487
    assert [typical(p, token, epsilon=1, delta=0.421) for token in range(4)] == [True, True, False, False]  # > 0.12516
    assert [typical(p, token, epsilon=1, delta=1.0) for token in range(4)] == [True, False, False, False]  # > 0.29730
    assert [typical(p, token, epsilon=0.125, delta=1.0) for token in range(4)] == [True, True, False, False]  # above it
    # defaults: 0.09 where the target is sure, 0.3 / 8 where eight tokens are equally likely
    assert [typical([0.85, 0.091, 0.059, 0.0], token) for token in range(4)] == [True, True, False, False]
    assert typical([1 / 8] * 8, 3)
    assert typical([1 / 16] * 16 + [0.0], 3)  # which is below 0.09


def test_typical_acceptance_keeps_the_longest_path_and_the_first_of_equals() -> None:
    #        ROOT
    #      0      1
    #      2    3   4
    #             5
    tree = TokenTree((0, 1, 0, 0, 1, 1), (-1, -1, 0, 1, 1, 4))
    sure, two = np.array([0.95, 0.05]), np.array([0.5, 0.5])
    everywhere = accept_typical(tree, lambda node: two, RandomDice(0))
    assert everywhere.path == (1, 4, 5)
    assert accept_typical(tree, lambda node: sure if node == 1 else two, RandomDice(0)).path == (0, 2)
    assert accept_typical(tree, lambda node: sure if node == 4 else two, RandomDice(0)).path == (0, 2)
    assert accept_typical(tree, lambda node: sure, RandomDice(0)).path == (0, 2)


def test_typical_acceptance_emits_from_the_end_of_its_path() -> None:
    tree = TokenTree.chain([0, 0])
    p = {ROOT: np.array([0.5, 0.5, 0, 0]), 0: np.array([0.99, 0, 0, 0.01]), 1: np.array([0, 0, 1.0, 0])}
    assert accept_typical(tree, p.__getitem__, RandomDice(0)) == Accepted((0, 1), 2)
    assert accept_typical(TokenTree.chain([2]), p.__getitem__, RandomDice(0)).token in (0, 1)


def test_typical_acceptance_is_not_lossless() -> None:
    target = cache(lambda context: np.array([0.5, 0.3, 0.2]))
    joint: Joint = defaultdict(Fraction)
    tree = TokenTree.chain([1])
    for accepted, chance in outcomes(lambda dice: accept_typical(tree, target, dice)):
        joint[block_of(tree, accepted)] += chance
    assert {text[0] for text in joint} == {1}, "the draft's token, whatever the target draws"
    assert joint != plain(target, 2)


def test_typical_acceptance_of_a_sure_target_is_greedy() -> None:
    for seed in range(50):
        one_hot = cache(lambda context, seed=seed: np.eye(3)[rng_at(seed, context).integers(3)])
        tree = grow(StaticShape(SHAPES["medusa"]), random_model(seed, 3, zeros=False), RandomDice(seed))
        got = accept_typical(tree, lambda node, p=one_hot, tree=tree: p(tuple(tree.text(node))), RandomDice(0))
        block = block_of(tree, got)
        assert block == argmax_text(one_hot, len(block))


def test_only_typical_acceptance_is_called_lossy() -> None:
    assert [rule for rule in ACCEPTANCE_RULES if not is_lossless(rule)] == ["lossy-typical"]
    assert not make_row([1], temperature=1.0, acceptance="lossy-typical").stats.lossless
    assert make_row([1], temperature=1.0).stats.lossless


def test_typical_acceptance_runs_only_where_it_was_asked_for() -> None:
    """And then on trees and chains alike, but never at temperature 0."""
    p = np.array([0.5, 0.3, 0.2])
    logits = np.tile(np.log(p).astype(np.float32), (3, 1))
    for tree in (TokenTree.chain([1, 2], [p, p]), TokenTree((1, 2), (-1, -1))):
        row = make_row([1], temperature=1.0, acceptance="lossy-typical", seed=0)
        assert accept(row, tree, logits).path == tuple(range(2 if tree.is_chain else 1))
        assert accept(make_row([1], acceptance="lossy-typical"), tree, logits) == Accepted((), 0)


# --- Degenerate distributions, and rounding


class Loses(RandomDice):
    def coin(self, probability: float) -> bool:
        return False


def nearly_equal() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """p and q that differ by rounding or not at all, some with residuals that vanish or are denormal."""
    for seed in range(60):
        p = np.random.default_rng(seed).dirichlet([0.3] * 4)
        p[seed % 4] = 0
        p /= p.sum()
        yield p, p
        yield p, (p * 3) / (p * 3).sum()
        yield p, np.nextafter(p, 1) * (p > 0)
        yield p, np.nextafter(p, 0)
    tiny = np.array([5e-324, 1 - 1e-16, 0.0, 1e-300])
    yield tiny, tiny
    yield tiny, np.array([1e-323, 1.0, 0.0, 1e-300])
    yield np.array([0.0, 1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0, 0.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_a_residual_that_underflows_gives_a_token_of_p(rule: Rule) -> None:
    """Coins that cannot lose but by rounding are made to lose."""
    for p, q in nearly_equal():
        for token in np.flatnonzero(q):
            for tree in (TokenTree.chain([int(token)], [q]), TokenTree.chain([int(token)] * 2, [q, q])):
                for dice in (Loses(0), RandomDice(int(token))):
                    got = rule(tree, lambda node, p=p: p, dice)
                    assert p[got.token] > 0
        if rule is accept_tokens:
            drawn = draw_without_replacement(q, 4, RandomDice(0))
            siblings = TokenTree(tuple(drawn), (-1,) * len(drawn), (q,) * len(drawn))
            assert p[rule(siblings, lambda node, p=p: p, Loses(0)).token] > 0
            ranked = TokenTree(tuple(most_probable_ids(q, 4)), (-1,) * len(most_probable_ids(q, 4)))
            assert p[rule(ranked, lambda node, p=p: p, Loses(0)).token] > 0


DEGENERATE = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 1e-6},
    "hot": {"temperature": 100.0},
    "top-k 1": {"temperature": 1.0, "top_k": 1},
    "top-p 0": {"temperature": 1.0, "top_p": 0.0},
    "top-p 1": {"temperature": 1.0, "top_p": 1.0},
    "min-p 1": {"temperature": 1.0, "min_p": 1.0},
    "one token": {"temperature": 1.0, "allowed_token_ids": (1,)},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("acceptance", ["block", "token", "coupled"])
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_requests_emit_what_is_possible(case: str, acceptance: str) -> None:
    """Real dice; some logits are -inf. Every token of every block is possible where it stands."""
    for seed in range(60):
        row = make_row(PROMPT, max_new_tokens=9, seed=seed, acceptance=acceptance, **DEGENERATE[case])
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((6, 4)).astype(np.float32) * 5
        logits[:, 2 + seed % 2] = -np.inf
        drafted = rng.standard_normal((6, 4)).astype(np.float32) * 5
        shape = StaticShape.chain(3) if seed % 2 else StaticShape(SHAPES["medusa"])

        def q(context: Context, row: Row = row, drafted: np.ndarray = drafted) -> np.ndarray:
            return row.pipeline.probabilities(drafted[sum(context) % 6], [*PROMPT, *context])

        tree = grow(shape, q, row.dice, by_rank=seed % 3 == 0)
        got = accept(row, tree, logits[: 1 + len(tree)])
        node, history = ROOT, list(PROMPT)
        for token, after in zip(block_of(tree, got), (*got.path, None), strict=True):
            p = row.pipeline.probabilities(logits[node + 1], history)
            assert p[token] > 0
            if case not in ("hot", "top-p 1"):
                assert p.max() == 1, "one token is possible"
            node, history = after, [*history, token]


def test_a_greedy_tie_goes_to_the_first_token_and_is_never_drawn() -> None:
    """Temperature 0 divides nothing: equal logits would give equal probabilities."""
    logits = np.array([[1, 3, 3, 0]] * 3, np.float32)
    for seed in range(20):
        row = make_row(PROMPT, seed=seed)
        assert accept(row, TokenTree.chain([1, 2]), logits) == Accepted((0,), 1)
        assert row.pipeline.probabilities(logits[0], PROMPT).tolist() == [0, 1, 0, 0]


def test_what_the_draft_cannot_draw_is_emitted_as_often_as_the_target_wants() -> None:
    p, q = distribution(1, 1, 2), distribution(1, 1, 0)
    got = emitted(growth(StaticShape([[0], [1]]), lambda context: q), accept_tokens, lambda context: p, 1)
    assert got == {(0,): Fraction(1, 4), (1,): Fraction(1, 4), (2,): Fraction(1, 2)}


def test_top_k_of_the_request_holds_for_draft_and_target() -> None:
    request = Request("filters", top_k=1)
    for tree, _ in outcomes(growth(StaticShape.chain(2), request.q)):
        assert all(q is not None and q.max() == 1 for q in tree.q)
    assert len(plain(request.p, 3)) == 1


def test_parameters_of_a_request_are_those_of_its_pipeline() -> None:
    assert make_row(PROMPT, temperature=0.5).pipeline.params == SamplingParams(temperature=0.5)
