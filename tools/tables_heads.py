"""Medusa heads that look their logits up: what the real heads say to the real engine's hidden state of a text.

A table's engine hands out numbers of texts in place of hidden states (`tables.Book`); here a number becomes
its text again.
This module knows texts and logits: nothing of speculation.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from specdec.engines.base import Heads
from specdec.engines.contract import FloatArray, IntArray
from specdec.tools.tables import NOTHING, Book, Change, Table, Text


class HeadTable:
    """Logits of `heads` after texts of `table`, whose engine has their hidden states.

    `ids` [Vd]: the model's ids that the heads' logits are of; None: all.
    """

    def __init__(self, heads: Heads, ids: IntArray | None, table: Table) -> None:
        self.table, self._heads = table, heads
        size = table.spec.vocab_size
        self.spec = msgspec.structs.replace(heads.spec, logits_size=size)
        known = np.arange(heads.spec.logits_size) if ids is None else ids
        place = np.full(table.engine.spec.logits_size, -1)  # of the model's ids in the heads' logits
        place[known] = np.arange(len(known))
        self._places = place[:size] if table.ids is None else place[np.asarray(table.ids)]
        if table.ids is not None:
            self._places[NOTHING] = -1
        self._final = table.engine.spec.tap("final")
        self._scores: dict[Text, FloatArray] = {}

    def scores(self, text: Text) -> FloatArray:
        """Logits [heads, V] of the state at the last token of `text`; -inf for ids that the heads do not know."""
        if text not in self._scores:
            (logits,) = self._heads.logits(self.table.states(text)[None, self._final])
            known = self._places >= 0
            found = np.full((len(logits), len(known)), -np.inf, np.float32)
            found[:, known] = logits[:, self._places[known]]
            self._scores[text] = found
        return self._scores[text]

    def logits(self, text: Text) -> FloatArray:
        """Logits [V] of the token after `text`, as head 0 drafts it from the token before the last one."""
        first: FloatArray = self.scores(text[:-1])[0]
        return first

    def prepare(self, texts: Iterable[Text]) -> None:
        """Compute what is missing of `texts`."""
        self.table.prepare(text[:-1] for text in texts)


class TableHeads:
    """`Heads` whose logits are a table's, as `change` makes them of text, depth and logits."""

    def __init__(self, table: HeadTable, book: Book, change: Change | None = None) -> None:
        self.spec = table.spec
        self._table, self._book, self._change = table, book, change

    def logits(self, features: FloatArray) -> FloatArray:
        """See `Heads.logits`; the features are the numbers that `book` has of texts."""
        return np.stack([self._changed(self._book.text(int(number))) for number in features[:, 0]])

    def close(self) -> None:
        """See `Heads.close`: the table stays."""

    def _changed(self, text: Text) -> FloatArray:
        scores = self._table.scores(text)
        if self._change is None:
            return scores
        return np.stack([self._change((*text, depth), logits) for depth, logits in enumerate(scores)])
