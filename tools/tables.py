"""Engines that look their logits up: the real engine computes a text's logits once, then they are read many times.

So the whole runtime (scheduler, drafter, cache, acceptance) runs at the speed of a dictionary, and what it should have
given can be computed from the same table. The caches of such an engine hold token ids: a slot that was rolled back,
moved wrongly or never written makes another text, and so other logits. Most tables speak of a few tokens only, with
numbers of their own: ids 1, 2, ... stand for some of the model's, id 0 for padding, which is never a token.

This module knows texts and logits: nothing of speculation.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from specdec.engines.base import Capabilities, Engine, KVBuffers, capacity_bucket
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import Chunk, FloatArray, IntArray, ModelSpec
from specdec.engines.errors import ContractError, EngineError
from specdec.engines.scoring import LEAST_WIDTH

Text = tuple[int, ...]
Change = Callable[[Text, FloatArray], FloatArray]  # what to make of a text's logits

NOTHING = 0  # the id that stands for no token, where a table has ids of its own
_ROWS = 8  # texts that are computed in one pass


class Table:
    """Logits [V] after texts, from `engine`.

    `ids`: the model's id of every id of the table (the first one is not used, it is `NOTHING`'s); None: the same ids.
    """

    def __init__(self, engine: Engine, ids: Sequence[int] | None = None) -> None:
        self.engine = engine
        self.ids = ids
        self.computed = 0  # texts
        size = engine.spec.vocab_size if ids is None else len(ids)
        real = engine.spec
        features = real.features // real.hidden_size
        self.spec: ModelSpec = msgspec.structs.replace(
            real, vocab_size=size, logits_size=size, hidden_size=1, features=features
        )
        self._known: dict[Text, FloatArray] = {}
        self._states: dict[Text, FloatArray] = {}
        self._kv: KVBuffers | None = None
        self._held: list[Text] = [()] * (_ROWS if engine.capabilities.batch else 1)  # what each row's cache holds

    def logits(self, text: Text) -> FloatArray:
        """Logits [V] after `text`; not to be changed."""
        if text not in self._known:
            self.prepare([text])
        return self._known[text]

    def states(self, text: Text) -> FloatArray:
        """The engine's hidden states [taps * H] of the last token of `text`; not to be changed."""
        self.logits(text)
        return self._states[text]

    def prepare(self, texts: Iterable[Text]) -> None:
        """Compute what is missing of `texts`, several in a pass."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(missing), len(self._held)):
            part = missing[start : start + len(self._held)]
            for text, (logits, states) in zip(part, self._compute(part), strict=True):
                self._states[text] = states
                if self.ids is not None:
                    logits = logits[np.asarray(self.ids)]
                    logits[NOTHING] = -np.inf
                self._known[text] = logits
        self.computed += len(missing)

    def close(self) -> None:
        """Give back the cache; what is known stays."""
        self._kv = None

    def _real(self, text: Text) -> Text:
        if self.ids is None:
            return text
        if NOTHING in text:
            raise EngineError("the text that a pass attends holds padding: the cache was committed or moved wrongly")
        return tuple(self.ids[token] for token in text)

    def _slots(self, common: int) -> int:
        """How many slots hold the first `common` tokens of a text."""
        return common

    def _input(self, text: Text, past: int) -> RowInput:
        """What scores `text` behind the slots `past`."""
        return RowInput(self._real(text)[past:], 1)

    def _spread(self, logits: FloatArray) -> FloatArray:
        """The engine's logits as logits of the vocabulary."""
        return logits

    def _compute(self, texts: Sequence[Text]) -> list[tuple[FloatArray, FloatArray]]:
        """Logits [vocabulary] after each text and states of its last token; a cache is used where it is the same."""
        shared = [self._slots(_common(held, text[:-1])) for held, text in zip(self._held, texts, strict=False)]
        inputs = [self._input(text, past) for past, text in zip(shared, texts, strict=True)]
        spec = self.engine.spec
        chunk = pack(inputs, np.array(shared, np.int64), LEAST_WIDTH, spec.max_length)
        slots = max(shared) + chunk.width
        if self._kv is None:
            self._kv = self.engine.allocate(len(self._held), capacity_bucket(slots))
            self._held = [()] * len(self._held)
            return self._compute(texts)
        if slots > self._kv.capacity:
            self._kv.resize(self._kv.rows, capacity_bucket(slots), self._kv.capacity)
        logits = self.engine.step(chunk, self._kv)
        self._held[: len(texts)] = texts
        hidden = self._kv.hidden if spec.taps else np.empty((len(texts), chunk.width, 0), np.float32)
        return [
            (self._spread(logits[row, 0, : spec.vocab_size].copy()), hidden[row, len(fed.tokens) - 1].copy())
            for row, fed in enumerate(inputs)
        ]


class TableKV:
    """The cache of a table's engine: token ids by slot, -1 where none was written."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.tokens = np.full((rows, capacity), -1, np.int64)
        self.hidden: FloatArray = np.empty((rows, 0, 0), np.float32)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.tokens.shape[0])

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return int(self.tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens.nbytes

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """See `KVBuffers.resize`."""
        old, self.tokens = self.tokens, np.full((rows, capacity), -1, np.int64)
        self.tokens[: old.shape[0], :used] = old[:rows, :used]

    def move_row(self, source: int, target: int, used: int) -> None:
        """See `KVBuffers.move_row`; what lay there is gone."""
        self.tokens[target] = -1
        self.tokens[target, :used] = self.tokens[source, :used]

    def clear(self, row: int) -> None:
        """See `KVBuffers.clear`."""
        self.tokens[row] = -1

    def move_slots(self, row: int, sources: IntArray, start: int) -> None:
        """See `KVBuffers.move_slots`."""
        self.tokens[row, start : start + len(sources)] = self.tokens[row, sources]

    def first_layers(self, layers: int) -> "TableKV":
        """See `KVBuffers.first_layers`: tokens are those of every layer."""
        return self

    def read(self, row: int, used: int) -> np.ndarray:
        """See `KVBuffers.read`."""
        return self.tokens[row, :used][None, None, :, None].copy()

    def write(self, row: int, data: np.ndarray) -> None:
        """See `KVBuffers.write`; what lay behind is gone."""
        self.tokens[row] = -1
        self.tokens[row, : data.shape[2]] = data[0, 0, :, 0]


class Book:
    """Texts by number, 1, 2, ...: what stands for hidden states, so that each tells which text it was left at."""

    def __init__(self) -> None:
        self._numbers: dict[Text, int] = {}
        self._texts: list[Text] = []

    def number(self, text: Text) -> int:
        """The number of `text`, a new one for a new text."""
        if text not in self._numbers:
            self._texts.append(text)
            self._numbers[text] = len(self._texts)
        return self._numbers[text]

    def text(self, number: int) -> Text:
        """The text of `number`. Raises `EngineError` when there is none."""
        if not 0 < number <= len(self._texts):
            raise EngineError(f"hidden state {number} was never left by a pass")
        return self._texts[number - 1]


class TableEngine:
    """An `Engine` whose logits are a table's, as `change` makes them. Not for several threads.

    Hidden states are the numbers that `book` has of the texts that they were left at.
    """

    def __init__(self, table: Table, change: Change | None = None, book: Book | None = None) -> None:
        self.table, self.book = table, book or Book()
        self.spec = table.spec
        self.capabilities: Capabilities = table.engine.capabilities
        self._change = change
        self._changed: dict[Text, FloatArray] = {}

    def allocate(self, rows: int, capacity: int) -> TableKV:
        """See `Engine.allocate`."""
        return TableKV(rows, capacity)

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        """See `Engine.step`. Raises `EngineError` for slots that were never written and for wrong positions."""
        if not isinstance(kv, TableKV):
            raise ContractError(f"a table takes the buffers that it allocates, not {type(kv).__name__}")
        chunk.validate(self.spec, kv.rows - first_row, kv.capacity)
        nodes = [self._texts(chunk, kv, first_row, b) for b in range(chunk.rows)]  # what each node stands behind
        texts = [
            [row[node] for node in wanted] for row, wanted in zip(nodes, chunk.logit_indices.tolist(), strict=True)
        ]
        self.table.prepare(text for row in texts for text in row if not self._is_padding(text))
        out = np.zeros((*chunk.logit_indices.shape, self.spec.logits_size), self.spec.dtype)
        for b, wanted in enumerate(texts):
            for n, text in enumerate(wanted):
                if not self._is_padding(text):
                    out[b, n] = self.logits(text)
        if self.spec.taps:
            numbers = [[self.book.number(text) for text in row] for row in nodes]
            kv.hidden = np.repeat(np.array(numbers, np.float32)[..., None], self.spec.tapped_size, -1)
        return out

    def logits(self, text: Text) -> FloatArray:
        """Logits [V] after `text`; not to be changed."""
        if self._change is None:
            return self.table.logits(text)
        if text not in self._changed:
            self._changed[text] = self._change(text, self.table.logits(text))
        return self._changed[text]

    def close(self) -> None:
        """See `Engine.close`: the table stays."""

    def _is_padding(self, text: Text) -> bool:
        """Whether a row that wants nothing was padded: `pack` asks for the logits of its first position."""
        return self.table.ids is not None and text[-1] == NOTHING

    def _texts(self, chunk: Chunk, kv: TableKV, first_row: int, b: int) -> list[Text]:
        """What each node of row `b` attends: committed tokens and its path. Writes the chunk's tokens.

        Raises `EngineError` for a node that attends later ones, and for wrong positions.
        """
        past, row = int(chunk.past_lens[b]), kv.tokens[first_row + b]
        before, ids = tuple(row[:past].tolist()), chunk.input_ids[b].tolist()
        if -1 in before:
            raise EngineError(f"row {first_row + b} attends slot {before.index(-1)}, which was never written")
        row[past : past + chunk.width] = ids
        found: list[Text] = []
        for node, (mask, position) in enumerate(
            zip(chunk.chunk_mask[b].tolist(), chunk.position_ids[b].tolist(), strict=True)
        ):
            text = (*before, *(token for token, seen in zip(ids, mask, strict=True) if seen))
            if not mask[node] or True in mask[node + 1 :]:
                raise EngineError(f"token {node} of a pass attends later ones, or not itself")
            if position != min(len(text), self.spec.max_length) - 1:
                raise EngineError(f"a token after {len(text) - 1} others was given position {position}")
            found.append(text)
        return found


def _common(left: Text, right: Text) -> int:
    """Length of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
