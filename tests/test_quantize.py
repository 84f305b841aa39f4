"""Quantizers: levels that exist, scales as they are stored, grids recovered, errors never above the naive ones."""

import ml_dtypes
import numpy as np
import pytest

from specdec.engines.errors import ExportError
from specdec.export.calibrate import Statistics
from specdec.export.grid import Grid
from specdec.export.quantize import HIGHEST, LOWEST, activation_scale, quantize_weight, round_levels
from specdec.export.recipes import Kind

KINDS: tuple[Kind, ...] = ("int8", "int4", "float8e4m3fn")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def damage(grid: Grid, weight: np.ndarray, importance: np.ndarray | None = None) -> float:
    error = (grid.values().astype(np.float64) - weight) ** 2
    return float((error if importance is None else error * importance).sum())


def test_levels_of_float8_are_the_type_s_own() -> None:
    x = np.concatenate([random(4000) * scale for scale in (1e-4, 1e-2, 1, 100)])
    x = np.concatenate([x, np.arange(-448, 449, 0.5, np.float32), np.float32([0, 2**-10, 3 * 2**-10, 2**-6, 1e6])])
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_levels(x, "float8e4m3fn"), expected)


def test_levels_of_integers_round_half_to_even_and_saturate() -> None:
    x = np.float32([-200, -127.6, -8.5, -0.5, 0.5, 1.5, 7.5, 200])
    assert round_levels(x, "int8").tolist() == [-127, -127, -8, 0, 0, 2, 8, 127]
    assert round_levels(x, "int4").tolist() == [-8, -8, -8, 0, 0, 2, 7, 7]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("block", [32, None])
@pytest.mark.parametrize("kind", KINDS)
def test_search_is_never_worse_than_the_naive_scale(
    kind: Kind, block: int | None, offset: bool, dtype: type[np.floating]
) -> None:
    weight, importance = random(40, 96) * 0.02, np.exp(2 * random(96, seed=1))
    options = {"block": block, "offset": offset, "importance": importance, "dtype": dtype}
    naive = quantize_weight(weight, kind, search=False, **options)
    found = quantize_weight(weight, kind, **options)
    for grid in (naive, found):
        assert grid.levels.shape == weight.shape
        assert grid.scale.shape == (40, 96 // (block or 96))
        assert (grid.offset is not None) == offset
        assert grid.block == (block or 96)
        as_numbers = grid.levels.astype(np.float32)
        assert as_numbers.min() >= LOWEST[kind]
        assert as_numbers.max() <= HIGHEST[kind]
        for part in (grid.scale, grid.offset):
            assert part is None or np.array_equal(part, part.astype(dtype).astype(np.float32))
        assert grid.scale.min() > 0
    for row in range(40):  # row by row: no average hides a loss
        one, other = (damage_of(grid, weight, importance, row) for grid in (found, naive))
        assert one <= other * (1 + 1e-5)
    gain = {"int8": 0.98, "int4": 0.9, "float8e4m3fn": 0.98}[kind]
    assert damage(found, weight, importance) < gain * damage(naive, weight, importance)


def damage_of(grid: Grid, weight: np.ndarray, importance: np.ndarray, row: int) -> float:
    floored = np.maximum(importance / importance.mean(), 1e-3)
    return float(((grid.values()[row].astype(np.float64) - weight[row]) ** 2 * floored).sum())


def test_naive_scales_reach_the_largest_value() -> None:
    weight = random(6, 64)
    grid = quantize_weight(weight, "int8", block=32, search=False)
    largest = np.abs(weight.reshape(6, 2, 32)).max(-1)
    np.testing.assert_allclose(grid.scale, largest / 127, rtol=1e-6)
    assert np.abs(grid.values() - weight).max() <= largest.max() / 254 * (1 + 1e-5)
    ranged = quantize_weight(weight, "int4", block=32, offset=True, search=False)
    low, high = weight.reshape(6, 2, 32).min(-1), weight.reshape(6, 2, 32).max(-1)
    np.testing.assert_allclose(ranged.scale, (high - low) / 15, rtol=1e-6)
    np.testing.assert_allclose(ranged.offset - 8 * ranged.scale, low, rtol=1e-4)


@pytest.mark.parametrize("search", [False, True])
def test_a_grid_of_q4_1_is_recovered(search: bool) -> None:
    generator = np.random.default_rng(0)
    levels = generator.integers(0, 16, (50, 4, 32))
    levels[..., 0], levels[..., 1] = 0, 15  # as Q4_1 makes them: offset is the minimum, 15 levels above is the maximum
    scale = generator.uniform(0.001, 0.1, (50, 4, 1)).astype(np.float16).astype(np.float32)
    least = generator.normal(0, 0.3, (50, 4, 1)).astype(np.float16).astype(np.float32)
    weight = (levels * scale + least).astype(np.float32).reshape(50, 128)
    grid = quantize_weight(weight, "int4", block=32, offset=True, search=search, importance=random(128) ** 2)
    np.testing.assert_array_equal(grid.levels.reshape(levels.shape) + 8, levels)
    np.testing.assert_allclose(grid.values(), weight, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_symmetric_grid_is_recovered(kind: Kind) -> None:
    levels = round_levels(random(20, 64) * HIGHEST[kind] / 4, kind)
    levels[:, ::32] = HIGHEST[kind]
    weight = levels * np.repeat(np.random.default_rng(2).uniform(0.01, 1, (20, 2)).astype(np.float32), 32, 1)
    grid = quantize_weight(weight, kind, block=32)
    np.testing.assert_array_equal(grid.levels.astype(np.float32), levels)
    np.testing.assert_allclose(grid.values(), weight, rtol=1e-5)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_silent_blocks_and_silent_channels(kind: Kind, offset: bool) -> None:
    weight = random(4, 64)
    weight[1], weight[2, :32] = 0, 0.25
    for dtype in (np.float32, np.float16):
        grid = quantize_weight(weight, kind, block=32, offset=offset, importance=np.zeros(64, np.float32), dtype=dtype)
        assert np.all(np.isfinite(grid.values()))
        np.testing.assert_array_equal(grid.values()[1], 0)
        np.testing.assert_allclose(grid.values()[2, :32], 0.25, rtol=1e-3)


@pytest.mark.parametrize("offset", [False, True])
def test_the_same_weights_give_the_same_bytes_however_many_rows(offset: bool) -> None:
    weight, importance = random(3000, 64), random(64, seed=3) ** 2
    first, second = (
        quantize_weight(given, "int4", block=32, offset=offset, importance=importance)
        for given in (weight, np.concatenate([weight, weight[:7]])[:3000].copy())
    )
    few = quantize_weight(weight[2990:], "int4", block=32, offset=offset, importance=importance)
    assert first.levels.tobytes() == second.levels.tobytes()
    assert first.scale.tobytes() == second.scale.tobytes()
    np.testing.assert_array_equal(few.levels, first.levels[2990:])
    np.testing.assert_array_equal(few.scale, first.scale[2990:])


def test_importance_moves_the_error_to_channels_that_matter_little() -> None:
    weight, importance = random(64, 64), np.where(np.arange(64) % 4 == 0, 100, 1).astype(np.float32)
    plain, aware = (quantize_weight(weight, "int4", block=32, importance=given) for given in (None, importance))
    assert damage(aware, weight, importance) < 0.8 * damage(plain, weight, importance)
    assert damage(plain, weight) < damage(aware, weight)


def test_inputs_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ExportError, match="48 inputs of a product are not whole blocks of 32"):
        quantize_weight(random(4, 48), "int8", block=32)


def statistics(x: np.ndarray) -> Statistics:
    values, counts = np.unique(np.abs(x), return_counts=True)
    return Statistics(len(x), np.abs(x).max(0), np.square(x).mean(0), values, counts)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_scales_lose_least(kind: Kind) -> None:
    x = random(2000, 16)

    def loss(scale: float) -> float:
        return float(np.square(x - round_levels(x / np.float32(scale), kind) * np.float32(scale)).sum(dtype=np.float64))

    seen = statistics(x)
    naive, found = activation_scale(seen, kind), activation_scale(seen, kind, search=True)
    assert naive == pytest.approx(np.abs(x).max() / HIGHEST[kind])
    assert loss(found) <= min(loss(naive * 0.97**step) for step in range(0, 100, 7)) * 1.001
    half = activation_scale(seen, kind, search=True, dtype=np.float16)
    assert half == float(np.float16(half)) == pytest.approx(found, rel=0.05)


def test_a_silent_input_has_a_scale() -> None:
    assert activation_scale(statistics(np.zeros((3, 4), np.float32)), "int8") == 1.0
