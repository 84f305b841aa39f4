"""A draft model: its own engine and cache, under the target's rollback rule.

After a round the cache is cut back to the tokens that were kept; the next proposal first feeds what it has not seen
(the last kept draft token, if it was the block's last, and the pending token). Tokens are drawn from q, the request's
own pipeline on the draft's logits, and q is handed on as it was drawn from.
"""

from collections.abc import Sequence

import numpy as np

from specdec.engines.chunk import RowInput
from specdec.engines.contract import FloatArray
from specdec.runtime import sampling
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class ModelDrafter:
    """Drafts chains of up to `num_tokens` with `model`.

    `vocab_size`: ids of the target. `shared_vocab`: ids below it mean the same in both models; no other is drafted, and
    where the text holds one, the draft model is given id 0 in its place (a draft may be poor, it cannot be wrong).
    A row that outgrows the draft's context is no longer drafted for.
    """

    def __init__(self, model: CachedModel, num_tokens: int, vocab_size: int, shared_vocab: int) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._shared_vocab = min(shared_vocab, vocab_size)
        self._drafted: list[int] = []  # tokens that the last proposal wrote behind the committed ones, by row

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`: prefills all but the pending token."""
        index = self._model.add_row()
        self._drafted.append(0)
        if self._fits(row, 0):
            self._model.prefill(index, self._known(row.tokens[:-1]))

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`: one pass per token, all rows together."""
        model = self._model
        counts = [self._count(row, limit) for row, limit in zip(rows, limits, strict=True)]
        tokens: list[list[int]] = [[] for _ in rows]
        q: list[list[FloatArray]] = [[] for _ in rows]
        for depth in range(max(counts, default=0)):
            feeds = []
            for index, row in enumerate(rows):
                active = depth < counts[index]
                unseen = row.tokens[int(model.lens[index]) :] if depth == 0 else tokens[index][-1:]
                feeds.append(RowInput(self._known(unseen) if active else (), int(active)))
            for index, logits in enumerate(model.step(feeds)):
                if depth < counts[index]:
                    model.commit(index, len(feeds[index].tokens))
                    token, distribution = self._choose(rows[index], tokens[index], logits[0])
                    tokens[index].append(token)
                    q[index].append(distribution)
        for index, chain in enumerate(tokens):
            self._drafted[index] = max(0, len(chain) - 1)  # the last token was not fed
        return [
            TokenTree.chain(chain, None if row.params.temperature == 0 else distributions)
            for row, chain, distributions in zip(rows, tokens, q, strict=True)
        ]

    def commit(self, index: int, row: Row, kept: int) -> None:
        """See `Drafter.commit`: gives back the slots of tokens that were not kept."""
        self._model.lens[index] -= max(0, self._drafted[index] - kept)
        self._drafted[index] = 0
        assert self._model.lens[index] < len(row.tokens), "the draft's cache holds no more than the target's"

    def release(self, index: int) -> None:
        """See `Drafter.release`."""
        self._model.drop_row(index)
        self._drafted[index] = self._drafted[-1]
        self._drafted.pop()

    def _known(self, tokens: list[int]) -> list[int]:
        return [token if token < self._shared_vocab else 0 for token in tokens]

    def _count(self, row: Row, limit: int) -> int:
        count = min(self._num_tokens, limit)
        return count if self._fits(row, count) else max(0, self._model.max_length - len(row.tokens))

    def _fits(self, row: Row, count: int) -> bool:
        return len(row.tokens) + count <= self._model.max_length

    def _choose(self, row: Row, drafted: list[int], logits: FloatArray) -> tuple[int, FloatArray]:
        """Draw the next draft token of `row` after `drafted`; return it and the distribution it was drawn from."""
        known = np.full(self._vocab_size, -np.inf, np.float32)  # ids that the draft does not share are never drawn
        known[: self._shared_vocab] = logits[: self._shared_vocab]
        history = row.tokens + drafted
        if row.params.temperature == 0:
            best = sampling.scores(known, history, row.params)
            return int(best.argmax()), best
        distribution = sampling.probabilities(known, history, row.params)
        return row.dice.draw(distribution), distribution
