"""Faults to plant into the runtime of this process, so that a check can show that it would notice them.

Each replaces an attribute of a module or class of `specdec.runtime` while `planted` is open. They are the mistakes that
implementations of speculative decoding make: all of them still give fluent text. This module knows the runtime's
insides; whoever changes those finds the tests of `specdec-verify` failing here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from specdec.engines.contract import FloatArray
from specdec.engines.errors import RequestError
from specdec.runtime import SamplingParams, scheduler
from specdec.runtime.accept import Accepted, Target, accept_block, accept_tokens, accept_typical
from specdec.runtime.chance import Dice, PositionNoise, RandomDice
from specdec.runtime.drafters.growth import GrowingTree
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.request import FinishReason, Row
from specdec.runtime.sampling import LogitsPipeline, most_probable
from specdec.runtime.tree import ROOT, TokenTree
from specdec.tools import faults_kv
from specdec.tools.faults_kv import Patch

Rule = Callable[[TokenTree, Target, Dice], Accepted]
Choose = Callable[[FloatArray, int], Sequence[int]]


class Fault(NamedTuple):
    """What is wrong while it is planted, and how it is planted."""

    breaks: str
    patches: Callable[[], Sequence[Patch]]


@contextmanager
def planted(name: str) -> Iterator[Fault]:
    """Break the runtime of this process as `name` says. Raises `RequestError` for an unknown name."""
    fault = FAULTS.get(name)
    if fault is None:
        raise RequestError(f"no fault is called {name!r}: choose one of {', '.join(FAULTS)}")
    patches = fault.patches()
    sound = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, wrong in patches:
        setattr(owner, attribute, wrong)
    try:
        with np.errstate(all="ignore"):  # broken arithmetic warns
            yield fault
    finally:
        for owner, attribute, right in sound:
            setattr(owner, attribute, right)


def _always_accept() -> list[Patch]:
    return [(RandomDice, "coin", lambda self, probability: True)]


def _inverted_ratio() -> list[Patch]:
    coin = RandomDice.coin
    return [(RandomDice, "coin", lambda self, ratio: coin(self, 1 / ratio if ratio else np.inf))]


def _redrawn(wrong: Callable[[TokenTree, Accepted, Target], FloatArray | None]) -> list[Patch]:
    """Rules whose last token is drawn from wrong(tree, what was accepted, p), unless that is None."""

    def broken(rule: Rule) -> Rule:
        def accept(tree: TokenTree, p: Target, dice: Dice) -> Accepted:
            found = rule(tree, p, dice)
            weights = wrong(tree, found, p)
            return found if weights is None else Accepted(found.path, dice.draw(weights))

        return accept

    return [
        (scheduler, "accept_tokens", broken(accept_tokens)),
        (scheduler, "accept_block", broken(accept_block)),
    ]


def _residual_from_p() -> list[Patch]:
    def residual(tree: TokenTree, found: Accepted, p: Target) -> FloatArray | None:
        last = found.path[-1] if found.path else ROOT
        return p(last) if tree.children(last) else None

    return _redrawn(residual)


def _bonus_from_wrong_row() -> list[Patch]:
    def bonus(tree: TokenTree, found: Accepted, p: Target) -> FloatArray | None:
        if not found.path or tree.children(found.path[-1]):
            return None
        return p(tree.parents[found.path[-1]])

    return _redrawn(bonus)


def _raw_q() -> list[Patch]:
    kept: list[tuple[FloatArray, FloatArray]] = []  # (q that is drawn from, q without the request's filters)
    distribution, tree = ModelDrafter._distribution, GrowingTree.tree

    def remembering(self: ModelDrafter, row: Row, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        plain = copy(row)
        plain.pipeline = LogitsPipeline(SamplingParams(temperature=1.0), len(row.prompt))
        q = distribution(self, row, logits, history)
        kept.append((q, distribution(self, plain, logits, history)))
        del kept[:-256]
        return q

    def handed_on(self: GrowingTree, *, sampled: bool) -> TokenTree:
        made = tree(self, sampled=sampled)
        if not made.q:
            return made
        q = tuple(next((raw for drawn, raw in kept if drawn is one), one) for one in made.q)
        return TokenTree(made.tokens, made.parents, q)

    return [(ModelDrafter, "_distribution", remembering), (GrowingTree, "tree", handed_on)]


class _BrokenOff:
    """Dice whose coins all lose after the first loss."""

    def __init__(self, dice: Dice) -> None:
        self._dice, self._lost = dice, False

    def coin(self, probability: float) -> bool:
        self._lost = self._lost or not self._dice.coin(probability)
        return not self._lost

    def draw(self, weights: FloatArray) -> int:
        return self._dice.draw(weights)


def _block_break_at_first_loss() -> list[Patch]:
    return [(scheduler, "accept_block", lambda tree, p, dice: accept_block(tree, p, _BrokenOff(dice)))]


def _typical_as_block() -> list[Patch]:
    return [(scheduler, "accept_block", accept_typical)]


def _with_row(change: Callable[[Row, TokenTree], Any]) -> list[Patch]:
    """Acceptance that sees a copy of the row after change(copy, proposal)."""
    decide = scheduler.accept

    def broken(row: Row, tree: TokenTree, logits: FloatArray) -> Accepted:
        seen = copy(row)
        change(seen, tree)
        return decide(seen, tree, logits)

    return [(scheduler, "accept", broken)]


def _history_without_draft() -> list[Patch]:
    class Forgetful:
        def __init__(self, row: Row) -> None:
            self._sound, self._history = row.pipeline, list(row.tokens)

        def probabilities(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
            return self._sound.probabilities(logits, self._history)

        def best(self, logits: FloatArray, history: Sequence[int]) -> int:
            return self._sound.best(logits, self._history)

    return _with_row(lambda row, tree: setattr(row, "pipeline", Forgetful(row)))


def _noise_depends_on_draft() -> list[Patch]:
    class Shifted:
        def __init__(self, noise: PositionNoise, by: int) -> None:
            self._noise, self._by = noise, by

        def ranking(self, p: FloatArray, position: int, count: int) -> list[int]:
            return self._noise.ranking(p, position + self._by, count)

    def change(row: Row, tree: TokenTree) -> None:
        if row.noise is not None:
            row.noise = Shifted(row.noise, 1000 * len(tree))  # type: ignore[assignment]

    return _with_row(change)


def _noise_without_position() -> list[Patch]:
    ranking = PositionNoise.ranking
    return [(PositionNoise, "ranking", lambda self, p, position, count: ranking(self, p, 0, count))]


def _deterministic_as_sampled() -> list[Patch]:
    tree = GrowingTree.tree
    return [(GrowingTree, "tree", lambda self, *, sampled: tree(self, sampled=True))]


def _dropped_after_drawing() -> list[Patch]:
    extend = GrowingTree.extend

    def dropping(
        self: GrowingTree, q: Sequence[FloatArray], choose: Callable[[FloatArray, int], Sequence[int]]
    ) -> None:
        extend(self, q, lambda weights, count: [token for token in choose(weights, count) if weights[token] >= 0.3])

    return [(GrowingTree, "extend", dropping)]


def _greedy_accepts_second_best() -> list[Patch]:
    decide = scheduler.accept

    def broken(row: Row, tree: TokenTree, logits: FloatArray) -> Accepted:
        if row.params.temperature > 0:
            return decide(row, tree, logits)

        def good(node: int) -> list[int]:
            scores = row.pipeline.scores(logits[node + 1], row.tokens + tree.text(node))
            return [int(token) for token in most_probable(scores, 2)]

        path: list[int] = []
        node: int | None = ROOT
        while node is not None:
            last, wanted = node, good(node)
            node = next((child for child in tree.children(last) if tree.tokens[child] in wanted), None)
            path += [] if node is None else [node]
        return Accepted(tuple(path), good(last)[0])

    return [(scheduler, "accept", broken)]


def _end_in_draft_missed() -> list[Patch]:
    emit = Row.emit

    def broken(self: Row, block: Sequence[int], logits: FloatArray) -> None:
        *draft, own = range(len(block))
        eos, self.eos_token_ids = self.eos_token_ids, frozenset()
        if draft:
            emit(self, [block[index] for index in draft], logits)
        self.eos_token_ids = eos
        reason: FinishReason | None = self.finish_reason
        if reason is None:
            emit(self, [block[own]], logits[own:])

    return [(Row, "emit", broken)]


FAULTS = {
    "always-accept": Fault("every draft token is kept", _always_accept),
    "inverted-ratio": Fault("draft tokens are kept with probability q/p instead of p/q", _inverted_ratio),
    "residual-from-p": Fault("after a rejection the token is drawn from p, not from max(p - q, 0)", _residual_from_p),
    "bonus-from-wrong-row": Fault("the token after a whole draft is drawn from the row before", _bonus_from_wrong_row),
    "raw-q": Fault("the rule is given q without the filters that the draft was drawn with", _raw_q),
    "block-break-at-first-loss": Fault("block verification stops at the first coin lost", _block_break_at_first_loss),
    "lossy-typical-as-block": Fault("typical acceptance runs under the name of block verification", _typical_as_block),
    "history-without-draft": Fault("penalties do not count the draft's own tokens", _history_without_draft),
    "deterministic-as-sampled": Fault("most probable children are tested as if drawn", _deterministic_as_sampled),
    "dropped-after-drawing": Fault("tokens are drawn and then dropped for being unlikely", _dropped_after_drawing),
    "greedy-accepts-second-best": Fault("greedy drafts are kept if second best", _greedy_accepts_second_best),
    "noise-without-position": Fault("coupled sampling uses the same noise everywhere", _noise_without_position),
    "noise-depends-on-draft": Fault("coupled sampling's noise depends on the draft's length", _noise_depends_on_draft),
    "kv-commit-one-too-many": Fault("one slot too many counts as committed", faults_kv.commit_one_too_many),
    "kv-slot-off-by-one": Fault("the last committed slot holds what came after it", faults_kv.slot_off_by_one),
    "kv-path-not-compacted": Fault("a tree's accepted path is left where it lay", faults_kv.path_not_compacted),
    "batch-rows-swapped": Fault("two rows of a batch get each other's logits", faults_kv.rows_swapped),
    "batch-row-not-moved": Fault("a row takes a free place without its cache", faults_kv.row_not_moved),
    "tree-siblings-seen": Fault("nodes of a tree attend their siblings", faults_kv.siblings_seen),
    "tree-positions-in-order": Fault("a tree's positions go by order, not by depth", faults_kv.positions_in_order),
    "end-in-draft-missed": Fault("an end token inside a draft does not end the answer", _end_in_draft_missed),
}
