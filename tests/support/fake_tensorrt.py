"""TensorRT and CUDA played by the host, so that the engine's own work runs where there is no GPU.

"Device memory" is host memory, and a "plan" is the path of an ONNX graph, which ONNX Runtime executes on what lies at
the addresses that the engine sets. What a GPU would get wrong without a word is an error here: an address that is not
set or not aligned, a cache output that is not where its input is, a shape outside the profile, a copy outside an
allocation.
"""

import ctypes
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from specdec.engines.contract import LOGITS, ModelSpec, past_names, present_names
from specdec.engines.manifest import Plan
from specdec.engines.plan import input_shapes, profiles

ALIGNMENT = 256
OUT_OF_MEMORY = 2


class FakeCuda:
    """`cuda.bindings.runtime`: the calls that specdec makes, on host memory; every one returns a code first."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.limit: int | None = None  # bytes of the next allocation that are too many

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == 1
        return 0, 77

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        assert stream == 77
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:  # noqa: N802
        if self.limit is not None and size > self.limit:
            return OUT_OF_MEMORY, None
        block = np.full(size + ALIGNMENT, 0xA5, np.uint8)  # not zero: what is not cleared shows
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.blocks[address] = block[address - block.ctypes.data :][:size]
        return 0, address

    cudaMallocHost = cudaMalloc  # noqa: N815

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        del self.blocks[address]
        return (0,)

    cudaFreeHost = cudaFree  # noqa: N815

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        self.check(address, size)
        ctypes.memset(address, value, size)
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:  # noqa: N802
        return self.cudaMemcpy2DAsync(target, size, source, size, size, 1, kind, stream)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, target: int, tpitch: int, source: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[int]:
        assert (kind, stream) == (4, 77)
        assert width <= min(tpitch, spitch)
        for row in range(height):
            to, start = target + row * tpitch, source + row * spitch
            assert abs(to - start) >= width, "overlapping copy"
            for address in (to, start):
                self.check(address, width, either=True)
            ctypes.memmove(to, start, width)
        return (0,)

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, {OUT_OF_MEMORY: b"out of memory"}[code]

    def check(self, address: int, size: int, *, either: bool = False) -> None:
        """An access to what is allocated; with `either`, ordinary host memory is as good."""
        for start, block in self.blocks.items():
            if start <= address < start + len(block):
                assert address + size <= start + len(block), "access behind an allocation"
                return
        assert either, "access outside every allocation"


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class FakeTensorRT:
    """The module `tensorrt_rtx`, for one plan of one model."""

    __version__ = "1.7.1.116"
    TensorLocation = TensorLocation
    ExecutionContextAllocationStrategy = SimpleNamespace(ON_PROFILE_CHANGE="on profile change")

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

    def __init__(self, spec: ModelSpec, plan: Plan, cuda: FakeCuda) -> None:
        self.spec, self.plan, self.cuda = spec, plan, cuda
        self.engine_type: type[FakeEngine] = FakeEngine
        self.engines: list[FakeEngine] = []

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=lambda raw: self._load(logger, raw))

    def _load(self, logger: Any, raw: bytes) -> Any:
        path = Path(raw.decode(errors="replace"))
        if not path.name.endswith(".onnx"):
            logger.log(self.ILogger.Severity.ERROR, "IRuntime::load: Error Code 1: Serialization (magic tag differs.)")
            return None
        self.engines.append(self.engine_type(self, path, logger))
        return self.engines[-1]


class FakeEngine:
    """`ICudaEngine`; tests subclass it to make an engine that breaks the contract."""

    def __init__(self, library: FakeTensorRT, path: Path, logger: Any) -> None:
        self.library, self.logger = library, logger
        options = ort.SessionOptions()
        options.log_severity_level = 3  # here the cache is copied, which ONNX Runtime warns of
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.contexts: list[FakeContext] = []
        layers = library.spec.num_layers
        self.aliases = dict(zip(present_names(layers), past_names(layers), strict=True))
        self.names = [value.name for value in (*self.session.get_inputs(), *self.session.get_outputs())]

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> str:
        spec = self.library.spec
        dtype = self.library.plan.inputs.get(name) or (spec.logits_dtype if name == LOGITS else spec.dtype)
        return f"DataType.{ {'float32': 'FLOAT', 'float16': 'HALF', 'int64': 'INT64', 'bool': 'BOOL'}[dtype] }"

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return input_shapes(self.library.spec, self.library.plan.capacity, -1, -1, -1)[name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        profile, spec, capacity = profiles(self.library.plan)[index], self.library.spec, self.library.plan.capacity
        largest = input_shapes(spec, capacity, profile.rows, profile.width, profile.logits)[name]
        return [input_shapes(spec, capacity, 1, 1, 1)[name], largest, largest]

    def create_execution_context(self, strategy: str) -> "FakeContext":
        assert strategy == "on profile change"
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeContext:
    """`IExecutionContext`: runs the graph on the memory that it was pointed to. `runs` counts the passes."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.runs = 0
        self.fails = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return stream == 77

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % ALIGNMENT == 0, f"{name} is not aligned"
        self.addresses[name] = address
        return name in self.engine.names

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile or 0)
        fits = all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))
        self.shapes[name] = shape
        if not fits:
            self._error(f"{name} {shape} is outside the profile")
        return fits

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 77
        if self.fails:
            self._error("IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (an illegal memory access)")
            return False
        spec, inputs = self.engine.library.spec, self.engine.library.plan.inputs
        feeds = {name: self._at(name, shape, inputs[name]).copy() for name, shape in self.shapes.items()}
        logits, *present = self.engine.session.run(None, feeds)
        for (output, past), data in zip(self.engine.aliases.items(), present, strict=True):
            assert self.addresses[output] == self.addresses[past], f"{output} is not in place"
            self._at(output, data.shape, spec.dtype)[:] = data
        self._at(LOGITS, logits.shape, spec.logits_dtype)[:] = logits
        self.runs += 1
        return True

    def _at(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.engine.library.cuda.check(self.addresses[name], size)
        block = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return np.frombuffer(block, dtype).reshape(shape)

    def _error(self, message: str) -> None:
        self.engine.logger.log(self.engine.library.ILogger.Severity.ERROR, message)
