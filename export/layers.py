"""Trace each kind of decoder layer once, then repeat it in the graph as often as the model has it.

Tracing costs a second or two a layer and a decoder's layers differ in their weights only, so the traced model has one
layer of every distinct kind. In the traced graph each of them lies between two marker nodes (`mark`); its nodes are
those between the markers that depend on the layer's own inputs: hidden state, cache buffers, parameters. What they
read besides that depends on the graph's inputs alone (cos and sin, masks, shapes) and is shared by all copies.

This module knows dataflow and names. It knows no family and no operator; that a copy computes what the model's layer
computes follows from equal signatures, and is checked on logits by the gates of every export.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.engines.errors import ExportError

MARKER_DOMAIN = "specdec.marker"
LAYER = "specdec.layer"  # `Value.meta[LAYER]` of the hidden state that a decoder layer leaves: the layer's index


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """`templates[k]`: the layer that stands for kind k; `kinds[l]`: the kind of layer l; `prefix`: their path."""

    templates: tuple[int, ...]
    kinds: tuple[int, ...]
    prefix: str

    @property
    def repeats(self) -> bool:
        """Whether the traced model has fewer layers than the model."""
        return len(self.templates) < len(self.kinds)


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Path and modules of the decoder layers: the model's one `ModuleList` of `num_hidden_layers` modules."""
    depth = model.config.num_hidden_layers
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(found) != 1:
        raise ExportError(f"{type(model).__name__}: expected one list of {depth} decoder layers, found {len(found)}")
    return found[0]


def signature(layer: nn.Module, layer_type: str | None) -> tuple[Any, ...]:
    """What a layer computes apart from the values of its weights: equal signatures, equal graphs."""
    parts: list[Any] = [layer_type]
    for path, module in layer.named_modules():
        scalars = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if key != "layer_idx" and isinstance(value, (bool, int, float, str, tuple, type(None)))
        )
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors)
        parts.append((path, type(module).__qualname__, scalars, shapes))
    return tuple(parts)


def signatures(model: Any) -> tuple[tuple[Any, ...], ...]:
    """The signature of every decoder layer of `model`."""
    _, layers = decoder_layers(model)
    types = getattr(model.config, "layer_types", None) or [None] * len(layers)
    return tuple(signature(layer, kind) for layer, kind in zip(layers, types, strict=True))


def plan_layers(model: Any) -> LayerPlan:
    """Group the layers of `model` by signature."""
    prefix, _ = decoder_layers(model)
    kinds: dict[tuple[Any, ...], int] = {}
    templates: list[int] = []
    indices: list[int] = []
    for index, sign in enumerate(signatures(model)):
        if sign not in kinds:
            kinds[sign] = len(templates)
            templates.append(index)
        indices.append(kinds[sign])
    return LayerPlan(tuple(templates), tuple(indices), prefix)


def full_plan(model: Any) -> LayerPlan:
    """The plan that repeats nothing."""
    prefix, layers = decoder_layers(model)
    return LayerPlan(tuple(range(len(layers))), tuple(range(len(layers))), prefix)


def template_config(config: PretrainedConfig, plan: LayerPlan) -> Any:
    """`config` of the model that has the plan's templates as its only layers."""
    reduced: Any = copy.deepcopy(config)
    types = getattr(config, "layer_types", None)
    if types is not None:
        reduced.layer_types = [types[index] for index in plan.templates]
    reduced.num_hidden_layers = len(plan.templates)
    return reduced


def mark(model: Any) -> None:
    """Hook every decoder layer of `model` so that its hidden state passes a marker on the way in and out."""
    _, layers = decoder_layers(model)
    for index, layer in enumerate(layers):

        def enter(_: nn.Module, args: tuple[Any, ...], index: int = index) -> tuple[Any, ...]:
            return (_marker("Enter", args[0], index), *args[1:])

        def leave(_: nn.Module, __: Any, output: Any, index: int = index) -> Any:
            if isinstance(output, tuple):
                return (_marker("Leave", output[0], index), *output[1:])
            return _marker("Leave", output, index)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)


def repeat_layers(model: ir.Model, plan: LayerPlan) -> None:
    """Replace the marked layers of `model` in place by the layers of `plan`; no marker remains.

    Cache inputs and outputs are those of contract version 1, in its order. Raises `ExportError` naming the value when
    a layer has other inputs or outputs than its hidden state, its cache and shared values.
    """
    graph = model.graph
    cuts = [_Cut(graph, index, plan.prefix) for index in range(len(plan.templates))]
    for cut in cuts:
        cut.check(cuts)
    for before, after in pairwise(cuts):
        if after.enter.inputs[0] is not before.leave.outputs[0]:
            raise ExportError(f"decoder layer {after.index} cannot be repeated: it does not read layer {before.index}")
    outside = [value for value in graph.inputs if not value.name or not value.name.startswith("past_key_values.")]
    logits = [value for value in graph.outputs if not value.name or not value.name.startswith("present.")]
    hidden = cuts[0].enter.inputs[0]
    assert hidden is not None
    nodes: list[ir.Node] = []
    past: list[ir.Value] = []
    present: list[ir.Value] = []
    parameters: list[ir.Value] = []
    for layer, kind in enumerate(plan.kinds):
        copied = cuts[kind].copy(layer, hidden)
        nodes += copied.nodes
        past += copied.past
        present += copied.present
        parameters += copied.parameters
        hidden = copied.hidden
        hidden.meta[LAYER] = layer
    last = cuts[-1].leave
    graph.insert_before(last, nodes)
    last.outputs[0].replace_all_uses_with(hidden)
    graph.outputs[:] = [*logits, *present]
    for cut in reversed(cuts):
        graph.remove([cut.leave, *reversed(cut.nodes), cut.enter], safe=True)
        for old, first in zip(cut.past, past[:2], strict=True):
            old.replace_all_uses_with(first)  # what is left asks for shapes, which are those of every layer
    graph.inputs[:] = [*outside, *past]
    for cut in cuts:
        for value in cut.parameters:
            del graph.initializers[_name(value)]
    for value in parameters:
        graph.initializers[_name(value)] = value


def _marker(kind: str, hidden: torch.Tensor, index: int) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{kind}", (hidden,), {"layer": index}, dtype=hidden.dtype, shape=hidden.shape, version=1
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """One repetition of a template: its nodes in order, and the values that it brings or leaves."""

    nodes: list[ir.Node]
    past: list[ir.Value]
    present: list[ir.Value]
    parameters: list[ir.Value]
    hidden: ir.Value


class _Cut:
    """The nodes of one traced layer, between its markers."""

    def __init__(self, graph: ir.Graph, index: int, prefix: str) -> None:
        self.index = index
        self.prefix = prefix
        self.enter = _find_marker(graph, "Enter", index)
        self.leave = _find_marker(graph, "Leave", index)
        self.past = [_by_name(graph.inputs, f"past_key_values.{index}.{part}") for part in ("key", "value")]
        self.present = [_by_name(graph.outputs, f"present.{index}.{part}") for part in ("key", "value")]
        own = f"{prefix}.{index}."
        self.parameters = [value for name, value in graph.initializers.items() if name.startswith(own)]
        downstream = _reach_down([self.enter.outputs[0], *self.past, *self.parameters], stop=self.leave)
        hidden = self.leave.inputs[0]
        assert hidden is not None
        upstream = _reach_up([hidden, *self.present], stop=self.enter)
        inside = downstream & upstream
        self.nodes = [node for node in graph if node in inside]

    def check(self, cuts: Sequence["_Cut"]) -> None:
        """Raise `ExportError` unless only the hidden state and the cache leave, and nothing of another layer enters."""
        inside = set(self.nodes)
        kept = {*self.present}
        for node in self.nodes:
            for value in node.outputs:
                strays = [user for user in value.consumers() if user not in inside and user is not self.leave]
                if strays or (value.is_graph_output() and value not in kept):
                    raise ExportError(f"decoder layer {self.index} cannot be repeated: {value.name} is used outside it")
        foreign = {node for cut in cuts if cut is not self for node in (*cut.nodes, cut.enter, cut.leave)}
        for node in self.nodes:
            for source in node.inputs:
                if source is not None and source.producer() in foreign:
                    raise ExportError(f"decoder layer {self.index} cannot be repeated: it reads {source.name}")

    def copy(self, layer: int, hidden: ir.Value) -> _Copy:
        """Clone the nodes as layer `layer` of the model, reading `hidden`."""
        own, new = f"{self.prefix}.{self.index}.", f"{self.prefix}.{layer}."
        mapping: dict[ir.Value, ir.Value] = {self.enter.outputs[0]: hidden}
        past = [_renamed(old, _name(old).replace(f".{self.index}.", f".{layer}.")) for old in self.past]
        parameters = [_renamed(old, new + _name(old).removeprefix(own)) for old in self.parameters]
        mapping.update(zip([*self.past, *self.parameters], [*past, *parameters], strict=True))
        nodes = [_clone(node, mapping) for node in self.nodes]
        present = [mapping[old] for old in self.present]
        for old, value in zip(self.present, present, strict=True):
            value.name = _name(old).replace(f".{self.index}.", f".{layer}.")
        source = self.leave.inputs[0]
        assert source is not None
        return _Copy(nodes, past, present, parameters, mapping[source])


def _clone(node: ir.Node, mapping: dict[ir.Value, ir.Value]) -> ir.Node:
    """Copy `node` with its inputs mapped; its outputs are added to `mapping`."""
    inputs = [None if value is None else mapping.get(value, value) for value in node.inputs]
    outputs = [ir.Value(type=value.type, shape=value.shape) for value in node.outputs]
    mapping.update(zip(node.outputs, outputs, strict=True))
    attributes = list(node.attributes.values())
    return ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, version=node.version)


def _renamed(value: ir.Value, name: str) -> ir.Value:
    copied = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    copied.meta.update(value.meta)
    return copied


def _find_marker(graph: ir.Graph, kind: str, index: int) -> ir.Node:
    for node in graph:
        if node.domain == MARKER_DOMAIN and node.op_type == kind and node.attributes["layer"].as_int() == index:
            return node
    raise ExportError(f"decoder layer {index} left no {kind} marker in the traced graph")


def _by_name(values: Iterable[ir.Value], name: str) -> ir.Value:
    for value in values:
        if value.name == name:
            return value
    raise ExportError(f"the traced graph has no {name}")


def _reach_down(sources: Iterable[ir.Value], stop: ir.Node) -> set[ir.Node]:
    """Nodes that depend on the content of `sources` (shapes are those of every layer), not looking past `stop`."""
    seen: set[ir.Node] = set()
    todo = list(sources)
    while todo:
        for node in todo.pop().consumers():
            if node not in seen and node is not stop and node.op_type != "Shape":
                seen.add(node)
                todo.extend(node.outputs)
    return seen


def _reach_up(targets: Iterable[ir.Value], stop: ir.Node) -> set[ir.Node]:
    """Nodes that `targets` depend on, not looking past `stop`."""
    seen: set[ir.Node] = set()
    todo = list(targets)
    while todo:
        node = todo.pop().producer()
        if node is not None and node not in seen and node is not stop:
            seen.add(node)
            todo.extend(value for value in node.inputs if value is not None)
    return seen


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name
