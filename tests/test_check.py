"""The gates pass a right graph and catch planted faults: each names the gate, how far off, and where."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engines.base import Engine
from specdec.engines.contract import Chunk, FloatArray, ModelSpec
from specdec.engines.errors import ExportError, GateError
from specdec.engines.invariance import PROBE_TOKENS
from specdec.engines.manifest import read_manifest
from specdec.export.check import Reference, check_parity, probe_tokens, reference, run_gates
from specdec.export.sources import open_checkpoint
from support.bundles import TOKENIZER_SIZE, shared_bundle, shared_checkpoint
from support.engines import TOKENS, Faulty, IgnoresTree, open_tiny


def expected(family: str = "llama", tokens: list[int] = TOKENS, **changes: Any) -> Reference:
    checkpoint = open_checkpoint(str(shared_checkpoint(family)))
    for name, value in changes.items():
        setattr(checkpoint.config, name, value)
    return reference(checkpoint.load(torch.float32), tokens, TOKENIZER_SIZE)


@pytest.fixture(scope="module")
def llama() -> Reference:
    return expected()


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


def test_a_right_graph_passes(llama: Reference) -> None:
    opened = []

    def opener(threads: int) -> Engine:
        opened.append(open_tiny(threads))
        return opened[-1]

    parity, invariance = run_gates(opener, llama, TOKENS)
    assert 0 < parity.max_abs_error < parity.tolerance == 1e-4
    assert parity.positions == sum(len(step.tokens) * step.scored for step in llama.rounds) == 74
    assert (invariance.exact, invariance.least_width, invariance.scorings) == (True, 1, 26)
    assert invariance.one_token_max_abs_diff == 0
    assert len(opened) == 3  # one per thread count, one at a time, closed again
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


@pytest.mark.parametrize("window", [1, 5, 13, 16])
def test_a_window_may_be_shorter_than_what_leads_up_to_its_edge(window: int) -> None:
    tokens = probe_tokens(TOKENS, read_manifest(shared_bundle("mistral")).target.spec, window)
    crossing = expected("mistral", tokens, sliding_window=window).long_round
    assert [len(step.past[0]) for step in crossing] == [0, max(window - 12, 2), window + 12]
    assert [step.scored for step in crossing] == [2, min(window + 10, 24), 8]


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
