"""The products of a traced graph: nodes that multiply by a parameter, and what that parameter is in the checkpoint.

Three forms occur: MatMul with a weight stored transposed (nn.Linear), MatMul or Gemm with a weight stored as it is
(Conv1D), and Gemm with transB=1 (an LM head tied to the embedding). This module knows orientation and names, no number.
"""

from dataclasses import dataclass

import onnx_ir as ir

from specdec.export.canonical import is_parameter
from specdec.export.weights import PARTS, TRANSPOSED


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """`node` computes `hidden` [..., K] times `weight`.

    `weight` is stored [K, N], or [N, K] where `outputs_first`. `names`: its parts in the state dict, side by side along
    N; `inputs_axis`: the axis of K there (1: [N, K] as nn.Linear has it, 0: [K, N] as Conv1D).
    """

    node: ir.Node
    hidden: ir.Value
    weight: ir.Value
    names: tuple[str, ...]
    inputs_axis: int
    outputs_first: bool = False

    @property
    def inputs(self) -> int:
        """K."""
        return self._size(int(self.outputs_first))

    @property
    def outputs(self) -> int:
        """N, of all parts together."""
        return self._size(int(not self.outputs_first))

    def _size(self, axis: int) -> int:
        return int(self.weight.shape.numpy()[axis]) if self.weight.shape is not None else 0


def find_products(graph: ir.Model) -> list[Product]:
    """Every product, in the order of the graph."""
    return [found for node in graph.graph if (found := as_product(node)) is not None]


def as_product(node: ir.Node) -> Product | None:
    """`node` as a product; None for anything else."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    hidden, weight = node.inputs[:2]
    if hidden is None or weight is None or not is_parameter(weight) or weight.name is None:
        return None
    if weight.shape is None or len(weight.shape) != 2 or _flag(node, "transA"):
        return None
    source = weight.meta.get(TRANSPOSED)
    parts = weight.meta.get(PARTS)
    names = tuple(name for name, _ in parts) if parts else (source or weight.name,)
    outputs_first = _flag(node, "transB")
    return Product(node, hidden, weight, names, int(bool(source) != outputs_first), outputs_first)


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())
