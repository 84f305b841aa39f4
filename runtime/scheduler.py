"""Which rows run, and one round of all of them: propose, verify in one pass, accept, commit, emit.

Rows wait until one of the target's rows is free, join between rounds and leave when they end; the last row then takes
the place of the one that left, in the target's cache and in the drafter's alike. This module knows the algorithm; it
knows no engine, no tokenizer and no file.
"""

from collections import deque
from time import perf_counter

from specdec.engines.contract import FloatArray
from specdec.runtime import sampling
from specdec.runtime.accept import Accepted, accept_chain, accept_greedy
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
            scored = scored[:, : self._target.engine.spec.vocab_size]  # the rest is padding of the checkpoint
            accepted = accept(row, tree, scored)
            self._target.commit(index, 1 + accepted.kept)  # the pending token and the draft tokens that were kept
            row.stats.rounds += 1
            row.stats.draft_tokens_proposed += len(tree)
            row.emit((*tree.tokens[: accepted.kept], accepted.token), scored)
            if not row.finish_reason:
                assert self._target.lens[index] == len(row.tokens) - 1, "the cache holds all but the pending token"
                if self._drafter:
                    self._drafter.commit(index, row, accepted.kept)
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
    """Decide how much of a chain is kept and what follows it, by the request's own pipeline.

    logits [1 + len(tree), V]: after the pending token and after every node.
    """
    if not tree.is_chain:
        raise ValueError("only chains can be accepted")

    def history(depth: int) -> list[int]:
        return row.tokens + list(tree.tokens[:depth])

    def best(depth: int) -> int:
        return int(sampling.scores(logits[depth], history(depth), row.params).argmax())

    def p(depth: int) -> FloatArray:
        return sampling.probabilities(logits[depth], history(depth), row.params)

    if row.params.temperature == 0:
        return accept_greedy(tree.tokens, best)
    return accept_chain(tree.tokens, p, tree.q, row.dice)
