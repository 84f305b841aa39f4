"""Joined projections: fewer nodes, the same bits, and only where they may be joined."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specdec.engines.ort import OrtEngine
from specdec.export.projections import JoinedProjections
from specdec.export.trace import model_spec, trace
from specdec.export.weights import PARTS, write_graph
from support import models, scoring


def leave(self: JoinedProjections, model: ir.Model) -> ir.passes.PassResult:
    return ir.passes.PassResult(model, modified=False)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_joining_changes_no_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = getattr(models, family)()
    weights = models.random_model(config).state_dict()
    spec = model_spec(config, config.vocab_size, "float32")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 33))
    found, nodes = [], []
    for name in ("joined", "apart"):
        (tmp_path / name).mkdir()
        graph = trace(config)
        write_graph(graph, weights, tmp_path / name / "model.onnx")
        engine = OrtEngine(tmp_path / name / "model.onnx", spec)
        found.append([scoring.bits(scoring.score(engine, ids, widths)) for widths in ([33], [1], [5])])
        nodes.append(Counter(node.op_type for node in graph.graph))
        monkeypatch.setattr(JoinedProjections, "call", leave)
    assert all(np.array_equal(left, right) for left, right in zip(*found, strict=True))
    depth = config.num_hidden_layers
    joined, apart = nodes
    assert apart["MatMul"] - joined["MatMul"] == 2 * depth
    assert apart["Transpose"] - joined["Transpose"] == 2 * depth
    assert apart["RotaryEmbedding"] - joined["RotaryEmbedding"] == depth


def test_biases_are_joined_with_their_weights() -> None:
    parts = {name: value.meta.get(PARTS) for name, value in trace(models.qwen2()).graph.initializers.items()}
    size = models.qwen2().hidden_size
    shared = size * 2 // 4  # two key heads for four query heads
    layer = "model.layers.2.self_attn"
    for kind in ("weight", "bias"):
        assert parts[f"{layer}.q_proj.{kind}.joined"] == (
            (f"{layer}.q_proj.{kind}", size), (f"{layer}.k_proj.{kind}", shared), (f"{layer}.v_proj.{kind}", shared),
        )  # fmt: skip
        assert f"{layer}.k_proj.{kind}" not in parts


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "gpt2"])
def test_other_computations_are_left(family: str) -> None:
    graph = trace(getattr(models, family)())
    assert not any(PARTS in value.meta for value in graph.graph.initializers.values())
