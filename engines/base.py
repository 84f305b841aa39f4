"""What a backend must provide: load a graph, allocate cache buffers, run one chunk in place.

An engine holds weights and no conversation: all state of a row is in `KVBuffers` (memory) and in the caller's
`past_lens` (how much of it counts). Nothing here knows drafting, acceptance or sampling.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specdec.engines.contract import Chunk, FloatArray, HeadsSpec, IntArray, ModelSpec
from specdec.engines.errors import ContractError


def capacity_bucket(slots: int) -> int:
    """Return the capacity to allocate for `slots` slots: a multiple of 128 up to 1024, of 512 beyond.

    Engines attend over the whole capacity, so it stays close to the need, while growing (a copy) stays rare.
    """
    step = 128 if slots <= 1024 else 512
    return -(-slots // step) * step


def check_slots(data: np.ndarray, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
    """Raise `ContractError` unless `data` is of `dtype` and `shape` [2 * layers, H_kv, C, D], with C slots at most."""
    layers, heads, capacity, size = shape
    fits = data.ndim == 4 and data.shape[2] <= capacity and data.shape == (layers, heads, data.shape[2], size)
    if not fits or data.dtype != dtype:
        raise ContractError(f"slots {list(data.shape)} of {data.dtype} do not fit into a row {list(shape)} of {dtype}")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, known before work begins.

    `batch`: several rows a pass. `growable`: rows and capacity may change after loading, to fewer as well. `device`:
    where it runs, in words.
    """

    device: str
    batch: bool = True
    growable: bool = True


class KVBuffers(Protocol):
    """Cache memory of `rows` rows with `capacity` slots each; allocated finite, never copied by a pass."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def capacity(self) -> int:
        """Slots per row."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    @property
    def hidden(self) -> FloatArray:
        """Hidden states [B, S, taps * H] of the last pass on these buffers, valid until the next one.

        Raises `EngineError` when the engine has none (`ModelSpec.taps`).
        """
        ...

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """Reallocate to `rows` and `capacity`, more or fewer; of rows that stay, slots below `used` keep their content.

        Raises `EngineError` when the engine's capacity is fixed or memory is short; the old buffers stay valid then.
        """
        ...

    def move_row(self, source: int, target: int, used: int) -> None:
        """Copy slots below `used` of row `source` over row `target`."""
        ...

    def clear(self, row: int) -> None:
        """Make all slots of row `row` zero: what is no number spoils sums even where it is masked (0 times NaN)."""
        ...

    def move_slots(self, row: int, sources: IntArray, start: int) -> None:
        """Copy slots `sources` (ascending, none below its place) of `row` to `start`, `start + 1`, ..."""
        ...

    def first_layers(self, layers: int) -> "KVBuffers":
        """The same memory for an engine that has only the first `layers` layers of this one's; it follows `resize`.

        Nothing is allocated, and what either engine writes the other one reads. Raises `EngineError` when there are
        fewer layers, or the engine cannot share its cache.
        """
        ...

    def read(self, row: int, used: int) -> np.ndarray:
        """Copy of row `row`'s slots below `used`: [2 * layers, H_kv, used, D], a layer's keys before its values.

        In the cache's own dtype; bfloat16, which numpy lacks, as its bits (uint16). Not for every pass: it may go
        through the host.
        """
        ...

    def write(self, row: int, data: np.ndarray) -> None:
        """Put `data`, as `read` gave it here or of other buffers of this engine, into the first slots of row `row`.

        Slots behind them stay. Raises `ContractError` when shape or dtype are not this cache's.
        """
        ...


class Engine(Protocol):
    """One loaded model. Threads may call `step` at the same time, each on buffers of its own."""

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        ...

    def allocate(self, rows: int, capacity: int) -> KVBuffers:
        """New cache buffers. Raises `EngineError` when they do not fit."""
        ...

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        """Run `chunk` on rows `first_row ..` of `kv`: write its keys and values at `past_lens`, return its logits.

        `kv`: buffers of this engine, or those of an engine with more layers by `first_layers`.
        Returns logits [B, N, V], valid until the next call with the same buffers. The slots from `past_lens[b]` to
        `past_lens[b] + S` are overwritten; no other memory of `kv` changes. Raises `ContractError` for a chunk that
        does not fit, `EngineError` when the engine fails.
        """
        ...

    def close(self) -> None:
        """Release the engine; further calls raise `EngineError`. Closing twice is allowed."""
        ...


class Heads(Protocol):
    """Loaded Medusa heads. They hold no state; threads may call `logits` at the same time."""

    @property
    def spec(self) -> HeadsSpec:
        """Shape of the heads."""
        ...

    def logits(self, features: FloatArray) -> FloatArray:
        """Logits [B, heads, logits_size] from the target's last hidden states `features` [B, hidden_size].

        Raises `ContractError` for another shape, `EngineError` when the engine fails.
        """
        ...

    def close(self) -> None:
        """Release the heads; further calls raise `EngineError`. Closing twice is allowed."""
        ...
