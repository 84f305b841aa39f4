"""Quantize-dequantize pairs on the products of a written graph: what TensorRT's parser is tried on.

Scales come from the weights alone, activations get one fixed scale: such graphs show what builds, not what is accurate.
"""

import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

LARGEST = {ir.DataType.INT8: 127, ir.DataType.INT4: 7, ir.DataType.FLOAT8E4M3FN: 448}
NUMPY = {ir.DataType.INT8: np.int8, ir.DataType.INT4: ml_dtypes.int4, ir.DataType.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn}


def quantized(
    source: Path,
    target: Path,
    kind: ir.DataType,
    *,
    block: int | None = None,
    axis: int = 0,
    activations: bool = False,
    head: bool = False,
    edit: Callable[[ir.Model], None] | None = None,
) -> Path:
    """Write `source` to `target` with the weight [K, N] of every MatMul in `kind`; return `target`.

    `block`: inputs that share a scale, along `axis` of the weight (None: one scale for each of the N outputs).
    `activations`: the product's input is rounded to `kind` too, with one scale. `head`: the product of the logits too.
    `edit`: a last change.
    """
    model = ir.load(source)
    ir.external_data.load_to_model(model)
    graph = model.graph
    for node in [step for step in graph if step.op_type == "MatMul"]:
        hidden, weight = node.inputs
        assert hidden is not None
        if weight is None or weight.const_value is None or (node.outputs[0].is_graph_output() and not head):
            continue
        node.replace_input_with(1, _weight(node, weight, kind, block, axis))
        if activations:
            node.replace_input_with(0, _rounded(node, hidden, kind, weight.const_value.numpy().dtype))
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    if edit is not None:
        edit(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, target, external_data=f"{target.name}.data", size_threshold_bytes=1024)
    return target


def _weight(node: ir.Node, weight: ir.Value, kind: ir.DataType, block: int | None, axis: int) -> ir.Value:
    """DequantizeLinear of the weight's levels."""
    assert weight.const_value is not None
    data, real = weight.const_value.numpy().astype(np.float32), weight.const_value.numpy().dtype
    largest = LARGEST[kind]
    if block is None:
        scale = (np.abs(data).max(axis=0) / largest).astype(real)  # [N]
        wide, attributes = scale, {"axis": 1}
    else:
        shape = list(data.shape)
        shape[axis : axis + 1] = [math.ceil(shape[axis] / block), block]
        scale = (np.abs(data.reshape(shape)).max(axis=axis + 1) / largest).astype(real)
        wide, attributes = np.repeat(scale, block, axis), {"axis": axis, "block_size": block}
    levels = data / wide.astype(np.float32)
    if kind != ir.DataType.FLOAT8E4M3FN:
        levels = np.rint(levels)
    levels = np.clip(levels, -largest, largest).astype(NUMPY[kind])
    name = weight.name or ""
    inputs = [_parameter(node, f"{name}.levels", levels, kind), _parameter(node, f"{name}.scale", scale)]
    return _insert(node, "DequantizeLinear", inputs, **attributes)


def _rounded(node: ir.Node, hidden: ir.Value, kind: ir.DataType, real: np.dtype) -> ir.Value:
    """QuantizeLinear and DequantizeLinear of `hidden`, with one scale."""
    scale = _parameter(node, f"{node.name}.input_scale", np.array(8 / LARGEST[kind], real))
    zero = _parameter(node, f"{node.name}.input_zero", np.array(0, NUMPY[kind]), kind)
    levels = _insert(node, "QuantizeLinear", [hidden, scale, zero])
    return _insert(node, "DequantizeLinear", [levels, scale, zero])


def _parameter(node: ir.Node, name: str, data: np.ndarray, kind: ir.DataType | None = None) -> ir.Value:
    assert node.graph is not None
    tensor = ir.Tensor(data, dtype=kind, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    node.graph.initializers[name] = value
    return value


def _insert(node: ir.Node, operator: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
    assert node.graph is not None
    made = ir.node(operator, inputs, attributes)
    node.graph.insert_before(node, made)
    return made.outputs[0]
