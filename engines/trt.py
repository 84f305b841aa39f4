"""TensorRT and TensorRT-RTX backend: runs a plan with the KV cache in place on the GPU.

The library is injected (`tensorrt` or `tensorrt_rtx`), CUDA's runtime too. Every cache input and the output of the same
layer have one address; a view of rows `first ..` is that address plus whole rows, so a batch of n uses n rows. There is
one execution context for each profile: going from prefill to verification and back costs no set-up. What goes in and
out passes through pinned memory on one stream; a pass ends when its logits are on the host.

Without a driver TensorRT's runtime crashes the process that gives it an engine: `open_plan` asks the driver first.
This module knows nothing of what the tokens mean.
"""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from specdec.engines import nvidia
from specdec.engines.base import Capabilities, KVBuffers
from specdec.engines.contract import (
    CHUNK_INPUTS,
    ITEMSIZE,
    LOGITS,
    Chunk,
    FloatArray,
    ModelSpec,
    past_names,
    present_names,
)
from specdec.engines.cuda import ALIGNMENT, Cuda, DeviceMemory, PinnedMemory, load_cuda
from specdec.engines.errors import ContractError, EngineError, EngineUnavailableError
from specdec.engines.manifest import Plan
from specdec.engines.plan import choose_plan, choose_profile, input_shapes, profiles
from specdec.engines.trt_cache import TrtKV, check_size
from specdec.engines.trt_library import Library, collecting_logger, dtype_name, load_library


def open_plan(plans: Mapping[Path, Plan], spec: ModelSpec, backend: str) -> "TrtEngine":
    """Load the plan among `plans` that `backend` runs on the first GPU here.

    Raises `EngineUnavailableError` when there is no GPU, no plan for it, or no library of the plan's version;
    `EngineError` when the plan does not load, `ContractError` when it is not what its record says.
    """
    found = nvidia.probe()
    if not found.devices:
        raise EngineUnavailableError(
            f"{backend} needs an NVIDIA GPU: {found.problem}; use --backend ort on this machine"
        )
    device = found.devices[0]
    plan = choose_plan({path.stem: plan for path, plan in plans.items()}, backend, device.architecture)
    path = next(path for path, known in plans.items() if known is plan)
    library = load_library(plan.backend)
    if library.__version__ != plan.library:
        raise EngineUnavailableError(
            f"{path.name} was built by {backend} {plan.library} and runs on no other version, here is "
            f'{library.__version__}: pip install "{backend}=={plan.library}", or export again'
        )
    return TrtEngine(path, plan, spec, library, Cuda(load_cuda()), device.name)


class TrtEngine:
    """One plan in one TensorRT runtime. Passes on different buffers take turns: there is one stream."""

    def __init__(self, path: Path, plan: Plan, spec: ModelSpec, library: Library, cuda: Cuda, device: str) -> None:
        """Load `path`. The caller has made sure that there is a driver, and a GPU of the plan's architecture."""
        if not path.is_file():
            raise EngineError(f"{path} is missing")
        self.spec, self.plan = spec, plan
        self.capabilities = Capabilities(device=f"{plan.backend} {plan.library}, {device}", growable=False)
        self._library, self._cuda, self._lock = library, cuda, Lock()
        self._logger, self._messages = collecting_logger(library)
        self._runtime = library.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(f"{plan.backend} cannot load {path}: {self._messages.reason()}; export the bundle again")
        self._past, self._present = list(past_names(spec.num_layers)), list(present_names(spec.num_layers))
        check_engine(self._engine, library, spec, plan)
        self._staging = self._stage()
        self._logits: DeviceMemory | None = None
        self._contexts: list[Any] = [self._context(index) for index in range(len(profiles(plan)))]
        self._bound: list[tuple[int, int] | None] = [None] * len(self._contexts)

    def allocate(self, rows: int, capacity: int) -> TrtKV:
        """See `Engine.allocate`; the buffers have the plan's capacity, which is at least `capacity`."""
        self._check_open()
        check_size(self.plan, rows, capacity)
        return TrtKV(self._cuda, self.spec, self.plan, rows)

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        """See `Engine.step`. A chunk also has to fit one of the plan's profiles."""
        self._check_open()
        if not isinstance(kv, TrtKV):
            raise ContractError(f"a TensorRT engine takes the buffers that it allocates, not {type(kv).__name__}")
        chunk.validate(self.spec, kv.rows - first_row, kv.capacity)
        wanted = chunk.logit_indices.shape[1]
        index = choose_profile(self.plan, chunk.rows, chunk.width, wanted)
        shape = (chunk.rows, wanted, self.spec.logits_size)  # [B, N, V]
        with self._lock:
            context = self._contexts[index]
            self._feed(context, chunk)
            self._bind_cache(index, kv, first_row)
            size = int(np.prod(shape)) * ITEMSIZE[self.spec.logits_dtype]
            if self._logits is None or self._logits.nbytes < size:
                self._logits = self._cuda.allocate(size)
            self._try(context.set_tensor_address(LOGITS, self._logits.address), LOGITS)
            self._try(context.execute_async_v3(self._cuda.stream), f"a chunk of {chunk.rows} x {chunk.width} tokens")
            address, logits = kv.logits_memory(shape)
            self._cuda.copy(address, self._logits.address, size)
            self._cuda.synchronize()
        return logits

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            self._contexts.clear()
            self._engine = self._runtime = self._logits = None
            self._staging = {}

    def _check_open(self) -> None:
        if self._engine is None:
            raise EngineError("the engine is closed")

    def _stage(self) -> dict[str, tuple[PinnedMemory, DeviceMemory]]:
        """Memory on both sides for every input of a chunk, as large as the largest profile needs."""
        sizes = dict.fromkeys(CHUNK_INPUTS, 0)
        for profile in profiles(self.plan):
            shapes = input_shapes(self.spec, self.plan.capacity, profile.rows, profile.width, profile.logits)
            for name in CHUNK_INPUTS:
                nbytes = int(np.prod(shapes[name])) * np.dtype(self.plan.inputs[name]).itemsize
                sizes[name] = max(sizes[name], nbytes)
        return {name: (self._cuda.pin(size), self._cuda.allocate(size)) for name, size in sizes.items()}

    def _context(self, index: int) -> Any:
        """An execution context that stays in profile `index`; its working memory is as large as that profile needs."""
        strategy = self._library.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise EngineError(f"{self.plan.backend} made no execution context: {self._messages.reason()}")
        self._try(context.set_optimization_profile_async(index, self._cuda.stream), f"profile {index}")
        for name, (_, device) in self._staging.items():
            self._try(context.set_tensor_address(name, device.address), name)
        self._cuda.synchronize()
        return context

    def _feed(self, context: Any, chunk: Chunk) -> None:
        """Queue the chunk's arrays for the GPU and tell the context every input's shape."""
        for name, (pinned, device) in self._staging.items():
            array = getattr(chunk, name)
            staged = pinned.view(array.shape, self.plan.inputs[name])
            np.copyto(staged, array)
            self._cuda.copy(device.address, pinned.address, staged.nbytes)
        shapes = input_shapes(self.spec, self.plan.capacity, chunk.rows, chunk.width, chunk.logit_indices.shape[1])
        for name, shape in shapes.items():
            self._try(context.set_input_shape(name, shape), f"{name} {shape}")

    def _bind_cache(self, index: int, kv: TrtKV, first_row: int) -> None:
        """Give each cache input and its output the address of row `first_row`, unless they have it already."""
        if self._bound[index] == (kv.number, first_row):
            return
        context = self._contexts[index]
        for buffer, names in enumerate(zip(self._past, self._present, strict=True)):
            for name in names:
                self._try(context.set_tensor_address(name, kv.view(buffer, first_row)), name)
        self._bound[index] = (kv.number, first_row)

    def _try(self, done: bool, what: str) -> None:
        if not done:
            reason = self._messages.reason()
            self._messages.errors.clear()
            raise EngineError(f"{self.plan.backend} failed on {what}: {reason}")


def check_engine(engine: Any, library: Library, spec: ModelSpec, plan: Plan) -> None:
    """Compare a loaded engine with the contract and with its record; raise `ContractError` on the first difference."""
    past, present = list(past_names(spec.num_layers)), list(present_names(spec.num_layers))
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    expected = [*CHUNK_INPUTS, *past, LOGITS, *present]
    if odd := sorted({*names} ^ {*expected}):
        raise ContractError(
            f"the plan does not keep the engine contract: {', '.join(odd[:5])}; export the bundle again"
        )
    outputs = {LOGITS: spec.logits_dtype, **dict.fromkeys(present, spec.dtype)}
    for name in names:
        dtype = dtype_name(engine.get_tensor_dtype(name))
        wanted = outputs.get(name) or plan.inputs.get(name)
        if dtype != wanted:
            raise ContractError(f"{name} of the plan is {dtype}, its record says {wanted}; export the bundle again")
        if engine.get_tensor_location(name) != library.TensorLocation.DEVICE:
            raise ContractError(f"{name} of the plan lies in host memory, which specdec does not feed; export again")
    cache = input_shapes(spec, plan.capacity, -1, -1, -1)
    for name, output in zip(past, present, strict=True):
        if tuple(engine.get_tensor_shape(name)) != cache[name]:
            found = tuple(engine.get_tensor_shape(name))
            raise ContractError(f"{name} of the plan is {found}, the manifest says {cache[name]}; export again")
        if engine.get_aliased_input_tensor(output) != name:
            raise ContractError(f"{output} of the plan is not written in place of {name}; export the bundle again")
    row = cache[past[0]][1:]
    if int(np.prod(row)) * ITEMSIZE[spec.dtype] % ALIGNMENT:
        raise ContractError(f"rows {row} of {spec.dtype} do not begin at multiples of {ALIGNMENT} bytes; export again")
    for index, profile in enumerate(profiles(plan)):
        shapes = input_shapes(spec, plan.capacity, profile.rows, profile.width, profile.logits)
        for name, shape in shapes.items():
            found = tuple(engine.get_tensor_profile_shape(name, index)[2])
            if found != shape:
                raise ContractError(
                    f"{name} of the plan goes to {found} in profile {profile}, not {shape}; export again"
                )
