"""Small ONNX graphs: made by hand, run on ONNX Runtime, compared as bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

OPSET = 24
FLOAT = ir.TensorType(ir.DataType.FLOAT)
INT64 = ir.TensorType(ir.DataType.INT64)


def value(name: str, axes: Sequence[int | str], kind: ir.TensorType = FLOAT) -> ir.Value:
    return ir.Value(name=name, type=kind, shape=ir.Shape(axes))


def node(operator: str, inputs: Sequence[ir.Value | None], axes: Sequence[int | str], **attributes: Any) -> ir.Node:
    made = ir.node(operator, inputs, attributes)
    made.outputs[0].shape, made.outputs[0].type = ir.Shape(axes), FLOAT
    return made


def model(inputs: Sequence[ir.Value], nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Model:
    """A graph of `nodes`; values that no node makes and that are no inputs are its initializers."""
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": OPSET}, name="test")
    for made in nodes:
        for read in made.inputs:
            if read is not None and read.producer() is None and read not in inputs:
                graph.initializers.add(read)
    return ir.Model(graph, ir_version=11)


def operators(made: ir.Model) -> list[str]:
    return [step.op_type for step in made.graph]


def run(made: ir.Model, feeds: Mapping[str, np.ndarray], parameters: Mapping[str, np.ndarray] | None = None) -> Any:
    """Outputs of the graph; parameters (initializers without data) get theirs for the run only."""
    given = parameters or {}
    for name, data in given.items():
        made.graph.initializers[name].const_value = ir.tensor(data, name=name)
    try:
        proto = ir.to_proto(made).SerializeToString()
    finally:
        for name in given:
            made.graph.initializers[name].const_value = None
    return ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, dict(feeds))
