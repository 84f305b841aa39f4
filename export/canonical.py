"""The last two passes over a graph: one form for equal graphs, and the check that it is the contract's.

They know operators' inputs and outputs, names and axes; no family, no engine, no weight's value.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from specdec.engines.contract import (
    CHUNK_INPUTS,
    FEATURES,
    HIDDEN,
    LOGITS,
    OPSET,
    Dtype,
    ModelSpec,
    past_names,
    present_names,
)
from specdec.engines.errors import ExportError

AXES = ("batch", "chunk", "num_logits", "capacity")

REAL: dict[Dtype, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_Named = tuple[str, list[int | str]]
_Expected = tuple[str, ir.DataType, list[int | str]]


class CanonicalForm(ir.passes.InPlacePass):
    """Order and name nodes, values and initializers by dataflow from the outputs alone, and drop everything else.

    Ensures that equal graphs are equal bytes: no name, order, shape or metadata of the trace remains (stack traces with
    paths of this machine among them). Nodes that read a parameter are named after it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rebuild the node list in dataflow order and rename."""
        graph = model.graph
        nodes = list(_dataflow_order(graph.outputs))
        graph.remove(list(graph))
        graph.extend(nodes)
        self._rename_initializers(graph, nodes)
        kept = {*graph.inputs, *graph.outputs}
        names: Counter[str] = Counter()
        count = 0
        for node in nodes:
            node.name = _node_name(node, names)
            _forget(node)
            for value in node.outputs:
                if value not in kept:
                    value.name, count = f"value.{count}", count + 1
                    value.shape = value.type = None
        for value in [*kept, *graph.initializers.values()]:
            _forget(value)
        _forget(graph)
        _forget(model)
        graph.name, model.producer_name, model.producer_version = "specdec", "specdec", None
        model.opset_imports.clear()
        model.opset_imports[""] = OPSET
        model.opset_imports.update(dict.fromkeys(sorted({node.domain for node in nodes} - {""}), 1))
        return ir.passes.PassResult(model, modified=True)

    @staticmethod
    def _rename_initializers(graph: ir.Graph, nodes: list[ir.Node]) -> None:
        """Keep the initializers that are read, in order of first use; number the constants among them."""
        read = {value: None for node in nodes for value in node.inputs if value is not None and value.is_initializer()}
        graph.initializers.clear()
        count = 0
        for value in read:
            if value.const_value is not None:
                value.name = value.const_value.name = f"constant.{count}"
                count += 1
            graph.initializers.add(value)


class ContractForm(ir.passes.InPlacePass):
    """Check that a graph is contract version 1 in standard operators, and write the contract's axes on its ends.

    Changes nothing but the names of axes. Raises `ExportError` naming what differs.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Check against the contract of `spec`."""
        super().__init__()
        self.spec = spec

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Compare every node with the operator set, and inputs and outputs with the contract."""
        for node in model.graph:
            if node.domain or node.version not in (None, OPSET):
                raise ExportError(f"{node.name}: {node.domain}::{node.op_type} is not of the standard opset {OPSET}")
        inputs, outputs = _contract_ends(self.spec)
        _check_ends(model.graph.inputs, inputs)
        _check_ends(model.graph.outputs, outputs)
        return ir.passes.PassResult(model, modified=True)


def _contract_ends(spec: ModelSpec) -> tuple[list[_Expected], list[_Expected]]:
    """Inputs and outputs of contract version 1 in order: name, dtype, axes."""
    rows, width, positions, capacity = AXES
    integer, real = ir.DataType.INT64, REAL[spec.dtype]
    cache: list[int | str] = [rows, spec.num_kv_heads, capacity, spec.head_dim]
    features: list[_Named] = [(FEATURES, [rows, width, spec.features])] if spec.features else []
    hidden: list[_Named] = [(HIDDEN, [rows, width, spec.tapped_size])] if spec.taps else []
    ids, position_ids, past_lens, chunk_mask, logit_indices = CHUNK_INPUTS
    inputs: list[_Expected] = [
        (ids, integer, [rows, width]),
        (position_ids, integer, [rows, width]),
        (past_lens, integer, [rows]),
        (chunk_mask, ir.DataType.BOOL, [rows, width, width]),
        (logit_indices, integer, [rows, positions]),
        *((name, real, axes) for name, axes in features),
        *((name, real, cache) for name in past_names(spec.num_layers)),
    ]
    outputs: list[_Expected] = [
        (LOGITS, REAL[spec.logits_dtype], [rows, positions, spec.logits_size]),
        *((name, real, axes) for name, axes in hidden),
        *((name, real, cache) for name in present_names(spec.num_layers)),
    ]
    return inputs, outputs


def _check_ends(values: Iterable[ir.Value], expected: list[_Expected]) -> None:
    found = list(values)
    names = [value.name for value in found]
    if names != [name for name, _, _ in expected]:
        raise ExportError(f"the traced graph has {names}, the contract {[name for name, _, _ in expected]}")
    for value, (name, dtype, axes) in zip(found, expected, strict=True):
        sizes = list(value.shape) if value.shape is not None else []
        fits = len(sizes) == len(axes) and all(
            size == axis if isinstance(axis, int) else not isinstance(size, int)
            for size, axis in zip(sizes, axes, strict=True)
        )
        if value.dtype != dtype or not fits:
            raise ExportError(f"{name} is {value.dtype} {sizes}, contract version 1 wants {dtype} {axes}")
        value.shape = ir.Shape(axes)


def _node_name(node: ir.Node, names: Counter[str]) -> str:
    """The parameter that `node` reads and its operator; without a parameter the operator and a number."""
    parameters = [value.name for value in node.inputs if value is not None and is_parameter(value)]
    owner = (parameters[0] or "").removesuffix(".transposed").rpartition(".")[0] if parameters else ""
    name = f"{owner}/{node.op_type}" if owner else node.op_type
    names[name] += 1
    return name if owner and names[name] == 1 else f"{name}.{names[name] - 1}"


def is_parameter(value: ir.Value) -> bool:
    """Whether `value` is an initializer whose data comes from the checkpoint."""
    return value.is_initializer() and value.const_value is None


def _forget(thing: ir.Model | ir.Graph | ir.Node | ir.Value) -> None:
    thing.doc_string = None
    thing.metadata_props.clear()


def _dataflow_order(outputs: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """Nodes in depth-first order from `outputs`, inputs first: it depends on nothing but the dataflow."""
    done: set[ir.Node] = set()
    for output in outputs:
        stack = [(output.producer(), False)]
        while stack:
            node, ready = stack.pop()
            if node is None or node in done:
                continue
            if ready:
                done.add(node)
                yield node
            else:
                stack.append((node, True))
                stack.extend((value.producer(), False) for value in reversed(node.inputs) if value is not None)
