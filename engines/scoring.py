"""Scoring known tokens with an engine in any split, batch and order: what the gates and the verifier are made of.

`score` runs whole sequences; `Round` is one pass written down with the text that each of its rows has committed, so
that every logit can be traced back to the exact token path that it must depend on. Only numpy and the `Engine`
protocol: no torch, no bundle, and no opinion on what the right logits are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.engines.base import Engine, KVBuffers
from specdec.engines.chunk import RowInput, nodes_to, pack
from specdec.engines.contract import Chunk, FloatArray

LEAST_WIDTH = 2  # positions of a pass: on many graphs one-token passes take other kernels (docs/lossless.md)

TokenPath = tuple[int, ...]  # tokens from the start of the text to one scored token, both included


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass over the rows `first_row ..`: what each has committed, what it adds, and the tree of the new tokens.

    `parents[i]` is the index of node i's parent among the new tokens, -1 for the root (None: a chain). Shorter rows are
    padded. The logits of the last `scored` tokens of each row are asked for.
    """

    name: str
    past: tuple[TokenPath, ...]
    tokens: tuple[TokenPath, ...]
    parents: tuple[int, ...] | None = None
    scored: int = 1
    first_row: int = 0

    def chunk(self, max_length: int) -> Chunk:
        """The pass as the engine takes it."""
        inputs = [RowInput(row, self.scored, self.parents) for row in self.tokens]
        return pack(inputs, np.array([len(row) for row in self.past], np.int64), LEAST_WIDTH, max_length)

    def paths(self) -> Iterator[tuple[int, int, TokenPath]]:
        """(row, index among the scored, path) of every scored token."""
        for row, tokens in enumerate(self.tokens):
            parents = _chain(len(tokens)) if self.parents is None else self.parents
            for index, node in enumerate(range(len(tokens) - self.scored, len(tokens))):
                line = nodes_to(parents, node)
                yield row, index, (*self.past[row], *(tokens[step] for step in line))


def score(
    engine: Engine,
    kv: KVBuffers,
    rows: Sequence[Sequence[int]],
    widths: Sequence[int],
    *,
    past: Sequence[int] = (),
    least: int = LEAST_WIDTH,
) -> list[FloatArray]:
    """Logits [len, V] of every position of every row, run as one batch in chunks of `widths` (repeated as needed).

    Positions in chunks of the widths `past`, which go before, get no logits: [len - sum(past), V] are returned.
    A pass has at least `least` positions per row; rows that are done, or shorter than the pass, are padded.
    `kv` needs `max(len) + max(widths)` slots.
    """
    start, longest = sum(past), engine.spec.max_length
    for width, at in zip(past, np.cumsum([0, *past]), strict=False):
        engine.step(
            pack([RowInput(row[at : at + width], 0) for row in rows], np.full(len(rows), at), least, longest), kv
        )
    scored = [np.empty((len(row) - start, engine.spec.logits_size), engine.spec.logits_dtype) for row in rows]
    done, turn = [start] * len(rows), 0
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        width = widths[turn % len(widths)]
        parts = [row[at : at + width] for at, row in zip(done, rows, strict=True)]
        chunk = pack([RowInput(part, len(part)) for part in parts], np.array(done), least, longest)
        logits = engine.step(chunk, kv)  # [B, N, V]
        for index, part in enumerate(parts):
            scored[index][done[index] - start : done[index] - start + len(part)] = logits[index, : len(part)]
            done[index] += len(part)
        turn += 1
    return scored


def soil(engine: Engine, kv: KVBuffers, seed: int = 0) -> None:
    """Fill every slot of every row with keys and values of random tokens: what a used cache looks like."""
    spec, width = engine.spec, min(64, kv.capacity)
    rng = np.random.default_rng(seed)
    for start in [*range(0, kv.capacity - width, width), kv.capacity - width]:
        rows = rng.integers(0, spec.vocab_size, (kv.rows, width)).tolist()
        engine.step(pack([RowInput(row, 1) for row in rows], np.full(kv.rows, start), width, spec.max_length), kv)


def same_bits(left: FloatArray, right: FloatArray) -> bool:
    """Whether two arrays are equal bit for bit (-0.0 is not 0.0, and a NaN equals itself)."""
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    return left.dtype == right.dtype and np.array_equal(left.view(unsigned), right.view(unsigned))


def _chain(width: int) -> tuple[int, ...]:
    return tuple(range(-1, width - 1))
