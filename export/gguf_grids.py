"""The grids that a quantized GGUF file already has: levels, scales and offsets as they are stored, not rounded again.

transformers loads the file as plain float32 weights, under other names and some with rows in another order. That is not
repeated here: a weight is found in the file by its content, as the tensor that has the same rows, and its grid gives
exactly the weight's bits. Layouts of the block types: ggml, `block_q*` in ggml-common.h and `dequantize_row_q*` in
ggml-quants.c. This module knows no name of a weight, no family and no graph.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from specdec.engines.errors import SourceError
from specdec.export.grid import BOUNDS, Array, Grid
from specdec.export.recipes import Kind

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.bytes_]  # [N], one for each row of a matrix
Blocks = tuple[np.ndarray, Array, Array | None]  # levels [n, E], scale [n, J], offset [n, J]: n blocks of E values

SLAB = 1 << 22  # values that are looked at in one piece: what is held besides the weights and their grids


@dataclass(frozen=True, slots=True)
class _Layout:
    """A block type: `decode` splits blocks [n, bytes]; levels have `bits` bits, no sign if there is an offset."""

    bits: int
    decode: Callable[[Bytes], Blocks]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A matrix [N, K] of the state dict, and all the names that it has there."""

    names: list[str]
    values: Array
    digests: Digests


def read_grids(path: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, Grid]:
    """Grids of those `weights` (a state dict loaded from the GGUF file `path`, on the CPU) that the file has quantized.

    `grid.values()` is the weight, bit for bit. Kind int4 for types of up to four bits, else int8; blocks are the file's
    (16 or 32 inputs). Stored levels that have no sign are centred on zero, offset' = offset + 2^(bits - 1) * scale, so
    that they fit int4 and errors of the other factor weigh least; where float32 cannot hold such an offset exactly, all
    levels of the weight stay as stored (0 to 15 are then int8). No grid: weights that are not float32 matrices, that
    the loader changed or transposed, or that the file does not hold in blocks of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or
    Q2_K to Q6_K. Names of one tensor share one grid. Holds one tensor at a time besides `weights` and the result.

    Raises `SourceError` when the file cannot be read.
    """
    wanted = _by_content(weights)
    shapes = {weight.values.shape for same in wanted.values() for weight in same}
    grids: dict[str, Grid] = {}
    for tensor in _open(path).tensors:
        layout, shape = _LAYOUTS.get(tensor.tensor_type), tuple(int(size) for size in reversed(tensor.shape))
        if layout is None or shape not in shapes:
            continue
        stored = _decode(np.asarray(tensor.data), layout, shape[1], gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
        digests = _digests(stored)
        for weight in wanted.pop(_content(shape, digests), ()):
            order = np.empty(len(digests), np.int64)  # [N]: the row of the file that each row of the weight is
            order[np.argsort(weight.digests)] = np.argsort(digests)
            grid = _take(stored, order)
            exact = next((form for form in (_centred(grid, layout), grid) if _gives(form, weight.values)), None)
            if exact is not None:
                grids |= dict.fromkeys(weight.names, exact)
    return grids


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except Exception as exc:  # the reader meets a damaged file as ValueError, IndexError, KeyError ...
        raise SourceError(f"{path} is truncated or damaged: {exc}; fetch it again") from exc


def _by_content(weights: Mapping[str, torch.Tensor]) -> dict[bytes, list[_Weight]]:
    """The float32 matrices by what is in them, apart from the order of rows."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in weights.items():
        if tensor.ndim == 2 and tensor.dtype == torch.float32:
            places.setdefault((tensor.data_ptr(), *tensor.shape, *tensor.stride()), []).append(name)
    found: dict[bytes, list[_Weight]] = {}
    for names in places.values():
        values = weights[names[0]].detach().numpy()
        digests = np.concatenate([_row_digests(values[rows]) for rows in _slabs(*values.shape)])
        found.setdefault(_content(values.shape, digests), []).append(_Weight(names, values, digests))
    return found


def _content(shape: tuple[int, ...], digests: Digests) -> bytes:
    return hashlib.blake2b(repr(shape).encode() + np.sort(digests).tobytes()).digest()


def _digests(grid: Grid) -> Digests:
    return np.concatenate([_row_digests(_take(grid, rows).values()) for rows in _slabs(*grid.levels.shape)])


def _row_digests(values: Array) -> Digests:
    rows = np.ascontiguousarray(values)
    return np.array([hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows], "S32")


def _slabs(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, SLAB // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _decode(data: Bytes, layout: _Layout, columns: int, block: int) -> Grid:
    """The grid of a tensor [N, `columns`] as it is stored: data [N, bytes of a row], blocks of `block` bytes."""
    parts = []
    for rows in _slabs(len(data), columns):
        levels, scale, offset = layout.decode(data[rows].reshape(-1, block))
        parts.append((levels, scale, offset if offset is not None else scale[:, :0]))
    levels, scale, offset = (np.concatenate(part).reshape(len(data), -1) for part in zip(*parts, strict=True))
    fits = layout.bits + (offset.size > 0) <= 4  # without a sign, a bit more is needed
    return Grid("int4" if fits else "int8", levels, scale, offset if offset.size else None)


def _take(grid: Grid, rows: slice | npt.NDArray[np.int64]) -> Grid:
    offset = None if grid.offset is None else grid.offset[rows]
    return Grid(grid.kind, grid.levels[rows], grid.scale[rows], offset)


def _centred(grid: Grid, layout: _Layout) -> Grid:
    """The same values, up to rounding, by levels around zero."""
    if grid.offset is None:
        return grid
    half = 1 << (layout.bits - 1)
    kind: Kind = "int4" if half - 1 <= BOUNDS["int4"][1] else "int8"
    offset = grid.offset + np.float32(half) * grid.scale
    return replace(grid, kind=kind, levels=grid.levels - np.int8(half), offset=offset)


def _gives(grid: Grid, values: Array) -> bool:
    """Whether the grid's values are the bits of `values`."""
    return all(
        np.array_equal(_take(grid, rows).values().view(np.uint32), np.ascontiguousarray(values[rows]).view(np.uint32))
        for rows in _slabs(*values.shape)
    )


def _half(blocks: Bytes, start: int) -> Array:
    """The float16 number at byte `start` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fields(data: Bytes, bits: int, run: int) -> Bytes:
    """Fields of `bits` bits out of bytes [n, B]: of each run of bytes all lowest fields first, then all next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits out of twelve bytes [n, 12]; the last four hold bits of both."""
    first, second, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.hstack([first & 63, (mixed & 15) | (first >> 6 << 4)])
    return scales, np.hstack([second & 63, (mixed >> 4) | (second >> 6 << 4)])


def _signed(levels: np.ndarray, middle: int) -> np.ndarray:
    return levels.view(np.int8) - np.int8(middle)


def _q4_0(blocks: Bytes) -> Blocks:
    return _signed(_fields(blocks[:, 2:], 4, 16), 8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Blocks:
    return _signed(_fields(blocks[:, 4:], 4, 16), 0), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Blocks:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _signed(_fields(blocks[:, 6:], 4, 16) | fifth << 4, 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Blocks:
    fifth = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little")
    return _signed(_fields(blocks[:, 8:], 4, 16) | fifth << 4, 0), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Blocks:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: Bytes) -> Blocks:
    scale, least = _half(blocks, 80) * (blocks[:, :16] & 15), _half(blocks, 82) * (blocks[:, :16] >> 4)
    return _signed(_fields(blocks[:, 16:80], 2, 32), 0), scale, -least


def _q3_k(blocks: Bytes) -> Blocks:
    packed = blocks[:, 96:108]
    scales = _signed(_fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4, 32)
    levels = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return _signed(levels, 4), _half(blocks, 108) * scales, None


def _q4_k(blocks: Bytes) -> Blocks:
    scales, minima = _six_bits(blocks[:, 4:16])
    return _signed(_fields(blocks[:, 16:], 4, 32), 0), _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Blocks:
    scales, minima = _six_bits(blocks[:, 4:16])
    levels = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _signed(levels, 0), _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Blocks:
    levels = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _signed(levels, 32), _half(blocks, 208) * scales, None


_LAYOUTS = {
    Type.Q4_0: _Layout(4, _q4_0),
    Type.Q4_1: _Layout(4, _q4_1),
    Type.Q5_0: _Layout(5, _q5_0),
    Type.Q5_1: _Layout(5, _q5_1),
    Type.Q8_0: _Layout(8, _q8_0),
    Type.Q2_K: _Layout(2, _q2_k),
    Type.Q3_K: _Layout(3, _q3_k),
    Type.Q4_K: _Layout(4, _q4_k),
    Type.Q5_K: _Layout(5, _q5_k),
    Type.Q6_K: _Layout(6, _q6_k),
}
