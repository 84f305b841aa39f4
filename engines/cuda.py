"""Device and pinned host memory, copies and one stream, through NVIDIA's `cuda-bindings`.

The runtime API is injected (`cuda.bindings.runtime`: every call returns an error code and its results), so that nothing
is imported here. Copies are queued on the stream in order; who reads a result on the host calls `synchronize` first.
This module knows bytes and addresses; it knows no tensor and no engine.
"""

import ctypes
import importlib
import importlib.util
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.engines.errors import EngineError, EngineUnavailableError

NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the default stream
ALIGNMENT = 256  # bytes: what cudaMalloc gives and TensorRT asks of every tensor

Bytes = npt.NDArray[np.uint8]


class DeviceMemory:
    """One allocation on the GPU; freed with the object. `address` is an integer."""

    def __init__(self, cuda: "Cuda", nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(cuda.call("cudaMalloc", max(nbytes, 1))[0])
        self._free = weakref.finalize(self, cuda.runtime.cudaFree, self.address)


class PinnedMemory:
    """Host memory that the GPU copies to and from directly; freed with the object, which outlives its views."""

    def __init__(self, cuda: "Cuda", nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(cuda.call("cudaMallocHost", max(nbytes, 1))[0])
        self._free = weakref.finalize(self, cuda.runtime.cudaFreeHost, self.address)

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array on the first bytes; it keeps this memory alive."""
        count = int(np.prod(shape))
        block = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(self.address)
        block.owner = self  # type: ignore[attr-defined]  # ctypes arrays take attributes, and numpy keeps the array
        array: np.ndarray = np.frombuffer(memoryview(block).cast("B"), dtype, count)
        return array.reshape(shape)


class Cuda:
    """The first GPU that CUDA shows (`CUDA_VISIBLE_DEVICES` chooses which), and one stream on it."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.stream = int(self.call("cudaStreamCreateWithFlags", NON_BLOCKING)[0])
        weakref.finalize(self, runtime.cudaStreamDestroy, self.stream)
        self._default = runtime.cudaMemcpyKind.cudaMemcpyDefault  # the direction follows from the addresses

    def call(self, name: str, *arguments: object) -> tuple[Any, ...]:
        """Call the runtime API and return its results; `EngineError` with CUDA's own words when it fails."""
        code, *results = getattr(self.runtime, name)(*arguments)
        if int(code) != 0:
            text = self.runtime.cudaGetErrorString(code)[1]
            raise EngineError(f"{name} failed: {text.decode() if isinstance(text, bytes) else text}")
        return tuple(results)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """New device memory, not initialized. Raises `EngineError` when there is not enough."""
        return DeviceMemory(self, nbytes)

    def pin(self, nbytes: int) -> PinnedMemory:
        """New pinned host memory, not initialized. Raises `EngineError` when there is not enough."""
        return PinnedMemory(self, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between addresses on the host or the device; the ranges do not overlap."""
        self.call("cudaMemcpyAsync", target, source, nbytes, self._default, self.stream)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Queue a copy of `rows` runs of `width` bytes, `..._pitch` bytes apart; the ranges do not overlap."""
        self.call(
            "cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, rows, self._default, self.stream
        )

    def clear(self, address: int, nbytes: int) -> None:
        """Queue zeros."""
        self.call("cudaMemsetAsync", address, 0, nbytes, self.stream)

    def synchronize(self) -> None:
        """Wait for everything that was queued. Raises `EngineError` when some of it failed."""
        self.call("cudaStreamSynchronize", self.stream)


def load_cuda() -> Any:
    """Import `cuda.bindings.runtime`. Raises `EngineUnavailableError` when it is not installed or does not load."""
    install = 'pip install "specdec[rtx]" (or "specdec[tensorrt]")'
    try:
        if importlib.util.find_spec("cuda.bindings") is None:
            raise EngineUnavailableError(f"cuda-bindings is not installed: {install}")
        return importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError as exc:
        raise EngineUnavailableError(f"cuda-bindings is not installed: {install}") from exc
    except (ImportError, OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise EngineUnavailableError(f"cuda-bindings is installed and does not load: {reason}; try {install}") from exc
