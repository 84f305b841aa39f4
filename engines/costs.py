"""What a pass costs on this machine: milliseconds by the number of rows and of tokens a row.

Only the `Engine` protocol: which engine it is, and what is done with the figures, is not known here.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import msgspec
import numpy as np

from specdec.engines.base import Engine
from specdec.engines.chunk import RowInput, pack

WIDTHS, BATCHES = (1, 2, 3, 4, 6, 8, 16), (1, 4)  # of the passes whose cost is measured
PAST, CAPACITY, PASSES = 200, 512, 20  # committed tokens of a row, slots of a row, measured passes of each kind


class PassCost(msgspec.Struct, frozen=True):
    """Milliseconds of one pass of `batch` rows, `width` tokens each."""

    batch: int
    width: int
    best_ms: float
    median_ms: float


def pass_costs(engine: Engine) -> list[PassCost]:
    """Time passes of all widths and batches, in turns; logits of every position, as in decoding.

    They come after `PAST` tokens, or fewer where the model's context is shorter.
    """
    rows = max(BATCHES)
    spec, kv = engine.spec, engine.allocate(rows, CAPACITY)
    past = min(PAST, spec.max_length - max(WIDTHS))
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (rows, past)).tolist()

    def fed(row: Sequence[int], logits: int) -> RowInput:  # what features hold does not matter to time
        return RowInput(row, logits, features=np.zeros((len(row), spec.features)) if spec.features else None)

    engine.step(pack([fed(row, 0) for row in tokens], np.zeros(rows, np.int64), 1, spec.max_length), kv)
    chunks = {
        (batch, width): pack(
            [fed(row[:width], width) for row in tokens[:batch]], np.full(batch, past), 1, spec.max_length
        )
        for batch in BATCHES
        for width in WIDTHS
    }
    times: dict[tuple[int, int], list[float]] = {key: [] for key in chunks}
    for turn in range(1 + PASSES):
        for key, chunk in chunks.items():
            started = perf_counter()
            engine.step(chunk, kv)
            if turn:  # the first one is a warm-up
                times[key].append((perf_counter() - started) * 1000)
    return [PassCost(batch, width, min(ms), median(ms)) for (batch, width), ms in times.items()]
