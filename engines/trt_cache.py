"""The KV cache of a TensorRT engine: one allocation on the GPU, in which a pass reads and writes in place.

The capacity is the plan's, since both libraries write a cache in place only if its size is fixed; rows can be added.
This module knows where slots lie; it runs no engine.
"""

import itertools

import numpy as np

from specdec.engines.base import check_slots
from specdec.engines.contract import ITEMSIZE, FloatArray, IntArray, ModelSpec
from specdec.engines.cuda import Cuda, DeviceMemory, PinnedMemory
from specdec.engines.errors import EngineError
from specdec.engines.manifest import Plan


class TrtKV:
    """Cache buffers [2 * layers, rows, H_kv, capacity, D] in one allocation on the GPU."""

    _numbers = itertools.count()

    def __init__(self, cuda: Cuda, spec: ModelSpec, plan: Plan, rows: int) -> None:
        self._cuda, self._spec, self._plan = cuda, spec, plan
        self._slot = spec.head_dim * ITEMSIZE[spec.dtype]  # bytes of a slot of one head
        self._head = self._slot * plan.capacity
        self._row = self._head * spec.num_kv_heads
        self._count = 2 * spec.num_layers
        self._dtype = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)  # as the host sees it
        self._memory, self._rows = self._zeros(rows), rows
        self._pinned: PinnedMemory | None = None
        self.number = next(self._numbers)  # names this allocation: another one has another number

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._rows

    @property
    def capacity(self) -> int:
        """Slots per row: the plan's, whatever less was asked for."""
        return self._plan.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held on the GPU."""
        return self._spec.kv_bytes(self._rows, self.capacity)

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """See `KVBuffers.resize`; rows can be added, and nothing else changes."""
        if rows < self._rows:
            raise EngineError(f"a cache of {self._rows} rows cannot shrink to {rows}")
        check_size(self._plan, rows, capacity)
        memory = self._zeros(rows)
        for index in range(self._count):
            target, source = memory.address + index * rows * self._row, self.view(index, 0)
            self._cuda.copy_rows(
                target, self._head, source, self._head, used * self._slot, self._rows * self._spec.num_kv_heads
            )
        self._cuda.synchronize()
        self._memory, self._rows, self.number = memory, rows, next(self._numbers)

    def move_row(self, source: int, target: int, used: int) -> None:
        """See `KVBuffers.move_row`."""
        if source == target or not used:
            return
        for index in range(self._count):
            self._copy_slots(self.view(index, target), self.view(index, source), used)
        self._cuda.synchronize()

    def clear(self, row: int) -> None:
        """See `KVBuffers.clear`."""
        for index in range(self._count):
            self._cuda.clear(self.view(index, row), self._row)
        self._cuda.synchronize()

    def move_slots(self, row: int, sources: IntArray, start: int) -> None:
        """See `KVBuffers.move_slots`. Ascending slots move down, so no copy touches a later one's source."""
        for index in range(self._count):
            base = self.view(index, row)
            for place, slot in enumerate(sources.tolist(), start):
                if slot != place:
                    self._copy_slots(base + place * self._slot, base + slot * self._slot, 1)
        self._cuda.synchronize()

    @property
    def hidden(self) -> FloatArray:
        """See `KVBuffers.hidden`."""
        raise EngineError("TensorRT plans have no hidden states: run this drafter on backend ort")

    def first_layers(self, layers: int) -> "TrtKV":
        """See `KVBuffers.first_layers`: plans are built for one model each, none for a part of it."""
        raise EngineError(f"a TensorRT engine does not share its cache with one of {layers} layers: use backend ort")

    def read(self, row: int, used: int) -> np.ndarray:
        """See `KVBuffers.read`."""
        data = np.empty((self._count, self._spec.num_kv_heads, used, self._spec.head_dim), self._dtype)
        width = used * self._slot
        for index, part in enumerate(data):
            self._cuda.copy_rows(
                part.ctypes.data, width, self.view(index, row), self._head, width, self._spec.num_kv_heads
            )
        self._cuda.synchronize()
        return data

    def write(self, row: int, data: np.ndarray) -> None:
        """See `KVBuffers.write`."""
        check_slots(data, (self._count, self._spec.num_kv_heads, self.capacity, self._spec.head_dim), self._dtype)
        data, width = np.ascontiguousarray(data), data.shape[2] * self._slot
        for index, part in enumerate(data):
            self._cuda.copy_rows(
                self.view(index, row), self._head, part.ctypes.data, width, width, self._spec.num_kv_heads
            )
        self._cuda.synchronize()

    def view(self, index: int, first_row: int) -> int:
        """Address of row `first_row` of buffer `index`."""
        return self._memory.address + (index * self._rows + first_row) * self._row

    def logits_memory(self, shape: tuple[int, ...]) -> tuple[int, FloatArray]:
        """Address and view of pinned memory for the logits of one pass, reused by the next."""
        dtype = np.dtype(self._spec.logits_dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if self._pinned is None or self._pinned.nbytes < nbytes:
            self._pinned = self._cuda.pin(nbytes)
        return self._pinned.address, self._pinned.view(shape, dtype)

    def _copy_slots(self, target: int, source: int, slots: int) -> None:
        """Copy `slots` slots of every head of a row between addresses of their first slots."""
        self._cuda.copy_rows(target, self._head, source, self._head, slots * self._slot, self._spec.num_kv_heads)

    def _zeros(self, rows: int) -> DeviceMemory:
        memory = self._cuda.allocate(self._count * rows * self._row)
        self._cuda.clear(memory.address, memory.nbytes)
        return memory


def check_size(plan: Plan, rows: int, capacity: int) -> None:
    """Raise `EngineError` for more rows or slots than the plan has."""
    if rows > plan.max_batch or capacity > plan.capacity:
        raise EngineError(
            f"a cache of {rows} rows x {capacity} slots is more than this engine's {plan.max_batch} x {plan.capacity}: "
            "export with a larger --max-batch or --max-length"
        )
