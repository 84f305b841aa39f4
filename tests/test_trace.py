"""Every family's graph against PyTorch: all ways to pass tokens, stale caches, and bit for bit against itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.engines.contract import ModelSpec
from specdec.engines.ort import OrtEngine
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
        path = scoring.path_to(node, parents)
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
