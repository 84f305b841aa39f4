"""Acceptance is proved by exact enumeration: every outcome of every coin and draw, with fractions, no tolerance."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest

from specdec.runtime.accept import Accepted, RandomDice, accept_chain, accept_greedy

VOCAB = 3
Distribution = np.ndarray  # [VOCAB] of Fraction
Model = Callable[[tuple[int, ...]], Distribution]


def random_model(seed: int, zeros: bool) -> Model:
    """A distribution for every context, exact; with `zeros`, some tokens are impossible."""
    table: dict[tuple[int, ...], Distribution] = {}
    rng = np.random.default_rng(seed)

    def model(context: tuple[int, ...]) -> Distribution:
        if context not in table:
            weights = rng.integers(0 if zeros else 1, 8, VOCAB)
            weights[rng.integers(VOCAB)] += 1
            table[context] = np.array([Fraction(int(w), int(weights.sum())) for w in weights], object)
        return table[context]

    return model


class Branch(Exception):  # noqa: N818 - not an error: asks for the outcomes of one more choice
    def __init__(self, outcomes: list[tuple[object, Fraction]]) -> None:
        self.outcomes = outcomes


class ScriptedDice:
    """Replays given outcomes; at the first choice beyond them, reports what it could be."""

    def __init__(self, script: tuple[object, ...]) -> None:
        self.script = list(script)

    def coin(self, probability: Fraction) -> bool:
        p = min(Fraction(1), probability)
        return self._next([(True, p), (False, 1 - p)])

    def draw(self, weights: Distribution) -> int:
        return self._next([(i, Fraction(w) / sum(weights)) for i, w in enumerate(weights)])

    def _next(self, outcomes: list) -> object:
        if self.script:
            return self.script.pop(0)
        raise Branch([(value, p) for value, p in outcomes if p > 0])


def outcomes(run: Callable[[ScriptedDice], Accepted]) -> Iterator[tuple[Accepted, Fraction]]:
    """Every result of `run` with its exact probability."""
    pending: list[tuple[tuple[object, ...], Fraction]] = [((), Fraction(1))]
    while pending:
        script, p = pending.pop()
        try:
            yield run(ScriptedDice(script)), p
        except Branch as branch:
            pending += [((*script, value), p * chance) for value, chance in branch.outcomes]


def emitted(rule: Callable, target: Model, draft: Model, depth: int, *, deterministic: bool) -> dict:
    """Joint distribution of the first depth + 1 emitted tokens; a short block is continued by the target itself."""
    joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for tokens in product(range(VOCAB), repeat=depth):
        q = [draft(tokens[:i]) for i in range(depth)]
        if deterministic:
            chance = Fraction(int(all(tokens[i] == np.argmax(q[i]) for i in range(depth))))
        else:
            chance = np.prod([q[i][tokens[i]] for i in range(depth)], initial=Fraction(1))
        if chance == 0:
            continue
        p_after = [target(tokens[:i]) for i in range(depth + 1)].__getitem__
        run = partial(rule, tokens, p_after, None if deterministic else q)
        for result, p in outcomes(run):
            continue_from(joint, (*tokens[: result.kept], result.token), chance * p, target, depth + 1)
    return dict(joint)


def continue_from(joint: dict, block: tuple[int, ...], p: Fraction, target: Model, length: int) -> None:
    if len(block) == length:
        joint[block] += p
        return
    for token, chance in enumerate(target(block)):
        if chance:
            continue_from(joint, (*block, token), p * chance, target, length)


def plain(target: Model, length: int) -> dict:
    joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    continue_from(joint, (), Fraction(1), target, length)
    return dict(joint)


CASES = [(seed, zeros, depth) for seed in range(6) for zeros in (False, True) for depth in (1, 2, 3)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize(("seed", "zeros", "depth"), CASES)
def test_chain_emits_the_targets_distribution(seed: int, zeros: bool, depth: int, deterministic: bool) -> None:
    target, draft = random_model(seed, zeros), random_model(1000 + seed, zeros)
    assert emitted(accept_chain, target, draft, depth, deterministic=deterministic) == plain(target, depth + 1)


def test_accepts_with_one_minus_total_variation() -> None:
    target, draft = random_model(3, False), random_model(1003, False)
    p, q = target(()), draft(())
    accepted = sum(
        q[x] * chance
        for x in range(VOCAB)
        for result, chance in outcomes(lambda dice, x=x: accept_chain((x,), lambda i: target((x,)[:i]), [q], dice))
        if result.kept == 1
    )
    assert accepted == 1 - sum(abs(p - q)) / 2


def test_draft_equal_to_target_is_always_accepted() -> None:
    target = random_model(5, False)
    tokens = (0, 2)
    q = [target(tokens[:i]) for i in range(2)]
    assert all(
        result.kept == 2
        for result, _ in outcomes(lambda dice: accept_chain(tokens, lambda i: target(tokens[:i]), q, dice))
    )


def inverted_ratio(draft, p, q, dice):
    flipped = [2 * qi - np.minimum(qi, p(i)) for i, qi in enumerate(q)] if q else None
    for kept, token in enumerate(draft):
        if dice.coin(q[kept][token] / p(kept)[token] if q and p(kept)[token] else Fraction(0)):
            continue
        return accept_chain(draft[: kept + 1], p, flipped and flipped[: kept + 1], dice)._replace(kept=kept)
    return Accepted(len(draft), dice.draw(p(len(draft))))


def residual_from_p(draft, p, q, dice):
    for kept, token in enumerate(draft):
        if not dice.coin(p(kept)[token] / q[kept][token]):
            return Accepted(kept, dice.draw(p(kept)))
    return Accepted(len(draft), dice.draw(p(len(draft))))


def bonus_from_wrong_row(draft, p, q, dice):
    result = accept_chain(draft, p, q, dice)
    return Accepted(result.kept, dice.draw(p(len(draft) - 1))) if result.kept == len(draft) else result


def always_accepts(draft, p, q, dice):
    return Accepted(len(draft), dice.draw(p(len(draft))))


def never_lowers_the_token(draft, p, q, dice):
    """Residual keeps the rejected token's full mass."""
    for kept, token in enumerate(draft):
        if not dice.coin(p(kept)[token] / q[kept][token]):
            residual = np.maximum(p(kept) - q[kept], 0)
            residual[token] = p(kept)[token]
            return Accepted(kept, dice.draw(residual))
    return Accepted(len(draft), dice.draw(p(len(draft))))


MUTANTS = [
    inverted_ratio,
    residual_from_p,
    bonus_from_wrong_row,
    always_accepts,
    never_lowers_the_token,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_enumeration_kills_mutants(mutant: Callable) -> None:
    target, draft = random_model(0, False), random_model(1000, False)
    assert emitted(mutant, target, draft, 2, deterministic=False) != plain(target, 3)


def test_enumeration_kills_a_deterministic_draft_tested_as_sampled() -> None:
    target, draft = random_model(0, False), random_model(1000, False)

    def mutant(tokens, p, q, dice):
        return accept_chain(tokens, p, [draft(tokens[:i]) for i in range(len(tokens))], dice)

    assert emitted(mutant, target, draft, 2, deterministic=True) != plain(target, 3)


@pytest.mark.parametrize(
    ("best", "expected"),
    [((4, 5, 6), Accepted(2, 6)), ((4, 7, 6), Accepted(1, 7)), ((3, 5, 6), Accepted(0, 3))],
)
def test_greedy_keeps_the_matching_prefix(best: tuple[int, ...], expected: Accepted) -> None:
    assert accept_greedy((4, 5), best.__getitem__) == expected


def test_greedy_asks_no_further_than_the_first_mismatch() -> None:
    asked: list[int] = []

    def best(i: int) -> int:
        asked.append(i)
        return 0

    accept_greedy((1, 0), best)
    assert set(asked) == {0}


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


@pytest.mark.parametrize(
    ("u", "expected"), [(0.0, 1), (0.2499, 1), (0.25, 3), (np.nextafter(1, 0), 3)], ids=["zero", "below", "edge", "top"]
)
def test_draw_never_returns_a_weight_of_zero(u: float, expected: int) -> None:
    assert dice_with(u).draw(np.array([0.0, 0.5, 0.0, 1.5, 0.0])) == expected


def test_draw_survives_rounding_at_the_top() -> None:
    assert dice_with(np.nextafter(1, 0)).draw(np.array([0.1] * 3 + [0.0])) == 2


def test_residual_that_underflows_falls_back_to_p() -> None:
    """p and q differ by less than rounding: a lost coin must still emit a token of p."""
    p = np.array([0.5, 0.5])

    class Loses(RandomDice):
        def coin(self, probability: float) -> bool:
            return False

    assert accept_chain((0,), lambda i: p, [p], Loses(0)).token in (0, 1)


def test_seed_repeats_and_seeds_differ() -> None:
    def draws(seed: int | None) -> list[int]:
        dice = RandomDice(seed)
        return [dice.draw(np.ones(100)) for _ in range(8)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(None) != draws(None)
