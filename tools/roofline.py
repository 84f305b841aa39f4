"""How near a pass comes to what the machine allows: a roofline (Williams, Waterman and Patterson, CACM 52(4), 2009).

A pass reads every weight and every committed slot once, and multiplies for every token. It takes at least as long as
memory needs for the one, and as the engine's own arithmetic needs for the other. Both rates are measured here; this
module knows bytes and milliseconds, and no graph.
"""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import msgspec
import numpy as np

from specdec.engines.base import Engine
from specdec.engines.costs import CAPACITY, PAST, pass_costs
from specdec.tools.probes import cpu

READ_BYTES = 256 << 20  # far more than caches hold
REPEATS = 8
WIDE = (64, 128)  # tokens of passes that arithmetic alone decides, as of prompts
WIDE_PASSES = 4


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_per_second`: read by all threads together. `weight_bytes`: of the graph. `slot_bytes`: of a token's keys
    and values. `token_ms`: what one more token adds to a pass that is as wide as a prompt's.
    """

    bytes_per_second: float
    weight_bytes: int
    slot_bytes: int
    token_ms: float

    def memory_ms(self, rows: int, width: int, past: int = PAST) -> float:
        """Milliseconds to read what a pass of `rows` rows, `width` tokens each, has to read behind `past` tokens."""
        return 1000 * (self.weight_bytes + rows * (past + width) * self.slot_bytes) / self.bytes_per_second

    def limit_ms(self, rows: int, width: int, past: int = PAST) -> float:
        """The least that the pass can take: the larger one of reading and multiplying."""
        return max(self.memory_ms(rows, width, past), rows * width * self.token_ms)


def measure_roofline(
    engine: Engine, weight_bytes: int, threads: int | None = None, widest: int = max(WIDE), slots: int = CAPACITY
) -> Roofline:
    """Measure both rates with as many threads as the engine has (None: all cores). `widest`: pass of the engine."""
    low, high = (min(width, widest) for width in WIDE)
    narrow, wide = pass_costs(engine, (low if low < high else high // 2, high), (1,), WIDE_PASSES, slots)
    return Roofline(
        bytes_per_second=read_rate(threads or cpu().cores),
        weight_bytes=weight_bytes,
        slot_bytes=engine.spec.kv_bytes(1, 1),
        token_ms=max(wide.best_ms - narrow.best_ms, 0.0) / (wide.width - narrow.width),
    )


def read_rate(threads: int, size: int = READ_BYTES) -> float:
    """Bytes a second that `threads` threads read together from memory, the best of several times."""
    memory = np.ones(size // 4, np.float32)
    parts = np.array_split(memory, threads)
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            started = perf_counter()
            list(pool.map(np.max, parts))  # NumPy lets other threads run meanwhile
            best = min(best, perf_counter() - started)
    return float(memory.nbytes / best)
