"""Weights as levels on a grid, in standard operators: DequantizeLinear before a product or behind an embedding.

The graph computes in its own precision; only what it stores is smaller (opset 21: block-wise scales, 4-bit types). An
offset, which no engine takes together with 4 bits, is a small product of its own: (d q + m) x = d q x + m sum(x) for
every block. This module knows which grids there are and no number in them.
"""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from specdec.engines.errors import ExportError
from specdec.export.canonical import is_parameter
from specdec.export.edit import constant, insert, nodes_of, replace_output
from specdec.export.grid import Grid, joined
from specdec.export.products import Product, find_products
from specdec.export.weights import ALIASES, PARTS, QUANTIZED, Quantized, checkpoint_shape, parts_of

LEVEL_TYPES = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8e4m3fn": ir.DataType.FLOAT8E4M3FN,
}


class QuantizedWeights(ir.passes.InPlacePass):
    """Read the weights that have a grid from it.

    Needs products as `products` knows them. Ensures that such a product reads DequantizeLinear of levels and scales,
    plus, for a grid with offsets, the product of its input's block sums; and that an embedding which has a grid is
    gathered as levels and scales (and offsets). What has no grid stays as it is.
    """

    def __init__(self, grids: Mapping[str, Grid]) -> None:
        """`grids` by the weight's name in the state dict."""
        super().__init__()
        self._grids = grids

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantize every product, then every embedding, that has grids for all of its parts."""
        changed = False
        sums: dict[tuple[ir.Value, int], ir.Value] = {}
        read: set[ir.Value] = set()
        for product in find_products(model):
            grid = self._grid(product.names, product.weight)
            if grid is not None:
                _dequantize_product(model.graph, product, grid, sums)
                read.add(product.weight)
                changed = True
        for node in nodes_of(model, "Gather"):
            table = node.inputs[0]
            if table is None or not is_parameter(table) or table.name is None:
                continue
            grid = self._grid((table.name,), table)
            if grid is not None:
                _dequantize_embedding(model.graph, node, table, grid)
                read.add(table)
                changed = True
        for value in read:
            if not value.uses():
                del model.graph.initializers[value.name or ""]
        return ir.passes.PassResult(model, modified=changed)

    def _grid(self, names: tuple[str, ...], weight: ir.Value) -> Grid | None:
        aliases = weight.meta.get(ALIASES, ())
        found = [next((self._grids[n] for n in (name, *aliases) if n in self._grids), None) for name in names]
        known = [grid for grid in found if grid is not None]
        return joined(known) if len(known) == len(names) else None


def piece(
    graph: ir.Graph,
    weight: ir.Value,
    quantized: Quantized,
    shape: tuple[int, ...],
    dtype: ir.DataType,
    name: str | None = None,
) -> ir.Value:
    """The initializer without data that holds a piece of the grid of `weight`; the same one when it exists already."""
    name = name or f"{weight.name}.{quantized.piece}"
    if (existing := graph.initializers.get(name)) is not None:
        return existing
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    if ALIASES in weight.meta:
        value.meta[ALIASES] = weight.meta[ALIASES]
    value.meta[QUANTIZED] = quantized
    value.meta[PARTS] = parts_of(weight)
    graph.initializers.add(value)
    return value


def _dequantize_product(
    graph: ir.Graph, product: Product, grid: Grid, sums: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    node, weight, real = product.node, product.weight, _real(product.weight)
    inputs, outputs, blocks = product.inputs, product.outputs, grid.scale.shape[1]
    shape, first = checkpoint_shape(weight), not product.outputs_first
    sizes = (inputs, outputs) if first else (outputs, inputs)
    if blocks == 1:  # one scale for each output
        scales: tuple[int, ...] = (outputs,)
        attributes: dict[str, Any] = {"axis": int(first)}
    else:
        scales = (blocks, outputs) if first else (outputs, blocks)
        attributes = {"axis": int(not first), "block_size": grid.block}
    levels = piece(graph, weight, Quantized("levels", shape, first), sizes, LEVEL_TYPES[grid.kind])
    scale = piece(graph, weight, Quantized("scale", shape, first), scales, real)
    node.replace_input_with(1, insert(node, "DequantizeLinear", [levels, scale], **attributes))
    if grid.offset is None:
        return
    if (product.hidden, blocks) not in sums:
        leading = [-1] if node.op_type == "Gemm" else [0, 0]
        split = insert(node, "Reshape", [product.hidden, constant(node, [*leading, blocks, grid.block])])
        sums[product.hidden, blocks] = insert(node, "ReduceSum", [split, constant(node, [-1])], keepdims=0)  # [.., J]
    offset = piece(graph, weight, Quantized("offset", shape, True), (blocks, outputs), real)
    shift = insert(node, "MatMul", [sums[product.hidden, blocks], offset])
    old = node.outputs[0]
    total = ir.node("Add", [old, shift])
    graph.insert_after(node, total)
    new = total.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    total.replace_input_with(0, old)


def _real(weight: ir.Value) -> ir.DataType:
    if weight.dtype is None:
        raise ExportError(f"parameter {weight.name} of the traced graph has no type")
    return weight.dtype


def _dequantize_embedding(graph: ir.Graph, node: ir.Node, table: ir.Value, grid: Grid) -> None:
    ids, real = node.inputs[1], _real(table)
    outputs, inputs = checkpoint_shape(table)
    shape = (outputs, inputs)
    # Gather takes no 4-bit type; levels of 8 bits that a head reads as well are stored once all the same
    levels = piece(graph, table, Quantized("levels", shape), shape, ir.DataType.INT8, f"{table.name}.rows")
    scale = piece(graph, table, Quantized("scale", shape), (outputs, grid.scale.shape[1]), real)
    rows = insert(node, "Gather", [levels, ids], axis=0)  # [B, S, H]
    scales = insert(node, "Gather", [scale, ids], axis=0)  # [B, S, H / block]
    dense = insert(node, "DequantizeLinear", [rows, scales], axis=2, block_size=grid.block)
    if grid.offset is not None:
        blocks = grid.scale.shape[1]
        offset = piece(graph, table, Quantized("offset", shape), (outputs, blocks), real)
        shift = insert(node, "Unsqueeze", [insert(node, "Gather", [offset, ids], axis=0), constant(node, [-1])])
        split = insert(node, "Reshape", [dense, constant(node, [0, 0, blocks, grid.block])])  # [B, S, J, block]
        dense = insert(node, "Reshape", [insert(node, "Add", [split, shift]), constant(node, [0, 0, inputs])])
    replace_output(node, dense)
