"""Parameters of a traced graph become bytes on disk: one tensor at a time, in the graph's dtype and orientation.

A parameter is an initializer without data whose name is the state dict's; `Value.meta` says more where that is not
all: `TRANSPOSED` (the name whose two axes are swapped in the file), `ALIASES` (further names of a tied parameter),
`PARTS` (names and sizes of the parameters that it joins along their first axis), `QUANTIZED` (which piece of the
parameters' grids it holds, instead of the parameters themselves).
This module knows names, shapes and bytes; it knows no operator.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch

from specdec.engines.errors import ExportError, ResourceError
from specdec.export.grid import BOUNDS, Grid, joined, pack_nibbles

TRANSPOSED = "specdec.transposed"
ALIASES = "specdec.aliases"
PARTS = "specdec.parts"
QUANTIZED = "specdec.quantized"
TORCH = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}
ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class Quantized:
    """`Value.meta[QUANTIZED]`: a piece of the grid of a weight of N outputs and K inputs, J blocks each.

    `piece`: `levels` [N, K], `scale` or `offset` [N, J], `unsigned`: levels counted from the lowest that so many bits
    have. With `inputs_first` the axes are swapped. `shape`: of the weight in the checkpoint. The value's own shape may
    be any that holds as many elements; its type says how many bits levels are stored in.
    """

    piece: Literal["levels", "unsigned", "scale", "offset"]
    shape: tuple[int, ...]
    inputs_first: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter of the checkpoint: the names it may have in the state dict, and its shape there."""

    names: tuple[str, ...]
    shape: list[int]

    def tensor(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return next(weights[name] for name in self.names if name in weights)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one parameter goes: what it is made of, the value in the graph, the place in the data file."""

    value: ir.Value
    name: str
    shape: ir.Shape
    dtype: ir.DataType
    parts: tuple[_Part, ...]
    transposed: bool
    quantized: Quantized | None
    file: str
    offset: int
    length: int

    @property
    def content(self) -> object:
        """Equal for equal bytes."""
        return (tuple(part.names for part in self.parts), self.transposed, self.quantized, self.dtype)


@dataclass(frozen=True, slots=True)
class Lender:
    """A graph whose data file, `data` in the same folder, has some of what another graph reads (by name and form)."""

    graph: ir.Model
    data: str


def parts_of(weight: ir.Value) -> tuple[tuple[str, int], ...]:
    """Names in the state dict, and sizes along the first axis there, of the parameters that make up `weight`."""
    if PARTS in weight.meta:
        parts: tuple[tuple[str, int], ...] = weight.meta[PARTS]
        return parts
    shape = checkpoint_shape(weight)
    return ((str(weight.meta.get(TRANSPOSED) or weight.name), shape[0]),)


def checkpoint_shape(weight: ir.Value) -> tuple[int, ...]:
    """Shape of `weight` as the checkpoint has it."""
    if weight.shape is None:
        raise ExportError(f"parameter {weight.name} of the traced graph has no shape")
    sizes = tuple(int(size) for size in weight.shape.numpy())
    return sizes[::-1] if TRANSPOSED in weight.meta else sizes


def graph_bytes(graph: ir.Model) -> int:
    """Bytes of the data file that `write_graph` writes."""
    return _end(_layout(graph, "data"))


def write_graph(
    graph: ir.Model,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    grids: Mapping[str, Grid] | None = None,
    lender: Lender | None = None,
) -> None:
    """Write `graph` to `path` and its parameters, taken from `weights`, to `path` + ".data" beside it.

    What the graph holds quantized is taken from `grids`, which has the names of `weights`; what `lender` has is read
    where it lies, and is in neither. Holds one tensor at a time
    besides them; equal graphs, weights and grids give equal bytes. `progress(done, total)` is called in bytes. Raises
    `ExportError` naming the first parameter that is missing, unused or of another shape, before anything is written,
    and `ResourceError` when the disk does not take it.
    """
    data = path.with_name(path.name + ".data")
    slots = [slot for slot in _layout(graph, data.name, lender) if slot.file == data.name]
    _check(slots, weights)
    try:
        _write_data(slots, weights, grids or {}, data, progress)
        save_graph(graph, path, data.name, lender=lender)
    except OSError as exc:
        raise ResourceError(f"{exc.filename or data} cannot be written: {exc.strerror or exc}") from exc


def save_graph(
    graph: ir.Model, path: Path, data: str, whole: ir.Model | None = None, lender: Lender | None = None
) -> None:
    """Write `graph` to `path`; its parameters are those in the file `data` beside it, laid out by `write_graph`.

    `whole`: the graph that the file was written for, if `graph` has only some of its parameters (by name). Raises
    `ExportError` when it has others.
    """
    own = {slot.name: slot.value for slot in _layout(graph, data)}
    laid_out = _layout(whole or graph, data, lender)
    slots = [replace(slot, value=own.pop(slot.name)) for slot in laid_out if slot.name in own]
    if own:
        raise ExportError(f"parameter {next(iter(own))} is not in {data}")
    with _external(slots):
        ir.save(graph, path)


def _write_data(
    slots: list[_Slot],
    weights: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    data: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = _end(slots)
    with data.open("wb") as stream:
        for slot in slots:
            if slot.offset < stream.tell():
                continue  # the bytes of an earlier slot
            stream.write(bytes(slot.offset - stream.tell()))
            (_tensor(slot, weights) if slot.quantized is None else _piece(slot, slot.quantized, grids)).tofile(stream)
            if progress is not None:
                progress(slot.offset + slot.length, total)


def _end(slots: list[_Slot]) -> int:
    return max((slot.offset + slot.length for slot in slots), default=0)


@contextmanager
def _external(slots: list[_Slot]) -> Iterator[None]:
    """While open, the parameters refer to their places in the data files."""
    try:
        for slot in slots:
            slot.value.const_value = ir.ExternalTensor(
                slot.file, slot.offset, slot.length, slot.dtype, shape=slot.shape, name=slot.name, base_dir=""
            )
        yield
    finally:
        for slot in slots:
            slot.value.const_value = None


def _layout(graph: ir.Model, data: str, lender: Lender | None = None) -> list[_Slot]:
    """Parameters in the order of the graph's initializers, each at an aligned offset of the file `data`.

    Equal bytes are there once, and not at all if `lender` has them.
    """
    slots: list[_Slot] = []
    lent = _layout(lender.graph, lender.data) if lender is not None else []
    places = {slot.content: (slot.file, slot.offset) for slot in lent}
    end = 0
    for value in graph.graph.initializers.values():
        if value.const_value is not None:
            continue
        if value.shape is None or value.dtype is None or value.name is None:
            raise ExportError(f"parameter {value.name} of the traced graph has no shape or no dtype")
        source, quantized = value.meta.get(TRANSPOSED), value.meta.get(QUANTIZED)
        sizes = [int(size) for size in value.shape.numpy()]
        original = sizes[::-1] if source else sizes  # as the checkpoint has it
        if quantized is not None:
            original = list(quantized.shape)
        name = source or value.name
        joined_parts = value.meta.get(PARTS) or ((name, original[0] if original else 0),)
        parts = tuple(
            _Part((name, *value.meta.get(ALIASES, ())), [size, *original[1:]] if original else [])
            for name, size in joined_parts
        )
        length = math.ceil(math.prod(sizes) * value.dtype.itemsize)
        form = (value, value.name, value.shape, value.dtype, parts, source is not None, quantized)
        slot = _Slot(*form, data, -(-end // ALIGNMENT) * ALIGNMENT, length)
        file, offset = places.setdefault(slot.content, (slot.file, slot.offset))
        slots.append(replace(slot, file=file, offset=offset))
        if file == data:
            end = max(end, offset + length)
    return slots


def _check(slots: list[_Slot], weights: Mapping[str, torch.Tensor]) -> None:
    used: set[str] = set()
    for part in (part for slot in slots for part in slot.parts):
        present = [name for name in part.names if name in weights]
        if not present:
            raise ExportError(f"the checkpoint has no weight {part.names[0]}, which the model needs")
        used.update(present)
        for name in present:
            found = list(weights[name].shape)
            if found != part.shape:
                raise ExportError(f"the checkpoint's weight {name} has shape {found}, the model needs {part.shape}")
        first = weights[present[0]]
        for name in present[1:]:
            other = weights[name]
            if other.data_ptr() != first.data_ptr() and not torch.equal(other, first):
                raise ExportError(f"the checkpoint's weights {present[0]} and {name} differ, the model ties them")
    unused = sorted(set(weights) - used)
    if unused:
        raise ExportError(f"the checkpoint's weight {unused[0]} is not used by the model ({len(unused)} unused in all)")


def _tensor(slot: _Slot, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    """The parameter as it lies in the file: C-contiguous, in the graph's dtype."""
    tensors = [part.tensor(weights) for part in slot.parts]
    tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if slot.transposed:
        tensor = tensor.t()
    tensor = tensor.detach().to(device="cpu", dtype=TORCH[slot.dtype]).contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


def _piece(slot: _Slot, quantized: Quantized, grids: Mapping[str, Grid]) -> np.ndarray:
    """A piece of the parameter's grid as it lies in the file, in the value's type."""
    grid = joined([next(grids[name] for name in part.names if name in grids) for part in slot.parts])
    array: np.ndarray | None
    packed = slot.length < grid.levels.size and quantized.piece in ("levels", "unsigned")
    if quantized.piece == "unsigned":
        lowest = BOUNDS["int4" if packed else "int8"][0]
        array = (grid.levels.astype(np.int16) - lowest).astype(np.uint8)
    else:
        array = {"levels": grid.levels, "scale": grid.scale, "offset": grid.offset}[quantized.piece]
    if array is None:
        raise ExportError(f"{slot.name}: the weight's grid has no {quantized.piece}")
    if quantized.inputs_first:
        array = array.T
    if packed:
        return pack_nibbles(array)
    if quantized.piece in ("scale", "offset"):
        array = array.astype(slot.dtype.numpy())
    return np.ascontiguousarray(array)
