"""Which rows run, and one round of all of them: propose, verify in one pass, accept, commit, emit.

Rows wait until one of the target's rows is free, join between rounds and leave when they end; the last row then takes
the place of the one that left, in the target's cache and in the drafter's alike. This module knows the algorithm; it
knows no engine, no tokenizer and no file.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import TypeVar

from specdec.engines.contract import FloatArray
from specdec.engines.errors import DeadEndError
from specdec.runtime.accept import Accepted, accept_block, accept_matching, accept_tokens, accept_typical
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import ROOT, TokenTree

T = TypeVar("T")


class Scheduler:
    """Runs rows to their end on one target and, optionally, one drafter."""

    def __init__(self, target: CachedModel, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []

    @property
    def busy(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self._waiting or self._rows)

    def submit(self, row: Row) -> None:
        """Let `row` wait for its turn."""
        self._waiting.append(row)

    def step(self) -> list[Row]:
        """Run one round; return the rows that ran, those that ended (`finish_reason`) included."""
        self._admit()
        rows, started = list(self._rows), perf_counter()
        trees = self._propose()
        drafted, engine_before = perf_counter(), self._target.seconds
        logits = self._target.step([tree.verify(row.pending) for row, tree in zip(rows, trees, strict=True)])
        for index, (row, tree, scored) in enumerate(zip(rows, trees, logits, strict=True)):
            path, token = accept(row, tree, scored)
            kept = (0, *(1 + node for node in path))  # the pending token and the draft tokens that were kept
            self._target.commit(index, kept)
            row.stats.count_draft(len(tree), tree.depth, len(path))
            row.emit((*(tree.tokens[node] for node in path), token), scored[list(kept)])
            if not row.finish_reason:
                assert self._target.lens[index] == len(row.tokens) - 1, "the cache holds all but the pending token"
                if self._drafter:
                    self._drafter.commit(index, row, path)
        self._release_finished()
        draft, target = drafted - started, self._target.seconds - engine_before
        host = perf_counter() - started - draft - target
        for row in rows:
            row.stats.draft_ms += 1000 * draft
            row.stats.target_ms += 1000 * target
            row.stats.host_ms += 1000 * host
        return rows

    def _admit(self) -> None:
        """Prefill waiting rows while there is room: all of the prompt but its last token, the first pending one."""
        while self._waiting and self._target.rows < self._target.max_rows:
            started = perf_counter()
            row = self._waiting.popleft()
            index = self._target.add_row()
            self._rows.append(row)
            self._target.prefill(index, row.tokens[:-1])
            if self._drafter:
                self._drafter.admit(row)
            row.stats.prefill_ms = (perf_counter() - started) * 1000

    def _propose(self) -> list[TokenTree]:
        if self._drafter is None:
            return [TokenTree()] * len(self._rows)
        # at least one token of every round is the target's own
        return self._drafter.propose(self._rows, [row.remaining - 1 for row in self._rows])

    def _release_finished(self) -> None:
        for index in reversed(range(len(self._rows))):
            if self._rows[index].finish_reason:
                if self._drafter:
                    self._drafter.release(index)
                self._target.drop_row(index)
                self._rows[index] = self._rows[-1]
                self._rows.pop()


def accept(row: Row, tree: TokenTree, logits: FloatArray) -> Accepted:
    """Decide which path of `tree` is kept and what follows it, by the request's own pipeline and rule.

    logits [1 + len(tree), V]: after the pending token and after every node. `block` is for drafters that make chains
    only: a rule that is chosen by what was drawn (this tree happens to be a chain) would bias the text; elsewhere it is
    the rule `token`. What lies behind an end token or a dead end is never emitted: any distribution does there.
    Raises `DeadEndError` when the text, not only a draft, comes to a position where no token is possible.
    """
    pipeline, dead = row.pipeline, dict[int, DeadEndError]()

    def asked(node: int, ask: Callable[[FloatArray, Sequence[int]], T]) -> T | None:
        """What the pipeline says after `node`; None where no text goes on."""
        draft = tree.text(node)
        if row.ends_in(draft):
            return None
        try:
            return ask(logits[node + 1], row.tokens + draft)
        except DeadEndError as exc:
            if node == ROOT:
                raise
            dead[node] = exc
            return None

    @cache
    def p(node: int) -> FloatArray:
        found = asked(node, pipeline.probabilities)
        return p(tree.parents[node]) if found is None else found

    def coupled(logits: FloatArray, history: Sequence[int]) -> int:
        return row.draw(pipeline.probabilities(logits, history), 1, len(history))[0]

    rule = row.params.acceptance
    if row.params.temperature == 0:
        accepted = accept_matching(tree, lambda node: asked(node, pipeline.best) or 0)
    elif rule == "coupled":
        accepted = accept_matching(tree, lambda node: asked(node, coupled) or 0)
    elif rule == "lossy-typical":
        accepted = accept_typical(tree, p, row.dice)
    elif rule == "block" and tree.linear and tree.is_sampled:
        accepted = accept_block(tree, p, row.dice)
    else:
        accepted = accept_tokens(tree, p, row.dice)
    for node in accepted.path:
        if node in dead:
            raise dead[node]
    return accepted
