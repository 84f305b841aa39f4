"""Every pass for ONNX Runtime, alone and together: the same numbers, and the same bits however a text is cut."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common

from specdec.engines.contract import FloatArray
from specdec.engines.errors import GateError
from specdec.engines.invariance import (
    FEW_SCORINGS,
    PROBE_TOKENS,
    Base,
    check_invariance,
    probe_rows,
    run_invariance,
)
from specdec.engines.manifest import Invariance
from specdec.engines.registry import EngineConfig, open_engine
from specdec.engines.scoring import score
from specdec.export import lower_ort
from specdec.export.canonical import CanonicalForm
from specdec.export.edit import insert, nodes_of, replace_output
from specdec.export.lower_ort import (
    CONTRIB,
    BlockEmbeddings,
    BlockProducts,
    BlockSums,
    FloatMasks,
    lower_for_ort,
)
from specdec.export.passes import MergedConstants, run_passes
from specdec.export.precision import Prepared, dequantize, prepare, quantize_graph, without_rounding
from specdec.export.recipes import ORT, find_recipe
from specdec.export.trace import model_spec, trace
from specdec.export.weights import write_graph
from support import models

TOKENS = np.random.default_rng(5).integers(0, 101, 240).tolist()
SIZES = {"hidden_size": 64, "intermediate_size": 128}
CASES = {"llama": SIZES, "gemma3": SIZES, "gpt2": {"n_embd": 64}}
CLEAN = (MergedConstants, common.RemoveUnusedNodesPass, CanonicalForm)


class Case:
    """A tiny family at a precision: its portable graph, and what PyTorch computes with the weights of the grids."""

    def __init__(self, family: str, precision: str) -> None:
        config = models.FAMILIES[family](**CASES[family])
        self.model = models.random_model(config)
        self.graph, self.spec = trace(config), model_spec(config, config.vocab_size, "float32")
        self.prepared = Prepared(self.model.state_dict(), {}, {})
        recipe = find_recipe(precision, ORT)
        if recipe.weights is not None:
            self.prepared = prepare(self.graph, self.model, recipe, [TOKENS[:64]])
            dequantize(self.model, self.graph, self.prepared)
            quantize_graph(self.graph, recipe, self.prepared)
        with torch.inference_mode():
            self.expected = self.model(torch.tensor([TOKENS[:PROBE_TOKENS]])).logits[0].numpy()

    def write(self, graph: ir.Model, folder: Path) -> Path:
        path = folder / "model.onnx"
        write_graph(graph, self.model.state_dict(), path, grids=self.prepared.grids)
        return path

    def logits(self, graph: ir.Model, folder: Path) -> FloatArray:
        engine = open_engine(self.write(graph, folder), self.spec)
        return score(engine, engine.allocate(1, 128), [TOKENS[:PROBE_TOKENS]], (PROBE_TOKENS,))[0]


@cache
def case(family: str, precision: str) -> Case:
    return Case(family, precision)


def lowered(graph: ir.Model, *passes: ir.passes.PassBase) -> ir.Model:
    return run_passes(graph.clone(), [*passes, *(step() for step in CLEAN)])


def count(graph: ir.Model) -> Mapping[str, int]:
    kinds = [node.op_type for node in graph.graph]
    return {kind: kinds.count(kind) for kind in kinds}


ALL = (FloatMasks, BlockProducts, BlockEmbeddings, BlockSums)
STEPS: dict[str, tuple[tuple[Any, ...], str]] = {
    "masks": ((FloatMasks,), "fp32"),
    "products": ((BlockProducts,), "int8"),
    "embeddings": ((BlockEmbeddings,), "int8"),
    "sums": ((BlockSums,), "int4"),
    "all-fp32": (ALL, "fp32"),
    "all-int8": (ALL, "int8"),
    "all-int4": (ALL, "int4"),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, family) for name in STEPS for family in CASES if family == "llama" or name.startswith("all-")],
)
def test_a_pass_changes_no_number_and_keeps_the_bits_of_every_cut(name: str, family: str, tmp_path: Path) -> None:
    steps, precision = STEPS[name]
    made = case(family, precision)
    graph = lowered(made.graph, *(step() for step in steps))
    exact = made.logits(without_rounding(graph), tmp_path)
    np.testing.assert_allclose(exact, made.expected, atol=2e-4 * np.abs(made.expected).max())
    engine = open_engine(made.write(graph, tmp_path), made.spec, EngineConfig(threads=2))
    base = Base(engine, probe_rows(TOKENS))
    assert check_invariance(engine, base, FEW_SCORINGS).exact


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_lowering_leaves_the_operators_that_were_measured(precision: str) -> None:
    made = case("llama", precision)
    before, after = count(made.graph), count(lower_for_ort(made.graph.clone(), made.spec))
    layers, products = made.spec.num_layers, 4 * made.spec.num_layers + 1  # q/k/v, o, gate/up, down; the head
    assert after["Where"] == before.get("Where", 0) + 1
    assert after["Attention"] == layers
    if precision == "fp32":
        assert "MatMulNBits" not in after
        return
    assert before["DequantizeLinear"] == products + 1  # the embedding
    assert after["MatMulNBits"] == products
    assert after["GatherBlockQuantized"] == 1
    assert "DequantizeLinear" not in after
    if precision == "int4":  # attention's input, its output, the MLP's input, its middle: one sum for each
        assert before["ReduceSum"] == 4 * layers
        assert "ReduceSum" not in after


def test_activations_are_rounded_where_the_engine_computes_in_integers(tmp_path: Path) -> None:
    made = case("llama", "int8")
    graph = lower_for_ort(made.graph.clone(), made.spec)
    levels = {node.attributes["accuracy_level"].as_int() for node in graph.graph if node.op_type == "MatMulNBits"}
    assert levels == {4}
    rounded = made.logits(graph, tmp_path)
    error = np.abs(rounded - made.expected).max() / np.abs(made.expected).max()
    assert 1e-3 < error < 0.1


def test_levels_that_head_and_embedding_share_are_stored_once(tmp_path: Path) -> None:
    made = case("gemma3", "int8")
    data = made.write(lower_for_ort(made.graph.clone(), made.spec), tmp_path).with_name("model.onnx.data")
    weights = sum(grid.levels.size + 4 * grid.scale.size for grid in set(made.prepared.grids.values()))
    floats = sum(
        4 * tensor.numel()
        for name, tensor in made.model.state_dict().items()
        if tensor.dim() == 1 and name != "lm_head.weight"
    )
    assert weights + floats <= data.stat().st_size < weights + floats + 64 * 200  # alignment


def test_a_wide_product_keeps_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_ort, "MOST_ONES", 64 * 2)
    made = case("llama", "int4")
    after = count(lowered(made.graph, BlockSums()))
    assert after["ReduceSum"] == made.spec.num_layers  # the MLP's middle: 96 inputs in 3 blocks


def test_float16_graphs_are_left_to_the_engine() -> None:
    config = models.llama(**SIZES)
    graph = lower_for_ort(trace(config, "float16"), model_spec(config, config.vocab_size, "float16"))
    assert {node.domain for node in graph.graph} == {""}


class SharedSums(ir.passes.InPlacePass):
    """Attention as a product of weights and values: ONNX Runtime shares its columns among threads, and with them K."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        attentions = nodes_of(model, "Attention")
        for node in attentions:
            query, keys, values, mask = node.inputs[:4]
            scaled = node.attributes.get_float("scale", 1.0)
            scores = insert(node, "FusedMatMul", [query, keys], CONTRIB, transB=1, alpha=scaled)
            weights = insert(node, "Softmax", [insert(node, "Add", [scores, mask])], axis=-1)
            replace_output(node, insert(node, "MatMul", [weights, values]))
        return ir.passes.PassResult(model, modified=bool(attentions))


def test_the_gate_sees_sums_that_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    config = models.FAMILIES["llama"](**SIZES, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    model, spec = models.random_model(config), model_spec(config, config.vocab_size, "float32")
    paths = []
    for steps in ((FloatMasks(),), (FloatMasks(), SharedSums())):
        paths.append(tmp_path / str(len(steps)) / "model.onnx")
        paths[-1].parent.mkdir()
        write_graph(lowered(trace(config), *steps), model.state_dict(), paths[-1])

    def gate(path: Path) -> Invariance:
        opener = lambda threads: open_engine(path, spec, EngineConfig(threads=threads))  # noqa: E731
        return run_invariance(opener, TOKENS, lambda engine: None)[1]

    assert gate(paths[0]).exact
    with pytest.raises(GateError, match=r"bits differ.* in 4 thread.*behind 300 tokens"):
        gate(paths[1])
