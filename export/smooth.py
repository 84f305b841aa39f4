"""SmoothQuant (arXiv 2211.10438) without a trace of it in the graph: outliers of activations move into weights.

A product's input channel c is divided by s_c and the weights that read it are multiplied, which changes no result. The
division is folded into what makes the channel, so it costs nothing: a norm's weight and bias, or the rows of `up` in
act(gate) * up. Which parameters these are is read off the traced graph; anything else (attention's output, whose value
heads are shared; fused gates; a tied or shared parameter) is left alone. This module rounds nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch

from specdec.engines.errors import ExportError
from specdec.export.calibrate import Statistics
from specdec.export.canonical import is_parameter
from specdec.export.products import as_product
from specdec.export.weights import ALIASES

Size = Literal["maximum", "rms"]
NORMS = ("RMSNormalization", "LayerNormalization")


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter [C, ...] whose first axis makes the channels: they are `offset` (Gemma's norms: 1) plus it."""

    name: str
    channels: int
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Consumer:
    """A weight that multiplies the channels, which are its `axis`: 1 of nn.Linear [N, C], 0 of Conv1D [C, N]."""

    name: str
    axis: int


@dataclass(frozen=True, slots=True)
class Group:
    """Channels [C] that are all of what `sources` make and all of what `consumers` read."""

    sources: tuple[Source, ...]
    consumers: tuple[Consumer, ...]


def find_groups(graph: ir.Model) -> list[Group]:
    """The groups of a graph of `trace`, in the order of the graph; parameters under their names in the state dict."""
    groups = []
    for node in graph.graph:
        if node.op_type in NORMS:
            sources = [_scale(value) for value in node.inputs[1:3] if value is not None]
        elif node.op_type == "Mul":
            sources = _up(node)
        else:
            continue
        known = [source for source in sources if source is not None]
        if not known or len(known) < len(sources):
            continue
        if consumers := _consumers(node.outputs[0], known[0].channels):
            groups.append(Group(tuple(known), tuple(consumers)))
    return groups


def smooth(
    weights: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    statistics: Mapping[str, Statistics],
    alpha: float,
    size: Size = "maximum",
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state dict with s_c = |x_c|^alpha / |w_c|^(1 - alpha) folded in, and s [C] by consumers' names.

    |.| is the `size` of a channel: its largest value, as in the paper, for a scale that all channels share; its root
    mean square where blocks of neighbours have scales of their own. alpha 0 makes weights' sizes equal, 1 inputs'.
    Changed tensors are new, in their dtype. The inputs of consumers are divided by s: collect their statistics anew.
    Raises `ExportError` for a group whose input was not calibrated.
    """
    found, made = dict(weights), {}
    for group in reversed(groups):  # the rows of `up` before its columns, which they change
        first = group.consumers[0].name
        if first not in statistics:
            raise ExportError(f"the inputs of {first} were not calibrated")
        columns = [_sizes(found[consumer.name], consumer.axis, size) for consumer in group.consumers]
        seen = statistics[first]
        inputs = seen.maximum if size == "maximum" else np.sqrt(seen.mean_square)
        factors = _factors(torch.from_numpy(inputs), torch.stack(columns).amax(0), alpha)
        for source in group.sources:
            tensor = found[source.name]
            divisor = factors.reshape(-1, *[1] * (tensor.dim() - 1))
            found[source.name] = ((tensor.float() + source.offset) / divisor - source.offset).to(tensor.dtype)
        for consumer in group.consumers:
            tensor = found[consumer.name]
            found[consumer.name] = (tensor.float() * factors.reshape(-1, *[1] * (1 - consumer.axis))).to(tensor.dtype)
            made[consumer.name] = factors
    return found, made


def _factors(inputs: torch.Tensor, columns: torch.Tensor, alpha: float) -> torch.Tensor:
    """s [C], with a geometric mean of one; one for channels that are silent on either side."""
    heard = (inputs > 0) & (columns > 0)
    logs = torch.where(heard, alpha * inputs.double().log() - (1 - alpha) * columns.double().log(), 0.0)
    logs = torch.where(heard, logs - logs[heard].mean(), 0.0)
    return logs.exp().float()


def _sizes(weight: torch.Tensor, axis: int, size: Size) -> torch.Tensor:
    values = weight.float()
    return values.abs().amax(1 - axis) if size == "maximum" else values.square().mean(1 - axis).sqrt()


def _consumers(value: ir.Value, channels: int) -> list[Consumer]:
    """The weights that multiply `value`, flattened or not; none unless products are all that reads it."""
    found: list[Consumer] = []
    for use in value.uses():
        if use.node.op_type == "Reshape" and use.idx == 0:
            more = _consumers(use.node.outputs[0], channels)
        else:
            product = as_product(use.node) if use.idx == 0 else None
            if product is None or not _is_own(product.weight) or product.inputs != channels:
                return []
            more = [Consumer(name, product.inputs_axis) for name in product.names]
        if not more:
            return []
        found.extend(more)
    return sorted(found, key=lambda consumer: consumer.name)


def _scale(value: ir.Value) -> Source | None:
    """A norm's weight or bias: a parameter, or a parameter plus a constant."""
    add = value.producer()
    if add is None:
        return _source(value) if _is_own(value) else None
    if add.op_type != "Add" or len(value.uses()) != 1:
        return None
    for parameter, constant in (add.inputs, add.inputs[::-1]):
        tensor = ir.convenience.get_const_tensor(constant) if constant is not None else None
        if parameter is not None and _is_own(parameter) and tensor is not None and tensor.size == 1:
            return _source(parameter, float(np.asarray(tensor.numpy()).reshape(())))
    return None


def _up(node: ir.Node) -> list[Source | None]:
    """Weight, and bias, of the product that is one factor of `node`, when the other factor is none."""
    linear = [found for value in node.inputs if value is not None and (found := _linear(value))]
    return list(linear[0]) if len(linear) == 1 else []


def _linear(value: ir.Value) -> list[Source]:
    """Parameters [C, ...] of the product (plus a bias) whose only reader takes `value`; none if it is another thing."""
    node, found = value.producer(), []
    if len(value.uses()) != 1 or node is None:
        return []
    if node.op_type == "Add":
        bias = next((read for read in node.inputs if read is not None and is_parameter(read)), None)
        rest = next((read for read in node.inputs if read is not bias), None)
        if bias is None or rest is None or not _is_own(bias) or len(rest.uses()) != 1:
            return []
        found.append(_source(bias))
        node = rest.producer()
    product = as_product(node) if node is not None else None
    if product is None or not _is_own(product.weight) or product.inputs_axis != 1 or len(product.names) > 1:
        return []
    return [Source(product.names[0], product.outputs), *found]


def _source(value: ir.Value, offset: float = 0.0) -> Source:
    if value.name is None or value.shape is None:
        raise ExportError(f"parameter {value.name} of the traced graph has no name or no shape")
    return Source(value.name, int(value.shape.numpy()[0]), offset)


def _is_own(value: ir.Value) -> bool:
    """Whether `value` is a parameter with one name and one reader."""
    return is_parameter(value) and len(value.uses()) == 1 and ALIASES not in value.meta
