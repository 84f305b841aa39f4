"""Every outcome of every coin and every draw, with its exact probability: what a rule emits, as fractions.

A rule that is lossless emits exactly the target's joint distribution, so tests compare dictionaries of fractions: no
sampling, no tolerance. Models are distributions by context (the tokens emitted since the pending one), made of small
integers. Anything that takes `Dice` can be enumerated: a draft that is drawn, a verification, a whole generation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from typing import TypeVar

import numpy as np

from specdec.runtime.accept import Accepted, Target
from specdec.runtime.chance import Dice, draw_without_replacement
from specdec.runtime.drafters.growth import GrowingTree, Shape
from specdec.runtime.drafters.model import most_probable_ids
from specdec.runtime.request import Row
from specdec.runtime.sampling import LogitsPipeline
from specdec.runtime.tree import ROOT, TokenTree

Context = tuple[int, ...]
Distribution = np.ndarray  # [V] of Fraction, dtype object
Model = Callable[[Context], Distribution]
Joint = dict[Context, Fraction]  # a text and its probability
Propose = Callable[[Dice], TokenTree]
Rule = Callable[[TokenTree, Target, Dice], Accepted]
T = TypeVar("T")

# How draft and target relate, see `pair`.
KINDS = ("full", "zeros", "equal", "disjoint", "narrow draft", "narrow target")


class ScriptedDice:
    """Replays the choices of `script`; beyond it takes the first possible one and notes the others as scripts."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self._script = script
        self._taken: tuple[int, ...] = ()
        self.probability = Fraction(1)
        self.others: list[tuple[int, ...]] = []

    def coin(self, probability: Fraction | float) -> bool:
        p = min(Fraction(1), Fraction(probability))
        return bool(self._choose([1 - p, p]))

    def draw(self, weights: np.ndarray) -> int:
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        return self._choose([weight / total for weight in exact])

    def _choose(self, chances: list[Fraction]) -> int:
        assert min(chances) >= 0, f"a negative probability: {chances}"
        depth = len(self._taken)
        if depth < len(self._script):
            choice = self._script[depth]
        else:
            choice, *others = (index for index, chance in enumerate(chances) if chance)
            self.others += [(*self._taken, other) for other in others]
        self._taken += (choice,)
        self.probability *= chances[choice]
        return choice


def outcomes(run: Callable[[ScriptedDice], T]) -> Iterator[tuple[T, Fraction]]:
    """Every result of `run` with its exact probability: one call for each way that chance can go."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        dice = ScriptedDice(scripts.pop())
        result = run(dice)
        scripts += dice.others
        yield result, dice.probability


def distribution(*weights: int) -> Distribution:
    return np.array([Fraction(int(weight), int(sum(weights))) for weight in weights], object)


def rng_at(seed: int, context: Context) -> np.random.Generator:
    """Another one for every context: NumPy takes [1, 0] and [1, 0, 0] for the same seed, hence the length."""
    return np.random.default_rng([seed, len(context), *context])


def random_model(seed: int, vocab: int, *, zeros: bool) -> Model:
    """A distribution for every context; with `zeros`, some tokens are impossible."""

    @cache
    def model(context: Context) -> Distribution:
        rng = rng_at(seed, context)
        weights = rng.integers(0 if zeros else 1, 8, vocab)
        if zeros:
            weights[rng.integers(vocab)] = 0
        weights[rng.integers(vocab)] += 1
        return distribution(*weights)

    return model


def pair(kind: str, seed: int, vocab: int) -> tuple[Model, Model]:
    """Target and draft. `zeros`: each has its own impossible tokens; `narrow draft`: q is 0 where p has mass."""
    target = random_model(seed, vocab, zeros=kind in ("zeros", "equal"))
    draft = random_model(1000 + seed, vocab, zeros=kind == "zeros")
    if kind == "equal":
        return target, target
    if kind not in ("disjoint", "narrow draft", "narrow target"):
        return target, draft

    def part(model: Model, ids: slice, context: Context) -> Distribution:
        order = rng_at(2000 + seed, context).permutation(vocab)
        return _restricted(model(context), order[ids])

    if kind == "narrow draft":
        return target, cache(lambda context: part(draft, slice(1, None), context))
    if kind == "narrow target":
        return cache(lambda context: part(target, slice(1, None), context)), draft
    cut = vocab // 2
    return (
        cache(lambda context: part(target, slice(cut), context)),
        cache(lambda context: part(draft, slice(cut, None), context)),
    )


def _restricted(p: Distribution, ids: np.ndarray) -> Distribution:
    out = np.array([Fraction(0)] * len(p), object)
    out[ids] = p[ids] / p[ids].sum()
    return out


def path_text(tokens: list[int], parents: list[int], node: int) -> Context:
    """Tokens from the first level down to `node`."""
    text: Context = ()
    while node != ROOT:
        text = (tokens[node], *text)
        node = parents[node]
    return text


def grow(
    shape: Shape, draft: Model, dice: Dice, *, depth: int = 9, nodes: int = 99, by_rank: bool = False
) -> TokenTree:
    """The runtime's own growth, from `draft`: children drawn without replacement, or the most probable ones."""
    tree = GrowingTree(shape, depth, nodes)
    choose = most_probable_ids if by_rank else partial(draw_without_replacement, dice=dice)
    while tree.frontier:
        tree.extend([draft(path_text(tree.tokens, tree.parents, node)) for node in tree.frontier], choose)
    return tree.tree(sampled=not by_rank)


def growth(shape: Shape, draft: Model, **options: int) -> Propose:
    """`grow` as a proposal whose randomness is enumerated."""
    return lambda dice: grow(shape, draft, dice, **options)


def emitted(propose: Propose, rule: Rule, target: Model, length: int) -> Joint:
    """Joint distribution of the first `length` tokens that a round emits; a short block is continued by the target."""
    joint: Joint = defaultdict(Fraction)
    for tree, chance in outcomes(propose):
        p = cache(lambda node, tree=tree: target(tuple(tree.text(node))))
        for accepted, conditional in outcomes(lambda dice, tree=tree, p=p: rule(tree, p, dice)):
            joint[block_of(tree, accepted)[:length]] += chance * conditional
    return continued(joint, target, length)


def block_of(tree: TokenTree, accepted: Accepted) -> Context:
    """The tokens that a round emits."""
    return (*(tree.tokens[node] for node in accepted.path), accepted.token)


def continued(blocks: Joint, target: Model, length: int) -> Joint:
    """Texts of `length` tokens: what `blocks` leave open comes from the target, one token after another."""
    joint: Joint = defaultdict(Fraction)
    pending = list(blocks.items())
    while pending:
        block, chance = pending.pop()
        if len(block) == length:
            joint[block] += chance
        else:
            pending += [((*block, token), chance * p) for token, p in enumerate(target(block)) if p]
    return dict(joint)


def plain(target: Model, length: int) -> Joint:
    """Joint distribution of `length` tokens without speculation."""
    return continued({(): Fraction(1)}, target, length)


def plain_texts(row: Row, logits: Callable[[Context], np.ndarray]) -> Joint:
    """Plain decoding of a request: token after token until an end token or the length. logits(text): of its model."""
    joint: Joint = defaultdict(Fraction)
    pending: list[tuple[Context, Fraction]] = [((), Fraction(1))]
    while pending:
        answer, chance = pending.pop()
        ended = not row.params.ignore_eos and not row.eos_token_ids.isdisjoint(answer[-1:])
        if ended or len(answer) == row.params.max_new_tokens:
            joint[answer] += chance
            continue
        history = [*row.prompt, *answer]
        p = row.pipeline.probabilities(logits(tuple(history)), history)
        pending += [((*answer, token), chance * weight) for token, weight in enumerate(p) if weight]
    return dict(joint)


def mean_accepted(propose: Propose, rule: Rule, target: Model) -> Fraction:
    """Exact expectation of how many draft tokens a round keeps."""
    return sum(
        (
            chance * conditional * len(accepted.path)
            for tree, chance in outcomes(propose)
            for accepted, conditional in outcomes(
                lambda dice, tree=tree: rule(tree, lambda node: target(tuple(tree.text(node))), dice)
            )
        ),
        Fraction(0),
    )


class ExactPipeline:
    """A request's pipeline whose distributions are fractions: the floats in 4096ths, normalized by their exact sum.

    Rounding is upwards, so what is possible stays possible, and it is the same wherever the pipeline is asked.
    """

    def __init__(self, pipeline: LogitsPipeline) -> None:
        self._pipeline = pipeline
        self.scores, self.best, self.logprob = pipeline.scores, pipeline.best, pipeline.logprob
        self.ignores_history = pipeline.ignores_history

    def probabilities(self, logits: np.ndarray, history: list[int]) -> Distribution:
        return distribution(*np.ceil(self._pipeline.probabilities(logits, history) * 4096).astype(int))
