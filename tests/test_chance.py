"""Dice and noise: coins at their edges, draws, noise by position, and text that no draft changes."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from itertools import permutations

import numpy as np
import pytest

from specdec.runtime.chance import LIKELY, PositionNoise, RandomDice, draw_without_replacement
from specdec.runtime.drafters.growth import DynamicShape, GrowingTree, Shape, StaticShape
from specdec.runtime.drafters.model import most_probable_ids
from specdec.runtime.request import Row
from specdec.runtime.scheduler import accept
from specdec.runtime.tree import TokenTree
from support.enumeration import distribution, outcomes, path_text
from support.fake_engine import FakeEngine, fake_spec
from support.rows import make_row

SAMPLES = 10_000


def agrees(counts: Counter, expected: dict) -> bool:
    """χ² at 1 in 10000, for one fixed seed."""
    from scipy.stats import chisquare

    assert set(counts) <= set(expected)
    total = counts.total()
    observed = [counts[key] for key in expected]
    return chisquare(observed, [float(p) * total for p in expected.values()]).pvalue > 1e-4


# --- Dice


class FixedUniform:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def dice_with(u: float) -> RandomDice:
    dice = RandomDice(0)
    dice._rng = FixedUniform(u)
    return dice


@pytest.mark.parametrize(("u", "probability", "expected"), [(0.0, 0.0, False), (0.0, 1e-300, True), (0.5, 0.5, False)])
def test_coin_wins_iff_u_is_below(u: float, probability: float, expected: bool) -> None:
    assert dice_with(u).coin(probability) is expected


def test_coin_of_one_never_loses() -> None:
    assert dice_with(np.nextafter(1, 0)).coin(1.0)
    assert dice_with(np.nextafter(1, 0)).coin(np.float64(np.inf))


@pytest.mark.parametrize(
    ("u", "expected"), [(0.0, 1), (0.2499, 1), (0.25, 3), (np.nextafter(1, 0), 3)], ids=["zero", "below", "edge", "top"]
)
def test_draw_never_returns_a_weight_of_zero(u: float, expected: int) -> None:
    assert dice_with(u).draw(np.array([0.0, 0.5, 0.0, 1.5, 0.0])) == expected


def test_draw_survives_rounding_at_the_top() -> None:
    assert dice_with(np.nextafter(1, 0)).draw(np.array([0.1] * 3 + [0.0])) == 2


def test_draw_survives_the_smallest_weights() -> None:
    for u in (0.0, 0.5, np.nextafter(1, 0)):
        assert dice_with(u).draw(np.array([0.0, 5e-324, 0.0])) == 1


def test_draw_is_distributed_as_its_weights() -> None:
    dice = RandomDice(1)
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    counts = Counter(dice.draw(weights) for _ in range(SAMPLES))
    assert agrees(counts, {0: 1 / 8, 2: 2 / 8, 3: 5 / 8})


def test_seed_repeats_and_seeds_differ() -> None:
    def draws(seed: int | None) -> list[int]:
        dice = RandomDice(seed)
        return [dice.draw(np.ones(100)) for _ in range(8)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(None) != draws(None)


# --- Without replacement


def plackett_luce(p: np.ndarray, count: int) -> dict[tuple[int, ...], Fraction | float]:
    """Probability of every ordered list of `count` tokens drawn one after another without replacement."""
    lists = {}
    for order in permutations(np.flatnonzero(p).tolist(), count):
        chance, left = 1, p.sum()
        for token in order:
            chance, left = chance * p[token] / left, left - p[token]
        lists[order] = chance
    return lists


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_without_replacement_enumerated(count: int) -> None:
    q = distribution(3, 0, 1, 4, 2)
    got = {}
    for drawn, chance in outcomes(lambda dice: tuple(draw_without_replacement(q, count, dice))):
        assert drawn not in got
        got[drawn] = chance
    assert got == plackett_luce(q, count)
    assert q.tolist() == distribution(3, 0, 1, 4, 2).tolist(), "q is not changed"


def test_no_more_are_drawn_than_are_possible() -> None:
    for seed in range(20):
        q = np.array([0.0, 0.25, 0.0, 0.75])
        assert sorted(draw_without_replacement(q, 4, RandomDice(seed))) == [1, 3]
        assert sorted(PositionNoise(seed).ranking(q, 7, 4)) == [1, 3]
        assert draw_without_replacement(np.array([0.0, 1.0]), 2, RandomDice(seed)) == [1]
        assert PositionNoise(seed).ranking(np.array([0.0, 1.0]), 7, 2) == [1]
        for zeros, count in itertools.product((np.zeros(3), np.zeros(0)), (1, 2)):
            assert PositionNoise(seed).ranking(zeros, 7, count) == []


# --- Noise by position

P = np.array([0.1, 0.0, 0.2, 0.3, 0.4])
every_share = pytest.mark.parametrize("likely", [LIKELY, 0.35, 0.25, 2.0], ids=["all", "one", "two", "none"])


@every_share
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranking_over_positions_is_drawing_without_replacement(count: int, likely: float) -> None:
    noise = PositionNoise(5, likely)
    counts = Counter(tuple(noise.ranking(P, position, count)) for position in range(SAMPLES))
    assert agrees(counts, plackett_luce(P, count))


@pytest.mark.parametrize("likely", [LIKELY, 0.25])
@pytest.mark.parametrize("count", [1, 2])
def test_ranking_over_seeds_is_drawing_without_replacement(count: int, likely: float) -> None:
    counts = Counter(tuple(PositionNoise(seed, likely).ranking(P, 9, count)) for seed in range(SAMPLES))
    assert agrees(counts, plackett_luce(P, count))


@pytest.mark.parametrize("likely", [LIKELY, 0.25])
@pytest.mark.parametrize("distance", [1, 2, 4])
def test_tokens_of_two_positions_are_independent(distance: int, likely: float) -> None:
    noise = PositionNoise(2, likely)
    first = [noise.ranking(P, position, 1)[0] for position in range(SAMPLES)]
    counts = Counter(zip(first, first[distance:], strict=False))
    assert agrees(counts, {(a, b): P[a] * P[b] for a in range(5) for b in range(5) if P[a] * P[b]})


@every_share
def test_the_first_of_a_list_is_the_token_that_is_asked_for_alone(likely: float) -> None:
    noise = PositionNoise(3, likely)
    for position in range(200):
        assert noise.ranking(P, position, 4)[0] == noise.ranking(P, position, 1)[0]
        assert noise.ranking(P, position, 4)[:2] == noise.ranking(P, position, 2)


def numbers(noise: PositionNoise, position: int, size: int) -> list[float]:
    return noise.noise(position, np.arange(size)).tolist()


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    expected = {position: numbers(PositionNoise(1), position, 9) for position in range(60)}
    noise, rng = PositionNoise(1), np.random.default_rng(0)
    for position in rng.integers(0, 60, 600):  # in any order, again and again, any tokens
        ids = rng.permutation(9)[:4]
        assert noise.noise(int(position), ids).tolist() == [expected[int(position)][token] for token in ids]
    assert numbers(PositionNoise(2), 5, 9) != expected[5]
    assert numbers(PositionNoise(None), 5, 9) != numbers(PositionNoise(None), 5, 9)


def test_noise_is_of_splitmix64() -> None:
    """By whole numbers of Python, from the definition; the first of state 0 is the published 0xE220A8397B1DCDAF."""

    def splitmix64(state: int) -> int:
        z = state % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    gamma = 0x9E3779B97F4A7C15
    assert splitmix64(gamma) == 0xE220A8397B1DCDAF
    word = int(np.random.SeedSequence(3, spawn_key=(17,)).generate_state(1, np.uint64)[0])
    ids = [-3, -1, 0, 1, 49151, 2**31]
    uniform = [(splitmix64(word + (token + 1) * gamma) >> 11) / 2**53 for token in ids]
    assert PositionNoise(3).noise(17, np.array(ids)).tolist() == pytest.approx(
        [-math.log(1 - u) for u in uniform], rel=1e-15
    )


def test_positions_and_seeds_share_no_number() -> None:
    some = [number for seed in (0, 1, 2**40, 2**130) for position in (*range(100), 2**31, 2**40) for number in
            numbers(PositionNoise(seed), position, 50)]  # fmt: skip
    assert len(set(some)) == len(some)
    long = numbers(PositionNoise(0), 0, 300_000)
    assert len(set(long)) == len(long)
    assert not any(set(long) & set(numbers(PositionNoise(0), position, 1000)) for position in (1, 2, 3, 1000, 10**6))


@pytest.mark.parametrize("by", ["tokens", "positions", "seeds"])
def test_noise_is_exponential(by: str) -> None:
    from scipy.stats import ks_1samp

    noise = {
        "tokens": lambda: numbers(PositionNoise(0), 3, 20_000),
        "positions": lambda: [number for at in range(4000) for number in numbers(PositionNoise(0), at, 3)],
        "seeds": lambda: [number for seed in range(4000) for number in numbers(PositionNoise(seed), 3, 3)],
    }[by]()
    assert ks_1samp(noise, lambda x: 1 - np.exp(-x)).pvalue > 1e-4


def test_a_long_tail_is_drawn_as_often_as_it_should() -> None:
    """The law over a real vocabulary's size, by how likely tokens are: those that run as one, and those that do not."""
    p = np.random.default_rng(4).dirichlet(np.full(5000, 0.05))
    classes = np.digitize(p, [1e-6, LIKELY, 1e-3])
    noise = PositionNoise(6)
    counts = Counter(int(classes[noise.ranking(p, position, 1)[0]]) for position in range(4 * SAMPLES))
    assert agrees(counts, {index: p[classes == index].sum() for index in range(4)})


@every_share
def test_a_lead_is_what_would_have_to_change(likely: float) -> None:
    """Up to the lead the token stays the first, beyond it the other one is; which tokens run as one does not change."""
    rng, seen = np.random.default_rng(2), set()
    for position in range(1500):
        noise, p = PositionNoise(8, likely), rng.permutation(P) * rng.uniform(0.98, 1.02, 5)
        (token,), other = noise.ranking(p, position, 1), int(rng.choice(np.flatnonzero(p)))
        lead = noise.lead(p, position, token, other)
        unlikely = p[[token, other]] < likely
        if token == other:
            assert lead == 0
        elif lead < 0.1 and unlikely[0] == unlikely[1]:
            seen.add(bool(unlikely[0]))
            for share in (0.99, 1.01):
                changed = p.copy()
                changed[token] *= np.exp(-share * lead)
                assert (changed < likely).tolist() == (p < likely).tolist()
                assert (noise.ranking(changed, position, 1) == [token]) == (share < 1)
        assert lead >= 0
    assert seen == {LIKELY: {False}, 0.35: {True}, 0.25: {False, True}, 2.0: {True}}[likely]


# --- Coupled sampling: the same text whatever the draft

VOCAB, LENGTH = 5, 8
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
DRAFTS: dict[str, Shape] = {
    "chain": StaticShape.chain(3),
    "tree": StaticShape(TREE),
    "dynamic tree": DynamicShape(5),
}


@cache
def logits_of(seed: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    engine = FakeEngine(fake_spec(VOCAB), seed=seed, order=2, sharpness=1.0)
    of_end = cache(lambda end: engine.logits_after(list(end)))
    return lambda history: of_end(tuple(history[-2:]))


def text(row: Row, target: int, draft: int | None, shape: Shape | None, *, by_rank: bool = False) -> list[int]:
    """Generate `LENGTH` tokens, round after round; draft None is plain decoding."""
    p, prompt = logits_of(target), len(row.tokens)
    while len(row.tokens) < prompt + LENGTH:
        tree = TokenTree()
        if draft is not None:
            growing, level = GrowingTree(shape, 9, 99), len(row.tokens)
            while growing.frontier:
                contexts = [
                    [*row.tokens, *path_text(growing.tokens, growing.parents, node)] for node in growing.frontier
                ]
                q = [row.pipeline.probabilities(logits_of(draft)(context), context) for context in contexts]
                growing.extend(q, most_probable_ids if by_rank else partial(row.draw, position=level))
                level += 1
            tree = growing.tree(sampled=not by_rank)
        logits = np.array([p([*row.tokens, *tree.text(node)]) for node in range(-1, len(tree))])
        path, token = accept(row, tree, logits)
        row.tokens += [*(tree.tokens[node] for node in path), token]
        row.stats.draft_tokens_accepted += len(path)
        row.stats.rounds += 1
    return row.tokens[prompt : prompt + LENGTH]


TERMS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
    {"temperature": 1.5, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("shape", DRAFTS)
def test_coupled_text_is_the_same_with_and_without_drafts(shape: str) -> None:
    lengths = set()
    for seed in range(200):
        request = partial(make_row, [1, 2, seed % VOCAB], seed=seed, acceptance="coupled", max_new_tokens=64,
                          **TERMS[seed % 3])  # fmt: skip
        alone = text(request(), seed, None, None)
        for draft, by_rank in ((seed, False), (1000 + seed, False), (1000 + seed, True)):
            row = request()
            assert text(row, seed, draft, DRAFTS[shape], by_rank=by_rank) == alone
            lengths.add(row.stats.draft_tokens_accepted)
    assert len(lengths) > 4


def test_coupled_text_can_be_taken_up_anywhere() -> None:
    """The position that counts is the absolute one: an answer that becomes part of the prompt goes on as it did."""
    for seed in range(40):
        request = {"seed": seed, "acceptance": "coupled", "max_new_tokens": 64, "temperature": 1.0}
        whole = text(make_row([1, 2], **request), seed, None, None)
        for cut in (1, 3, 6):
            rest = text(make_row([1, 2, *whole[:cut]], **request), seed, 1000 + seed, StaticShape(TREE))
            assert rest[: LENGTH - cut] == whole[cut:]


def test_coupled_text_is_distributed_as_the_targets() -> None:
    """χ² of two tokens over seeds, with a draft; the draft's own tokens are as often kept as the theory promises."""
    p = logits_of(7)
    pipeline = make_row([1, 2], temperature=1.0).pipeline
    expected = {
        (a, b): first * second
        for a, first in enumerate(pipeline.probabilities(p((1, 2)), [1, 2]))
        for b, second in enumerate(pipeline.probabilities(p((2, a)), [1, 2, a]))
    }
    counts: Counter = Counter()
    for seed in range(4000):
        row = make_row([1, 2], seed=seed, acceptance="coupled", temperature=1.0)
        tree = TokenTree.chain(row.draw(pipeline.probabilities(logits_of(8)((1, 2)), [1, 2]), 1, 2))
        path, token = accept(row, tree, np.array([p((1, 2)), p((2, tree.tokens[0]))]))
        block = [*(tree.tokens[node] for node in path), token]
        if len(block) == 1:
            block.append(row.draw(pipeline.probabilities(p((2, token)), [1, 2, token]), 1, 3)[0])
        counts[tuple(block)] += 1
    assert agrees(counts, expected)


def test_a_draft_equal_to_the_target_is_always_accepted_when_coupled() -> None:
    for seed in range(50):
        row = make_row([1, 2], seed=seed, acceptance="coupled", temperature=1.0, max_new_tokens=64)
        text(row, seed, seed, StaticShape.chain(3))
        assert row.stats.draft_tokens_accepted == 3 * row.stats.rounds


@pytest.mark.parametrize("likely", [LIKELY, 2.0], ids=["all", "none"])
def test_coupled_acceptance_is_at_least_what_the_theory_promises(likely: float) -> None:
    """(1 - TV) / (1 + TV), less five standard errors."""
    noise = PositionNoise(11, likely)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet([0.7] * 6), rng.dirichlet([0.7] * 6)
        q = p * 0.7 + q * 0.3 if seed % 2 else q
        distance = abs(p - q).sum() / 2
        count = 3000
        agreed = np.mean([noise.ranking(p, at, 1) == noise.ranking(q, at, 1) for at in range(count)])
        assert (1 - distance) / (1 + distance) - 2.5 / count**0.5 < agreed < 1 - distance + 2.5 / count**0.5
