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

import numpy as np
import onnxruntime as ort  # noqa: TID253 - this module is the ONNX Runtime boundary, imported only by the registry

from specdec.engines.base import Capabilities, KVBuffers
from specdec.engines.contract import (
    CHUNK_INPUTS,
    FEATURES,
    HIDDEN,
    LOGITS,
    Chunk,
    FloatArray,
    ModelSpec,
    past_names,
    present_names,
)
from specdec.engines.errors import ContractError, EngineError, EngineUnavailableError
from specdec.engines.ort_ends import check_ends
from specdec.engines.ort_kv import OrtKV

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}

# Each session has threads of its own, which spin after work. While those of a draft do (for milliseconds, left to
# themselves), the target's find no core: a pass took twice as long beside a draft. Between operators this is enough.
SPIN_US = 200


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
