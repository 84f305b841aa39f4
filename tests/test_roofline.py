"""What a pass can take at least: the arithmetic of the limits, and how both rates are measured."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from specdec.engines.costs import PassCost
from specdec.tools import roofline
from specdec.tools.roofline import Roofline, measure_roofline, read_rate
from support.fake_engine import FakeEngine, fake_spec

FOUND = Roofline(bytes_per_second=2e9, weight_bytes=10_000_000, slot_bytes=1_000, token_ms=0.75)


def test_a_pass_is_bound_by_memory_or_by_arithmetic() -> None:
    assert FOUND.memory_ms(1, 1, past=199) == pytest.approx(5.1)  # 10.2 MB at 2 GB/s
    assert FOUND.memory_ms(4, 2, past=198) == pytest.approx(5.4)
    assert FOUND.limit_ms(1, 1, past=199) == pytest.approx(5.1)
    assert FOUND.limit_ms(4, 2, past=198) == pytest.approx(6.0)  # eight tokens


@pytest.mark.parametrize(("widest", "widths"), [(500, (64, 128)), (100, (64, 100)), (40, (20, 40))])
def test_arithmetic_is_what_a_token_more_costs_in_a_wide_pass(
    widest: int, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(engine: object, asked: Sequence[int], batches: Sequence[int], *_: object) -> list[PassCost]:
        assert (tuple(asked), tuple(batches)) == (widths, (1,))
        return [PassCost(1, width, 7 + 0.5 * width, 99.0) for width in asked]

    monkeypatch.setattr(roofline, "pass_costs", passes)
    monkeypatch.setattr(roofline, "read_rate", lambda threads: 1e9 * threads)
    engine = FakeEngine(fake_spec(8))
    found = measure_roofline(engine, 77, threads=3, widest=widest)
    slot = engine.spec.kv_bytes(1, 1)
    assert found == Roofline(bytes_per_second=3e9, weight_bytes=77, slot_bytes=slot, token_ms=0.5)


def test_the_rate_is_of_the_fastest_time_and_every_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    took, read = iter([0.5, 0.25, *[1.0] * (roofline.REPEATS - 2)]), list[int]()
    now = (place // 2 + (next(took) if place % 2 else 0.0) for place in count())
    monkeypatch.setattr(roofline, "perf_counter", lambda: next(now))
    most = np.max
    monkeypatch.setattr(np, "max", lambda part: read.append(part.nbytes) or most(part))
    assert read_rate(3, size=4_000_000) == 16_000_000
    assert sum(read) == roofline.REPEATS * 4_000_000
    assert len(read) == roofline.REPEATS * 3
