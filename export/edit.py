"""Small steps that graph passes share: find nodes, insert one. They know no operator's meaning."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specdec.engines.errors import ExportError


def nodes_of(model: ir.Model, operator: str) -> list[ir.Node]:
    """The nodes of `operator`, as a list that edits do not disturb."""
    return [node for node in model.graph if node.op_type == operator and not node.domain]


def insert(before: ir.Node, operator: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
    """Insert a node and return its output."""
    node = ir.node(operator, inputs, {name: value for name, value in attributes.items() if value is not None})
    if before.graph is None:
        raise ExportError(f"{before.name} is in no graph")
    before.graph.insert_before(before, node)
    return node.outputs[0]


def constant(before: ir.Node, values: Sequence[int]) -> ir.Value:
    """An int64 vector, inserted as a Constant."""
    return insert(before, "Constant", [], value=ir.tensor(np.array(values, np.int64)))
