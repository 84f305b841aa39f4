"""What a pass costs on this machine: milliseconds by the number of rows and of tokens a row.

Only the `Engine` protocol: which engine it is, and what is done with the figures, is not known here.
"""

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec
import numpy as np

from specdec.engines.base import Engine
from specdec.engines.cache import cache_dir
from specdec.engines.chunk import RowInput, pack

WIDTHS, BATCHES = (1, 2, 3, 4, 6, 8, 16), (1, 4)  # of the passes whose cost is measured
PAST, CAPACITY, PASSES = 200, 512, 20  # committed tokens of a row, slots of a row, measured passes of each kind
QUICK_PASSES = 3  # of each width for a curve, which later passes correct


class PassCost(msgspec.Struct, frozen=True):
    """Milliseconds of one pass of `batch` rows, `width` tokens each."""

    batch: int
    width: int
    best_ms: float
    median_ms: float


def pass_costs(
    engine: Engine, widths: Sequence[int] = WIDTHS, batches: Sequence[int] = BATCHES, passes: int = PASSES
) -> list[PassCost]:
    """Time passes of all widths and batches, in turns; logits of every position, as in decoding.

    They come after `PAST` tokens, or fewer where the model's context is shorter.
    """
    rows = max(batches)
    spec, kv = engine.spec, engine.allocate(rows, CAPACITY)
    past = min(PAST, spec.max_length - max(widths))
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (rows, past)).tolist()

    def fed(row: Sequence[int], logits: int) -> RowInput:  # what features hold does not matter to time
        return RowInput(row, logits, features=np.zeros((len(row), spec.features)) if spec.features else None)

    engine.step(pack([fed(row, 0) for row in tokens], np.zeros(rows, np.int64), 1, spec.max_length), kv)
    chunks = {
        (batch, width): pack(
            [fed(row[:width], width) for row in tokens[:batch]], np.full(batch, past), 1, spec.max_length
        )
        for batch in batches
        for width in widths
    }
    times: dict[tuple[int, int], list[float]] = {key: [] for key in chunks}
    for turn in range(1 + passes):
        for key, chunk in chunks.items():
            started = perf_counter()
            engine.step(chunk, kv)
            if turn:  # the first one is a warm-up
                times[key].append((perf_counter() - started) * 1000)
    return [PassCost(batch, width, min(ms), median(ms)) for (batch, width), ms in times.items()]


def cost_curve(engine: Engine, least_width: int, content: str) -> dict[int, float]:
    """Milliseconds of a pass of one row by its tokens, from `least_width` on; measured once a machine.

    `content` says which graph it is (its hash). What was measured is kept in the cache folder, which need not be
    writable. Takes about as long as thirty passes.
    """
    key = "\n".join((content, str(least_width), engine.capabilities.device, _machine()))
    path = cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, float])
    except (OSError, msgspec.MsgspecError):  # not there, or damaged: it is measured
        pass
    widths = [width for width in WIDTHS if width >= least_width]
    curve = {cost.width: cost.best_ms for cost in pass_costs(engine, widths, (1,), QUICK_PASSES)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(msgspec.json.encode(curve))
        os.replace(part.name, path)
    except OSError:  # no place to keep it: the next load measures again
        pass
    return curve


def _machine() -> str:
    """What decides how fast passes are: processor and number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return f"{platform.machine()} {found[1] if found else platform.processor()} {os.cpu_count()}"
