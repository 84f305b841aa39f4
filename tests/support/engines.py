"""Tiny real engines, sound and faulty, and a text for them: what the gates are tried on."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from specdec.engines.base import Capabilities, Engine, KVBuffers
from specdec.engines.contract import Chunk, FloatArray, ModelSpec
from specdec.engines.invariance import PROBE_TOKENS
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from support.bundles import TOKENIZER_SIZE, shared_bundle

TOKENS: list[int] = np.random.default_rng(3).integers(0, TOKENIZER_SIZE, PROBE_TOKENS).tolist()
ROWS = [TOKENS, TOKENS[4:50], TOKENS[9:30], TOKENS[1:33]]


def open_tiny(threads: int = 1, family: str = "llama", graph: Path | None = None) -> Engine:
    """The target of a shared bundle, from another graph file if one is given."""
    bundle = shared_bundle(family)
    manifest = read_manifest(bundle)
    path = graph or bundle / manifest.target.variants["fp32"].graph
    return open_engine(path, manifest.target.spec, EngineConfig(threads=threads))


class Faulty:
    """A tiny engine with a fault: `chunk` and `logits` change what goes in and comes out."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.spec: ModelSpec = inner.spec
        self.capabilities: Capabilities = inner.capabilities

    def allocate(self, rows: int, capacity: int) -> KVBuffers:
        return self.inner.allocate(rows, capacity)

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        changed = self.chunk(chunk)
        return self.logits(changed, self.inner.step(changed, kv, first_row))

    def close(self) -> None:
        self.inner.close()

    def chunk(self, chunk: Chunk) -> Chunk:
        return chunk

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits


class IgnoresTree(Faulty):
    """Every token sees all before it, siblings too."""

    def chunk(self, chunk: Chunk) -> Chunk:
        mask = np.broadcast_to(np.tril(np.ones((chunk.width, chunk.width), bool)), chunk.chunk_mask.shape)
        return replace(chunk, chunk_mask=np.ascontiguousarray(mask))
