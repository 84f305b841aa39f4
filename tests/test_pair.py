"""Target and draft tokenizers: what may differ, what may not, and what the refusal shows."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import tokenizers

from specdec.engines.errors import PairError
from specdec.export.pair import check_pair
from specdec.export.sources import open_checkpoint
from specdec.export.tokenizer import TokenizerFiles, read_tokenizer
from support.bundles import TOKENIZER_SIZE, shared_checkpoint, tiny_tokenizer

BASE = read_tokenizer(open_checkpoint(str(shared_checkpoint())))


def variant(
    change: Callable[[tokenizers.Tokenizer], object] | None = None,
    *,
    eos: list[int] | None = None,
    bos: str | None = None,
) -> TokenizerFiles:
    """The tiny tokenizer with changes, written differently, so that equality of bytes does not decide."""
    backend = tiny_tokenizer()
    if change is not None:
        change(backend)
    record = BASE.record
    if eos is not None:
        record = msgspec.structs.replace(record, eos_token_ids=eos)
    if bos is not None:
        record = msgspec.structs.replace(record, special_tokens={**record.special_tokens, "bos_token": bos})
    return TokenizerFiles(
        json=backend.to_str(pretty=True).encode() + b"\n\n",
        chat_template=None,
        generation_config={},
        record=record,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
    )


def swapped(first: int, second: int) -> TokenizerFiles:
    """The tiny tokenizer with two ids exchanged."""
    state = json.loads(BASE.json)
    names = {token: name for name, token in state["model"]["vocab"].items()}
    state["model"]["vocab"][names[first]], state["model"]["vocab"][names[second]] = second, first
    return TokenizerFiles(
        json=json.dumps(state).encode(),
        chat_template=None,
        generation_config={},
        record=BASE.record,
        vocab_size=TOKENIZER_SIZE,
    )


def test_equal_content_in_other_bytes() -> None:
    assert variant().json != BASE.json
    assert check_pair(BASE, variant()) == TOKENIZER_SIZE
    assert check_pair(BASE, BASE) == TOKENIZER_SIZE


def test_one_may_know_more_ids() -> None:
    longer = variant(lambda backend: backend.add_special_tokens(["<tool>", "<image>"]))
    assert longer.vocab_size == TOKENIZER_SIZE + 2
    assert check_pair(BASE, longer) == TOKENIZER_SIZE
    assert check_pair(longer, BASE) == TOKENIZER_SIZE


def test_differing_ids_are_shown_with_both_strings() -> None:
    names = {token: name for name, token in tiny_tokenizer().get_vocab().items()}
    with pytest.raises(PairError) as caught:
        check_pair(BASE, swapped(290, 300))
    assert str(caught.value) == (
        f"target and draft differ in 2 of {TOKENIZER_SIZE} shared token ids (target / draft): "
        f"290: {names[290]!r} / {names[300]!r}, 300: {names[300]!r} / {names[290]!r}"
    )


def test_raw_strings_are_compared_not_what_decoding_shows() -> None:
    """ "Ġ" and "Ċ" are a space and a line feed: bytes that a cleaned-up decoding may drop."""
    vocabulary = tiny_tokenizer().get_vocab()
    with pytest.raises(PairError, match="differ in 2 of"):
        check_pair(BASE, swapped(vocabulary["Ġ"], vocabulary["Ċ"]))


def test_too_small_an_overlap() -> None:
    wide = variant(lambda backend: backend.add_tokens([f"<{index}>" for index in range(TOKENIZER_SIZE + 1)]))
    with pytest.raises(PairError, match=rf"knows {TOKENIZER_SIZE} token ids and the target {2 * TOKENIZER_SIZE + 1}"):
        check_pair(wide, BASE)
    assert check_pair(BASE, wide) == TOKENIZER_SIZE


def test_end_tokens_must_meet() -> None:
    with pytest.raises(PairError, match=r"ends a text with token ids \[2\], the draft with \[0\]"):
        check_pair(variant(eos=[2]), variant(eos=[0]))
    assert check_pair(variant(eos=[0, 2]), variant(eos=[0])) == TOKENIZER_SIZE
    longer = variant(lambda backend: backend.add_special_tokens(["<end>"]), eos=[TOKENIZER_SIZE])
    assert check_pair(longer, variant(eos=[2])) == TOKENIZER_SIZE  # the draft cannot know the target's only end


def test_bos_must_agree() -> None:
    with pytest.raises(PairError, match=r"begins a text with '<\|im_start\|>', the draft with '<\|endoftext\|>'"):
        check_pair(BASE, variant(bos="<|endoftext|>"))


def test_real_folders(tmp_path: Path) -> None:
    other = read_tokenizer(open_checkpoint(str(shared_checkpoint("qwen2", 1))))
    assert check_pair(BASE, other) == TOKENIZER_SIZE
