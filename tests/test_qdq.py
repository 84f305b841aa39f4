"""Rounded inputs: the graph computes what NumPy rounds to; pairs are shared and typed, and the same bytes again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from specdec.engines.errors import ExportError
from specdec.engines.ort import OrtEngine
from specdec.export.blocks import QuantizedWeights
from specdec.export.canonical import CanonicalForm
from specdec.export.grid import Grid
from specdec.export.products import find_products
from specdec.export.qdq import RoundedInputs, head_product, is_gated
from specdec.export.quantize import quantize_weight
from specdec.export.recipes import Kind
from specdec.export.trace import TORCH_DTYPES, model_spec, trace
from specdec.export.weights import write_graph
from support import graphs, models, scoring

TOKENS = np.random.default_rng(0).integers(3, 101, (1, 20))
SCALES: dict[Kind, tuple[float, float]] = {"int8": (0.02, 0.03), "float8e4m3fn": (0.01, 0.02)}


def scales_of(names: list[str], kind: Kind) -> dict[str, float]:
    """Two scales, equal for products of one input, small enough to saturate now and then; numbers of float16."""
    small, large = (float(np.float16(scale)) for scale in SCALES[kind])
    return {name: small if "_proj" in name and "mlp" in name else large for name in names}


def rounded(x: torch.Tensor, scale: float, kind: Kind) -> torch.Tensor:
    levels = x.numpy() / np.float32(scale)
    if kind == "int8":
        found = np.clip(np.rint(levels), -128, 127)
    else:
        found = np.clip(levels, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy(found * np.float32(scale))


def fake_quantized(model: Any, grids: dict[str, Grid], scales: dict[str, float], kind: Kind) -> np.ndarray:
    """Logits [T, V] of `model` with the grids' weights and rounded inputs; `model` is changed."""
    for name, scale in scales.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight.copy_(torch.from_numpy(grids[name].values()))
        module.register_forward_pre_hook(lambda _, given, s=scale: (rounded(given[0], s, kind),))
    return scoring.reference(model, TOKENS[0])


def layer_names(graph: ir.Model) -> list[str]:
    head = head_product(graph)
    assert head is not None
    return [name for product in find_products(graph) if product.node is not head.node for name in product.names]


@pytest.mark.parametrize(
    ("family", "kind", "dtype", "tolerance"),
    [
        (models.llama, "int8", "float32", 2e-4),
        (models.qwen2, "float8e4m3fn", "float32", 2e-4),
        (models.gemma3, "int8", "float16", 5e-2),
    ],
)
def test_the_graph_computes_what_rounding_says(
    tmp_path: Path, family: Callable[[], Any], kind: Kind, dtype: Any, tolerance: float
) -> None:
    model = models.random_model(family())
    exact = scoring.reference(model, TOKENS[0])
    graph = trace(model.config, dtype)
    names = layer_names(graph)
    assert names
    assert not any("lm_head" in name or "embed" in name for name in names)
    state = model.state_dict()
    stored = np.float32 if dtype == "float32" else np.float16
    grids = {name: quantize_weight(state[name].numpy(), kind, dtype=stored) for name in names}
    scales = scales_of(names, kind)
    for step in (RoundedInputs(kind, scales), QuantizedWeights(grids), CanonicalForm()):
        step(graph)
    write_graph(graph, state, tmp_path / "model.onnx", grids=grids)
    engine = OrtEngine(tmp_path / "model.onnx", model_spec(model.config, 101, dtype), threads=1)
    found = scoring.score(engine, TOKENS, [20])[0].astype(np.float32)
    expected = fake_quantized(model.to(TORCH_DTYPES["float32"]), grids, scales, kind)
    peak = float(np.abs(exact).max())
    assert float(np.abs(found - expected).max()) < tolerance * peak
    assert float(np.abs(exact - expected).max()) > 5 * tolerance * peak or dtype == "float16"  # rounding shows


def pair_graph() -> ir.Model:
    """logits = x @ a + (x @ [b | c]) @ d, all [8, 8] but [b | c]; in float16."""
    half = ir.TensorType(ir.DataType.FLOAT16)
    x = graphs.value("x", ["n", 8], half)
    weights = {name: graphs.value(f"{name}.weight", shape, half) for name, shape in SHAPES.items()}
    weights["b"].meta["specdec.parts"] = (("b.weight", 3), ("c.weight", 5))
    weights["b"].meta["specdec.transposed"] = "b.weight"
    first = graphs.node("MatMul", [x, weights["a"]], ["n", 8])
    second = graphs.node("MatMul", [x, weights["b"]], ["n", 8])
    third = graphs.node("MatMul", [second.outputs[0], weights["d"]], ["n", 8])
    total = graphs.node("Add", [first.outputs[0], third.outputs[0]], ["n", 8])
    total.outputs[0].name, total.outputs[0].type = "logits", half
    return graphs.model([x], [first, second, third, total], total.outputs)


SHAPES = {"a": [8, 8], "b": [8, 8], "d": [8, 8]}


def operators(graph: ir.Model) -> list[str]:
    return [name for name in graphs.operators(graph) if name != "Constant"]


def test_products_of_one_input_share_a_pair() -> None:
    graph = pair_graph()
    assert RoundedInputs("int8", {"a.weight": 0.5, "b.weight": 0.5, "c.weight": 0.5})(graph).modified
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert operators(graph) == [*pair, "MatMul", "MatMul", "MatMul", "Add"]
    quantize, dequantize = (node for node in graph.graph if node.op_type in pair)
    assert quantize.inputs[0] is graph.graph.inputs[0]
    assert [use.node.inputs[1].name for use in dequantize.outputs[0].uses()] == ["a.weight", "b.weight"]
    for node in (quantize, dequantize):
        scale, zero = (ir.convenience.get_const_tensor(value) for value in node.inputs[1:])
        assert (scale.dtype, scale.numpy().item()) == (ir.DataType.FLOAT16, 0.5)
        assert (zero.dtype, zero.numpy().item()) == (ir.DataType.INT8, 0)


def test_different_scales_are_different_pairs() -> None:
    graph = pair_graph()
    RoundedInputs("float8e4m3fn", {"a.weight": 0.5, "b.weight": 0.25, "c.weight": 0.25, "d.weight": 0.5})(graph)
    assert operators(graph).count("QuantizeLinear") == 3
    assert not RoundedInputs("int8", {})(pair_graph()).modified


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"b.weight": 0.5}, r"b\.weight, c\.weight read one input: it needs one scale, for all or for none"),
        ({"b.weight": 0.5, "c.weight": 0.4}, "it needs one scale"),
        ({"a.weight": 0.5, "e.weight": 0.5}, r"e\.weight is the weight of no product: its input cannot be rounded"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: dict[str, float], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        RoundedInputs("int8", scales)(pair_graph())


def test_the_same_graph_twice_is_the_same_bytes() -> None:
    def build() -> bytes:
        graph = pair_graph()
        RoundedInputs("int8", {"a.weight": 0.5, "b.weight": 0.5, "c.weight": 0.5, "d.weight": 0.1})(graph)
        CanonicalForm()(graph)
        return ir.to_proto(graph).SerializeToString()

    assert build() == build()


def test_the_head_is_found_behind_what_follows_it() -> None:
    graph = pair_graph()
    assert head_product(graph).names == ("a.weight",)  # the first way back from the logits
    graph.graph.outputs[0].name = "other"
    assert head_product(graph) is None


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (models.llama, "model.layers.{}.mlp.down_proj.weight"),
        (models.gemma3, "model.layers.{}.mlp.down_proj.weight"),
        (models.phi3, "model.layers.{}.mlp.down_proj.weight"),
        (models.gpt2, "transformer.h.{}.mlp.c_proj.weight"),
    ],
)
def test_inputs_that_are_products_of_activations_are_known(family: Callable[[], Any], expected: str) -> None:
    config = family()
    found = [product.names for product in find_products(trace(config)) if is_gated(product)]
    assert found == [(expected.format(layer),) for layer in range(config.num_hidden_layers)]
