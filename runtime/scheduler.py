"""Which rows run, and one round of all of them: propose, verify in one pass, accept, commit, emit.

Rows wait until one of the target's rows is free, join between rounds, are filled with their prompts part by part, and
leave when they end or are aborted; the last row then takes the place of the one that left, in the target's cache and in
the drafter's alike. What a row that ended held may be kept for rows that begin alike (`prefixes`). This module knows
the algorithm; it knows no engine, no tokenizer and no file.
"""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np

from specdec.engines.chunk import RowInput
from specdec.engines.contract import FloatArray
from specdec.engines.errors import DeadEndError
from specdec.runtime.accept import Accepted, accept_block, accept_matching, accept_tokens, accept_typical
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.kv import PREFILL_WIDTH, CachedModel, KVBudget
from specdec.runtime.prefixes import Prefix, PrefixStore
from specdec.runtime.request import Row
from specdec.runtime.tree import ROOT, TokenTree

PREFILL_TOKENS = 128  # a pass so wide costs no more a token than a wider one, and others wait less for it
IDLE = RowInput((), 0)  # of a row that has no part in a pass

T = TypeVar("T")


class Scheduler:
    """Runs rows to their end on one target and, optionally, one drafter.

    `prefill_tokens`: of prompts, a round at most, as long as other rows wait for it: a long prompt does not stall them.
    `budget`: bytes that caches may take; a row joins when all that run with it can grow to their ends. None: no limit.
    `prefixes`: what rows that ended leave to rows that begin alike, of these very models alone; None: nothing. Where no
    pass changes a bit (`exact`), neither does that. Elsewhere the cache of an earlier answer may have been written by
    other kernels than a prefill's: it is the target's own of the same tokens still, and near-ties may fall differently.
    An error of one row (its grammar, its terms, logits that are no numbers) ends that row; one of an engine ends the
    rows of that pass. They end with `finish_reason` "error", and others go on.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        budget: KVBudget | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._prefill_tokens = prefill_tokens
        self._budget = budget
        self._prefixes = prefixes
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []

    @property
    def busy(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self._waiting or self._rows)

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Row]:
        """The rows that the target holds."""
        return tuple(self._rows)

    def submit(self, row: Row) -> None:
        """Let `row` wait for its turn. Raises `RequestError` when it can never fit."""
        if self._budget is not None:
            self._budget.check(row)
        self._waiting.append(row)

    def step(self) -> list[Row]:
        """Run one round; return the rows that took part in it and those that ended (`finish_reason`)."""
        ended = self._leave()
        self._admit()
        self._fill()
        rows = self._rows[: next((n for n in range(len(self._rows), 0, -1) if self._rows[n - 1].ready), 0)]
        if rows:
            self._round(rows)
        ran = [row for row in self._rows if row.filled or row.finish_reason]
        self._release_finished()
        return ended + ran

    def step_together(self) -> list[Row]:
        """See `step`, for rows that succeed or fail together: raises the error of one that failed."""
        ran = self.step()
        for row in ran:
            if row.error:
                raise row.error
        return ran

    def _round(self, rows: Sequence[Row]) -> None:
        """Propose, verify in one pass, accept, commit, emit; `rows`: the first ones, some of which may not be ready."""
        started, engine_before = perf_counter(), self._target.seconds
        try:
            trees = self._propose(rows)
            drafted = perf_counter()
            inputs = [tree.verify(row.pending) if row.ready else IDLE for row, tree in zip(rows, trees, strict=True)]
            scored = self._target.step(inputs)
        except Exception as exc:  # what the caches hold is not known any more
            for row in rows:
                row.fail(exc)
            return
        for index, (row, tree, logits) in enumerate(zip(rows, trees, scored, strict=True)):
            if row.ready:
                with row.guard():
                    self._take(index, row, tree, logits)
        draft, target = drafted - started, self._target.seconds - engine_before
        host = perf_counter() - started - draft - target
        for row in rows:
            row.stats.draft_ms += 1000 * draft
            row.stats.target_ms += 1000 * target
            row.stats.host_ms += 1000 * host

    def _take(self, index: int, row: Row, tree: TokenTree, logits: FloatArray) -> None:
        """Accept what `logits` allow of a row's proposal, commit and emit it."""
        self._target.check(index, logits)
        path, token = accept(row, tree, logits)
        kept = (0, *(1 + node for node in path))  # the pending token and the draft tokens that were kept
        self._target.commit(index, kept)
        row.stats.count_draft(len(tree), tree.depth, len(path), row.age_ms)
        row.emit((*(tree.tokens[node] for node in path), token), logits[list(kept)])
        if not row.finish_reason:
            assert self._target.lens[index] == len(row.tokens) - 1, "the cache holds all but the pending token"
            if self._drafter:
                self._drafter.commit(index, row, path)

    def _leave(self) -> list[Row]:
        """End the rows that were aborted; return them."""
        aborted = [row for row in (*self._waiting, *self._rows) if row.aborted]
        for row in aborted:
            row.finish_reason = "abort"
        if aborted:
            self._waiting = deque(row for row in self._waiting if not row.aborted)
            self._release_finished()
        return aborted

    def _admit(self) -> None:
        """Open rows for those that wait, in their order, while there is room."""
        running = len(self._rows)
        while self._waiting and self._target.rows < self._target.max_rows:
            if self._budget is not None and not self._budget.fits([*self._rows, self._waiting[0]]):
                break
            row = self._waiting.popleft()
            row.stats.queue_ms = row.age_ms
            self._target.add_row()
            self._rows.append(row)
            if self._drafter:
                self._drafter.admit(row)
        if len(self._rows) > running:
            self._shrink()
        for index in range(running, len(self._rows)):
            self._resume(index, self._rows[index])

    def _resume(self, index: int, row: Row) -> None:
        """Give a new row what an earlier text, with the longest common beginning, left in the caches."""
        found = None if self._prefixes is None else self._prefixes.match(row.prompt)
        if self._prefixes is None or found is None:
            return
        started, (entry, count) = perf_counter(), found
        with row.guard():
            if self._drafter:
                count = self._drafter.reusable(row, entry.draft, count)
            if count < self._prefixes.least:
                return
            self._target.load(index, entry.kv, count, len(row.prompt))
            if self._drafter:
                self._drafter.restore(index, row, entry.draft, count)
            row.held = row.stats.reused_tokens = count
            self._prefixes.used(entry, count)
        row.stats.prefill_ms += (perf_counter() - started) * 1000

    def _keep(self, index: int, row: Row) -> None:
        """Store what a row that ended leaves in the caches; after an error nobody knows what that is."""
        if self._prefixes is None or row.error:
            return
        tokens = row.tokens[: int(self._target.lens[index])]  # a block that was cut left more in the cache
        if not self._prefixes.wants(tokens, self._target.engine.spec.kv_bytes(1, len(tokens))):
            return
        with row.guard():
            draft = self._drafter.save(index, row, len(tokens)) if self._drafter else None
            kv = self._target.save(index, len(tokens))
            self._prefixes.add(Prefix(np.array(tokens, np.int64), kv, draft))

    def _fill(self) -> None:
        """Prefill the prompts of rows that joined, oldest first: all but the last token, the first pending one."""
        left = self._prefill_tokens
        for index, row in enumerate(self._rows):
            while not row.filled and not row.finish_reason:
                if left <= 0 and any(other.ready for other in self._rows):
                    return
                started = perf_counter()
                part = row.prompt[row.held : -1][:PREFILL_WIDTH][: left if left > 0 else None]
                with row.guard():
                    self._target.reserve(len(row.prompt))  # once, not part by part
                    self._target.prefill(index, part)
                    row.held += len(part)
                    if self._drafter:
                        self._drafter.prefill(index, row)
                left -= len(part)
                row.stats.prefill_ms += (perf_counter() - started) * 1000

    def _propose(self, rows: Sequence[Row]) -> list[TokenTree]:
        if self._drafter is None:
            return [TokenTree()] * len(rows)
        # at least one token of every round is the target's own
        return self._drafter.propose(rows, [row.remaining - 1 if row.ready else 0 for row in rows])

    def _release_finished(self) -> None:
        left = len(self._rows)
        for index in reversed(range(left)):
            if self._rows[index].finish_reason:
                self._keep(index, self._rows[index])
                if self._drafter:
                    self._drafter.release(index, self._rows[index])
                self._target.drop_row(index, spoiled=self._rows[index].spoiled)
                self._rows[index] = self._rows[-1]
                self._rows.pop()
        if len(self._rows) < left and not self._waiting:  # else others take their places first
            self._shrink()

    def _shrink(self) -> None:
        self._target.shrink(max((len(row.tokens) for row in self._rows), default=0))


def accept(row: Row, tree: TokenTree, logits: FloatArray) -> Accepted:
    """Decide which path of `tree` is kept and what follows it, by the request's own pipeline and rule.

    logits [1 + len(tree), V]: after the pending token and after every node. `block` is for drafters that make chains
    only: a rule that is chosen by what was drawn (this tree happens to be a chain) would bias the text; elsewhere it is
    the rule `token`. What lies behind an end token or a dead end is never emitted: any distribution does there.
    Raises `DeadEndError` when the text, not only a draft, comes to a position where no token is possible.
    """
    pipeline, dead, known = row.pipeline, dict[int, DeadEndError](), dict[int, FloatArray]()

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

    def p(node: int) -> FloatArray:
        if node not in known:
            found = asked(node, pipeline.probabilities)
            known[node] = p(tree.parents[node]) if found is None else found
        return known[node]

    def coupled(logits: FloatArray, history: Sequence[int]) -> int:
        return row.draw(pipeline.probabilities(logits, history), 1, len(history))[0]

    rule = row.params.rule
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
