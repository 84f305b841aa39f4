"""Proposals, and their layout as chunks."""

import numpy as np
import pytest

from specdec.engines.chunk import RowInput, pack
from specdec.runtime.tree import TokenTree


def test_chain_is_the_tree_with_one_branch() -> None:
    assert TokenTree.chain([4, 5, 6]).parents == (-1, 0, 1)
    assert TokenTree.chain([4, 5]).is_chain
    assert TokenTree().is_chain
    assert not TokenTree((4, 5), (-1, -1)).is_chain


def test_pack_pads_rows_to_the_widest() -> None:
    chunk = pack([RowInput([7, 8, 9], 3), RowInput([5], 1)], np.array([10, 2]), 2, 100)
    assert chunk.input_ids.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert chunk.position_ids.tolist() == [[10, 11, 12], [2, 3, 4]]
    assert chunk.past_lens.tolist() == [10, 2]
    assert chunk.logit_indices.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert (chunk.chunk_mask == np.tril(np.ones((3, 3), bool))).all()


def test_pack_keeps_the_least_width() -> None:
    chunk = pack([RowInput([7], 1)], np.array([0]), 2, 100)
    assert chunk.input_ids.tolist() == [[7, 0]]
    assert chunk.logit_indices.tolist() == [[0, 0]]  # the product of the head has two rows, too
    assert pack([RowInput([7], 1)], np.array([0]), 1, 100).logit_indices.tolist() == [[0]]


def test_logits_are_of_the_last_tokens() -> None:
    assert pack([RowInput([1, 2, 3, 4], 2)], np.array([0]), 2, 100).logit_indices.tolist() == [[2, 3]]


def test_padding_stays_inside_the_models_positions() -> None:
    assert pack([RowInput([1], 1)], np.array([99]), 2, 100).position_ids.tolist() == [[99, 99]]


def test_tree_mask_and_positions_follow_the_ancestors() -> None:
    #        pending
    #        0    1
    #        2  3
    tree = TokenTree((10, 11, 12, 13), (-1, -1, 0, 0))
    chunk = pack([tree.verify(9)], np.array([5]), 2, 100)
    assert chunk.input_ids.tolist() == [[9, 10, 11, 12, 13]]
    assert chunk.position_ids.tolist() == [[5, 6, 6, 7, 7]]
    assert chunk.chunk_mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_parents_come_first() -> None:
    with pytest.raises(ValueError, match="comes before its parent"):
        pack([RowInput([1, 2, 3], 1, (-1, 2, 0))], np.array([0]), 2, 100)


def test_depth_is_that_of_the_longest_branch() -> None:
    assert TokenTree().depth == 0
    assert TokenTree.chain([5, 6, 7]).depth == 3
    assert TokenTree((5, 6, 7, 8), (-1, -1, 1, 0)).depth == 2
