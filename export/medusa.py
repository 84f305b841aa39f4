"""Medusa heads as a graph of their own: `features` [B, H] in, `logits` [B, heads, Vd] out, in standard operators.

Weights are stored as the target's are, but for int4, whose heads have 8 bits: they are small, and drafts gain from
every right guess. Then the graph is lowered and compared with PyTorch on hidden states of the exported target. This
module knows operators and stages; what heads are is `medusa_model`'s.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from specdec.engines.base import Heads
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import FEATURES, LOGITS, OPSET, FloatArray, HeadsSpec
from specdec.engines.errors import GateError
from specdec.engines.manifest import MedusaDrafter, Model, Parity
from specdec.engines.registry import open_engine, open_heads
from specdec.export.canonical import AXES, REAL, CanonicalForm
from specdec.export.check import ABSOLUTE, RELATIVE
from specdec.export.grid import Grid
from specdec.export.lower_ort import BlockProducts
from specdec.export.medusa_model import OFFSETS, SHARED, MedusaConfig, MedusaModel
from specdec.export.passes import MergedConstants, run_passes
from specdec.export.precision import Prepared, quantize_graph, without_rounding
from specdec.export.quantize import quantize_weight
from specdec.export.recipes import ORT, Recipe, find_recipe
from specdec.export.taps import FINAL
from specdec.export.trace import TORCH_DTYPES
from specdec.export.weights import TRANSPOSED, save_graph, write_graph

FOLDER = "drafter/medusa"


def export_medusa(
    heads: MedusaModel, target: Model, recipe: Recipe, bundle: Path, tokens: Sequence[int]
) -> MedusaDrafter:
    """Write `heads` into the folder `bundle`, which holds the finished `target` of `recipe`; return their record.

    `tokens`: a text whose hidden states the heads are compared on. Raises `GateError` when they differ from PyTorch's.
    """
    recipe = find_recipe("int8", ORT) if recipe.weights is not None and recipe.dtype == "float32" else recipe
    config = heads.config
    spec = HeadsSpec(
        heads=config.heads, hidden_size=config.hidden_size, logits_size=config.logits_size, dtype=recipe.dtype
    )
    name = f"{FOLDER}/model.onnx"
    path = bundle / name
    path.parent.mkdir(parents=True)
    weights = {name: tensor for name, tensor in heads.state_dict().items() if name != OFFSETS}
    graph, grids = heads_graph(config, spec), dict[str, Grid]()
    precision = "fp32" if recipe.dtype == "float32" else "fp16"
    if recipe.weights is not None and recipe.blocks:
        precision = recipe.name
        grids = {
            name: quantize_weight(tensor.numpy(), recipe.weights, block=recipe.block(tensor.shape[1]))
            for name, tensor in weights.items()
            if tensor.dim() == 2
        }
        quantize_graph(graph, recipe, Prepared(weights, grids, {}))
        heads.load_state_dict({name: torch.from_numpy(grid.values()) for name, grid in grids.items()}, strict=False)
        run_passes(graph, [BlockProducts(), MergedConstants(), common.RemoveUnusedNodesPass(), CanonicalForm()])
    write_graph(graph, weights, path, grids=grids)
    features = _final_states(target, bundle, tokens)
    twin = path.with_name("twin.onnx")
    save_graph(without_rounding(graph), twin, f"{path.name}.data", graph)
    try:
        with closing(open_heads(twin, spec)) as engine:
            parity = check_heads(engine, heads.to(TORCH_DTYPES[recipe.dtype]), features)
    finally:
        twin.unlink()
    with closing(open_heads(path, spec)) as engine:  # that it loads and runs
        engine.logits(features[:1])
    ids = None
    if heads.ids is not None:
        ids = f"{FOLDER}/ids.npy"
        np.save(bundle / ids, heads.ids.numpy())
    accuracies = [list(ranks) for ranks in config.accuracies]
    return MedusaDrafter(spec=spec, graph=name, ids=ids, precision=precision, parity=parity, accuracies=accuracies)


def heads_graph(config: MedusaConfig, spec: HeadsSpec) -> ir.Model:
    """The graph of heads of `config`, without weights: parameters have the names of `MedusaModel`."""
    real, size = REAL[spec.dtype], config.hidden_size
    features = ir.Value(name=FEATURES, type=ir.TensorType(real), shape=ir.Shape([AXES[0], size]))
    graph = ir.Graph([features], [], nodes=[], opset_imports={"": OPSET})

    def parameter(name: str, *shape: int) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(real), shape=ir.Shape(shape))
        if len(shape) == 2:
            value.meta[TRANSPOSED] = name  # as a product reads it: [inputs, outputs]
        graph.initializers.add(value)
        return value

    def node(operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made = ir.node(operator, inputs, attributes)
        graph.append(made)
        return made.outputs[0]

    axis = ir.Value(name="axis", const_value=ir.tensor(np.array([1]), name="axis"))
    graph.initializers.add(axis)
    found = []
    for head in range(config.heads):
        state = features  # [B, H]
        for block in range(config.layers):
            name = f"{head}.{block}.linear"
            linear = node("MatMul", state, parameter(f"{name}.weight", size, size))
            linear = node("Add", linear, parameter(f"{name}.bias", size))
            state = node("Add", state, node("Mul", linear, node("Sigmoid", linear)))
        if not config.shared_head:
            state = node("MatMul", state, parameter(f"{head}.{config.layers}.weight", size, spec.logits_size))
        found.append(node("Unsqueeze", state, axis))
    logits = node("Concat", *found, axis=1)  # [B, heads, H or Vd]
    if config.shared_head:
        logits = node("MatMul", logits, parameter(SHARED, size, spec.logits_size))
    logits.name, logits.type = LOGITS, ir.TensorType(real)
    logits.shape = ir.Shape([AXES[0], config.heads, spec.logits_size])
    graph.outputs.append(logits)
    return run_passes(ir.Model(graph, ir_version=10), [CanonicalForm()])


def check_heads(engine: Heads, heads: MedusaModel, features: FloatArray) -> Parity:
    """Compare `engine` with PyTorch's `heads` on `features` [B, H]; tolerances are those of models (`check`)."""
    dtype = engine.spec.dtype
    with torch.inference_mode():
        expected = heads(torch.from_numpy(features)).float().numpy()
    peak = float(np.abs(expected).max())
    tolerance = max(ABSOLUTE[dtype], RELATIVE[dtype] * peak)
    error = float(np.abs(engine.logits(features).astype(np.float32) - expected).max())
    if not error <= tolerance:
        raise GateError(f"parity gate failed: Medusa heads are {error:.3g} off PyTorch (tolerance {tolerance:.3g})")
    return Parity(max_abs_error=error, tolerance=tolerance, positions=expected.shape[0] * expected.shape[1])


def _final_states(target: Model, bundle: Path, tokens: Sequence[int]) -> FloatArray:
    """Last hidden states [len(tokens), H] of the exported target."""
    spec, variant = target.spec, next(iter(target.variants.values()))
    chunk = pack([RowInput(tokens, 1)], np.zeros(1, np.int64), 2, spec.max_length)
    with closing(open_engine(bundle / variant.graph, spec)) as engine:
        kv = engine.allocate(1, chunk.width)
        engine.step(chunk, kv)
        return kv.hidden[0, : len(tokens), spec.tap(FINAL)].copy()
