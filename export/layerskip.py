"""The target's first layers as a graph of their own, on the target's data file, and the model that it has to equal.

After LayerSkip (Elhoushi et al., arXiv:2404.16710): what N layers leave goes through the final norm and the head. The
graph is cut out of the finished one, so it has the target's precision and kernels; nothing is traced, quantized or
stored again. The hidden state after layer N was marked when the layers were put together (`layers`). This module knows
marks, inputs and outputs; it knows no operator, no family and no gate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from specdec.engines.contract import past_names, present_names
from specdec.engines.errors import ExportError
from specdec.export.canonical import CanonicalForm
from specdec.export.layers import LAYER, decoder_layers
from specdec.export.passes import run_passes
from specdec.export.taps import drop_taps


def first_layers(model: ir.Model, layers: int) -> ir.Model:
    """A copy of `model`, finished and perhaps lowered, in which the final norm reads what layer `layers` - 1 leaves.

    Inputs and outputs are the contract's for so many layers; parameters keep their names and are not all there. Raises
    `ExportError` when the graph has no such place, or reads what it should not.
    """
    cut = model.clone()
    graph = cut.graph
    drop_taps(cut)
    left = {value.meta[LAYER]: value for node in graph for value in node.outputs if LAYER in value.meta}
    depth = max(left, default=-1) + 1
    if not 1 <= layers < depth or layers - 1 not in left:
        raise ExportError(f"the graph cannot be cut after {layers} of its {depth} layers: no hidden state is marked")
    left[depth - 1].replace_all_uses_with(left[layers - 1])
    gone = {*past_names(depth), *present_names(depth)} - {*past_names(layers), *present_names(layers)}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in gone]
    run_passes(cut, [common.RemoveUnusedNodesPass(), CanonicalForm()])
    for value in graph.inputs:
        if value.name in gone and value.uses():
            raise ExportError(f"the graph cannot be cut after {layers} of its layers: they read {value.name}")
    graph.inputs[:] = [value for value in graph.inputs if value.name not in gone]
    return cut


@contextmanager
def shallow(model: Any, layers: int) -> Iterator[Any]:
    """While open, PyTorch's `model` has its first `layers` decoder layers only: what `first_layers` has to equal."""
    path, modules = decoder_layers(model)
    parent, _, name = path.rpartition(".")
    depth = model.config.num_hidden_layers
    setattr(model.get_submodule(parent), name, modules[:layers])
    model.config.num_hidden_layers = layers
    try:
        yield model
    finally:
        setattr(model.get_submodule(parent), name, modules)
        model.config.num_hidden_layers = depth
