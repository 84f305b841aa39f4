"""Every family's graph against PyTorch: all ways to pass tokens, stale caches, and bit for bit against itself."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama import modeling_llama

from specdec.engines.chunk import nodes_to
from specdec.engines.contract import ModelSpec
from specdec.engines.errors import ExportError, UnsupportedModelError
from specdec.engines.ort import OrtEngine
from specdec.export import attention
from specdec.export.trace import model_spec, trace
from specdec.export.weights import write_graph
from support import models, scoring

TOLERANCE = 1e-4
LENGTH = 23  # tokens of a prompt: three times the window


@dataclass(frozen=True)
class Exported:
    model: Any
    spec: ModelSpec
    path: Path
    engine: OrtEngine


@pytest.fixture(scope="module", params=sorted(models.FAMILIES))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model = models.random_model(models.FAMILIES[request.param]())
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    write_graph(trace(model.config), model.state_dict(), path)
    spec = model_spec(model.config, model.config.vocab_size, "float32")
    return Exported(model, spec, path, OrtEngine(path, spec, threads=1))


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 101, shape)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) < TOLERANCE


def test_prompt_then_single_tokens_then_verification(exported: Exported) -> None:
    ids = tokens(1, LENGTH + 3 + 5)
    found = scoring.score(exported.engine, ids, [LENGTH, 1, 1, 1, 5])
    assert_close(found[0], scoring.reference(exported.model, ids[0]))


def test_ragged_batch_of_three_with_last_logits_only(exported: Exported) -> None:
    lengths = np.array([5, LENGTH, 12])
    ids = tokens(3, LENGTH)
    kv = scoring.garbage(exported.engine, 3, 256)
    padded = np.where(np.arange(LENGTH) < lengths[:, None], ids, 0)
    found = np.array(exported.engine.step(scoring.chain(padded, [0, 0, 0], lengths[:, None] - 1), kv))
    more = tokens(3, 4, seed=1)
    then = np.array(exported.engine.step(scoring.chain(more, lengths.tolist()), kv))
    for row, length in enumerate(lengths):
        expected = scoring.reference(exported.model, [*ids[row, :length], *more[row]])
        assert_close(found[row, 0], expected[length - 1])
        assert_close(then[row], expected[length:])


def test_branching_tree_rollback_and_overwrite(exported: Exported) -> None:
    prompt = tokens(1, LENGTH)
    kv = scoring.garbage(exported.engine, 1, 256)
    exported.engine.step(scoring.chain(prompt, [0]), kv)
    parents = [-1, 0, 0, 1, 2, 3, 2]  # two branches below the root, one of them forked
    nodes = tokens(1, len(parents), seed=2)
    found = np.array(exported.engine.step(scoring.tree(nodes, [LENGTH], parents), kv))
    for node in range(len(parents)):
        path = nodes_to(parents, node)
        assert_close(found[0, node], scoring.reference(exported.model, [*prompt[0], *nodes[0, path]])[-1])
    after = tokens(1, 4, seed=3)  # root and first child accepted, the rest overwritten
    found = np.array(exported.engine.step(scoring.chain(after, [LENGTH + 2]), kv))
    expected = scoring.reference(exported.model, [*prompt[0], *nodes[0, :2], *after[0]])
    assert_close(found[0], expected[-4:])


def test_same_bits_however_the_tokens_are_passed(exported: Exported) -> None:
    ids = tokens(1, 40, seed=4)
    expected = scoring.score(exported.engine, ids, [40])
    for widths in ([2], [3, 3, 2], [5], [8], [33, 7], [11, 3, 2, 9, 15]):
        assert np.array_equal(scoring.bits(scoring.score(exported.engine, ids, widths)), scoring.bits(expected)), widths
    assert np.array_equal(scoring.bits(scoring.score(exported.engine, ids, [5], 512)), scoring.bits(expected))
    batch = np.concatenate([tokens(1, 40, seed=5), ids, tokens(1, 40, seed=6)])
    assert np.array_equal(scoring.bits(scoring.score(exported.engine, batch, [4]))[1], scoring.bits(expected)[0])
    threads = OrtEngine(exported.path, exported.spec, threads=2)
    assert np.array_equal(scoring.bits(scoring.score(threads, ids, [8])), scoring.bits(expected))


def test_a_single_token_has_the_same_bits_where_key_heads_are_shared(exported: Exported) -> None:
    ids = tokens(1, 40, seed=4)
    expected, found = (scoring.score(exported.engine, ids, widths) for widths in ([40], [1]))
    if exported.spec.num_kv_heads < exported.model.config.num_attention_heads:
        assert np.array_equal(scoring.bits(found), scoring.bits(expected))
    else:  # one query head for each key head: a single token takes another matrix kernel
        assert_close(found, expected)


def test_graph_is_standard_and_says_nothing_of_its_maker(exported: Exported) -> None:
    raw = exported.path.read_bytes()
    for trail in (b"site-packages", b"pkg.torch", b".py", b"specdec.marker"):
        assert trail not in raw
    model = ir.load(exported.path)
    assert dict(model.opset_imports) == {"": 24}
    counts = Counter(node.op_type for node in model.graph)
    depth = exported.spec.num_layers
    assert counts["Attention"] == depth
    assert counts["TensorScatter"] == 2 * depth
    family = exported.model.config.model_type
    if family != "gpt2":
        assert counts["RotaryEmbedding"] == depth * (1 if family in ("llama", "mistral", "qwen2") else 2)
        norms = {"gemma3_text": 6, "qwen3": 4}.get(family, 2)
        assert counts["RMSNormalization"] == norms * depth + 1
        assert counts["Pow"] == counts["Sqrt"] == 0
    assert all(node.inputs[3] is not None for node in model.graph if node.op_type == "Attention")
    transposed = [node.name for node in model.graph if node.op_type == "Transpose" and node.inputs[0].is_initializer()]
    assert transposed == []


def test_half_precision_runs_on_the_cpu(tmp_path: Path) -> None:
    model = models.random_model(models.gemma3())
    write_graph(trace(model.config, "float16"), model.state_dict(), tmp_path / "model.onnx")
    engine = OrtEngine(tmp_path / "model.onnx", model_spec(model.config, 101, "float16"), threads=1)
    ids = tokens(1, LENGTH)
    found = scoring.score(engine, ids, [LENGTH - 4, 2, 2])
    assert found.dtype == np.float16
    assert float(np.abs(found[0] - scoring.reference(model, ids[0])).max()) < 0.1


def test_what_the_family_raises_while_traced_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("cannot do that\nat all")

    before = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", fail)
    with pytest.raises(ExportError, match=r"^LlamaForCausalLM cannot be traced: cannot do that$"):
        trace(models.llama())
    assert modeling_llama.apply_rotary_pos_emb is before
    assert attention.NAME not in AttentionInterface._global_mapping
    assert attention.NAME not in AttentionMaskInterface._global_mapping


def test_the_configuration_is_left_as_it_was() -> None:
    config = models.qwen3(num_hidden_layers=1)
    before = config.to_dict()
    trace(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("argument", attention.BEYOND_ATTENTION)
def test_what_the_operator_cannot_hold_is_refused(argument: str) -> None:
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedModelError, match=f"Identity attends with {argument}, which ONNX Attention cannot"):
        attention._attend(torch.nn.Identity(), x, x, x, x, **{argument: 30.0})


@pytest.mark.slow
def test_every_process_writes_the_same_graph(tmp_path: Path) -> None:
    script = (
        "import sys, onnx_ir as ir; from support import models; from specdec.export.trace import trace;"
        "sys.stdout.buffer.write(ir.to_proto(trace(models.gemma3())).SerializeToString())"
    )
    found = []
    for seed in ("1", "2"):  # a family that walks a set gives another order under another seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        found.append(result.stdout)
    assert found[0] == found[1]
    assert len(found[0]) > 1000
