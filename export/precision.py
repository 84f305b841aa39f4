"""A recipe applied to one model: which weights go onto which grid, and the graph that reads them.

`prepare` decides numbers (calibration, smoothing, grids), `quantize_graph` edits the graph, `dequantize` gives PyTorch
the very weights that the graph stands for, and `without_rounding` makes the twin of a graph that computes exactly with
them: what is left is to compare the two. This module knows the order of these steps; the arithmetic is elsewhere.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from specdec.engines.errors import ExportError, RequestError
from specdec.export.blocks import QuantizedWeights
from specdec.export.calibrate import Statistics, collect
from specdec.export.canonical import CanonicalForm, is_parameter
from specdec.export.edit import nodes_of
from specdec.export.grid import BOUNDS, Array, Grid
from specdec.export.passes import MergedConstants, run_passes
from specdec.export.products import Product, find_products
from specdec.export.projections import JoinedProducts
from specdec.export.qdq import RoundedInputs, head_product, is_gated
from specdec.export.quantize import activation_scale, quantize_weight
from specdec.export.recipes import Kind, Recipe
from specdec.export.smooth import Group, Size, find_groups, smooth
from specdec.export.weights import ALIASES, parts_of


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model's weights by their names in the state dict: as they are, and on grids; scales of products' inputs."""

    weights: dict[str, torch.Tensor]
    grids: dict[str, Grid]
    scales: dict[str, float]


def prepare(
    graph: ir.Model,
    model: Any,
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    own: Mapping[str, Grid] | None = None,
    keep: Sequence[str] = (),
) -> Prepared:
    """Choose grids for `model` (PyTorch, float32; smoothed in place), whose weight-less graph is `graph`.

    `prompts`: token ids to calibrate with. `own`: grids that the checkpoint's weights lie on already; those that fit
    the recipe are taken as they are, and nothing is folded into their weights. `keep`: patterns of names of weights
    that are not quantized. Raises `ExportError` when calibration meets no token or numbers that are not finite.
    """
    products = find_products(graph)
    chosen = [product for product in products if not _kept(product, keep)]
    head = head_product(graph)
    layers = [product for product in chosen if head is None or product.node is not head.node]
    # integers with one scale for a tensor have no room for the outliers of act(gate) * up (docs/quantization.md)
    rounded = [product for product in layers if recipe.activations not in BOUNDS or not is_gated(product)]
    taken = {name: grid for name, grid in (own or {}).items() if _fits(grid, recipe)}
    statistics: Mapping[str, Statistics] = {}
    if not taken.keys() >= {name for product in layers for name in product.names}:
        statistics = collect(model, prompts)
        if recipe.smoothing is not None:
            changeable = layers if recipe.activations is None else rounded
            groups = _free(find_groups(graph), changeable, taken, {name for each in products for name in each.names})
            size: Size = "maximum" if not recipe.blocks else "rms"
            model.load_state_dict(smooth(model.state_dict(), groups, statistics, recipe.smoothing, size)[0])
            statistics = collect(model, prompts)
    weights = model.state_dict()
    grids = {
        name: taken[name] if name in taken else _grid(name, weights[name], product, recipe, statistics[name])
        for product in layers
        for name in product.names
    }
    scales = {
        name: activation_scale(statistics[name], recipe.activations)
        for product in rounded
        for name in product.names
        if recipe.activations is not None
    }
    if recipe.head is not None:
        tables = _tables(graph) | ({head.weight} if head is not None else set())
        for name in sorted(str(table.name) for table in tables if not _matches(_names(table), keep)):
            grids[name] = taken[name] if name in taken else _quantized(name, weights[name].numpy(), recipe, recipe.head)
    return Prepared(weights, grids, scales)


def round_weights(graph: ir.Model, weights: Mapping[str, torch.Tensor], recipe: Recipe) -> dict[str, Grid]:
    """Grids of the `weights` (float32) that products and embeddings of `graph` read, chosen without calibration."""
    head, grids = head_product(graph), dict[str, Grid]()
    for product in find_products(graph):
        kind = recipe.head if head is not None and product.node is head.node else recipe.weights
        for name in product.names:
            if name in weights and kind is not None:
                values = weights[name].numpy() if product.inputs_axis else weights[name].numpy().T
                grids[name] = _quantized(name, values, recipe, kind)
    for name in (str(table.name) for table in _tables(graph)):
        if name in weights and recipe.head is not None:
            grids[name] = _quantized(name, weights[name].numpy(), recipe, recipe.head)
    return grids


def check_keep(graphs: Sequence[ir.Model], patterns: Sequence[str]) -> None:
    """Raise `RequestError` for a pattern that matches no weight which is quantized in any of `graphs`."""
    weights = [product.weight for graph in graphs for product in find_products(graph)]
    names = [_all_names(weight) for weight in [*weights, *(table for graph in graphs for table in _tables(graph))]]
    for pattern in patterns:
        if not any(_matches(each, [pattern]) for each in names):
            known = ", ".join(dict.fromkeys((names[0][0], weights[-1].name or "")))
            raise RequestError(f"--keep {pattern} matches no weight that is quantized: they are named as {known}")


def quantize_graph(graph: ir.Model, recipe: Recipe, prepared: Prepared) -> ir.Model:
    """Let `graph` read the grids, and products their rounded inputs: standard operators, in place."""

    def form(names: Sequence[str]) -> tuple[Kind, int, bool] | None:
        """What the grids of one product's weights have in common; None where one has none."""
        grids = [prepared.grids[name] for name in names if name in prepared.grids]
        forms = {(grid.kind, grid.block, grid.offset is not None) for grid in grids}
        return forms.pop() if len(grids) == len(names) and len(forms) == 1 else None

    passes: list[ir.passes.PassBase] = [JoinedProducts(form), QuantizedWeights(prepared.grids)]
    if recipe.activations is not None:
        passes.insert(0, RoundedInputs(recipe.activations, prepared.scales))
    return run_passes(graph, [*passes, MergedConstants(), CanonicalForm()])


def without_rounding(graph: ir.Model) -> ir.Model:
    """A copy of a quantized graph, lowered or not, that rounds no activation: same weights, exact arithmetic."""
    twin = graph.clone()
    for node in list(twin.graph):
        if node.op_type == "MatMulNBits":
            node.attributes.pop("accuracy_level", None)
        source = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] else None
        if source is not None and source.op_type == "QuantizeLinear" and source.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(source.inputs[0])
            twin.graph.remove(node, safe=True)
    common.RemoveUnusedNodesPass()(twin)
    return twin


def dequantize(model: Any, graph: ir.Model, prepared: Prepared, dtype: torch.dtype = torch.float32) -> None:
    """Give PyTorch's `model` the weights that the quantized graph stands for, rounded to `dtype` as the graph does.

    `graph` as it was before it was quantized.
    """
    weights = dict(prepared.weights)
    axes = {name: product.inputs_axis for product in find_products(graph) for name in product.names}
    aliases = {str(value.name): _names(value) for value in graph.graph.initializers.values()}
    for name, grid in prepared.grids.items():
        values = torch.from_numpy(grid.values()).to(dtype).float()
        stored = values if axes.get(name, 1) else values.T
        weights |= dict.fromkeys((name, *aliases.get(name, ())), stored)
    model.load_state_dict(weights)


def _tables(graph: ir.Model) -> set[ir.Value]:
    """Embeddings: parameters whose rows are gathered."""
    tables = (node.inputs[0] for node in nodes_of(graph, "Gather"))
    return {table for table in tables if table is not None and is_parameter(table)}


def _names(weight: ir.Value) -> tuple[str, ...]:
    return (str(weight.name), *weight.meta.get(ALIASES, ()))


def _all_names(weight: ir.Value) -> tuple[str, ...]:
    return (*(name for name, _ in parts_of(weight)), *weight.meta.get(ALIASES, ()))


def _kept(product: Product, patterns: Sequence[str]) -> bool:
    return _matches((*product.names, *product.weight.meta.get(ALIASES, ())), patterns)


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _fits(grid: Grid, recipe: Recipe) -> bool:
    """Whether weights on `grid` stay on it. A file mixes types: where int4 is wanted, finer ones stay as they are."""
    return recipe.keeps_own and (grid.kind == recipe.weights or recipe.weights == "int4")


def _free(
    groups: Sequence[Group], layers: Sequence[Product], taken: Mapping[str, Grid], products: Collection[str]
) -> list[Group]:
    """The groups into which something may be folded.

    All weights that they change (not norms) are to be quantized, and have no grid yet; `products`: the weights of all.
    """
    names = {name for product in layers for name in product.names} - set(taken)
    fixed = set(products) - names
    return [
        group
        for group in groups
        if names.issuperset(consumer.name for consumer in group.consumers)
        and fixed.isdisjoint(source.name for source in group.sources)
    ]


def _grid(name: str, weight: torch.Tensor, product: Product, recipe: Recipe, statistics: Statistics) -> Grid:
    values = weight.numpy() if product.inputs_axis else weight.numpy().T
    return _quantized(name, values, recipe, recipe.weights, statistics.mean_square)


def _quantized(name: str, values: Array, recipe: Recipe, kind: Kind | None, importance: Array | None = None) -> Grid:
    if kind is None:
        raise RequestError(f"precision {recipe.name} quantizes no weights")
    inputs = values.shape[1]
    block = recipe.block(inputs)
    if block is not None and inputs % block:
        raise ExportError(
            f"the {inputs} inputs of {name} are not whole blocks of {block}: keep it with --keep '{name}'"
        )
    offset = recipe.offset and kind == recipe.weights
    dtype = np.float16 if recipe.dtype == "float16" else np.float32
    return quantize_weight(values, kind, block=block, offset=offset, importance=importance, dtype=dtype)
