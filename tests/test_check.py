"""The gates pass a right graph and catch planted faults: each names the gate, how far off, and where."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engines.base import Capabilities, Engine, KVBuffers
from specdec.engines.contract import Chunk, FloatArray, ModelSpec
from specdec.engines.errors import ExportError, GateError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.export.check import (
    PROBE_TOKENS,
    Base,
    Reference,
    check_invariance,
    check_parity,
    probe_tokens,
    reference,
    run_gates,
)
from specdec.export.scoring import Round, same_bits, score, soil
from specdec.export.sources import open_checkpoint
from support.bundles import LOGITS_SIZE, TOKENIZER_SIZE, shared_bundle, shared_checkpoint

TOKENS = np.random.default_rng(3).integers(0, TOKENIZER_SIZE, PROBE_TOKENS).tolist()
ROWS = [TOKENS, TOKENS[4:50], TOKENS[9:30], TOKENS[1:33]]


def open_tiny(threads: int = 1, family: str = "llama", graph: Path | None = None) -> Engine:
    bundle = shared_bundle(family)
    manifest = read_manifest(bundle)
    path = graph or bundle / manifest.target.variants["fp32"].graph
    return open_engine(path, manifest.target.spec, EngineConfig(threads=threads))


def expected(family: str = "llama", tokens: list[int] = TOKENS, **changes: Any) -> Reference:
    checkpoint = open_checkpoint(str(shared_checkpoint(family)))
    for name, value in changes.items():
        setattr(checkpoint.config, name, value)
    return reference(checkpoint.load(torch.float32), tokens, TOKENIZER_SIZE)


@pytest.fixture(scope="module")
def llama() -> Reference:
    return expected()


class Faulty:
    """A tiny engine with a fault: `chunk` and `logits` change what goes in and comes out."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.spec: ModelSpec = inner.spec
        self.capabilities: Capabilities = inner.capabilities

    def allocate(self, rows: int, capacity: int) -> KVBuffers:
        return self.inner.allocate(rows, capacity)

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        changed = self.chunk(chunk)
        return self.logits(changed, self.inner.step(changed, kv, first_row))

    def close(self) -> None:
        self.inner.close()

    def chunk(self, chunk: Chunk) -> Chunk:
        return chunk

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits


class IgnoresTree(Faulty):
    def chunk(self, chunk: Chunk) -> Chunk:
        mask = np.broadcast_to(np.tril(np.ones((chunk.width, chunk.width), bool)), chunk.chunk_mask.shape)
        return replace(chunk, chunk_mask=np.ascontiguousarray(mask))


class LateBySlot(Faulty):
    """Sees one stale slot too many after a rollback: writes one slot further than it should."""

    def chunk(self, chunk: Chunk) -> Chunk:
        late = (chunk.past_lens > 0) & (chunk.width < PROBE_TOKENS)  # but soils the cache as it should
        return replace(chunk, past_lens=chunk.past_lens + late)


class NotANumber(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        if chunk.width == 5:
            logits[0, 1, 7] = np.nan
        return logits


class WidthNoise(Faulty):
    """One unit in the last place off, at one width."""

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        if chunk.width == 3:
            logits[0, 2, 11] = np.nextafter(logits[0, 2, 11], np.float32(np.inf))
        return logits


class LeakyBatch(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.rows == 4) * np.float32(1e-6)


def test_a_right_graph_passes(llama: Reference) -> None:
    opened = []

    def opener(threads: int) -> Engine:
        opened.append(open_tiny(threads))
        return opened[-1]

    parity, invariance = run_gates(opener, llama, TOKENS)
    assert 0 < parity.max_abs_error < parity.tolerance == 1e-4
    assert parity.positions == sum(len(step.tokens) * step.scored for step in llama.rounds) == 74
    assert (invariance.exact, invariance.least_width, invariance.scorings) == (True, 1, 21)
    assert invariance.one_token_max_abs_diff == 0
    assert len(opened) == 2  # one per thread count, one at a time, closed again
    for engine in opened:
        with pytest.raises(Exception, match="closed"):
            engine.allocate(1, 8)


def test_every_situation_is_in_the_script(llama: Reference) -> None:
    names = [step.name for step in llama.rounds]
    assert names == [
        "ragged prefill", "decode", "verify", "tree", "rollback", "overwrite", "one row refilled", "its neighbours",
    ]  # fmt: skip
    assert {len(step.tokens[0]) for step in llama.rounds if step.name == "decode"} == {2}
    commits = {step.name: len(step.past[0]) for step in llama.rounds}
    assert commits["tree"] < commits["rollback"] < commits["tree"] + len(llama.rounds[3].tokens[0])
    assert commits["overwrite"] < commits["decode"]


def test_a_changed_weight_fails_parity(llama: Reference, tmp_path: Path) -> None:
    source = shared_bundle() / "target" / "fp32"
    (tmp_path / "model.onnx").write_bytes((source / "model.onnx").read_bytes())
    weights = np.fromfile(source / "model.onnx.data", np.float32)
    weights[weights.size // 3] += 0.5
    weights.tofile(tmp_path / "model.onnx.data")
    with pytest.raises(GateError, match=r"parity gate failed: [\d.e-]+ off PyTorch \(tolerance 0.0001\) in case '"):
        check_parity(open_tiny(graph=tmp_path / "model.onnx"), llama)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (IgnoresTree, r"parity gate failed: .* in case 'tree', row 0, position \d+, logit of token \d+"),
        (LateBySlot, r"parity gate failed: .* in case 'decode'"),
        (NotANumber, r"parity gate failed: nan off PyTorch .* in case 'verify', row 0, position 13, logit of token 7"),
    ],
)
def test_faults_fail_parity(llama: Reference, fault: type[Faulty], message: str) -> None:
    with pytest.raises(GateError, match=message):
        check_parity(fault(open_tiny()), llama)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            WidthNoise,
            r"first at position 2, logit of token 11 \(largest .*\) of row 0 in chunks of 3, batch 1, 160 slots",
        ),
        (LeakyBatch, r"of row 0 in chunks of 2/5/8, batch 4, 160 slots, against the whole text in one chunk"),
    ],
)
def test_faults_fail_invariance(fault: type[Faulty], message: str) -> None:
    with pytest.raises(GateError, match=r"^invariance gate failed: bits differ, .*" + message):
        check_invariance(fault(open_tiny()), Base(open_tiny(), ROWS))


class OneTokenNoise(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.width == 1) * np.float32(0.25)


def test_one_token_passes_may_differ_and_then_two_are_the_least() -> None:
    invariance = check_invariance(OneTokenNoise(open_tiny()), Base(open_tiny(), ROWS))
    assert (invariance.exact, invariance.least_width) == (True, 2)
    assert invariance.one_token_max_abs_diff == pytest.approx(0.25, rel=1e-5)


class DeepNoise(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.width == 5 and chunk.past_lens[0] > 256) * np.float32(1e-6)


def test_a_difference_far_into_the_text_fails_invariance() -> None:
    with pytest.raises(GateError, match="of row 0 in chunks of 5/2 behind 300 tokens, batch 1, 900 slots"):
        check_invariance(DeepNoise(open_tiny()), Base(open_tiny(), ROWS))


def test_threads_that_change_bits_fail_invariance(llama: Reference) -> None:
    class Off(Faulty):
        def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
            return logits + np.float32(1e-6)

    with pytest.raises(
        GateError, match=r"invariance gate failed: .* in 1 thread\(s\), chunks of 64, batch 1, 160 slots"
    ):
        run_gates(lambda threads: open_tiny(threads) if threads == 2 else Off(open_tiny(threads)), llama, TOKENS)


def test_the_window_is_crossed() -> None:
    tokens = probe_tokens(TOKENS, read_manifest(shared_bundle("mistral")).target.spec, 24)
    assert len(tokens) == PROBE_TOKENS + 24
    right = expected("mistral", tokens)
    assert [step.name for step in right.long_round] == [
        "prefill to the window", "across the window", "beyond the window",
    ]  # fmt: skip
    parity = check_parity(open_tiny(family="mistral"), right)
    assert parity.positions == 74 + 34
    wrong = expected("mistral", tokens, sliding_window=20)
    with pytest.raises(GateError, match="parity gate failed"):
        check_parity(open_tiny(family="mistral"), wrong)


def test_overflow_in_pytorch_itself_is_reported(llama: Reference) -> None:
    broken = replace(llama, logits={path: logits * np.float32(np.inf) for path, logits in llama.logits.items()})
    with pytest.raises(GateError, match="PyTorch's own logits are not finite in float32: choose another precision"):
        check_parity(open_tiny(), broken)


def test_probe_tokens() -> None:
    spec = read_manifest(shared_bundle()).target.spec
    assert probe_tokens([5, 6, 400], spec, None) == [5, 6] * (PROBE_TOKENS // 2)
    assert len(probe_tokens([5], spec, 512)) == PROBE_TOKENS + 512
    assert len(probe_tokens([5], spec, 4096)) == PROBE_TOKENS  # too long to cross at every export
    assert len(probe_tokens([5], spec, spec.max_length - PROBE_TOKENS + 1)) == PROBE_TOKENS
    short = ModelSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"max_length": 32})
    with pytest.raises(ExportError, match="context is 32 tokens: the gates need 64"):
        probe_tokens([5], short, None)


def test_score_pads_and_keeps_rows_apart() -> None:
    engine = open_tiny()
    kv = engine.allocate(3, 96)
    soil(engine, kv)
    rows = [TOKENS[:7], TOKENS[20:21], TOKENS[10:22]]  # 7 = 2 + 5, 1 is padded to 2, 12
    together = score(engine, kv, rows, [2, 5])
    assert [logits.shape for logits in together] == [(7, LOGITS_SIZE), (1, LOGITS_SIZE), (12, LOGITS_SIZE)]
    for row, logits in zip(rows, together, strict=True):
        assert same_bits(logits, score(engine, kv, [row], [len(row)])[0])


def test_same_bits_is_stricter_than_equality() -> None:
    zero = np.zeros(1, np.float32)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.astype(np.float16))
    assert same_bits(zero * np.nan, zero * np.nan)


def test_round_spells_out_paths() -> None:
    step = Round(name="tree", past=((1, 2), (3,)), tokens=((4, 5, 6), (7, 8, 9)), parents=(-1, 0, 0), scored=2)
    assert list(step.paths()) == [
        (0, 0, (1, 2, 4, 5)), (0, 1, (1, 2, 4, 6)), (1, 0, (3, 7, 8)), (1, 1, (3, 7, 9)),
    ]  # fmt: skip
    chunk = step.chunk(max_length=4)
    assert chunk.past_lens.tolist() == [2, 1]
    assert chunk.position_ids.tolist() == [[2, 3, 3], [1, 2, 2]]
    assert chunk.chunk_mask[0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert chunk.logit_indices.tolist() == [[1, 2], [1, 2]]
