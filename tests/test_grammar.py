"""Structured output: exact masks, the cursor against a fresh matcher, whole answers, and everything that is refused."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specdec.engines.errors import RequestError
from specdec.runtime.grammar import GrammarCompiler, GrammarMatcher, StructuredOutputsParams
from support.bundles import LOGITS_SIZE, TOKENIZER_SIZE, tiny_tokenizer

LETTERS = ("a", "b", "c", "ab", "bc", "abc", "<end>", "<stop>", "<other>")  # the last three are special
A, B, C, AB, BC, ABC, END, STOP, OTHER = range(len(LETTERS))
PADDED = 12  # the logits of the hand-made tokenizer
ENDS = {END, STOP}
EOS = (2, 0)  # of the tiny tokenizer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: sum "="\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,2}/'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def letters(folder: Path) -> GrammarCompiler:
    """The hand-made tokenizer: "abc" is one token, as are its parts."""
    vocabulary = {text: token for token, text in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("ab", "c")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(LETTERS[END:]))
    tokenizer.save(str(folder / "letters.json"))
    return GrammarCompiler(folder / "letters.json", PADDED, (END, STOP))


@cache
def tiny() -> Tokenizer:
    """Byte-level BPE with special tokens, and one added token that is text."""
    tokenizer = tiny_tokenizer(TOKENIZER_SIZE - 1)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@pytest.fixture(scope="module")
def bpe(folder: Path) -> GrammarCompiler:
    tiny().save(str(folder / "tiny.json"))
    return GrammarCompiler(folder / "tiny.json", LOGITS_SIZE, EOS)


def ids(mask: np.ndarray[Any, Any]) -> set[int]:
    assert mask.dtype == np.bool_
    return set(np.flatnonzero(mask).tolist())


def encode(text: str) -> list[int]:
    return list(tiny().encode(text, add_special_tokens=False).ids)


def permits(matcher: GrammarMatcher, text: str) -> bool:
    """Whether `text` is a complete answer."""
    tokens = [*encode(text), EOS[0]]
    return matcher.valid_prefix([], tokens) == len(tokens)


def walk(matcher: GrammarMatcher, rng: np.random.Generator, limit: int = 400) -> list[int]:
    """Draw tokens uniformly from what is allowed until an end token, which is left out."""
    tokens: list[int] = []
    while len(tokens) < limit:
        token = int(rng.choice(np.flatnonzero(matcher.allowed(tokens))))
        if token in EOS:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end in {limit} tokens: {tiny().decode(tokens)}")


def test_choices_allow_exactly_their_continuations(letters: GrammarCompiler) -> None:
    matcher = letters.matcher(StructuredOutputsParams(choice=["ab", "abc", "c"]))
    expected: dict[tuple[int, ...], set[int]] = {
        (): {A, AB, ABC, C},
        (A,): {B, BC},
        (A, B): {C} | ENDS,
        (AB,): {C} | ENDS,
        (A, BC): ENDS,
        (ABC,): ENDS,
        (C,): ENDS,
        (AB, C): ENDS,
        (ABC, STOP): ENDS,
        (AB, END, STOP): ENDS,
    }
    for generated, tokens in expected.items():
        assert ids(matcher.allowed(generated)) == tokens, generated
    assert len(matcher.allowed([])) == PADDED


@pytest.mark.parametrize(
    ("regex", "generated", "tokens"),
    [
        ("[ab]+c", (), {A, B, AB, BC, ABC}),
        ("[ab]+c", (A,), {A, B, C, AB, BC, ABC}),
        ("[ab]+c", (A, C), ENDS),
        ("a+b?", (), {A, AB}),
        ("a+b?", (A,), {A, B, AB} | ENDS),
        ("a+b?", (AB,), ENDS),
        ("(ab)*", (), {A, AB, ABC} - {ABC} | ENDS),
        ("^[a-c]{2}$", (), {A, B, C, AB, BC}),
        ("^[a-c]{2}$", (B,), {A, B, C}),
        (".*", (), {A, B, C, AB, BC, ABC} | ENDS),
    ],
)
def test_regexes_allow_exactly_their_continuations(
    letters: GrammarCompiler, regex: str, generated: tuple[int, ...], tokens: set[int]
) -> None:
    assert ids(letters.matcher(StructuredOutputsParams(regex=regex)).allowed(generated)) == tokens


def test_masks_are_those_of_the_definition(letters: GrammarCompiler) -> None:
    """Every sequence of up to three tokens, against the texts themselves."""
    sentences = {"".join(pieces) + "b" for count in range(12) for pieces in product(("ab", "c"), repeat=count)}
    matcher = letters.matcher(StructuredOutputsParams(regex="(ab|c)*b"))
    starts = {sentence[:end] for sentence in sentences for end in range(len(sentence) + 1)}
    seen = 0
    for generated in (path for n in range(4) for path in product(range(END), repeat=n)):
        text = "".join(LETTERS[token] for token in generated)
        if text in starts:
            expected = {token for token in range(END) if text + LETTERS[token] in starts}
            assert ids(matcher.allowed(generated)) == expected | (ENDS if text in sentences else set()), text
            seen += 1
        else:
            with pytest.raises(ValueError, match="was not allowed there"):
                matcher.allowed(generated)
    assert seen == 84


def test_a_text_without_alternative_has_the_tokenizers_own_tokens(letters: GrammarCompiler) -> None:
    matcher = letters.matcher(StructuredOutputsParams(choice=("abc",)))
    assert ids(matcher.allowed([])) == {ABC}
    assert matcher.valid_prefix([], [AB, C]) == 0
    with pytest.raises(ValueError, match="token 3 at position 0"):
        matcher.allowed([AB])


def test_end_tokens_follow_a_complete_answer_and_nothing_follows_them(letters: GrammarCompiler) -> None:
    matcher = letters.matcher(StructuredOutputsParams(regex="[ac]b+"))
    assert matcher.valid_prefix([], [A, END]) == 1
    assert matcher.valid_prefix([], [A, B, END]) == 3
    assert matcher.valid_prefix([A], [B, STOP, END, B]) == 3
    assert matcher.valid_prefix([A, B, END], [STOP, A]) == 1
    assert matcher.valid_prefix([A, B, END], [B]) == 0
    with pytest.raises(ValueError, match="token 6 at position 1"):
        matcher.allowed([A, END])
    with pytest.raises(ValueError, match="token 1 at position 3"):
        matcher.allowed([A, B, END, B])


def test_the_cursor_goes_back_over_the_end(letters: GrammarCompiler) -> None:
    """llguidance counts an end token where the grammar could go on, and does not where it could not."""
    for regex, after in (("ab", {B}), ("ab*", {B} | ENDS)):
        matcher = letters.matcher(StructuredOutputsParams(regex=f"{regex}|c"))
        for _ in range(2):
            assert ids(matcher.allowed([A, B, END])) == ENDS
            assert ids(matcher.allowed([A])) == after
            assert ids(matcher.allowed([])) == {A, AB, C}


def test_a_refused_token_is_named_and_leaves_the_matcher_usable(letters: GrammarCompiler) -> None:
    matcher = letters.matcher(StructuredOutputsParams(regex="[ab]+"))
    for wrong in (C, OTHER, PADDED - 1, PADDED, 10**9, -1):
        with pytest.raises(ValueError, match=f"token {wrong} at position 2 of the answer was not allowed there"):
            matcher.allowed([A, B, wrong, A])
        with pytest.raises(ValueError, match=f"token {wrong} at position 0"):
            matcher.valid_prefix([wrong], [A])
        assert matcher.valid_prefix([A], [B, wrong, A]) == 1
        assert ids(matcher.allowed([A, B])) == {A, B, AB} | ENDS


def test_padding_special_and_added_tokens_are_never_text(bpe: GrammarCompiler, folder: Path) -> None:
    anything = StructuredOutputsParams(regex="(?s:.)*")
    mask = bpe.matcher(anything).allowed([])
    text = {token for token in ids(mask) if token not in EOS}
    assert len(mask) == LOGITS_SIZE
    assert text == {token for token in range(3, TOKENIZER_SIZE - 1) if _may_begin(token)}
    inside = bpe.matcher(StructuredOutputsParams(json={"type": "string"})).allowed(encode('"a'))
    assert not inside[[*range(3), *range(TOKENIZER_SIZE - 1, LOGITS_SIZE)]].any()
    # logits that end before the tokenizer does
    cut = GrammarCompiler(folder / "tiny.json", 90, EOS).matcher(anything)
    assert cut.allowed([]).tolist() == mask[:90].tolist()
    assert mask[[89, 90]].all()
    assert cut.valid_prefix([], [89, 90]) == 1


def _may_begin(token: int) -> bool:
    """Whether the token's bytes begin some text in UTF-8."""
    piece = tiny().id_to_token(token)
    data = bytes(_BYTES[letter] for letter in piece)
    return any(_decodes(data + b"\x80" * more) or _decodes(data + b"\xbf" * more) for more in range(4))


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()

GRAMMARS: dict[str, Callable[[], StructuredOutputsParams]] = {
    "json": lambda: StructuredOutputsParams(json=SCHEMA),
    "regex": lambda: StructuredOutputsParams(regex=r"(red|green|blue)(, (red|green|blue)){0,3}\."),
    "lark": lambda: StructuredOutputsParams(grammar=LARK),
    "choice": lambda: StructuredOutputsParams(choice=("the quick fox", "the quiet fox", "the")),
    "no way back": lambda: StructuredOutputsParams(grammar='start: x "!"\nx[max_tokens=4]: /[a-c ]+/'),
}


@pytest.mark.parametrize("name", GRAMMARS)
@settings(derandomize=True, max_examples=15)
@given(data=st.data())
def test_any_order_of_questions_gets_the_answers_of_a_fresh_matcher(
    bpe: GrammarCompiler, name: str, data: st.DataObject
) -> None:
    params = GRAMMARS[name]()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    nodes: list[list[int]] = [[]]  # a random tree of beginnings of answers
    expected: list[np.ndarray[Any, Any]] = [bpe.matcher(params).allowed([])]
    for _ in range(14):
        parent = int(rng.integers(max(0, len(nodes) - 4), len(nodes)))
        nodes.append([*nodes[parent], int(rng.choice(np.flatnonzero(expected[parent])))])
        expected.append(bpe.matcher(params).allowed(nodes[-1]))
    matcher = bpe.matcher(params)
    for index in data.draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=40)):
        generated = nodes[index]
        if rng.random() < 0.3:
            draft = nodes[int(rng.integers(len(nodes)))] + [int(rng.integers(LOGITS_SIZE))]
            assert matcher.valid_prefix(generated, draft) == _count_allowed(bpe.matcher(params), generated, draft)
        assert (matcher.allowed(generated) == expected[index]).all()


def _count_allowed(matcher: GrammarMatcher, generated: list[int], draft: list[int]) -> int:
    """What `valid_prefix` is, by definition."""
    for count, token in enumerate(draft):
        if not matcher.allowed(generated + draft[:count])[token]:
            return count
    return len(draft)


def test_matchers_of_one_compiler_do_not_touch_each_other(bpe: GrammarCompiler) -> None:
    params = StructuredOutputsParams(regex="(one|two)(one|two)")
    first, second = bpe.matcher(params), bpe.matcher(params)
    start = first.allowed([])
    assert first.valid_prefix([], encode("oneone")) == len(encode("oneone"))
    assert (second.allowed([]) == start).all()
    assert ids(first.allowed(encode("oneone"))) == set(EOS)
    assert (second.allowed([]) == start).all()


def test_only_the_difference_is_consumed(letters: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = letters.matcher(StructuredOutputsParams(regex="[ab]+"))
    consumed: list[int] = []
    consume = matcher._consume
    monkeypatch.setattr(matcher, "_consume", lambda token: (consumed.append(token), consume(token))[1])
    matcher.allowed([A, B, A])
    assert matcher.valid_prefix([A, B, A], [AB, B]) == 2
    matcher.allowed([A, B, A, AB])
    matcher.allowed([A, B, B])
    assert consumed == [A, B, A, AB, B, B]


def test_a_mask_belongs_to_the_caller(letters: GrammarCompiler) -> None:
    matcher = letters.matcher(StructuredOutputsParams(regex="[ab]+"))
    mask = matcher.allowed([A])
    mask[:] = False
    assert ids(matcher.allowed([A])) == {A, B, AB} | ENDS


@pytest.mark.parametrize("seed", range(8))
def test_random_answers_are_of_the_schema(bpe: GrammarCompiler, seed: int) -> None:
    text = tiny().decode(walk(bpe.matcher(GRAMMARS["json"]()), np.random.default_rng(seed)))
    answer = json.loads(text)
    assert list(answer) == ["name", "age", "tags"]
    assert isinstance(answer["name"], str)
    assert len(answer["name"]) <= 6
    assert type(answer["age"]) is int
    assert 0 <= answer["age"] <= 130
    assert len(answer["tags"]) <= 3
    assert set(answer["tags"]) <= {"red", "green"}


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_are_of_the_regex_the_grammar_and_the_choice(bpe: GrammarCompiler, seed: int) -> None:
    def answer(name: str) -> str:
        return tiny().decode(walk(bpe.matcher(GRAMMARS[name]()), np.random.default_rng(seed)))

    assert re.fullmatch(r"(red|green|blue)(, (red|green|blue)){0,3}\.", answer("regex"))
    assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*=", answer("lark"))
    assert answer("choice") in {"the quick fox", "the quiet fox", "the"}
    assert re.fullmatch(r"[a-c ]+!", answer("no way back"))


def test_choices_of_any_characters(bpe: GrammarCompiler) -> None:
    texts = ('q"uo\\te', "new\nline", "é", "😀", "\x00", "a/b", "{x}", " a ", "//a", "a", "aa")
    matcher = bpe.matcher(StructuredOutputsParams(choice=texts))
    assert [text for text in texts if not permits(matcher, text)] == []
    assert not permits(matcher, "aaa")


def test_any_object_is_an_object(bpe: GrammarCompiler) -> None:
    matcher = bpe.matcher(StructuredOutputsParams(json_object=True))
    for text in ("{}", '{"a": [1, {"b": null}], "c": -1.5e3}'):
        assert permits(matcher, text)
    for text in ("[]", "1", '{"a": }', "{} "):
        assert not permits(matcher, text)


def test_white_space_in_json_is_one_space_unless_the_schema_asks_for_more(bpe: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = bpe.matcher(StructuredOutputsParams(json=schema))
    for text in ('{"a":1}', '{"a": 1}', '{ "a" : 1 }'):
        assert permits(matcher, text)
    for text in ('{"a":  1}', '{\n"a":1}', ' {"a":1}', '{"a":1} '):
        assert not permits(matcher, text)
    flexible = bpe.matcher(StructuredOutputsParams(json=schema | {"x-guidance": {"whitespace_pattern": r"\s+"}}))
    assert permits(flexible, '{\n  "a": 1\n}')


def test_params_are_frozen_hashable_and_equal_by_value() -> None:
    schema = {"type": "string"}
    first = StructuredOutputsParams(json=schema)
    schema["type"] = "integer"
    assert first == StructuredOutputsParams(json='{"type": "string"}')
    assert hash(StructuredOutputsParams(choice=["a"])) == hash(StructuredOutputsParams(choice=("a",)))
    with pytest.raises(AttributeError):
        first.regex = "a"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, not none"),
        ({"json_object": False}, "not none"),
        ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
        ({"json": {}, "json_object": True}, "not json and json_object"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": "[1]"}, r"not \[1\]"),
        ({"json": "true"}, "not True"),
        ({"json": 3}, "not 3"),
        ({"json": {"const": object}}, "not JSON serializable"),
        ({"json": {"const": float("nan")}}, "json must be a JSON schema"),
        ({"json": "[" * 100_000}, "json must be a JSON schema"),
        ({"json_object": 1}, "json_object must be True or False, not 1"),
        ({"regex": 3}, "regex must be a text, not 3"),
        ({"regex": b"a"}, "regex must be a text"),
        ({"grammar": ["start"]}, "grammar must be a text"),
        ({"choice": "yes"}, "choice must be one or more texts that are not empty, not 'yes'"),
        ({"choice": []}, "choice must be one or more texts"),
        ({"choice": ["a", ""]}, "choice must be one or more texts"),
        ({"choice": ["a", 1]}, "choice must be one or more texts"),
    ],
)
def test_wrong_params_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        StructuredOutputsParams(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(" + "ab " * 200}, "invalid regex"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"grammar": 'first: "a"'}, "no start rule"),
        ({"grammar": "start: <|nope|>"}, "unknown special token"),
        ({"choice": ["\ud800"]}, "structured outputs: "),
        ({"json": {"type": "frob"}}, "Invalid type: frob"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "string", "format": "frob"}}, "Unknown format: frob"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "oneOf"),
        ({"json": {"$ref": "https://example.org/schema"}}, "example.org"),
        *(
            ({"json": {"properties": {"a": {keyword: value}}}}, re.escape(f'Unimplemented keys: ["{keyword}"]'))
            for keyword, value in {
                "not": {}, "if": {}, "uniqueItems": True, "contains": {}, "propertyNames": {}, "$dynamicRef": "#",
                "unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["b"]},
            }.items()
        ),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
        ({"grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, "Unimplemented keys"),
    ],
)  # fmt: skip
def test_what_llguidance_cannot_honour_is_refused_by_name(
    bpe: GrammarCompiler, params: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        bpe.matcher(StructuredOutputsParams(**params))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 320
    assert capfd.readouterr() == ("", "")


def test_an_answer_that_cannot_go_on_ends_the_request_and_not_the_matcher(
    letters: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    stuck = letters.matcher(StructuredOutputsParams(regex="c|a(x|y)"))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"no way on after 1 tokens \(NoExtensionBias\): relax"):
            stuck.allowed([A])
        assert ids(stuck.allowed([C])) == ENDS
        assert stuck.valid_prefix([], [A, B]) == 1
    endless = letters.matcher(StructuredOutputsParams(grammar='start: "a" start'))
    assert ids(endless.allowed([])) == {A}
    for _ in range(2):
        with pytest.raises(RequestError, match=r"no way on after 0 tokens \(parser error: Too many items"):
            endless.allowed([A])
        assert endless.valid_prefix([], [A]) == 0  # a draft ends there, not the request
    assert capfd.readouterr() == ("", "")


def test_a_grammar_may_name_special_tokens_but_not_those_that_end_the_answer(letters: GrammarCompiler) -> None:
    special = letters.matcher(StructuredOutputsParams(grammar='start: "a" <end> "b" | "a" <other>'))
    assert ids(special.allowed([A])) == {OTHER}
    assert ids(special.allowed([A, OTHER])) == ENDS
    ended = letters.matcher(StructuredOutputsParams(grammar='start: "a" <end> "b"'))
    with pytest.raises(RequestError, match="no token of the vocabulary fits"):
        ended.allowed([A])


def test_an_end_token_is_no_text_even_where_the_tokenizer_says_so(letters: GrammarCompiler, folder: Path) -> None:
    compiler = GrammarCompiler(folder / "letters.json", PADDED, (C,))
    matcher = compiler.matcher(StructuredOutputsParams(regex="[a-c]+"))
    assert ids(matcher.allowed([])) == {A, B, AB, BC, ABC}
    assert ids(matcher.allowed([A])) == {A, B, C, AB, BC, ABC}
    assert ids(matcher.allowed([A, C])) == {C}
    assert matcher.valid_prefix([A], [C, A]) == 1
    assert matcher.valid_prefix([], [C]) == 0


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(folder / "tiny.json", LOGITS_SIZE, EOS)
    with pytest.raises(RequestError, match=re.escape('pip install "specdec[structured]"')):
        compiler.matcher(StructuredOutputsParams(regex="a"))


def test_tokenizers_that_cannot_be_used_are_refused(bpe: GrammarCompiler, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    cases: Sequence[tuple[Path, tuple[int, ...]]] = (
        (tmp_path / "missing.json", EOS),
        (tmp_path / "broken.json", EOS),
        (folder / "tiny.json", ()),
        (folder / "tiny.json", (LOGITS_SIZE,)),
    )
    for path, ends in cases:
        with pytest.raises(RequestError, match=r"llguidance cannot use .*json: ") as caught:
            GrammarCompiler(path, LOGITS_SIZE, ends).matcher(StructuredOutputsParams(regex="a"))
        assert "\n" not in str(caught.value)


def test_importing_the_module_loads_no_llguidance() -> None:
    code = "import specdec.runtime.grammar, sys; print('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
