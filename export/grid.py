"""Quantized weights of one product: integer (or float8) levels, and a scale, perhaps an offset, for each block.

    weight[n, k] = scale[n, k // block] * levels[n, k] + offset[n, k // block]

which is the grid of MatMulNBits, of block-wise DequantizeLinear-21 and of GGUF's block types. This module knows the
arithmetic and the packing; it chooses no scale.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.export.recipes import Kind

Array = npt.NDArray[np.float32]

BOUNDS: dict[Kind, tuple[int, int]] = {"int8": (-128, 127), "int4": (-8, 7)}  # levels that exist, by integer kind


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """N outputs, K inputs, blocks of K // J inputs.

    `levels` [N, K]: int8 (both integer kinds) or float8_e4m3fn. `scale` [N, J] float32, `offset` [N, J] float32 or None.
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


def pack_nibbles(levels: np.ndarray) -> npt.NDArray[np.uint8]:
    """Two 4-bit levels to a byte along the last axis, the first in the low half (ONNX INT4/UINT4, MatMulNBits)."""
    nibbles: npt.NDArray[np.uint8] = levels.astype(np.uint8) & np.uint8(15)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
