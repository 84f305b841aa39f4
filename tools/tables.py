"""Engines that look their logits up: the real engine computes a text's logits once, then they are read many times.

So the whole runtime (scheduler, drafter, cache, acceptance) runs at the speed of a dictionary, and what it should have
given can be computed from the same table. The caches of such an engine hold token ids: a slot that was rolled back,
moved wrongly or never written makes another text, and so other logits. Most tables speak of a few tokens only, with
numbers of their own: ids 1, 2, ... stand for some of the model's, id 0 for padding, which is never a token.

This module knows texts and logits: nothing of speculation.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
        self.spec: ModelSpec = msgspec.structs.replace(engine.spec, vocab_size=size, logits_size=size)
        self._known: dict[Text, FloatArray] = {}
        self._states: dict[Text, FloatArray] = {}
        self._numbers: dict[Text, int] = {}
        self._kv: KVBuffers | None = None
        self._held: list[Text] = [()] * (_ROWS if engine.capabilities.batch else 1)  # what each row's cache holds

    def logits(self, text: Text) -> FloatArray:
        """Logits [V] after `text`; not to be changed."""
        if text not in self._known:
            self.prepare([text])
        return self._known[text]

    def state(self, text: Text) -> FloatArray:
        """The engine's hidden states [taps * H] at the last token of `text`; not to be changed."""
        if text not in self._states:
            self.prepare([text])
        return self._states[text]

    def number(self, text: Text) -> int:
        """A number that stands for `text` where an engine has its hidden state."""
        return self._numbers.setdefault(text, len(self._numbers))

    def numbered(self) -> list[Text]:
        """All texts that have a number, in its order."""
        return list(self._numbers)

    def prepare(self, texts: Iterable[Text]) -> None:
        """Compute what is missing of `texts`, several in a pass."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(missing), len(self._held)):
            part = missing[start : start + len(self._held)]
            for text, (logits, state) in zip(part, self._compute([self._real(text) for text in part]), strict=True):
                if self.ids is not None:
                    logits = logits[np.asarray(self.ids)]
                    logits[NOTHING] = -np.inf
                self._known[text], self._states[text] = logits, state
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

    def _compute(self, texts: Sequence[Text]) -> list[tuple[FloatArray, FloatArray]]:
        """Logits [vocabulary] after each text (the model's ids), and hidden states [taps * H] (none without taps).

        A cache is used as far as its text is the same.
        """
        shared = [_common(held, text[:-1]) for held, text in zip(self._held, texts, strict=False)]
        inputs = [RowInput(text[past:], 1) for past, text in zip(shared, texts, strict=True)]
        spec = self.engine.spec
        chunk = pack(inputs, np.array(shared, np.int64), LEAST_WIDTH, spec.max_length)
        slots = max(shared) + chunk.width
        if self._kv is None:
            self._kv = self.engine.allocate(len(self._held), capacity_bucket(slots))
            self._held = [()] * len(self._held)
            return self._compute(texts)
        if slots > self._kv.capacity:
            self._kv.grow(self._kv.rows, capacity_bucket(slots), self._kv.capacity)
        logits = self.engine.step(chunk, self._kv)
        self._held[: len(texts)] = texts
        scored = [logits[row, 0, : spec.vocab_size].copy() for row in range(len(texts))]
        if not spec.taps:
            return [(own, own[:0]) for own in scored]
        hidden = self._kv.hidden
        return [(own, hidden[row, len(inputs[row].tokens) - 1].copy()) for row, own in enumerate(scored)]


class TableKV:
    """The cache of a table's engine: token ids by slot, -1 where none was written.

    A token's hidden state is the number of the text that it ends, as often as it is wide. `states` makes those of the
    last pass.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.tokens = np.full((rows, capacity), -1, np.int64)
        self.states: Callable[[], FloatArray] | None = None

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

    @property
    def hidden(self) -> FloatArray:
        """See `KVBuffers.hidden`."""
        if self.states is None:
            raise EngineError("no hidden states: no pass was made")
        return self.states()

    def grow(self, rows: int, capacity: int, used: int) -> None:
        """See `KVBuffers.grow`."""
        old, self.tokens = self.tokens, np.full((rows, capacity), -1, np.int64)
        self.tokens[: old.shape[0], :used] = old[:, :used]

    def move_row(self, source: int, target: int, used: int) -> None:
        """See `KVBuffers.move_row`; what lay there is gone."""
        self.tokens[target] = -1
        self.tokens[target, :used] = self.tokens[source, :used]

    def move_slots(self, row: int, sources: IntArray, start: int) -> None:
        """See `KVBuffers.move_slots`."""
        self.tokens[row, start : start + len(sources)] = self.tokens[row, sources]

    def first_layers(self, layers: int) -> "TableKV":
        """See `KVBuffers.first_layers`: tokens are those of every layer."""
        return self

    def read(self, row: int, used: int) -> np.ndarray:
        """See `KVBuffers.read`."""
        return self.tokens[row, :used][None, None, :, None].copy()


class TableEngine:
    """An `Engine` whose logits are a table's, as `change` makes them. Not for several threads."""

    def __init__(self, table: Table, change: Change | None = None) -> None:
        self.table = table
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
        texts: list[list[Text]] = []
        befores: list[Text] = []
        for b, past in enumerate(chunk.past_lens.tolist()):
            row = kv.tokens[first_row + b]
            before, ids = tuple(row[:past].tolist()), chunk.input_ids[b].tolist()
            if -1 in before:
                raise EngineError(f"row {first_row + b} attends slot {before.index(-1)}, which was never written")
            befores.append(before)
            row[past : past + chunk.width] = ids
            mask, positions = chunk.chunk_mask[b].tolist(), chunk.position_ids[b].tolist()
            wanted = chunk.logit_indices[b].tolist()
            texts.append([self._text(before, ids, mask[node], node, positions[node]) for node in wanted])
        kv.states = partial(self._states, befores, chunk)
        self.table.prepare(text for row in texts for text in row if not self._is_padding(text))
        out = np.zeros((*chunk.logit_indices.shape, self.spec.logits_size), self.spec.dtype)
        for b, wanted in enumerate(texts):
            for n, text in enumerate(wanted):
                if not self._is_padding(text):
                    out[b, n] = self.logits(text)
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

    def _states(self, befores: Sequence[Text], chunk: Chunk) -> FloatArray:
        """Hidden states [B, S, taps * H] of a pass behind the texts `befores`."""
        attended = [
            [(*before, *ids[seen].tolist()) for seen in mask]
            for before, ids, mask in zip(befores, chunk.input_ids, chunk.chunk_mask, strict=True)
        ]
        numbers = np.array([[self.table.number(text) for text in row] for row in attended], np.float64)
        return np.broadcast_to(numbers[..., None], (*numbers.shape, self.spec.tapped_size))

    def _is_padding(self, text: Text) -> bool:
        """Whether a row that wants nothing was padded: `pack` asks for the logits of its first position."""
        return self.table.ids is not None and text[-1] == NOTHING

    def _text(self, before: Text, ids: list[int], mask: list[bool], node: int, position: int) -> Text:
        """What a node attends: `before` and the nodes of its `mask`. Raises `EngineError` if it is not the last one."""
        text = (*before, *(token for token, seen in zip(ids, mask, strict=True) if seen))
        if not mask[node] or True in mask[node + 1 :]:
            raise EngineError(f"token {node} of a pass attends later ones, or not itself")
        if position != min(len(text), self.spec.max_length) - 1:
            raise EngineError(f"a token after {len(text) - 1} others was given position {position}")
        return text


def _common(left: Text, right: Text) -> int:
    """Length of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
