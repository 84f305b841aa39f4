"""Which rows run, and one round of all of them: propose, verify in one pass, accept, commit, emit.

Rows wait until one of the target's rows is free, join between rounds and leave when they end; the last row then takes
the place of the one that left, in the target's cache and in the drafter's alike. This module knows the algorithm; it
knows no engine, no tokenizer and no file.
"""

from collections import deque
from functools import cache
from time import perf_counter

from specdec.engines.contract import FloatArray
from specdec.runtime.accept import Accepted, accept_block, accept_matching, accept_tokens, accept_typical
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


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
            row.stats.rounds += 1
            row.stats.draft_tokens_proposed += len(tree)
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
                self._target.drop_row(index)
                if self._drafter:
                    self._drafter.release(index)
                self._rows[index] = self._rows[-1]
                self._rows.pop()


def accept(row: Row, tree: TokenTree, logits: FloatArray) -> Accepted:
    """Decide which path of `tree` is kept and what follows it, by the request's own pipeline and rule.

    logits [1 + len(tree), V]: after the pending token and after every node. On a tree that branches, or that holds
    deterministic tokens, the rule `block` is the rule `token`.
    """

    @cache
    def p(node: int) -> FloatArray:
        return row.pipeline.probabilities(logits[node + 1], row.tokens + tree.text(node))

    def best(node: int) -> int:
        return row.pipeline.best(logits[node + 1], row.tokens + tree.text(node))

    def coupled(node: int) -> int:
        history = row.tokens + tree.text(node)
        return row.draw(row.pipeline.probabilities(logits[node + 1], history), 1, len(history))[0]

    rule = row.params.acceptance
    if row.params.temperature == 0:
        return accept_matching(tree, best)
    if rule == "coupled":
        return accept_matching(tree, coupled)
    if rule == "lossy-typical":
        return accept_typical(tree, p, row.dice)
    if rule == "block" and tree.is_chain and tree.is_sampled:
        return accept_block(tree, p, row.dice)
    return accept_tokens(tree, p, row.dice)
