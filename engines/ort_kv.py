"""Caches of ONNX Runtime engines: buffers that a pass changes in place, and rows of them that are bound as views.

Source: `KVBuffers` of base.py. This module knows nothing of what the tokens mean.
"""

import msgspec
import numpy as np
import onnxruntime as ort  # noqa: TID253 - with ort.py the ONNX Runtime boundary, imported by that alone

from specdec.engines.base import check_slots
from specdec.engines.contract import FloatArray, IntArray, ModelSpec
from specdec.engines.errors import EngineError


class OrtMemory:
    """Cache buffers [rows, H_kv, capacity, D], two per layer, as OrtValues on the engine's device.

    `host`: on the CPU, the arrays that own the memory. `bindings`: of sessions to these buffers.
    """

    def __init__(self, device: str, arrays: list[np.ndarray]) -> None:
        self.device = device
        self.install(arrays)

    def install(self, arrays: list[np.ndarray]) -> None:
        """Make `arrays` the buffers; when the device does not take them, nothing has changed."""
        self.values = [ort.OrtValue.ortvalue_from_numpy(array, self.device, 0) for array in arrays]
        self.shape, self.dtype = arrays[0].shape, arrays[0].dtype
        self.host = arrays if self.device == "cpu" else []
        self.bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` rows of host buffers where they lie and give the rest back: nothing is copied."""
        arrays = self.host
        self.values, self.bindings = [], {}  # what points to memory that may move
        for array in arrays:
            array.resize((rows, *array.shape[1:]), refcheck=False)
        self.install(arrays)

    def read(self, index: int) -> np.ndarray:
        """Buffer `index` as an array: itself on the CPU, else a copy."""
        return self.host[index] if self.host else np.array(self.values[index].numpy())

    def write(self, index: int, array: np.ndarray) -> None:
        """Give buffer `index` what `read` gave and the caller changed."""
        if not self.host:
            self.values[index].update_inplace(array)


class OrtKV:
    """The cache of a model of `spec` in `memory`, which may hold more layers behind its own (`first_layers`)."""

    def __init__(self, spec: ModelSpec, memory: OrtMemory) -> None:
        self.layers = spec.num_layers
        self._spec, self._memory = spec, memory
        self._scratch = np.empty(0, spec.logits_dtype)
        self._hidden: FloatArray | None = None

    @classmethod
    def allocate(cls, spec: ModelSpec, device: str, rows: int, capacity: int) -> "OrtKV":
        """New buffers, all zero."""
        shape = (rows, spec.num_kv_heads, capacity, spec.head_dim)
        return cls(spec, OrtMemory(device, [np.zeros(shape, spec.dtype) for _ in range(2 * spec.num_layers)]))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._memory.shape[0])

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return int(self._memory.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held, those of its own layers alone."""
        return self._spec.kv_bytes(self.rows, self.capacity)

    @property
    def hidden(self) -> FloatArray:
        """See `KVBuffers.hidden`."""
        if self._hidden is None:
            raise EngineError("no hidden states: the graph has no taps, or no pass was made")
        return self._hidden

    @property
    def bindings(self) -> dict[tuple[int, int, int], ort.IOBinding]:
        """Bindings to these buffers by session, first row and number of rows; those of buffers outgrown are gone."""
        return self._memory.bindings

    def first_layers(self, layers: int) -> "OrtKV":
        """See `KVBuffers.first_layers`."""
        if layers > self.layers:
            raise EngineError(f"a cache of {self.layers} layers has no first {layers}")
        return OrtKV(msgspec.structs.replace(self._spec, num_layers=layers), self._memory)

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """See `KVBuffers.resize`."""
        if used > capacity:
            raise EngineError(f"{used} slots in use do not fit into a cache of {capacity}")
        memory, kept = self._memory, min(rows, self.rows)
        if memory.host and capacity == self.capacity and rows < self.rows:
            memory.truncate(rows)
            return
        shape = (rows, memory.shape[1], capacity, memory.shape[3])
        try:
            arrays = [np.zeros(shape, memory.dtype) for _ in memory.values]
            for index, new in enumerate(arrays):
                new[:kept, :, :used] = memory.read(index)[:kept, :, :used]
            memory.install(arrays)
        except (MemoryError, RuntimeError) as exc:
            need = self._spec.kv_bytes(rows, capacity) / 2**20
            raise EngineError(f"a cache of {rows} rows x {capacity} slots needs {need:.0f} MiB more") from exc

    def move_row(self, source: int, target: int, used: int) -> None:
        """See `KVBuffers.move_row`."""
        for index in range(len(self._memory.values)):
            array = self._memory.read(index)
            array[target, :, :used] = array[source, :, :used]
            self._memory.write(index, array)

    def clear(self, row: int) -> None:
        """See `KVBuffers.clear`."""
        for index in range(len(self._memory.values)):
            array = self._memory.read(index)
            array[row] = 0
            self._memory.write(index, array)

    def move_slots(self, row: int, sources: IntArray, start: int) -> None:
        """See `KVBuffers.move_slots`."""
        for index in range(len(self._memory.values)):
            array = self._memory.read(index)
            array[row, :, start : start + len(sources)] = array[row][:, sources]  # indexing copies: no overlap
            self._memory.write(index, array)

    def read(self, row: int, used: int) -> np.ndarray:
        """See `KVBuffers.read`."""
        return np.stack([self._memory.read(index)[row, :, :used] for index in range(2 * self.layers)])

    def write(self, row: int, data: np.ndarray) -> None:
        """See `KVBuffers.write`."""
        _, heads, capacity, size = self._memory.shape
        check_slots(data, (2 * self.layers, heads, capacity, size), self._memory.dtype)
        for index, slots in enumerate(data):
            array = self._memory.read(index)
            array[row, :, : data.shape[2]] = slots
            self._memory.write(index, array)

    def view(self, index: int, first_row: int) -> int:
        """Address of row `first_row` of buffer `index`."""
        row_bytes = int(np.prod(self._memory.shape[1:])) * self._memory.dtype.itemsize
        return int(self._memory.values[index].data_ptr()) + first_row * row_bytes

    def logits_memory(self, shape: tuple[int, ...]) -> FloatArray:
        """Host memory for the logits of one pass, reused by the next (fresh pages would cost more than the copy)."""
        size = int(np.prod(shape))
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._scratch.dtype)
        return self._scratch[:size].reshape(shape)

    def hidden_memory(self, shape: tuple[int, ...]) -> FloatArray:
        """New host memory for the hidden states of one pass, which `hidden` returns from now on."""
        self._hidden = np.empty(shape, self._spec.dtype)
        return self._hidden
