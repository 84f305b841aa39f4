"""Scoring pads, splits and batches without a trace, and a round spells out every path."""

import numpy as np

from specdec.engines.chunk import nodes_to
from specdec.engines.scoring import Round, same_bits, score, soil
from support.bundles import LOGITS_SIZE
from support.engines import TOKENS, open_tiny


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


def test_nodes_to_spells_out_one_path() -> None:
    parents = (-1, 0, 0, -1, 2, 4)
    assert [nodes_to(parents, node) for node in (0, 3, 5, -1)] == [[0], [3], [0, 2, 4, 5], []]
