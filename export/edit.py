"""Small steps that graph passes share: find nodes, insert one. They know no operator's meaning."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specdec.engines.errors import ExportError


def nodes_of(model: ir.Model, operator: str) -> list[ir.Node]:
    """The nodes of `operator`, as a list that edits do not disturb."""
    return [node for node in model.graph if node.op_type == operator and not node.domain]


def insert(
    before: ir.Node, operator: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any
) -> ir.Value:
    """Insert a node and return its output."""
    given = {name: value for name, value in attributes.items() if value is not None}
    node = ir.node(operator, inputs, given, domain=domain)
    if before.graph is None:
        raise ExportError(f"{before.name} is in no graph")
    before.graph.insert_before(before, node)
    return node.outputs[0]


def replace_output(node: ir.Node, value: ir.Value) -> None:
    """Put `value` in the place of the only output of `node`, name, shape and `meta` included, and remove `node`."""
    old = node.outputs[0]
    value.name, value.type, value.shape = old.name, old.type, old.shape
    value.meta.update(old.meta)
    old.replace_all_uses_with(value, replace_graph_outputs=True)
    if node.graph is None:
        raise ExportError(f"{node.name} is in no graph")
    node.graph.remove(node, safe=True)


def constant(before: ir.Node, values: Sequence[int]) -> ir.Value:
    """An int64 vector, inserted as a Constant."""
    return insert(before, "Constant", [], value=ir.tensor(np.array(values, np.int64)))
