"""Scoring known tokens with an engine in any split, batch and order: what the gates and the verifier are made of.

`score` runs whole sequences; `Round` is one pass written down with the text that each of its rows has committed, so
that every logit can be traced back to the exact token path that it must depend on. Only numpy and the `Engine`
protocol: no torch, no bundle, and no opinion on what the right logits are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.engines.base import Engine, KVBuffers
from specdec.engines.contract import Chunk, FloatArray

LEAST_WIDTH = 2  # positions of a pass: one-token passes take other kernels (ARCHITECTURE, idea 5)

Path = tuple[int, ...]  # tokens from the start of the text to one scored token, both included


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass over the rows `first_row ..`: what each has committed, what it adds, and the tree of the new tokens.

    `parents[i]` is the index of node i's parent among the new tokens, -1 for the root (None: a chain). Shorter rows are
    padded. The logits of the last `scored` tokens of each row are asked for.
    """

    name: str
    past: tuple[Path, ...]
    tokens: tuple[Path, ...]
    parents: tuple[int, ...] | None = None
    scored: int = 1
    first_row: int = 0

    def chunk(self, max_length: int) -> Chunk:
        """The pass as the engine takes it; padding repeats token 0 behind the row."""
        rows, width = len(self.tokens), max(LEAST_WIDTH, *(len(row) for row in self.tokens))
        chunk = _blank(rows, width, self.scored)
        chunk.past_lens[:] = [len(row) for row in self.past]
        parents = _chain(width) if self.parents is None else self.parents
        mask, depth = _ancestors(parents), np.array([len(_line(parents, node)) - 1 for node in range(width)])
        chunk.chunk_mask[:] = mask
        for index, row in enumerate(self.tokens):
            chunk.input_ids[index, : len(row)] = row
            chunk.position_ids[index] = np.minimum(len(self.past[index]) + depth, max_length - 1)
            chunk.logit_indices[index] = np.arange(len(row) - self.scored, len(row))
        return chunk

    def paths(self) -> Iterator[tuple[int, int, Path]]:
        """(row, index among the scored, path) of every scored token."""
        for row, tokens in enumerate(self.tokens):
            parents = _chain(len(tokens)) if self.parents is None else self.parents
            for index, node in enumerate(range(len(tokens) - self.scored, len(tokens))):
                line = _line(parents, node)
                yield row, index, (*self.past[row], *(tokens[step] for step in line))


def score(
    engine: Engine, kv: KVBuffers, rows: Sequence[Sequence[int]], widths: Sequence[int], *, least: int = LEAST_WIDTH
) -> list[FloatArray]:
    """Logits [len, V] of every position of every row, run as one batch in chunks of `widths` (repeated as needed).

    A pass has at least `least` positions per row; rows that are done, or shorter than the pass, are padded.
    `kv` needs `max(len) + max(widths)` slots.
    """
    lengths = [len(row) for row in rows]
    scored = [np.empty((length, engine.spec.logits_size), engine.spec.dtype) for length in lengths]
    done, turn = [0] * len(rows), 0
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        take = [min(widths[turn % len(widths)], length - at) for at, length in zip(done, lengths, strict=True)]
        width = max(least, *take)
        chunk = _blank(len(rows), width, width)
        chunk.past_lens[:] = done
        chunk.chunk_mask[:] = _ancestors(_chain(width))
        chunk.logit_indices[:] = np.arange(width)
        for index, row in enumerate(rows):
            chunk.input_ids[index, : take[index]] = row[done[index] : done[index] + take[index]]
            chunk.position_ids[index] = np.minimum(done[index] + np.arange(width), engine.spec.max_length - 1)
        logits = engine.step(chunk, kv)
        for index, count in enumerate(take):
            scored[index][done[index] : done[index] + count] = logits[index, :count]
            done[index] += count
        turn += 1
    return scored


def soil(engine: Engine, kv: KVBuffers, seed: int = 0) -> None:
    """Fill every slot of every row with keys and values of random tokens: what a used cache looks like."""
    spec, width = engine.spec, min(64, kv.capacity)
    rng = np.random.default_rng(seed)
    for start in [*range(0, kv.capacity - width, width), kv.capacity - width]:
        chunk = _blank(kv.rows, width, 1)
        chunk.input_ids[:] = rng.integers(0, spec.vocab_size, (kv.rows, width))
        chunk.position_ids[:] = np.minimum(start + np.arange(width), spec.max_length - 1)
        chunk.past_lens[:] = start
        chunk.chunk_mask[:] = _ancestors(_chain(width))
        engine.step(chunk, kv)


def same_bits(left: FloatArray, right: FloatArray) -> bool:
    """Whether two arrays are equal bit for bit (-0.0 is not 0.0, and a NaN equals itself)."""
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    return left.dtype == right.dtype and np.array_equal(left.view(unsigned), right.view(unsigned))


def _blank(rows: int, width: int, scored: int) -> Chunk:
    return Chunk(
        input_ids=np.zeros((rows, width), np.int64),
        position_ids=np.zeros((rows, width), np.int64),
        past_lens=np.zeros(rows, np.int64),
        chunk_mask=np.zeros((rows, width, width), np.bool_),
        logit_indices=np.zeros((rows, scored), np.int64),
    )


def _chain(width: int) -> tuple[int, ...]:
    return tuple(range(-1, width - 1))


def _line(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    line = [node]
    while parents[line[0]] >= 0:
        line.insert(0, parents[line[0]])
    return line


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """[S, S]: node i attends node j when j is i or one of its ancestors."""
    mask = np.zeros((len(parents), len(parents)), np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask
