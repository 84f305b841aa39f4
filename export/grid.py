"""Quantized weights of one product: integer (or float8) levels, and a scale, perhaps an offset, for each block.

    weight[n, k] = scale[n, k // block] * levels[n, k] + offset[n, k // block]

which is the grid of MatMulNBits, of block-wise DequantizeLinear-21 and of GGUF's block types. This module knows the
arithmetic and the packing; it chooses no scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.export.recipes import Kind

Array = npt.NDArray[np.float32]

BOUNDS: dict[Kind, tuple[int, int]] = {"int8": (-128, 127), "int4": (-8, 7)}  # levels that exist, by integer kind


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """N outputs, K inputs, blocks of K // J inputs.

    `levels` [N, K]: int8 (both integer kinds) or float8_e4m3fn. `scale` [N, J] and `offset` [N, J] (or None): float32.
    """

    kind: Kind
    levels: np.ndarray
    scale: Array
    offset: Array | None = None

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return int(self.levels.shape[1] // self.scale.shape[1])

    def values(self) -> Array:
        """The weights [N, K] that the grid stands for, in float32."""
        blocks = self.levels.astype(np.float32).reshape(*self.scale.shape, self.block)
        found = blocks * self.scale[..., None]
        if self.offset is not None:
            found += self.offset[..., None]
        return found.reshape(self.levels.shape)


def joined(grids: Sequence[Grid]) -> Grid:
    """The grid of several weights side by side along their outputs, in the finest form among them; no value changes.

    int4 levels are int8 levels too, a block is two half as long with the same scale, no offset is an offset of zero.
    """
    if len(grids) == 1:
        return grids[0]
    if len({grid.kind for grid in grids} - {"int4", "int8"}) > 1:
        raise ValueError(f"grids of {', '.join(sorted({grid.kind for grid in grids}))} cannot be joined")
    blocks = max(grid.scale.shape[1] for grid in grids)
    kind: Kind = next((grid.kind for grid in grids if grid.kind != "int4"), "int4")
    has_offset = any(grid.offset is not None for grid in grids)

    def finer(array: Array) -> Array:
        return np.repeat(array, blocks // array.shape[1], axis=1)

    return Grid(
        kind,
        np.concatenate([grid.levels for grid in grids]),
        np.concatenate([finer(grid.scale) for grid in grids]),
        np.concatenate([finer(np.zeros_like(grid.scale) if grid.offset is None else grid.offset) for grid in grids])
        if has_offset
        else None,
    )


def pack_nibbles(levels: np.ndarray) -> npt.NDArray[np.uint8]:
    """Two 4-bit levels to a byte in row-major order, the first in the low half (ONNX INT4/UINT4, MatMulNBits).

    An odd number of them is filled up with a zero.
    """
    levels = np.append(levels.reshape(-1), np.zeros(levels.size % 2, levels.dtype))
    nibbles: npt.NDArray[np.uint8] = levels.astype(np.uint8) & np.uint8(15)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
