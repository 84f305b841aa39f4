"""Weights onto a `Grid` by least error, not by largest value; and one scale for a tensor of activations.

What weights minimize is the weighted squared error Σ h (w - ŵ)², where h is the mean square of the input channel that a
weight multiplies (importance): the expected error of the output if channels were uncorrelated. A handful of starting
scales is tried for each block and refitted by least squares. The same input gives the same bytes: plain NumPy, one
thread. This module knows arrays; it knows no layer, no graph and no file.
"""

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

# Starting scales, as parts of the one that just reaches the largest value: few levels make clipping worth it. Measured:
# more starts or refits lower the error by another 2 to 5 % of itself and take three times as long.
RATIOS: dict[Kind, tuple[float, ...]] = {
    "int8": (1.0, 0.98, 0.96, 0.94),
    "int4": (1.05, 0.95, 0.85, 0.75, 0.65),
    "float8e4m3fn": tuple(2.0 ** (-step / 8) for step in range(8)),
}
REFITS = 3  # least squares and rounding in turn, from each start
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
    blocks = np.asarray(weight, np.float32).reshape(-1, block)  # [N * J, b]
    weights = _normalized(importance, inputs).reshape(-1, block)  # [J, b]
    levels = np.empty(blocks.shape, STORED[kind])
    scale, shift = np.empty(len(blocks), np.float32), np.empty(len(blocks), np.float32)
    step = max(1, CHUNK // block)
    for start in range(0, len(blocks), step):
        rows = np.arange(start, min(start + step, len(blocks)))
        fit = _Fit(_across(blocks[rows]), _across(weights[rows % len(weights)]), kind, offset, dtype)
        if search:
            fit.search()
        scale[rows], shift[rows], levels[rows] = fit.scale, fit.shift, fit.levels().T.astype(STORED[kind])
    shape = (outputs, inputs // block)
    return Grid(kind, levels.reshape(weight.shape), scale.reshape(shape), shift.reshape(shape) if offset else None)


class _Fit:
    """The best scales [R] (and shifts [R]) found so far for R blocks `w` [b, R], weighted by `h` [b, R].

    Blocks lie side by side, so that every sum over a block adds whole rows.
    """

    def __init__(self, w: Array, h: Array, kind: Kind, offset: bool, dtype: npt.DTypeLike) -> None:
        self._w, self._h, self._kind, self._offset, self._dtype = w, h, kind, offset, dtype
        low, high = w.min(0), w.max(0)
        lowest, highest = np.float32(LOWEST[kind]), np.float32(HIGHEST[kind])
        if offset:
            self._reach = (high - low) / (highest - lowest)
            self._middle, self._centre = (low + high) / 2, (lowest + highest) / 2
        else:
            self._reach = np.maximum(high / highest, low / lowest)
            self._middle, self._centre = np.zeros_like(low), np.float32(0)
        self.scale, self.shift = self._start(1.0)
        self._error = self._errors(self.levels(), self.scale, self.shift)

    def levels(self) -> Array:
        """Nearest levels [b, R] under the best scales."""
        return self._levels(self.scale, self.shift)

    def search(self) -> None:
        """Try every start, refitted; keep what is better."""
        for ratio in RATIOS[self._kind]:
            scale, shift = self._start(ratio)
            for _ in range(REFITS):
                levels = self._levels(scale, shift)
                scale, shift = self._stored(*self._least_squares(levels, shift))
                error = self._errors(levels, scale, shift)
                better = error < self._error
                self.scale = np.where(better, scale, self.scale)
                self.shift = np.where(better, shift, self.shift)
                self._error = np.where(better, error, self._error)

    def _start(self, ratio: float) -> tuple[Array, Array]:
        """Scale and shift that reach `ratio` of the range around its middle."""
        scale = self._reach * np.float32(ratio)
        return self._stored(scale, self._middle - self._centre * scale)

    def _stored(self, scale: Array, shift: Array) -> tuple[Array, Array]:
        """As the numbers that will be stored; a scale is never zero."""
        least = np.float32(2.0**-24 if self._dtype == np.float16 else 2.0**-126)
        scale = np.maximum(scale, least).astype(self._dtype).astype(np.float32)
        return scale, shift.astype(self._dtype).astype(np.float32)

    def _levels(self, scale: Array, shift: Array) -> Array:
        return round_levels((self._w - shift if self._offset else self._w) / scale, self._kind)

    def _errors(self, levels: Array, scale: Array, shift: Array) -> Array:
        """Weighted squared error [R]."""
        rest = levels * scale
        np.subtract(self._w, rest, out=rest)
        if self._offset:
            rest -= shift
        np.square(rest, out=rest)
        rest *= self._h
        error: Array = rest.sum(0)
        return error

    def _least_squares(self, q: Array, shift: Array) -> tuple[Array, Array]:
        """Scale and shift [R] of least weighted error for the levels `q` [b, R]."""
        w, h = self._w, self._h
        if not self._offset:
            hq = h * q
            return (hq * w).sum(0) / _nonzero((hq * q).sum(0)), shift
        total = h.sum(0)
        mean_w, mean_q = (h * w).sum(0) / total, (h * q).sum(0) / total
        centred = q - mean_q
        hq = h * centred
        scale = (hq * w).sum(0) / _nonzero((hq * centred).sum(0))
        return scale, mean_w - scale * mean_q


def _across(blocks: Array) -> Array:
    """[R, b] as [b, R] in memory."""
    return np.ascontiguousarray(blocks.T)


def _nonzero(x: Array) -> Array:
    """`x`, and infinity where it is zero: what is divided by it becomes zero."""
    found: Array = np.where(x > 0, x, np.float32(np.inf))
    return found


def _normalized(importance: Array | None, inputs: int) -> Array:
    """Weights [K] with mean one, none below a thousandth: a channel that calibration left silent still counts."""
    if importance is None:
        return np.ones(inputs, np.float32)
    mean = float(importance.mean(dtype=np.float64)) or 1.0
    floored: Array = np.maximum(importance / np.float32(mean), np.float32(1e-3))
    return floored


def activation_scale(
    statistics: Statistics, kind: Kind, *, search: bool = False, dtype: npt.DTypeLike = np.float32
) -> float:
    """One scale, a number of `dtype`, for a tensor of activations: it just reaches the largest value that was seen.

    `search=True` finds the scale of least squared error instead. It clips what few tokens have, and these tokens carry
    much: measured, it makes a smoothed int8 model worse (docs/quantization.md).
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
