"""ONNX Runtime backend: the KV cache is bound in place, so a pass never copies it.

Providers: CPU, and on an NVIDIA GPU CUDA, TensorRT and TensorRT-RTX; the last two hand to CUDA what they do not take.
Q/DQ pairs are computed as they are written, never fused: a quantized graph gives here what it says, and so is what
engines that do fuse are compared with.

Every cache input and the output of the same layer are bound to one address (`IOBinding`); rows `first .. first + n`
of a buffer are bound as a view, so a batch of n uses n rows and the prefill of one row leaves the others alone.
Bindings are kept per view: a pass binds its five small inputs and the logits, nothing else. This module knows nothing
of what the tokens mean.
"""

from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort  # noqa: TID253 - this module is the ONNX Runtime boundary, imported only by the registry

from specdec.engines.base import Capabilities, KVBuffers, check_slots
from specdec.engines.contract import (
    CHUNK_INPUTS,
    FEATURES,
    HIDDEN,
    LOGITS,
    Chunk,
    FloatArray,
    IntArray,
    ModelSpec,
    past_names,
    present_names,
)
from specdec.engines.errors import ContractError, EngineError, EngineUnavailableError
from specdec.engines.ort_ends import check_ends

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}

# Each session has threads of its own, which spin after work. While those of a draft do (for milliseconds, left to
# themselves), the target's find no core: a pass took twice as long beside a draft. Between operators this is enough.
SPIN_US = 200


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


class OrtEngine:
    """One ONNX graph in one ONNX Runtime session."""

    def __init__(self, graph: Path, spec: ModelSpec, *, provider: str = "cpu", threads: int | None = None) -> None:
        if spec.dtype == "bfloat16":
            raise EngineError(
                "ONNX Runtime has no bfloat16 kernels on the CPU, and numpy no such type: "
                "use precision fp32 or fp16, or backend tensorrt-rtx"
            )
        self.spec = spec
        self.capabilities = Capabilities(
            device=f"ONNX Runtime {ort.__version__}, {provider}" + (f", {threads} threads" if threads else "")
        )
        self._device = "cpu" if provider == "cpu" else "cuda"  # where tensors lie
        self._dtype, self._logits_dtype = np.dtype(spec.dtype), np.dtype(spec.logits_dtype)
        self._session: ort.InferenceSession | None = open_session(graph, provider, threads)
        self._past, self._present = list(past_names(spec.num_layers)), list(present_names(spec.num_layers))
        check_ends(self._session, spec)

    def allocate(self, rows: int, capacity: int) -> OrtKV:
        """See `Engine.allocate`."""
        self._open()
        try:
            return OrtKV.allocate(self.spec, self._device, rows, capacity)
        except (MemoryError, RuntimeError) as exc:
            need = self.spec.kv_bytes(rows, capacity) / 2**20
            raise EngineError(f"a cache of {rows} rows x {capacity} slots needs {need:.0f} MiB: not available") from exc

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        """See `Engine.step`."""
        session = self._open()
        if not isinstance(kv, OrtKV):
            raise ContractError(f"an ONNX Runtime engine takes the buffers that it allocates, not {type(kv).__name__}")
        if kv.layers != self.spec.num_layers:
            raise ContractError(f"a cache of {kv.layers} layers, the engine has {self.spec.num_layers}: first_layers")
        chunk.validate(self.spec, kv.rows - first_row, kv.capacity)
        binding = self._binding(session, kv, first_row, chunk.rows)
        for name in CHUNK_INPUTS:
            binding.bind_cpu_input(name, getattr(chunk, name))
        if self.spec.features:
            binding.bind_cpu_input(FEATURES, np.ascontiguousarray(chunk.features, self._dtype))
        shape = (*chunk.logit_indices.shape, self.spec.logits_size)  # [B, N, V]
        logits = kv.logits_memory(shape)
        binding.bind_output(LOGITS, "cpu", 0, self._logits_dtype.type, shape, logits.ctypes.data)
        if self.spec.taps:
            shape = (chunk.rows, chunk.width, self.spec.tapped_size)
            binding.bind_output(HIDDEN, "cpu", 0, self._dtype.type, shape, kv.hidden_memory(shape).ctypes.data)
        try:
            session.run_with_iobinding(binding)
        except Exception as exc:  # onnxruntime raises classes of its own that share no public base
            raise EngineError(f"ONNX Runtime failed on a chunk of {chunk.rows} x {chunk.width} tokens: {exc}") from exc
        return logits

    def close(self) -> None:
        """See `Engine.close`."""
        self._session = None

    def _open(self) -> ort.InferenceSession:
        if self._session is None:
            raise EngineError("the engine is closed")
        return self._session

    def _binding(self, session: ort.InferenceSession, kv: OrtKV, first_row: int, rows: int) -> ort.IOBinding:
        """Return the binding of `rows` rows from `first_row`: cache inputs and outputs on the same addresses."""
        key = (id(session), first_row, rows)
        binding = kv.bindings.get(key)
        if binding is None:
            binding = kv.bindings[key] = session.io_binding()
            shape = (rows, self.spec.num_kv_heads, kv.capacity, self.spec.head_dim)
            for index, (past, present) in enumerate(zip(self._past, self._present, strict=True)):
                place = (self._device, 0, self._dtype.type, shape, kv.view(index, first_row))
                binding.bind_input(past, *place)
                binding.bind_output(present, *place)
        return binding


def open_session(graph: Path, provider: str, threads: int | None) -> ort.InferenceSession:
    """Load `graph` on exactly the provider that was asked for; ONNX Runtime itself would fall back silently."""
    name = PROVIDERS.get(provider)
    if name is None:
        raise EngineUnavailableError(f"unknown provider {provider!r}: choose one of {', '.join(PROVIDERS)}")
    if name not in ort.get_available_providers():
        raise EngineUnavailableError(
            f'this ONNX Runtime has no {name}: pip install "specdec[gpu]" (and remove onnxruntime, which shadows it)'
        )
    if not graph.is_file():
        raise EngineError(f"{graph} is missing")
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only; they come as exceptions as well
    # Fused Q/DQ loses accuracy on AVX2 without a word, and float8 pairs around float32 products do not load at all.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = ort.InferenceSession(str(graph), options, providers=_in_order(name))
    except Exception as exc:  # onnxruntime raises classes of its own that share no public base
        raise EngineError(f"ONNX Runtime cannot load {graph}: {exc}") from exc
    got = session.get_providers()[0]
    if got != name:
        raise EngineUnavailableError(f"{name} was asked for and ONNX Runtime took {got}: check driver and CUDA version")
    return session


def _in_order(name: str) -> list[str]:
    """The provider, and behind TensorRT's the one that takes the nodes which it leaves."""
    behind = [PROVIDERS["cuda"]] if name not in (PROVIDERS["cpu"], PROVIDERS["cuda"]) else []
    return [name, *(other for other in behind if other in ort.get_available_providers())]
