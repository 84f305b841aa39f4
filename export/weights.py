"""Parameters of a traced graph become bytes on disk: one tensor at a time, in the graph's dtype and orientation.

A parameter is an initializer without data whose name is the state dict's; `Value.meta` says more where that is not
all: `TRANSPOSED` (the name whose two axes are swapped in the file), `ALIASES` (further names of a tied parameter),
`PARTS` (names and sizes of the parameters that it joins along their first axis).
This module knows names, shapes and bytes; it knows no operator.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from specdec.engines.errors import ExportError, ResourceError

TRANSPOSED = "specdec.transposed"
ALIASES = "specdec.aliases"
PARTS = "specdec.parts"
ALIGNMENT = 64  # bytes: a cache line


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
    offset: int
    length: int


def graph_bytes(graph: ir.Model) -> int:
    """Bytes of the data file that `write_graph` writes."""
    slots = _layout(graph)
    return slots[-1].offset + slots[-1].length if slots else 0


def write_graph(
    graph: ir.Model,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `graph` to `path` and its parameters, taken from `weights`, to `path` + ".data" beside it.

    Holds one tensor at a time besides `weights`; equal graphs and weights give equal bytes. `progress(done, total)` is
    called in bytes. Raises `ExportError` naming the first parameter that is missing, unused or of another shape,
    before anything is written, and `ResourceError` when the disk does not take it.
    """
    slots = _layout(graph)
    _check(slots, weights)
    data = path.with_name(path.name + ".data")
    try:
        _write_data(slots, weights, data, progress)
        with _external(slots, data.name):
            ir.save(graph, path)
    except OSError as exc:
        raise ResourceError(f"{exc.filename or data} cannot be written: {exc.strerror or exc}") from exc


def _write_data(
    slots: list[_Slot], weights: Mapping[str, torch.Tensor], data: Path, progress: Callable[[int, int], None] | None
) -> None:
    total = slots[-1].offset + slots[-1].length if slots else 0
    with data.open("wb") as stream:
        for slot in slots:
            stream.write(bytes(slot.offset - stream.tell()))
            _tensor(slot, weights).tofile(stream)
            if progress is not None:
                progress(slot.offset + slot.length, total)


@contextmanager
def _external(slots: list[_Slot], location: str) -> Iterator[None]:
    """While open, the parameters refer to their places in the data file."""
    try:
        for slot in slots:
            slot.value.const_value = ir.ExternalTensor(
                location, slot.offset, slot.length, slot.dtype, shape=slot.shape, name=slot.name, base_dir=""
            )
        yield
    finally:
        for slot in slots:
            slot.value.const_value = None


def _layout(graph: ir.Model) -> list[_Slot]:
    """Parameters in the order of the graph's initializers, each at an aligned offset."""
    slots: list[_Slot] = []
    end = 0
    for value in graph.graph.initializers.values():
        if value.const_value is not None:
            continue
        if value.shape is None or value.dtype is None or value.name is None:
            raise ExportError(f"parameter {value.name} of the traced graph has no shape or no dtype")
        source = value.meta.get(TRANSPOSED)
        sizes = [int(size) for size in value.shape.numpy()]
        original = sizes[::-1] if source else sizes  # as the checkpoint has it
        joined = value.meta.get(PARTS) or ((source or value.name, original[0] if original else 0),)
        parts = tuple(
            _Part((name, *value.meta.get(ALIASES, ())), [size, *original[1:]] if original else [])
            for name, size in joined
        )
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        length = math.prod(sizes) * value.dtype.itemsize
        slots.append(_Slot(value, value.name, value.shape, value.dtype, parts, source is not None, offset, int(length)))
        end = offset + int(length)
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
    dtype = torch.float16 if slot.dtype == ir.DataType.FLOAT16 else torch.float32
    if slot.transposed:
        tensor = tensor.t()
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous().numpy()
