"""The invariance gate catches a changed bit and says where; the noise functions measure what was planted."""

import numpy as np
import pytest

from specdec.engines.contract import Chunk, FloatArray
from specdec.engines.errors import ExportError, GateError
from specdec.engines.invariance import (
    PROBE_TOKENS,
    Base,
    TreeNoise,
    check_invariance,
    kernel_noise,
    probe_text,
    run_invariance,
    tree_noise,
)
from support.engines import ROWS, TOKENS, Faulty, open_tiny


class WidthNoise(Faulty):
    """One unit in the last place off, at one width."""

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        if chunk.width == 3:
            logits[0, 2, 11] = np.nextafter(logits[0, 2, 11], np.float32(np.inf))
        return logits


class LeakyBatch(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        return logits + (chunk.rows == 4) * np.float32(1e-6)


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


def test_the_gate_needs_no_reference() -> None:
    opened = []

    def opener(threads: int) -> Faulty:
        opened.append((threads, Faulty(open_tiny(threads))))
        return opened[-1][1]

    found, invariance = run_invariance(opener, TOKENS, lambda engine: (engine, len(opened)))
    assert found == (opened[0][1], 1)
    assert [threads for threads, _ in opened] == [2, 1, 4]
    assert (invariance.least_width, invariance.scorings, invariance.one_token_max_abs_diff) == (1, 26, 0.0)


def test_probe_text() -> None:
    spec = open_tiny().spec
    assert probe_text([5, 6, 400], spec, 5) == [5, 6, 5, 6, 5]
    assert probe_text([400], spec) == [0] * PROBE_TOKENS
    with pytest.raises(ExportError, match="context is 1024 tokens: the gates need 1025"):
        probe_text([5], spec, 1025)


def test_a_bit_exact_engine_has_no_kernel_noise() -> None:
    assert kernel_noise(open_tiny(), ROWS) == 0.0
    assert kernel_noise(open_tiny(), [TOKENS[:1]]) == 0.0


class Sawtooth(Faulty):
    """Every logit is zero, but for token 7: 0.25 up in passes of one, and 0.5 down in those of five."""

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        logits[:] = 0
        logits[..., 7] += {1: 0.25, 5: -0.5}.get(chunk.width, 0.0)
        return logits


def test_kernel_noise_is_the_largest_difference_of_any_two_widths() -> None:
    assert kernel_noise(Sawtooth(open_tiny()), [TOKENS[:12]]) == 0.75
    assert kernel_noise(Sawtooth(open_tiny()), [TOKENS[:2], TOKENS[:5]]) == 0.75


class OneRowNoise(Faulty):
    """One logit of one position of the text, in one-token passes only."""

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        if chunk.width == 1 and chunk.past_lens[0] == 40:
            logits[0, 0, 3] = np.float32(100.0)
        return logits


def test_kernel_noise_looks_at_every_position_of_every_row() -> None:
    assert kernel_noise(OneRowNoise(open_tiny()), [TOKENS[:40], TOKENS[:30]]) == 0.0
    assert kernel_noise(OneRowNoise(open_tiny()), [TOKENS[:40], TOKENS[:41]]) > 50


def test_kernel_noise_of_a_broken_engine_is_not_a_number() -> None:
    assert np.isnan(kernel_noise(NotANumber(open_tiny()), ROWS[:2]))


class NotANumber(Faulty):
    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        if chunk.width == 16:
            logits[0, 3, 7] = np.nan
        return logits


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tree_noise_of_a_right_graph_is_rounding(family: str) -> None:
    noise = tree_noise(open_tiny(family=family), TOKENS)
    assert noise.first_branch_exact
    assert 0 < noise.max_abs_diff < 1e-4
    assert noise == tree_noise(open_tiny(family=family), TOKENS)  # the trees are the same every time
    assert 8 * 12 / 2 < noise.nodes < 8 * 12
    deep = tree_noise(open_tiny(family=family), TOKENS * 5)  # across the borders of the kernels' blocks of 128 slots
    assert deep.first_branch_exact
    assert 0 < deep.max_abs_diff < 1e-4


class FlatTree(Faulty):
    """Every logit is zero, but for the nodes of a tree from `start` on, whose token 5 is `planted`."""

    def __init__(self, start: int, planted: float) -> None:
        super().__init__(open_tiny())
        self.start, self.planted = start, planted

    def logits(self, chunk: Chunk, logits: FloatArray) -> FloatArray:
        triangle = np.tril(np.ones((chunk.width, chunk.width), bool))
        fork = next((node for node in range(chunk.width) if (chunk.chunk_mask[0, node] != triangle[node]).any()), None)
        logits[:] = 0
        if fork is not None:
            logits[0, fork + self.start :, 5] = self.planted
        return logits


def test_tree_noise_is_what_was_planted_behind_the_fork() -> None:
    behind = tree_noise(FlatTree(0, 0.125), TOKENS)
    assert (behind.first_branch_exact, behind.max_abs_diff) == (True, 0.125)
    everywhere = tree_noise(FlatTree(-1, -0.25), TOKENS)
    assert everywhere == TreeNoise(first_branch_exact=False, max_abs_diff=0.25, nodes=behind.nodes)


def test_a_tree_without_a_fork_has_no_noise() -> None:
    assert tree_noise(open_tiny(), TOKENS, trees=3, nodes=1) == TreeNoise(
        first_branch_exact=True, max_abs_diff=0.0, nodes=0
    )
