"""What a pass costs on this machine: milliseconds by the number of rows and of tokens a row.

Only the `Engine` protocol: which engine it is, and what is done with the figures, is not known here.
"""

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec
import numpy as np

from specdec.engines.base import Engine
from specdec.engines.cache import cache_dir
from specdec.engines.chunk import RowInput, pack
from specdec.engines.files import replace_file

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
    engine: Engine,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    passes: int = PASSES,
    slots: int = CAPACITY,
) -> list[PassCost]:
    """Time passes of all widths and batches, in turns; logits of every position, as in decoding.

    They come after `PAST` tokens, or fewer where the model's context or `slots` are shorter.
    """
    rows = max(batches)
    spec, kv = engine.spec, engine.allocate(rows, slots)
    past = min(PAST, min(spec.max_length, slots) - max(widths))
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


def cost_curve(
    engine: Engine, content: str, least_width: int, most_width: int = max(WIDTHS), slots: int = CAPACITY
) -> dict[int, float]:
    """Milliseconds of a pass of one row by its tokens, `least_width` to `most_width`; measured once a machine.

    `content` says which graph it is (its hash). `slots`: of a row, at most; a compiled engine has no more and no wider
    passes than its bundle's limits. What was measured is kept in the cache folder, which need not be writable. Takes
    about as long as thirty passes.
    """
    slots = min(slots, CAPACITY)
    machine = f"{platform.machine()} {processor()} {os.cpu_count()}"
    key = "\n".join((content, f"{least_width} {most_width} {slots}", engine.capabilities.device, machine))
    path = cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, float])
    except (OSError, msgspec.MsgspecError):  # not there, or damaged: it is measured
        pass
    widths = [width for width in WIDTHS if least_width <= width <= most_width]
    curve = {cost.width: cost.best_ms for cost in pass_costs(engine, widths, (1,), QUICK_PASSES, slots)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda part: part.write_bytes(msgspec.json.encode(curve)))
    except OSError:  # no place to keep it: the next load measures again
        pass
    return curve


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor; its architecture where the system does not say."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
