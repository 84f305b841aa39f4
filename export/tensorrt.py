"""A graph becomes plans: engine files of TensorRT or TensorRT-RTX, checked before they are built.

The library is injected (`engines/trt_library`). TensorRT-RTX compiles for named architectures on a machine without a
GPU; TensorRT compiles for the GPU that is there. The graph is the bundle's portable one: only the cache's capacity
becomes a constant, because both libraries write a cache in place only if its size is fixed. Networks are strongly
typed: what is computed in which type is what the graph says, Q/DQ pairs included. Nothing here chooses a precision.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx_ir as ir

from specdec.engines import nvidia
from specdec.engines.contract import CHUNK_INPUTS, LOGITS, ModelSpec, past_names, present_names
from specdec.engines.errors import ExportError, RequestError, ResourceError
from specdec.engines.manifest import Limits, Plan
from specdec.engines.plan import Shape, input_shapes, plan_key, plan_sizes, profiles
from specdec.engines.trt_library import Backend, Library, Messages, collecting_logger, dtype_name, load_library, tidy
from specdec.export.bundle import check_memory

# What a build holds at its peak, measured with TensorRT-RTX 1.7.1: the library and its compiler, and every weight four
# times (as read, as a constant of the network, as laid out for kernels, as serialized), in 16 bits at least: narrower
# ones are unpacked on the way.
BUILD_BASE = 5 * 2**26
BUILD_COPIES = 4
BUILD_ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class Counts:
    """Layers of a network: quantization, dequantization, cache updates, attentions, and all."""

    quantize: int
    dequantize: int
    kv_updates: int
    attentions: int
    layers: int


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan that lies in the bundle: its key in the variant, its record, and what building it took."""

    key: str
    plan: Plan
    counts: Counts
    seconds: float
    nbytes: int


def build_plans(
    bundle: Path,
    graph: str,
    spec: ModelSpec,
    limits: Limits,
    backend: Backend,
    architectures: Sequence[str],
    workspace: int | None = None,
) -> list[BuiltPlan]:
    """Compile `bundle / graph` for `architectures` ("sm89", ...) and write the plans beside it; return their records.

    TensorRT-RTX puts all architectures into one plan; TensorRT takes none, or that of the GPU which is here.
    `workspace`: most bytes of GPU memory that a layer may use for its own purposes (None: the library's default).

    Raises `EngineUnavailableError` when the library is not here, `RequestError` for an architecture that it does not
    know, `ResourceError` when memory or disk are short, and `ExportError` with the parser's or the builder's reason, or
    with the check that failed; no plan is written then.
    """
    library = load_library(backend)
    names = known_architectures(library, backend, architectures)
    sizes = plan_sizes(limits)
    key = plan_key(backend, names)
    plan = Plan(
        backend=backend,
        library=library.__version__,
        architectures=names,
        file=str(PurePosixPath(graph).with_name(f"{key}.plan")),
        inputs=_input_types(spec),
        **sizes,
    )
    started = time.perf_counter()
    serialized, counts = build(library, bundle / graph, spec, plan, workspace)
    path = bundle / plan.file
    try:
        path.write_bytes(serialized)
    except OSError as exc:
        raise ResourceError(f"{path} cannot be written: {exc.strerror}") from exc
    return [BuiltPlan(key, plan, counts, time.perf_counter() - started, path.stat().st_size)]


def build_memory(model: ir.Model) -> int:
    """Bytes of main memory that compiling `model` takes at its peak (estimate; docs/engines.md has the figures)."""
    weights = 0
    for value in model.graph.initializers.values():
        if (tensor := value.const_value) is not None:
            weights += int(tensor.size * max(tensor.dtype.itemsize, BUILD_ITEMSIZE))
    return BUILD_BASE + BUILD_COPIES * weights


def known_architectures(library: Library, backend: Backend, wanted: Sequence[str]) -> list[str]:
    """The architectures to compile for, in ascending order.

    Raises `RequestError` for none or for one that the library does not compile for, `ExportError` when TensorRT has no
    GPU to compile for.
    """
    if backend == "tensorrt":
        return _present_architecture(wanted)
    known = sorted((name.lower() for name in dir(library.ComputeCapability) if name.startswith("SM")), key=_number)
    if not wanted:
        raise RequestError(f"{backend} needs to know for which GPUs: name each with --arch, of {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise RequestError(
                f"{backend} {library.__version__} does not compile for {name}: choose from {', '.join(known)}; "
                "other GPUs need --backend tensorrt"
            )
    return sorted(set(wanted), key=_number)


def build(
    library: Library, graph: Path, spec: ModelSpec, plan: Plan, workspace: int | None = None
) -> tuple[Any, Counts]:
    """Compile `graph` as `plan` says; return the serialized engine (a buffer) and the counts. Errors: `build_plans`."""
    model = fixed_capacity(graph, plan.capacity)
    check_memory(build_memory(model))
    logger, messages = collecting_logger(library)
    builder = library.Builder(logger)
    # the network lives as long as the parser reads it and the builder compiles it
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    if not parser.parse(ir.to_proto(model).SerializeToString(), str(graph)):
        raise ExportError(f"{plan.backend} does not take this graph: {_parser_reason(parser)}")
    counts = check_network(network, model, spec, plan.capacity)
    config = builder.create_builder_config()
    if plan.backend == "tensorrt-rtx":
        config.num_compute_capabilities = len(plan.architectures)
        for index, name in enumerate(plan.architectures):
            if not config.set_compute_capability(getattr(library.ComputeCapability, name.upper()), index):
                raise ExportError(f"{plan.backend} does not compile for {name}: {messages.reason()}")
    if workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, workspace)
    _add_profiles(builder, config, spec, plan, messages)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise ExportError(f"{plan.backend} cannot compile this graph for {_list(plan)}: {messages.reason()}")
    return serialized, counts


def check_network(network: Any, model: ir.Model, spec: ModelSpec, capacity: int) -> Counts:
    """Compare a parsed network with its graph and with the contract; return its counts.

    A parser may drop what it does not support without a word: an input that nothing reads, a pair of quantization
    layers, a cache that is copied instead of updated. Raises `ExportError` on the first difference.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    kinds = Counter(str(layer.type).rpartition(".")[2] for layer in layers)
    counts = Counts(
        quantize=kinds["QUANTIZE"],
        dequantize=kinds["DEQUANTIZE"],
        kv_updates=kinds["KV_CACHE_UPDATE"],
        attentions=kinds["ATTENTION_INPUT"],
        layers=len(layers),
    )
    operators = Counter(node.op_type for node in model.graph)
    for what, found, expected in (
        ("quantization layers", counts.quantize, operators["QuantizeLinear"]),
        ("dequantization layers", counts.dequantize, operators["DequantizeLinear"]),
        ("cache updates in place", counts.kv_updates, 2 * spec.num_layers),
        ("attention layers", counts.attentions, spec.num_layers),
    ):
        if found != expected:
            raise ExportError(f"the parsed network has {found} {what}, the graph asks for {expected}")
    _check_ends(network, spec, capacity)
    read = {tensor.name for layer in layers for tensor in _inputs(layer)}
    if ignored := [name for name in _ends(spec)[0] if name not in read]:
        raise ExportError(f"the parsed network reads {', '.join(ignored[:5])} nowhere: the parser dropped what did")
    return counts


def _check_ends(network: Any, spec: ModelSpec, capacity: int) -> None:
    """Compare names, types and shapes of inputs and outputs with the contract's."""
    shapes = input_shapes(spec, capacity, -1, -1, -1)
    inputs, outputs = _ends(spec)
    caches = dict(zip(present_names(spec.num_layers), past_names(spec.num_layers), strict=True))
    expected: dict[str, tuple[str, Shape]] = {name: (dtype, shapes[name]) for name, dtype in inputs.items()}
    for name, dtype in outputs.items():
        expected[name] = (dtype, (-1, -1, spec.logits_size) if name == LOGITS else shapes[caches[name]])
    ends = [network.get_input(index) for index in range(network.num_inputs)]
    ends += [network.get_output(index) for index in range(network.num_outputs)]
    found = {tensor.name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in ends}
    if odd := sorted({*found} ^ {*expected}):
        raise ExportError(f"the parsed network does not keep the engine contract: {', '.join(odd[:5])}")
    for name, end in expected.items():
        if found[name] != end:
            raise ExportError(f"{name} of the parsed network is {found[name]}, the contract says {end}")


def _ends(spec: ModelSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Types of the inputs and of the outputs, by name."""
    return _input_types(spec), {LOGITS: spec.logits_dtype, **dict.fromkeys(present_names(spec.num_layers), spec.dtype)}


def _input_types(spec: ModelSpec) -> dict[str, str]:
    integers = {name: "bool" if name == "chunk_mask" else "int64" for name in CHUNK_INPUTS}
    return {**integers, **dict.fromkeys(past_names(spec.num_layers), spec.dtype)}


def _inputs(layer: Any) -> Iterator[Any]:
    tensors = (layer.get_input(index) for index in range(layer.num_inputs))
    return (tensor for tensor in tensors if tensor is not None)


def fixed_capacity(path: Path, capacity: int) -> ir.Model:
    """The graph of `path`, its weights left where they are, with caches of `capacity` slots."""
    model = ir.load(path)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name is not None and value.name.startswith(("past_key_values.", "present.")):
            if value.shape is None or len(value.shape) != 4:
                raise ExportError(f"{value.name} has no shape [B, H_kv, C, D]: this is not a graph of specdec")
            rows, heads, _, size = value.shape.dims
            value.shape = ir.Shape([rows, heads, capacity, size])
    return model


def _add_profiles(builder: Any, config: Any, spec: ModelSpec, plan: Plan, messages: Messages) -> None:
    """Declare the plan's profiles: least, usual and largest shape of every input."""
    for index, profile in enumerate(profiles(plan)):
        declared = builder.create_optimization_profile()
        ranges = [
            input_shapes(spec, plan.capacity, *sizes)
            for sizes in ((1, 1, 1), profile.usual, (profile.rows, profile.width, profile.logits))
        ]
        try:
            for name in ranges[0]:
                declared.set_shape(name, *(shapes[name] for shapes in ranges))
        except ValueError as exc:
            raise ExportError(f"{plan.backend} refuses the profile {profile}: {tidy(str(exc))}") from exc
        if config.add_optimization_profile(declared) != index:
            raise ExportError(f"{plan.backend} refuses the profile {profile}: {messages.reason()}")


def _parser_reason(parser: Any) -> str:
    """The parser's first error in one line: operator, node, description."""
    if not parser.num_errors:
        return "the parser gave no reason"
    error = parser.get_error(0)
    lines = [line for line in error.desc().splitlines() if "catchCudaError" not in line]  # there may be no driver here
    more = f" (and {parser.num_errors - 1} more)" if parser.num_errors > 1 else ""
    return f"{error.node_operator()} {error.node_name()}: {tidy(' '.join(lines))}{more}".strip()


def _present_architecture(wanted: Sequence[str]) -> list[str]:
    found = nvidia.probe()
    if not found.devices:
        raise ExportError(
            f"tensorrt compiles for the GPU that is there: {found.problem}; --backend tensorrt-rtx needs none"
        )
    here = found.devices[0].architecture
    if list(wanted) not in ([], [here]):
        raise RequestError(f"tensorrt compiles for the GPU that is there, {here}: leave --arch out")
    return [here]


def _number(architecture: str) -> int:
    digits = re.sub(r"\D", "", architecture)
    return int(digits) if digits else 0


def _list(plan: Plan) -> str:
    return ", ".join(plan.architectures)
