"""A deterministic engine without a graph, which breaks loudly when the runtime breaks the contract.

Its logits are a hash of the tokens that a position attends, so any stale, missing or foreign slot changes them; and it
raises when a committed slot was never written, was rolled back over, holds padding, or stands at another position.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from specdec.engines.base import Capabilities
from specdec.engines.contract import Chunk, FloatArray, ModelSpec
from specdec.engines.errors import EngineError

STALE, PADDING, WRITTEN = 0, 1, 2


def fake_spec(
    vocab_size: int = 8, *, max_length: int = 64, logits_size: int | None = None, taps: tuple[str, ...] = ()
) -> ModelSpec:
    return ModelSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        logits_size=logits_size or vocab_size,
        vocab_size=vocab_size,
        max_length=max_length,
        taps=taps,
    )


@dataclass
class FakeKV:
    tokens: np.ndarray  # [rows, capacity]
    state: np.ndarray  # [rows, capacity]
    states: np.ndarray | None = None  # hidden states of the last pass

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    @property
    def hidden(self) -> FloatArray:
        if self.states is None:
            raise EngineError("the fake engine has no hidden states")
        return self.states

    def resize(self, rows: int, capacity: int, used: int) -> None:
        assert used <= capacity
        old = self.tokens, self.state
        self.tokens = np.full((rows, capacity), -1)
        self.state = np.full((rows, capacity), STALE)
        for new, kept in zip((self.tokens, self.state), old, strict=True):
            new[: kept.shape[0], :used] = kept[:rows, :used]

    def move_row(self, source: int, target: int, used: int) -> None:
        self.tokens[target, :used] = self.tokens[source, :used]
        self.state[target] = STALE
        self.state[target, :used] = self.state[source, :used]
        self.state[source] = STALE

    def clear(self, row: int) -> None:
        self.tokens[row], self.state[row] = -1, STALE

    def move_slots(self, row: int, sources: np.ndarray, start: int) -> None:
        assert all(source >= start + i for i, source in enumerate(sources))
        self.tokens[row, start : start + len(sources)] = self.tokens[row, sources]
        self.state[row, start : start + len(sources)] = self.state[row, sources]

    def first_layers(self, layers: int) -> "FakeKV":
        return self

    def read(self, row: int, used: int) -> np.ndarray:
        """Tokens where keys would be, and their states where values would be."""
        assert (self.state[row, :used] == WRITTEN).all(), f"row {row} is read where it was never written"
        return np.stack([self.tokens[row, :used], self.state[row, :used]])[:, None, :, None]

    def write(self, row: int, data: np.ndarray) -> None:
        self.state[row] = STALE
        self.tokens[row, : data.shape[2]], self.state[row, : data.shape[2]] = data[:, 0, :, 0]


@dataclass
class FakeEngine:
    """`order`: how many attended tokens the logits depend on (None: all). `min_width`: narrower passes raise.

    A token's hidden state, the same at every tap, is the number of the text that it ends: its place in `texts`.
    """

    spec: ModelSpec
    seed: int = 0
    order: int | None = None
    sharpness: float = 2.0
    min_width: int = 1
    widths: list[int] = field(default_factory=list)
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(device="fake"))
    closed: bool = False
    known: dict[tuple[int, ...], FloatArray] = field(default_factory=dict)
    texts: dict[tuple[int, ...], int] = field(default_factory=dict)
    prefilling: bool = False  # set by `rows.WatchedModel`: a prefill asks for no logits that tell padding from tokens

    def allocate(self, rows: int, capacity: int) -> FakeKV:
        return FakeKV(np.full((rows, capacity), -1), np.full((rows, capacity), STALE))

    def close(self) -> None:
        self.closed = True

    def logits_after(self, tokens: list[int]) -> FloatArray:
        """Logits [V] after `tokens`: what any way of computing them must give."""
        seen = tuple(tokens if self.order is None else tokens[-self.order :])
        if seen not in self.known:
            rng = np.random.default_rng([self.seed, zlib.crc32(np.asarray(seen, np.int64).tobytes())])
            self.known[seen] = (rng.standard_normal(self.spec.logits_size) * self.sharpness).astype(np.float32)
        return self.known[seen].copy()

    def step(self, chunk: Chunk, kv: FakeKV, first_row: int = 0) -> FloatArray:
        if self.closed:
            raise EngineError("the engine is closed")
        chunk.validate(self.spec, kv.rows - first_row, kv.capacity)
        if chunk.width < self.min_width:
            raise AssertionError(f"a pass of {chunk.width} positions, at least {self.min_width} are due")
        self.widths.append(chunk.width)
        out = np.full((*chunk.logit_indices.shape, self.spec.logits_size), np.nan, np.float32)
        for b in range(chunk.rows):
            row, past = first_row + b, int(chunk.past_lens[b])
            if (kv.state[row, :past] != WRITTEN).any():
                bad = int(np.flatnonzero(kv.state[row, :past] != WRITTEN)[0])
                kind = "padding" if kv.state[row, bad] == PADDING else "a stale slot"
                raise AssertionError(f"row {row} attends {kind} at {bad} of {past}")
            kv.state[row, past:] = STALE
            last_wanted = int(chunk.logit_indices[b].max())
            for i in range(chunk.width):
                kv.tokens[row, past + i] = chunk.input_ids[b, i]
                padding = i > last_wanted and not self.prefilling
                kv.state[row, past + i] = PADDING if padding else WRITTEN
            for n, i in enumerate(chunk.logit_indices[b]):
                out[b, n] = self._node(chunk, kv, b, row, past, int(i))
        if self.spec.taps:
            kv.states = np.zeros((chunk.rows, chunk.width, self.spec.tapped_size))
            for b, i in np.ndindex(chunk.rows, chunk.width):
                before = kv.tokens[first_row + b, : chunk.past_lens[b]].tolist()
                text = (*before, *chunk.input_ids[b, chunk.chunk_mask[b, i]].tolist())
                kv.states[b, i] = self.texts.setdefault(text, len(self.texts))
        return out

    def _node(self, chunk: Chunk, kv: FakeKV, b: int, row: int, past: int, i: int) -> FloatArray:
        seen = [j for j in range(chunk.width) if chunk.chunk_mask[b, i, j]]
        if seen[-1] != i:
            raise AssertionError(f"row {row}: node {i} attends a later node or not itself: {seen}")
        if past + len(seen) <= self.spec.max_length:
            positions = [int(chunk.position_ids[b, j]) for j in seen]
            if positions != list(range(past, past + len(seen))):
                raise AssertionError(f"row {row}: path {seen} of node {i} has positions {positions} after {past}")
        return self.logits_after([*kv.tokens[row, :past].tolist(), *(int(chunk.input_ids[b, j]) for j in seen)])
