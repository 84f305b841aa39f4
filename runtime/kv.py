"""A model and what its rows hold: cache buffers, committed lengths, prefill, one pass over all rows.

Rows 0 .. n-1 are active. A row's cache is what lies below `lens[row]`: committing adds to that number, rejecting adds
less, and nothing is copied but the accepted path of a tree that is not its first branch. A row that leaves is replaced
by the last one. Used alike for target and draft; a draft that is the target's first layers borrows the target's cache.
This module does not know who proposes or accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from specdec.engines.base import Engine, KVBuffers, capacity_bucket
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import FloatArray, ModelSpec
from specdec.engines.errors import EngineError, RequestError
from specdec.runtime.controller import PassTimes
from specdec.runtime.request import Row

PREFILL_WIDTH = 256  # tokens of a prefill pass; wider gains nothing on a CPU and holds more activations
SPARE = 64  # slots behind the longest row that buffers keep when they shrink


class CachedModel:
    """One engine with the cache of up to `max_rows` rows.

    `min_width`: fewest positions of a pass; 2 keeps the bits of an engine whose one-token kernels differ (`exact`).
    `keeps_hidden`: the hidden states of what is committed are kept until they are taken (`take_hidden`).
    `times`: learn what each pass takes.
    `seconds`: time spent in the engine so far.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int,
        min_width: int,
        keeps_hidden: bool = False,
        times: PassTimes | None = None,
    ) -> None:
        self.engine = engine
        self.max_rows = max_rows
        self.min_width = min_width
        self.rows = 0
        self.lens = np.zeros(max_rows, np.int64)  # committed tokens of each row
        self.seconds = 0.0
        self._times = times
        self._kept: list[list[FloatArray]] | None = [] if keeps_hidden else None  # by row
        self._kv: KVBuffers | None = None

    @property
    def max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.engine.spec.max_length

    @property
    def kv(self) -> KVBuffers | None:
        """The buffers in use, None before the first row."""
        return self._kv

    @property
    def hidden(self) -> FloatArray:
        """Hidden states [rows, S, taps * H] of the last pass, valid until the next one."""
        assert self._kv is not None, "a pass came before"
        return self._kv.hidden

    def add_row(self) -> int:
        """Open the next row, empty; return its index."""
        if self.rows == self.max_rows:
            raise ValueError(f"all {self.max_rows} rows are in use")
        self.lens[self.rows] = 0
        if self._kept is not None:
            self._kept.append([])
        self.rows += 1
        return self.rows - 1

    def drop_row(self, row: int, *, spoiled: bool = False) -> None:
        """Close `row`; the last row takes its index. `spoiled`: its slots may hold what is no number."""
        last = self.rows - 1
        if spoiled and self._kv is not None and row < self._kv.rows:
            self._kv.clear(row)
        if row != last:
            if self._kv is not None and self.lens[last] > 0:  # an empty row may lie beyond the buffers
                self._kv.move_row(last, row, int(self.lens[last]))
            self.lens[row] = self.lens[last]
        if self._kept is not None:
            self._kept[row] = self._kept[last]
            self._kept.pop()
        self.rows = last

    def prefill(self, row: int, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Commit `tokens` to `row`, in passes of `PREFILL_WIDTH` that leave the other rows alone.

        features [len(tokens), F], if the model takes them.
        """
        for start in range(0, len(tokens), PREFILL_WIDTH):
            part = slice(start, start + PREFILL_WIDTH)
            fed = RowInput(tokens[part], 0, features=None if features is None else features[part])
            self._run([fed], row)
            if self._kept is not None:
                self._kept[row].append(self.hidden[0, : len(fed.tokens)].copy())
            self.lens[row] += len(fed.tokens)

    def save(self, row: int, count: int) -> np.ndarray:
        """Copy of the first `count` committed slots of `row`, for `load`: [2 * layers, H_kv, count, D]; count > 0."""
        assert self._kv is not None, "a pass came before"
        return self._kv.read(row, count)

    def load(self, row: int, saved: np.ndarray, count: int, slots: int) -> None:
        """Commit the first `count` tokens of what was saved to `row`, which is empty, without a pass.

        `slots`: what the row will hold soon, so that buffers grow once. Bits are those of the passes that wrote them.
        Their hidden states are not kept (`take_hidden`): who needs the last one commits a token less. Raises
        `EngineError` when the buffers cannot grow, `ContractError` for what another engine saved.
        """
        self.reserve(slots).write(row, saved[:, :, :count])
        self.lens[row] = count

    def step(self, inputs: Sequence[RowInput]) -> list[FloatArray]:
        """Score one input for each of the first active rows in one pass; commits nothing.

        Returns, per row, logits [row.logits, V] of the vocabulary, valid until the next pass; `check` them.
        """
        if len(inputs) > self.rows:
            raise ValueError(f"{len(inputs)} inputs for {self.rows} rows")
        size = self.engine.spec.vocab_size  # the rest is padding of the checkpoint
        before, width = self.seconds, max(self.min_width, *(len(row.tokens) for row in inputs))
        scored = self._run(inputs, 0)
        if self._times is not None:
            self._times.observe(len(inputs), width, 1000 * (self.seconds - before))
        return [part[: row.logits, :size] for part, row in zip(scored, inputs, strict=True)]

    def check(self, row: int, logits: FloatArray) -> None:
        """Raise `EngineError` when logits [N, V] of `row` are NaN or infinite, or all -inf."""
        if logits.size and not np.isfinite(logits.max(axis=-1)).all():  # a NaN is its row's maximum
            raise EngineError(
                f"{self.engine.capabilities.device} returned logits that are not numbers, in row {row} after "
                f"{self.lens[row]} tokens: the graph overflows, or the engine is broken; try another precision"
            )

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Keep the inputs `nodes` of the last pass of `row`: a path, ascending.

        A path that is not 0, 1, 2, ... is gathered to the slots behind what is committed.
        """
        kept = next((place for place, node in enumerate(nodes) if place != node), len(nodes))
        if kept < len(nodes):
            assert self._kv is not None, "a pass came before"
            start = int(self.lens[row])
            self._kv.move_slots(row, start + np.asarray(nodes[kept:], np.int64), start + kept)
        if self._kept is not None:
            self._kept[row].append(self.hidden[row, list(nodes)])
        self.lens[row] += len(nodes)

    def take_hidden(self, row: int) -> FloatArray:
        """Hidden states [n, taps * H] of the tokens committed to `row` since they were last taken, in order."""
        assert self._kept is not None, "opened to keep them"
        taken = np.concatenate(self._kept[row] or [np.empty((0, self.engine.spec.tapped_size), np.float32)])
        self._kept[row].clear()
        return taken

    def _run(self, inputs: Sequence[RowInput], first_row: int) -> FloatArray:
        past = self.lens[first_row : first_row + len(inputs)]
        chunk = pack(inputs, past, self.min_width, self.max_length)
        kv = self.reserve(int(past.max()) + chunk.width)
        started = perf_counter()
        logits = self.engine.step(chunk, kv, first_row)
        self.seconds += perf_counter() - started
        return logits

    def reserve(self, slots: int, used: int = 0) -> KVBuffers:
        """Make the buffers hold all active rows and `slots` slots; what is committed stays, and slots below `used`."""
        if self._kv is None:
            self._kv = self.engine.allocate(self.rows, capacity_bucket(slots))
        elif self.rows > self._kv.rows or slots > self._kv.capacity:
            capacity = max(self._kv.capacity, capacity_bucket(slots))
            self._kv.resize(max(self.rows, self._kv.rows), capacity, max(used, int(self.lens[: self.rows].max())))
        return self._kv

    def shrink(self, slots: int = 0) -> None:
        """Give memory back when the active rows need half of the buffers or less: an engine attends over all of it.

        `slots`: what they will hold soon, if that is more than they do.
        """
        if self._kv is None or not self.engine.capabilities.growable:
            return
        used = int(self.lens[: self.rows].max(initial=0))
        rows, capacity = max(self.rows, 1), capacity_bucket(max(used, slots) + SPARE)
        rows = rows if 2 * rows <= self._kv.rows else self._kv.rows
        capacity = capacity if 2 * capacity <= self._kv.capacity else self._kv.capacity
        if (rows, capacity) != (self._kv.rows, self._kv.capacity):
            self._kv.resize(rows, capacity, used)


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`limit` bytes for the caches of all `models` (target, draft), whose rows grow to their ends.

    Buffers are rectangular: all rows have the slots of the longest. A pass writes up to `spare` slots behind a row. The
    copy that is made when buffers grow comes on top, for a moment.
    """

    limit: int
    models: Sequence[ModelSpec]
    spare: int

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether these rows can all run to their ends together."""
        return self.needed(rows) <= self.limit

    def check(self, row: Row) -> None:
        """Raise `RequestError` for a row that does not fit alone."""
        if not self.fits([row]):
            raise RequestError(
                f"{len(row.prompt)} tokens and up to {row.params.max_new_tokens} new ones need "
                f"{self.needed([row]) / 2**20:.1f} MiB of cache, and {self.limit / 2**20:.1f} are allowed: "
                "ask for fewer, or allow more"
            )

    def needed(self, rows: Sequence[Row]) -> int:
        """Bytes that the caches of these rows take at their ends."""
        longest = max(min(len(row.prompt) + row.params.max_new_tokens, row.max_length) for row in rows)
        slots = capacity_bucket(longest + self.spare)
        return sum(spec.kv_bytes(len(rows), slots) for spec in self.models)


class BorrowedModel(CachedModel):
    """The first layers of `target`, `engine`, on the target's own cache, which they fill with the very same content.

    So what the target has committed is committed here (`follow`): there is nothing to prefill and no row to add or
    drop. Passes write behind that, where the target's next pass overwrites whatever lies there before it is attended.
    """

    def __init__(self, engine: Engine, target: CachedModel, *, min_width: int) -> None:
        super().__init__(engine, max_rows=target.max_rows, min_width=min_width)
        self._target = target

    def follow(self) -> None:
        """Hold the target's rows, and of each what the target holds: what was committed here besides is dropped."""
        self.rows = self._target.rows
        self.lens[: self.rows] = self._target.lens[: self.rows]

    def shrink(self, slots: int = 0) -> None:
        """See `CachedModel.shrink`: the buffers are the target's."""

    def reserve(self, slots: int, used: int = 0) -> KVBuffers:
        """See `CachedModel.reserve`: the target's buffers, of which this model sees its layers."""
        whole = self._target.reserve(slots, max(used, int(self.lens[: self.rows].max())))
        if self._kv is None:
            self._kv = whole.first_layers(self.engine.spec.num_layers)
        return self._kv
