"""Tables of a drafter that reads hidden states: its logits after a text, and an engine that checks what it was fed.

The real drafter is run on the target's own states at every token. In the runtime a state is the number of the text that
it was left at (`tables.Book`), so a pair says which text its features are of: those of another text, a pair that is
missing, and one that was not rolled back are errors, whichever token they belong to.
"""

from collections.abc import Sequence

import numpy as np

from specdec.engines.base import Engine
from specdec.engines.chunk import RowInput
from specdec.engines.contract import Chunk, FloatArray, IntArray, tap_columns
from specdec.engines.errors import EngineError
from specdec.tools.tables import NOTHING, Book, Change, Table, TableEngine, TableKV, Text


class PairTable(Table):
    """Logits [V] in the target's ids after texts of two tokens and more, from a drafter of pairs.

    `target`: the target's table, in the same ids. `taps`: those that the drafter reads. `drafted` [Vd]: the target's
    ids of its logits (None: the same); no other token is possible.
    """

    def __init__(
        self, engine: Engine, taps: Sequence[str], drafted: IntArray | None, target: Table, ids: Sequence[int] | None
    ) -> None:
        super().__init__(engine, ids)
        self.target, self.taps, self._drafted = target, len(taps), drafted
        real = target.engine.spec
        self._columns = tap_columns(real.taps, real.hidden_size, taps)

    def _slots(self, common: int) -> int:
        return max(common - 1, 0)

    def _input(self, text: Text, past: int) -> RowInput:
        states = [self.target.states(text[: end + 1])[self._columns] for end in range(past, len(text) - 1)]
        features = np.zeros((len(states), self.engine.spec.features), np.float32)
        features[:, : len(self._columns)] = states
        return RowInput(self._real(text)[past + 1 :], 1, features=features)

    def _spread(self, logits: FloatArray) -> FloatArray:
        if self._drafted is None:
            return logits
        real = self.target.engine.spec
        whole = np.full(real.logits_size, -np.inf, logits.dtype)
        whole[self._drafted[: len(logits)]] = logits
        return whole[: real.vocab_size]


class PairEngine(TableEngine):
    """The drafter of `table`, on the states that the engine of `book` hands out and on its own."""

    def __init__(self, table: PairTable, book: Book, change: Change | None = None) -> None:
        super().__init__(table, change, book)
        self._taps = table.taps

    def _texts(self, chunk: Chunk, kv: TableKV, first_row: int, b: int) -> list[Text]:
        """The texts that the pairs of row `b` end. Raises `EngineError` for features of another text."""
        pairs = super()._texts(chunk, kv, first_row, b)
        assert chunk.features is not None, "validated"
        return [self._whole(pair, row) for pair, row in zip(pairs, chunk.features[b].tolist(), strict=True)]

    def _is_padding(self, text: Text) -> bool:
        return not text

    def _whole(self, pair: Text, features: list[float]) -> Text:
        """The text whose pairs have the later tokens `pair`; none for padding."""
        theirs, own = {*features[: self._taps]}, {*features[self._taps :]}  # `eagle` has one place for both
        numbers = (theirs | own) - {0.0}
        if not numbers and (self.table.ids is None or pair[-1] == NOTHING):
            return ()  # padding
        if len(numbers) != 1 or (own and (theirs == {0.0}) == (own == {0.0})):
            raise EngineError(f"the features of token {pair[-1]} are not those of one text")
        before = self.book.text(int(numbers.pop()))
        if before[1:] != pair[:-1]:
            raise EngineError(f"token {pair[-1]} was fed with the features of another text")
        return (*before, pair[-1])
