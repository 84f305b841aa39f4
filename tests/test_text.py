"""Detokenization as it comes, stop strings across tokens, chat templates in a sandbox."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from specdec.engines.errors import BundleError, RequestError
from specdec.engines.manifest import Tokenizer as TokenizerRecord
from specdec.runtime.request import Round
from specdec.runtime.text import TextCodec, TextStream
from specdec.runtime.vocabulary import TokenBytes
from support.bundles import tiny_tokenizer
from support.rows import letters


def stream(stop: tuple[str, ...] = ()) -> TextStream:
    return TextStream(letters(), stop)


def push(text_stream: TextStream, text: str) -> list[str]:
    """Push one token per letter; return what was handed out after each."""
    deltas = []
    for letter in text:
        text_stream.push(ord(letter) - 97)
        deltas.append(text_stream.delta(last=False))
    return deltas


def test_text_comes_token_by_token() -> None:
    assert push(stream(), "abc") == ["a", "b", "c"]


def test_what_could_become_a_stop_string_is_held_back() -> None:
    text = stream(("bcd",))
    assert push(text, "abcabx") == ["a", "", "", "bca", "", "bx"]
    assert not text.stopped


def test_a_stop_string_across_tokens_cuts_the_text_before_it() -> None:
    text = stream(("bcd",))
    assert push(text, "abcd") == ["a", "", "", ""]
    assert text.stopped
    assert text.text == "a"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    text = stream(("dd", "cdd"))
    push(text, "abcdd")
    assert text.text == "ab"


def test_text_held_back_is_handed_out_at_the_end() -> None:
    text = stream(("bcd",))
    push(text, "abc")
    text.finish()
    assert text.delta(last=True) == "bc"
    assert text.text == "abc"


def test_a_character_of_several_tokens_appears_when_it_is_whole() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("é!", add_special_tokens=False).ids
    assert len(ids) == 3  # two bytes and the sign
    text = TextStream(tokenizer, ())
    deltas = []
    for token in ids:
        text.push(token)
        deltas.append(text.delta(last=False))
    assert deltas == ["", "é", "!"]


def test_each_token_knows_where_the_text_stands_with_it() -> None:
    """A character's first bytes end where the text did; a stop string cuts the ends behind it as well."""
    tokenizer = tiny_tokenizer()
    text = TextStream(tokenizer, ())
    for token in tokenizer.encode("aé!", add_special_tokens=False).ids:
        text.push(token)
    assert text.ends == [1, 1, 2, 3]
    cut = stream(("bcd",))
    push(cut, "abcd")
    assert cut.ends == [1, 1, 1, 1]
    unfinished = TextStream(tokenizer, ())
    for token in tokenizer.encode("aé", add_special_tokens=False).ids[:-1]:
        unfinished.push(token)
    unfinished.finish()
    assert unfinished.ends == [1, 2]


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    tokenizer = tiny_tokenizer()
    of = TokenBytes(tokenizer)
    for text in ("the quick brown fox", "né€x 🙂\n\ttab", "def add(a, b):"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(of[token] for token in ids) == text.encode()
    assert of[10**6] == b""
    fallback = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256}, []))
    fallback.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenBytes(fallback)[token] for token in (0xE2, 0x41, 256)] == [b"\xe2", b"A", b" a"]


@pytest.mark.parametrize(
    ("depth", "kept", "origins"),
    [
        (0, 0, ["plain"]),
        (3, 0, ["corrected"]),
        (3, 2, ["accepted", "accepted", "corrected"]),
        (2, 2, ["accepted", "accepted", "bonus"]),
    ],
)
def test_a_round_says_how_its_tokens_came_to_be(depth: int, kept: int, origins: list[str]) -> None:
    assert list(Round(depth, kept, 1.0).origins()) == origins


def test_an_unfinished_character_is_shown_at_the_end_as_the_tokenizer_shows_it() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("aé", add_special_tokens=False).ids[:-1]
    text = TextStream(tokenizer, ())
    for token in ids:
        text.push(token)
    text.finish()
    assert text.text == tokenizer.decode(ids) == "a\ufffd"


def test_malformed_bytes_of_a_byte_fallback_vocabulary_are_text_too() -> None:
    """Gemma-like: an ASCII byte token followed by a lone continuation byte, in any order, must not fail."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, 257, 12).tolist()
        text = TextStream(tokenizer, ())
        shown = ""
        for token in ids:
            text.push(token)
            shown += text.delta(last=False)
        text.finish()
        assert shown + text.delta(last=True) == text.text
    whole = TextStream(tokenizer, ())
    for byte in "né€x".encode():
        whole.push(byte)
    whole.finish()
    assert whole.text == "né€x"


def codec(path: Path, template: str | None, special: dict[str, str] | None = None) -> TextCodec:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    record = TokenizerRecord(special_tokens=special or {}, eos_token_ids=[2], has_chat_template=template is not None)
    return TextCodec(path, record)


def test_chat_template_gets_messages_and_special_tokens(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m['content'] }};{% endfor %}{{ add_generation_prompt }}"
    )
    text = codec(tmp_path, template, {"bos_token": "<s>"})
    assert text.render_chat([{"role": "user", "content": "hi"}]) == "<s>user=hi;True"


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    text = codec(tmp_path, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="chat template fails"):
        text.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    text = codec(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        text.render_chat([{"role": "user", "content": "hi"}])


def test_templates_get_what_transformers_gives_them(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
    text = codec(tmp_path, template + "{{ strftime_now('%Y') | length }}")
    assert text.render_chat([{"role": "system"}, {"role": "<a> é"}]) == '{"role": "<a> é"}4'


@pytest.mark.parametrize("template", ["{{ messages[0].content + 'x' }}", "{{ range(10**7) | list }}"])
def test_what_a_template_raises_is_a_request_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template fails"):
        codec(tmp_path, template).render_chat([{"role": "user", "content": [1]}])


def test_without_a_template_raw_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template: use raw prompts"):
        codec(tmp_path, None).render_chat([{"role": "user", "content": "hi"}])


def test_a_broken_tokenizer_is_a_bundle_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    record = TokenizerRecord(special_tokens={}, eos_token_ids=[], has_chat_template=False)
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        TextCodec(tmp_path, record)
