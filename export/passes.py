"""Tidy a traced graph and check that it is the contract's: small passes, each with what it needs and ensures.

`lower` runs on the traced layers, `finish` on the whole model. Passes edit standard operators by dataflow and shape;
they know no family, no engine and no weight's value (parameters have a shape and a dtype here, see `weights`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import _constant_folding as folding
from onnxscript.rewriter import RewritePass
from onnxscript import rewriter

from specdec.engines.contract import CHUNK_INPUTS, LOGITS, OPSET, ModelSpec, past_names, present_names
from specdec.engines.errors import ExportError
from specdec.export.weights import TRANSPOSED

SMALL = 64  # elements of a constant that may be computed here


def lower(model: ir.Model) -> ir.Model:
    """Fold and merge what a trace leaves behind: constants, shape arithmetic, repeated subexpressions."""
    passes = [
        folding.FoldConstantsPass(shape_inference=True, input_size_limit=SMALL, output_size_limit=SMALL),
        RewritePass(rewriter._DEFAULT_REWRITE_RULES),
        common.RemoveUnusedNodesPass(),
        ConstantReshapes(),
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    ]
    return _run(model, passes)


def finish(model: ir.Model, spec: ModelSpec) -> ir.Model:
    """Store weights as products read them, name and order everything reproducibly, and check the contract."""
    passes = [
        TransposedWeights(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedNodesPass(),
        CanonicalForm(),
        ContractForm(spec),
    ]
    return _run(model, passes)


class ConstantReshapes(ir.passes.InPlacePass):
    """Give Reshape a constant shape: 0 copies an axis, one -1 stands for what is left.

    Needs value shapes. Ensures that a Reshape whose dynamic axes stay where they are reads no computed shape.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the second input of every Reshape that allows it."""
        changed = False
        for node in list(model.graph):
            if node.op_type != "Reshape" or ir.convenience.get_const_tensor(node.inputs[1]) is not None:
                continue
            shape = self._constant_shape(node)
            if shape is not None:
                constant = ir.node("Constant", [], {"value": ir.tensor(np.array(shape, np.int64))})
                model.graph.insert_before(node, constant)
                node.replace_input_with(1, constant.outputs[0])
                node.attributes.pop("allowzero", None)
                changed = True
        return ir.passes.PassResult(model, modified=changed)

    @staticmethod
    def _constant_shape(node: ir.Node) -> list[int] | None:
        source, target = node.inputs[0], node.outputs[0]
        if source is None or source.shape is None or target.shape is None:
            return None
        shape: list[int] = []
        for axis, size in enumerate(target.shape):
            if isinstance(size, int):
                shape.append(size)
            elif axis < len(source.shape) and size.value is not None and source.shape[axis] == size:
                shape.append(0)
            else:
                shape.append(-1)
        return shape if shape.count(-1) <= 1 else None


class TransposedWeights(ir.passes.InPlacePass):
    """Store a parameter as its product reads it.

    Ensures that no Transpose of a parameter remains: it becomes a parameter stored transposed (`weights.TRANSPOSED`).
    The one that is also read untransposed (an embedding tied to the head) gets a second, transposed copy.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace Transpose(parameter) by a transposed parameter."""
        graph = model.graph
        found = [node for node in graph if node.op_type == "Transpose" and self._is_parameter(node.inputs[0])]
        for node in found:
            source, target = node.inputs[0], node.outputs[0]
            assert source is not None and source.name is not None and source.shape is not None
            if len(source.shape) != 2:
                raise ExportError(f"cannot store {source.name} transposed: it has {len(source.shape)} axes")
            alone = len(source.uses()) == 1
            stored = ir.Value(
                name=source.name if alone else f"{source.name}.transposed",
                type=source.type,
                shape=ir.Shape(reversed(source.shape.dims)),
            )
            stored.meta.update(source.meta)
            stored.meta[TRANSPOSED] = source.name
            target.replace_all_uses_with(stored)
            graph.remove(node, safe=True)
            if alone:
                del graph.initializers[source.name]
            graph.initializers[stored.name] = stored
        return ir.passes.PassResult(model, modified=bool(found))

    @staticmethod
    def _is_parameter(value: ir.Value | None) -> bool:
        return value is not None and value.is_initializer() and value.const_value is None


class CanonicalForm(ir.passes.InPlacePass):
    """Order and name nodes, values and initializers by dataflow from the outputs alone, and drop everything else.

    Ensures that equal graphs are equal bytes: no names, order, shapes or metadata of the trace remain (stack traces
    with paths of this machine among them). Nodes that read a parameter are named after it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rebuild the node list in dataflow order and rename."""
        graph = model.graph
        order = list(_dataflow_order(graph.outputs))
        graph.remove(list(graph))
        graph.extend(order)
        initializers = {value: None for node in order for value in node.inputs if value and value.is_initializer()}
        graph.initializers.clear()
        constants, values = 0, 0
        for value in initializers:
            if value.const_value is not None:
                value.name, constants = f"constant.{constants}", constants + 1
                value.const_value.name = value.name
            graph.initializers[value.name] = value
        named = {*graph.inputs, *graph.outputs}
        names: Counter[str] = Counter()
        for node in order:
            node.name = self._node_name(node, names)
            for value in node.outputs:
                if value not in named:
                    value.name, values = f"value.{values}", values + 1
                    value.shape = value.type = None
            node.doc_string = None
            node.metadata_props.clear()
        for value in [*graph.inputs, *graph.outputs, *initializers]:
            value.doc_string = None
            value.metadata_props.clear()
        graph.name, graph.doc_string = "specdec", None
        graph.metadata_props.clear()
        model.metadata_props.clear()
        model.producer_name, model.producer_version, model.doc_string = "specdec", None, None
        model.opset_imports.clear()
        model.opset_imports[""] = OPSET
        return ir.passes.PassResult(model, modified=True)

    @staticmethod
    def _node_name(node: ir.Node, names: Counter[str]) -> str:
        parameters = [value.name for value in node.inputs if value and value.is_initializer() and not value.const_value]
        owner = parameters[0].removesuffix(".transposed").rpartition(".")[0] if parameters and parameters[0] else ""
        name = f"{owner}/{node.op_type}" if owner else node.op_type
        names[name] += 1
        return name if owner and names[name] == 1 else f"{name}.{names[name] - 1}"


class ContractForm(ir.passes.InPlacePass):
    """Check that a graph is contract version 1 in standard operators, and write the contract's axes on its ends.

    Changes nothing but the names of axes. Raises `ExportError` naming what differs.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Compare inputs and outputs with the contract and every node with the operator set."""
        graph, spec = model.graph, self.spec
        for node in graph:
            if node.domain or node.version not in (None, OPSET):
                raise ExportError(f"{node.name}: operator {node.domain}::{node.op_type} is not in ONNX opset {OPSET}")
        real = ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType.FLOAT16
        rows, width, positions, capacity = "batch", "chunk", "num_logits", "capacity"
        shapes = ([rows, width], [rows, width], [rows], [rows, width, width], [rows, positions])
        dtypes = (*[ir.DataType.INT64] * 3, ir.DataType.BOOL, ir.DataType.INT64)
        cache = [rows, spec.num_kv_heads, capacity, spec.head_dim]
        inputs = [*zip(CHUNK_INPUTS, dtypes, shapes, strict=True)]
        inputs += [(name, real, cache) for name in past_names(spec.num_layers)]
        outputs = [(LOGITS, real, [rows, positions, spec.logits_size])]
        outputs += [(name, real, cache) for name in present_names(spec.num_layers)]
        self._check(graph.inputs, inputs)
        self._check(graph.outputs, outputs)
        return ir.passes.PassResult(model, modified=True)

    @staticmethod
    def _check(values: Iterable[ir.Value], expected: list[tuple[str, ir.DataType, list[int | str]]]) -> None:
        found = list(values)
        if [value.name for value in found] != [name for name, _, _ in expected]:
            raise ExportError(f"graph has {[value.name for value in found]}, contract {[name for name, _, _ in expected]}")
        for value, (name, dtype, axes) in zip(found, expected, strict=True):
            sizes = list(value.shape) if value.shape is not None else []
            fits = len(sizes) == len(axes) and all(
                size == axis if isinstance(axis, int) else not isinstance(size, int)
                for size, axis in zip(sizes, axes, strict=True)
            )
            if value.dtype != dtype or not fits:
                raise ExportError(f"{name} is {value.dtype} {sizes}, contract version 1 wants {dtype} {axes}")
            value.shape = ir.Shape(axes)


def _run(model: ir.Model, passes: Iterable[ir.passes.PassBase]) -> ir.Model:
    for step in passes:
        try:
            model = step(model).model
        except ExportError:
            raise
        except Exception as exc:  # a pass of onnx_ir or onnxscript may raise anything; its name says where
            raise ExportError(f"graph pass {type(step).__name__} failed: {exc}") from exc
    return model


def _dataflow_order(outputs: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """Nodes in depth-first order from `outputs`, inputs first: it depends on nothing but the dataflow."""
    done: set[ir.Node] = set()
    for output in outputs:
        stack: list[tuple[ir.Node | None, bool]] = [(output.producer(), False)]
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
