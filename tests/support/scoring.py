"""Score token sequences and trees on an engine, and with PyTorch as the reference."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec.engines.base import Engine, KVBuffers
from specdec.engines.contract import Chunk

GARBAGE = 7.0


def chain(tokens: np.ndarray, past_lens: Sequence[int], logit_indices: np.ndarray | None = None) -> Chunk:
    """One chunk of `tokens` [B, S], each row a chain behind its past; logits everywhere unless told otherwise."""
    return tree(tokens, past_lens, list(range(-1, tokens.shape[1] - 1)), logit_indices)


def tree(
    tokens: np.ndarray, past_lens: Sequence[int], parents: Sequence[int], logit_indices: np.ndarray | None = None
) -> Chunk:
    """One chunk of `tokens` [B, S] whose node i hangs under node `parents[i]`; -1 is the row's last committed token."""
    rows, width = tokens.shape
    mask = np.zeros((width, width), bool)
    depth = np.zeros(width, np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node], depth[node] = mask[parent], depth[parent] + 1
        mask[node, node] = True
    past = np.array(past_lens, np.int64)
    return Chunk(
        input_ids=np.ascontiguousarray(tokens, np.int64),
        position_ids=past[:, None] + depth[None],
        past_lens=past,
        chunk_mask=np.ascontiguousarray(np.broadcast_to(mask, (rows, width, width))),
        logit_indices=np.tile(np.arange(width), (rows, 1)) if logit_indices is None else logit_indices,
    )


def garbage(engine: Engine, rows: int, capacity: int) -> KVBuffers:
    """Cache buffers whose every slot holds `GARBAGE`: finite, and visible in any logit that it reaches."""
    kv = engine.allocate(rows, capacity)
    for array in kv._memory.host:  # type: ignore[attr-defined]  # the ONNX Runtime CPU buffers
        array.fill(GARBAGE)
    return kv


def score(engine: Engine, tokens: np.ndarray, widths: Sequence[int], capacity: int = 256) -> np.ndarray:
    """Logits [B, T, V] of `tokens` [B, T], given in chunks of `widths` (the last one is repeated until the end)."""
    rows, length = tokens.shape
    kv = garbage(engine, rows, capacity)
    found: list[np.ndarray] = []
    start = step = 0
    while start < length:
        width = min(widths[min(step, len(widths) - 1)], length - start)
        chunk = chain(tokens[:, start : start + width], [start] * rows)
        found.append(np.array(engine.step(chunk, kv)))
        start, step = start + width, step + 1
    return np.concatenate(found, axis=1)


def reference(model: Any, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence, by the model's own eager forward."""
    with torch.no_grad():
        ids = torch.tensor(np.asarray(tokens, np.int64))[None]
        return np.asarray(model(input_ids=ids, use_cache=False).logits[0].float().numpy())


def bits(logits: np.ndarray) -> np.ndarray:
    """The logits' bit patterns."""
    return logits.view(np.uint32)
