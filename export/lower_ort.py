"""From the portable graph to the one that ONNX Runtime's CPU provider runs fastest: the same sums, fewer operators.

Every pass keeps the contract and the bitwise invariance (docs/lossless.md): what a token's logits are does not depend
on the chunk that it comes in. Which operators are worth it was measured (docs/performance.md). Contrib operators
(com.microsoft) occur here and nowhere else. These passes know ONNX Runtime's operators; they know no family.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from specdec.engines.contract import ModelSpec
from specdec.engines.errors import ExportError
from specdec.export.blocks import piece
from specdec.export.canonical import CanonicalForm
from specdec.export.edit import insert, nodes_of, replace_output
from specdec.export.passes import MergedConstants, run_passes
from specdec.export.weights import QUANTIZED, Quantized

CONTRIB = "com.microsoft"
MOST_ONES = 1 << 18  # elements of a matrix of ones: beyond it the product costs more than the two nodes it replaces
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: the input is rounded to int8 too, in blocks as the weights are
BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4}


def lower_for_ort(model: ir.Model, spec: ModelSpec) -> ir.Model:
    """Lower a finished graph, quantized or not, in place."""
    steps: list[ir.passes.PassBase] = [FloatMasks()]
    if spec.dtype == "float32":  # float16 has no kernels of its own on CPUs: nothing here would be faster
        steps += [BlockProducts(), BlockEmbeddings(), BlockSums()]
    return run_passes(model, [*steps, MergedConstants(), common.RemoveUnusedNodesPass(), CanonicalForm()])


class FloatMasks(ir.passes.InPlacePass):
    """Turn Attention's boolean masks into sums (0 or -infinity) once, instead of in every layer."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Insert one Where for each mask."""
        made: dict[ir.Value, ir.Value] = {}
        for node in nodes_of(model, "Attention"):
            mask, query = node.inputs[3], node.inputs[0]
            if mask is None or query is None or mask.producer() is None:
                raise ExportError(f"{node.name}: Attention without a mask that the graph computes")
            if mask not in made:
                dtype = np.float16 if model.graph.inputs[-1].dtype == ir.DataType.FLOAT16 else np.float32
                allowed, hidden = (_number(node, dtype(number)) for number in (0.0, -np.inf))
                made[mask] = insert(node, "Where", [mask, allowed, hidden])
            node.replace_input_with(3, made[mask])
        return ir.passes.PassResult(model, modified=bool(made))


class BlockProducts(ir.passes.InPlacePass):
    """Multiply by levels with integer arithmetic: MatMulNBits, whose input is rounded to int8 in blocks too."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace every product of block-wise DequantizeLinear."""
        changed = False
        for node in [*nodes_of(model, "MatMul"), *nodes_of(model, "Gemm")]:
            dense = node.inputs[1].producer() if node.inputs[1] is not None else None
            if dense is None or dense.op_type != "DequantizeLinear":
                continue
            levels, scale = dense.inputs[:2]
            quantized = levels.meta.get(QUANTIZED) if levels is not None else None
            bits = BITS.get(levels.dtype) if levels is not None and levels.dtype is not None else None
            block = dense.attributes.get_int("block_size", 0)
            if quantized is None or bits is None or levels is None or scale is None or not block:
                continue
            replace_output(node, _block_product(model.graph, node, levels, quantized, bits, block))
            changed = True
        return ir.passes.PassResult(model, modified=changed)


class BlockEmbeddings(ir.passes.InPlacePass):
    """Gather and dequantize rows in one operator, from the levels that a tied head reads: they are stored once."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace DequantizeLinear(Gather(levels), Gather(scale)) by GatherBlockQuantized."""
        changed = False
        for node in nodes_of(model, "DequantizeLinear"):
            gathers = [value.producer() if value is not None else None for value in node.inputs[:2]]
            if any(gather is None or gather.op_type != "Gather" for gather in gathers):
                continue
            rows, scales = (gather for gather in gathers if gather is not None)
            levels, ids, scale = rows.inputs[0], rows.inputs[1], scales.inputs[0]
            if levels is None or ids is None or scale is None or levels.dtype is None or levels.shape is None:
                continue
            bits, shape = BITS[levels.dtype], tuple(int(size) for size in levels.shape.numpy())
            sizes = (shape[0], shape[1] * bits // 8)
            stored = Quantized("unsigned", shape)
            name = f"{(levels.name or '').removesuffix('.rows')}.table"
            unsigned = piece(model.graph, levels, stored, sizes, ir.DataType.UINT8, name)
            attributes = {
                "bits": bits,
                "block_size": node.attributes.get_int("block_size", 0),
                "gather_axis": 0,
                "quantize_axis": 1,
            }
            gathered = insert(node, "GatherBlockQuantized", [unsigned, ids, scale], CONTRIB, **attributes)
            replace_output(node, gathered)
            changed = True
        return ir.passes.PassResult(model, modified=changed)


class BlockSums(ir.passes.InPlacePass):
    """Sum the blocks of a product's input in one small product with ones instead of Reshape and ReduceSum."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace ReduceSum over the last axis of a constant Reshape."""
        changed = False
        for node in nodes_of(model, "ReduceSum"):
            split = node.inputs[0].producer() if node.inputs[0] is not None else None
            if split is None or split.op_type != "Reshape" or split.inputs[0] is None or split.inputs[1] is None:
                continue
            shape = ir.convenience.get_const_tensor(split.inputs[1])
            if shape is None:
                continue
            blocks, block = (int(size) for size in shape.numpy()[-2:])
            if blocks * blocks * block > MOST_ONES:
                continue
            ones = np.kron(np.eye(blocks, dtype=np.float32), np.ones((block, 1), np.float32))  # [K, J]
            matrix = insert(node, "Constant", [], value=ir.tensor(ones))
            replace_output(node, insert(node, "MatMul", [split.inputs[0], matrix]))
            changed = True
        return ir.passes.PassResult(model, modified=changed)


def _block_product(
    graph: ir.Graph, node: ir.Node, levels: ir.Value, quantized: Quantized, bits: int, block: int
) -> ir.Value:
    """MatMulNBits over the levels, stored [N, J, bytes of a block] and counted from the lowest, scales [N * J]."""
    hidden = node.inputs[0]
    if hidden is None or levels.shape is None:
        raise ExportError(f"{node.name}: a product without an input or without a shape")
    sizes = [int(size) for size in levels.shape.numpy()]
    inputs, outputs = sizes if quantized.inputs_first else sizes[::-1]
    blocks, own = inputs // block, (levels.name or "").removesuffix(".levels")
    packed = piece(
        graph,
        levels,
        Quantized("unsigned", quantized.shape),
        (outputs, blocks, block * bits // 8),
        ir.DataType.UINT8,
        f"{own}.packed",
    )
    scale = piece(
        graph,
        levels,
        Quantized("scale", quantized.shape),
        (outputs * blocks,),
        ir.DataType.FLOAT,
        f"{own}.scales",
    )
    bias = [None, None, node.inputs[2]] if len(node.inputs) > 2 and node.inputs[2] is not None else []  # of a Gemm
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": INT8_ACTIVATIONS}
    return insert(node, "MatMulNBits", [hidden, packed, scale, *bias], CONTRIB, **attributes)


def _number(before: ir.Node, value: np.floating) -> ir.Value:
    return insert(before, "Constant", [], value=ir.tensor(np.array(value)))
