"""Inputs of products rounded with one fixed scale for a tensor: a QuantizeLinear and DequantizeLinear pair before each.

This is the only route to INT8 and FP8 on TensorRT, and ONNX Runtime computes the same. The graph stays strongly typed:
the scale has the type of what is multiplied, and the zero point is zero. Weights are `blocks`' business. This module
chooses no scale and knows no engine.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from specdec.engines.contract import LOGITS
from specdec.engines.errors import ExportError
from specdec.export.blocks import LEVEL_TYPES
from specdec.export.edit import insert
from specdec.export.products import Product, as_product, find_products
from specdec.export.recipes import Kind


class RoundedInputs(ir.passes.InPlacePass):
    """Let products read their inputs rounded to `kind`; products of one input share the pair.

    Needs products as `products` knows them, weights not quantized yet. `scales` by the state-dict names of weights:
    products without one stay as they are. Raises `ExportError` when parts of a product have different scales, or only
    some have one, and when a scale is of no product. New nodes have no names: `CanonicalForm` gives them.
    """

    def __init__(self, kind: Kind, scales: Mapping[str, float]) -> None:
        """Round to `kind` with `scales`."""
        super().__init__()
        self._kind, self._scales = LEVEL_TYPES[kind], scales

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Insert the pairs."""
        rounded: dict[tuple[ir.Value, float], ir.Value] = {}
        left = dict(self._scales)
        for product in find_products(model):
            scales = {left.pop(name, None) for name in product.names}
            scale = scales.pop()
            if scales:
                raise ExportError(f"{', '.join(product.names)} read one input: it needs one scale, for all or for none")
            if scale is None:
                continue
            if (product.hidden, scale) not in rounded:
                rounded[product.hidden, scale] = _rounded(product, scale, self._kind)
            product.node.replace_input_with(0, rounded[product.hidden, scale])
        if left:
            raise ExportError(f"{next(iter(left))} is the weight of no product: its input cannot be rounded")
        return ir.passes.PassResult(model, modified=bool(rounded))


def head_product(graph: ir.Model) -> Product | None:
    """The product that makes the logits; None when something else does."""
    logits = next((value for value in graph.graph.outputs if value.name == LOGITS), None)
    node = logits.producer() if logits is not None else None
    while node is not None:
        if (product := as_product(node)) is not None:
            return product
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return None


def is_gated(product: Product) -> bool:
    """Whether the product's input is itself a product of two activations: act(gate) * up, or a GELU written out.

    A few tokens make such an input thousands of times larger than all others do, so that one scale for the tensor, of
    integers, leaves the others nothing (docs/quantization.md).
    """
    node = product.hidden.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Mul" and not any(map(_is_initializer, node.inputs))


def _is_initializer(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _rounded(product: Product, scale: float, kind: ir.DataType) -> ir.Value:
    """The product's input as the levels of `kind` have it."""
    node, real = product.node, product.weight.dtype
    if real is None:
        raise ExportError(f"parameter {product.weight.name} of the traced graph has no type")
    size = insert(node, "Constant", [], value=ir.tensor(np.array(scale, real.numpy())))
    zero = insert(node, "Constant", [], value=ir.tensor(np.zeros((), kind.numpy()), dtype=kind))
    levels = insert(node, "QuantizeLinear", [product.hidden, size, zero])
    return insert(node, "DequantizeLinear", [levels, size, zero])
