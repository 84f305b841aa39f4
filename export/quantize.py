"""Weights onto a `Grid`, and one scale for a tensor of activations: by least error, not by largest value.

What is minimized is the weighted squared error Σ h (w - ŵ)², where h is the mean square of the input channel that a
weight multiplies (importance): the expected error of the output if channels were uncorrelated. A handful of starting
scales is tried for each block and refitted by least squares. The same input gives the same bytes: plain NumPy, one
thread. This module knows arrays; it knows no layer, no graph and no file.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

from specdec.engines.errors import ExportError
from specdec.export.calibrate import Statistics
from specdec.export.grid import Array, Grid
from specdec.export.recipes import Kind

# Levels that are used. -128 is not: TensorRT's int8 is symmetric. int4 has -8, which no positive level matches.
LOWEST: dict[Kind, float] = {"int8": -127.0, "int4": -8.0, "float8e4m3fn": -448.0}
HIGHEST: dict[Kind, float] = {"int8": 127.0, "int4": 7.0, "float8e4m3fn": 448.0}
STORED: dict[Kind, npt.DTypeLike] = {"int8": np.int8, "int4": np.int8, "float8e4m3fn": ml_dtypes.float8_e4m3fn}

# Starting scales, as parts of the one that just reaches the largest value. Few levels pay for clipping, many do not.
RATIOS: dict[Kind, tuple[float, ...]] = {
    "int8": (1.0, 0.98, 0.96, 0.94),
    "int4": tuple(1.0 - 0.03 * step for step in range(14)),
    "float8e4m3fn": tuple(2.0 ** (-step / 8) for step in range(8)),
}
REFITS = 2  # least squares and rounding in turn, from each start
CHUNK = 1 << 16  # weights that are worked on at a time: they stay in the processor's cache


def round_levels(x: Array, kind: Kind) -> Array:
    """`x`, in units of the scale, to the nearest levels of `kind` (ties to even), as float32."""
    if kind == "float8e4m3fn":
        power = (np.abs(x).view(np.int32) & np.int32(0x7F800000)).view(np.float32)  # 2 to the floor of log2
        step = np.maximum(power, np.float32(2.0**-6)) * np.float32(0.125)  # three bits of mantissa, subnormals below
        x = np.rint(x / step) * step
    else:
        x = np.rint(x)
    rounded: Array = np.clip(x, np.float32(LOWEST[kind]), np.float32(HIGHEST[kind]))
    return rounded


def quantize_weight(
    weight: Array,
    kind: Kind,
    *,
    block: int | None = None,
    offset: bool = False,
    importance: Array | None = None,
    search: bool = True,
    dtype: npt.DTypeLike = np.float32,
) -> Grid:
    """The grid of least error for `weight` [N, K]: one scale (and offset) for each `block` inputs, None for all K.

    `importance` [K], not negative: weight of each input's error. `search=False` only reaches the largest value (the
    naive reference; the search is never worse). Scale and offset are numbers of `dtype`, the levels fit them as stored.
    Raises `ExportError` when K is not a whole number of blocks.
    """
    outputs, inputs = weight.shape
    block = block or inputs
    if inputs % block:
        raise ExportError(f"{inputs} inputs of a product are not whole blocks of {block}: choose another block")
    blocks = np.ascontiguousarray(weight, np.float32).reshape(-1, block)  # [N * J, b]
    weights = _normalized(importance, inputs).reshape(-1, block)  # [J, b]
    levels = np.empty(blocks.shape, STORED[kind])
    scale, shift = np.empty(len(blocks), np.float32), np.zeros(len(blocks), np.float32)
    for part in _chunks(len(blocks), block):
        w = blocks[part]
        h = weights[np.arange(part.start, part.stop) % len(weights)]
        fit = _Fit(w, h, kind, offset, dtype)
        if search:
            fit.search()
        scale[part], shift[part] = fit.scale, fit.shift
        levels[part] = fit.levels().astype(STORED[kind])
    shape = (outputs, inputs // block)
    return Grid(kind, levels.reshape(weight.shape), scale.reshape(shape), shift.reshape(shape) if offset else None)


class _Fit:
    """The best scales [R] (and shifts [R]) found so far for R blocks `w` [R, b], weighted by `h` [R, b]."""

    def __init__(self, w: Array, h: Array, kind: Kind, offset: bool, dtype: npt.DTypeLike) -> None:
        self._w, self._h, self._kind, self._offset, self._dtype = w, h, kind, offset, dtype
        low, high = w.min(1), w.max(1)
        lowest, highest = LOWEST[kind], HIGHEST[kind]
        if offset:
            self._middle = (low + high) / 2 - (lowest + highest) / 2 * (high - low) / (highest - lowest)
            self._reach = (high - low) / np.float32(highest - lowest)
        else:
            self._middle = np.zeros(len(w), np.float32)
            self._reach = np.maximum(high / np.float32(highest), low / np.float32(lowest))
        self.scale, self.shift = self._stored(*self._start(1.0))
        self._error = self._errors(self.levels(), self.scale, self.shift)

    def levels(self) -> Array:
        """Nearest levels [R, b] under the best scales."""
        return self._levels(self.scale, self.shift)

    def search(self) -> None:
        """Try every start, refitted; keep what is better."""
        for ratio in RATIOS[self._kind]:
            scale, shift = self._stored(*self._start(ratio))
            for _ in range(REFITS):
                levels = self._levels(scale, shift)
                scale, shift = self._stored(*self._least_squares(levels))
                error = self._errors(levels, scale, shift)
                better = error < self._error
                self.scale = np.where(better, scale, self.scale)
                self.shift = np.where(better, shift, self.shift)
                self._error = np.where(better, error, self._error)

    def _start(self, ratio: float) -> tuple[Array, Array]:
        """Scale and shift that reach `ratio` of the range around its middle."""
        scale = self._reach * np.float32(ratio)
        if not self._offset:
            return scale, self._middle
        centre = np.float32((LOWEST[self._kind] + HIGHEST[self._kind]) / 2)
        return scale, self._middle + centre * (self._reach - scale)

    def _stored(self, scale: Array, shift: Array) -> tuple[Array, Array]:
        """As the numbers that will be stored; a scale is never zero."""
        least = np.finfo(self._dtype).smallest_normal if self._dtype == np.float32 else 2.0**-24
        scale = np.maximum(scale, np.float32(least)).astype(self._dtype).astype(np.float32)
        return scale, shift.astype(self._dtype).astype(np.float32)

    def _levels(self, scale: Array, shift: Array) -> Array:
        centred = self._w - shift[:, None] if self._offset else self._w
        return round_levels(centred / scale[:, None], self._kind)

    def _errors(self, levels: Array, scale: Array, shift: Array) -> Array:
        """Weighted squared error [R]."""
        rest = self._w - levels * scale[:, None]
        if self._offset:
            rest -= shift[:, None]
        error: Array = np.einsum("rb,rb,rb->r", rest, rest, self._h)
        return error

    def _least_squares(self, q: Array) -> tuple[Array, Array]:
        """Scale and shift of least weighted error for the levels `q` [R, b]; where they are free, those of before."""
        w, h = self._w, self._h
        if not self._offset:
            hq = h * q
            power = np.einsum("rb,rb->r", hq, q)
            return np.einsum("rb,rb->r", hq, w) / np.where(power > 0, power, np.inf), self.shift
        total = h.sum(1)
        mean_w, mean_q = (np.einsum("rb,rb->r", h, x) / total for x in (w, q))
        centred = q - mean_q[:, None]
        hq = h * centred
        power = np.einsum("rb,rb->r", hq, centred)
        scale = np.einsum("rb,rb->r", hq, w - mean_w[:, None]) / np.where(power > 0, power, np.inf)
        return scale, mean_w - scale * mean_q


def _normalized(importance: Array | None, inputs: int) -> Array:
    """Weights [K] with mean one, none below a thousandth: a channel that calibration left silent still counts."""
    if importance is None:
        return np.ones(inputs, np.float32)
    mean = float(importance.mean(dtype=np.float64)) or 1.0
    floored: Array = np.maximum(importance / np.float32(mean), np.float32(1e-3))
    return floored


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK // width)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def activation_scale(
    statistics: Statistics, kind: Kind, *, search: bool = True, dtype: npt.DTypeLike = np.float32
) -> float:
    """One scale for a tensor of activations: of least squared error over the values that calibration has seen.

    `search=False` only reaches the largest value. The scale is a number of `dtype`.
    """
    largest = float(statistics.maximum.max()) / HIGHEST[kind]
    ratios = 0.97 ** np.arange(120 if search else 1)
    values, counts = statistics.magnitudes, statistics.counts.astype(np.float64)
    best, least = 1.0, np.inf
    for ratio in ratios:
        scale = float(np.asarray(largest * ratio).astype(dtype))
        if scale <= 0:
            break
        rest = values - round_levels(values / np.float32(scale), kind) * np.float32(scale)
        error = float((counts * rest.astype(np.float64) ** 2).sum())
        if error < least:
            best, least = scale, error
    return best
