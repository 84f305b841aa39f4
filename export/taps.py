"""Let a graph hand out hidden states, for drafters that read them: the output `hidden` of the contract.

A tap is "final", what the head reads (behind the last norm), or a number of layers, "7": what the first seven leave.
This module knows marks and names; it knows no family, no drafter and no weight.
"""

from collections.abc import Iterable

import onnx_ir as ir

from specdec.engines.contract import HIDDEN, LOGITS, ModelSpec
from specdec.engines.errors import ExportError, RequestError
from specdec.export.canonical import AXES, REAL
from specdec.export.edit import nodes_of
from specdec.export.layers import LAYER

FINAL = "final"


def check_taps(taps: Iterable[str], layers: int) -> None:
    """Raise `RequestError` unless a model of so many layers has each of `taps`."""
    for tap in taps:
        if tap != FINAL and not 1 <= int(tap) <= layers:
            raise RequestError(f"there is no hidden state after {tap} layers: the model has {layers}")


def add_taps(model: ir.Model, spec: ModelSpec) -> ir.Model:
    """Add the output `hidden` [B, S, taps * H] with the taps of `spec` to a finished graph, in place, if it has any.

    Raises `ExportError` when the graph has no such place.
    """
    if not spec.taps:
        return model
    values = [_tapped(model, tap) for tap in spec.taps]
    hidden = values[0]
    if len(values) > 1 or hidden.is_graph_output():
        last = _behind(model.graph, values)
        hidden = ir.Value(type=ir.TensorType(REAL[spec.dtype]))
        node = ir.Node("", "Concat", values, [ir.AttrInt64("axis", -1)], outputs=[hidden])
        model.graph.insert_after(last, node)
    hidden.name = HIDDEN
    rows, width, *_ = AXES
    hidden.shape, hidden.type = ir.Shape([rows, width, spec.tapped_size]), ir.TensorType(REAL[spec.dtype])
    place = next(index for index, value in enumerate(model.graph.outputs) if value.name == LOGITS)
    model.graph.outputs.insert(place + 1, hidden)
    return model


def drop_taps(model: ir.Model) -> None:
    """Take the output `hidden` away, if there is one; what only it read stays until unused nodes are removed."""
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name != HIDDEN]


def _tapped(model: ir.Model, tap: str) -> ir.Value:
    """The value [B, S, H] at `tap`."""
    if tap == FINAL:
        indexed = [node for node in nodes_of(model, "GatherND") if node.attributes.get_int("batch_dims", 0) == 1]
        if len(indexed) != 1 or indexed[0].inputs[0] is None:
            raise ExportError("hidden states cannot be tapped before the head: no place where positions are chosen")
        return indexed[0].inputs[0]
    for node in model.graph:
        for value in node.outputs:
            if str(value.meta.get(LAYER, -1) + 1) == tap:
                return value
    raise ExportError(f"hidden states cannot be tapped after {tap} layers: the graph marks no such place")


def _behind(graph: ir.Graph, values: list[ir.Value]) -> ir.Node:
    """The last node, in graph order, that makes one of `values`."""
    makers = {value.producer() for value in values}
    return [node for node in graph if node in makers][-1]
