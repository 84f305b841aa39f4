"""Structured output: the tokens that may follow an answer which has to be of a JSON schema, regex, choice or grammar.

llguidance parses. What it allows is a pure function of the answer's tokens; the cursor that `GrammarMatcher` keeps only
makes the next question cheap. This module knows token ids and grammars: nothing of logits, drafts, trees or when a
request ends. llguidance is loaded with the first grammar: who asks for none need not have it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.engines.contract import BoolArray
from specdec.engines.errors import DeadEndError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WANTED = {"json_object": "True or False", "choice": "one or more texts that are not empty"}
_SYNTAX = "https://github.com/guidance-ai/llguidance/tree/main/docs says what it takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the answer has to be: exactly one of these. Names as in vLLM. Invalid values raise `RequestError`.

    `json`: a JSON schema, as text or mapping (kept as text). `json_object`: any JSON object. `regex`: what the whole
    answer matches, in the syntax of Rust's regex crate. `choice`: the possible texts. `grammar`: Lark, as llguidance
    reads it. JSON has at most one space where white space may be; properties come in the schema's order.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"structured outputs must be exactly one of {', '.join(values)}, not {found}")
        match *given, *given.values():
            case "json", schema:
                object.__setattr__(self, "json", _schema_text(schema))
            case "choice", [*texts] if texts and all(isinstance(text, str) and text for text in texts):
                object.__setattr__(self, "choice", tuple(texts))
            case ("json_object", True) | ("regex" | "grammar", str()):
                pass
            case name, value:
                raise RequestError(f"{name} must be {_WANTED.get(name, 'a text')}, not {value!r}")


class GrammarCompiler:
    """Grammars for one tokenizer, given as its file (truncation and padding off).

    vocab_size: length of the logits, longer or shorter than the tokenizer. eos_token_ids: what ends an answer.
    The first grammar waits for the tokenizer: 0.4 s for 49k tokens, 3 s for 262k (SmolLM2, Gemma 3; a core of an EPYC).
    """

    def __init__(self, tokenizer_json: str | Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._path = Path(tokenizer_json)
        self._vocab_size = vocab_size
        self._ends = sorted(eos_token_ids)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Compile the grammar of one request; about 1 ms for a small schema.

        Raises `RequestError` when llguidance is missing or cannot honour every part of the grammar.
        """
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, _llguidance_grammar(params), log_level=0)
        except ValueError as exc:  # JSON that Rust refuses, lone surrogates
            raise RequestError(f"structured outputs: {_line(exc)}; {_SYNTAX}") from exc
        if problem := matcher.get_error() or "; ".join(matcher.get_grammar_warnings()):
            raise RequestError(f"structured outputs: {_line(problem)}; {_SYNTAX}")
        return GrammarMatcher(matcher, min(tokenizer.vocab_size, self._vocab_size), self._vocab_size, self._ends)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as exc:
            raise RequestError('structured outputs need llguidance: pip install "specdec[structured]"') from exc
        try:
            return LLTokenizer(self._path.read_text(encoding="utf-8"), eos_token=self._ends)
        except (OSError, ValueError) as exc:
            raise RequestError(f"structured outputs: llguidance cannot use {self._path}: {_line(exc)}") from exc


class GrammarMatcher:
    """The grammar of one request. Its methods are pure functions of their arguments.

    The cursor holds the tokens of the last call: what the next one shares with them is free, going back is cheap.
    """

    def __init__(self, matcher: LLMatcher, known: int, vocab_size: int, ends: list[int]) -> None:
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._held: list[int] = []  # what the matcher has consumed; no end tokens, which it does not always count
        self._known = known  # ids from here on have no text
        self._vocab_size = vocab_size
        self._ends = ends

    def allowed(self, generated: Sequence[int]) -> BoolArray:
        """Return which tokens may follow `generated`, all tokens of the answer so far: a new array [vocab_size].

        They are those that go on within the grammar; where it leaves only one text, the tokenizer's own token for it
        alone. End tokens may follow a complete answer, and only they an end token; special and padding tokens never.
        Raises `ValueError` when a token of `generated` was not allowed, `DeadEndError` when none can follow.
        """
        self._follow(generated, len(generated))
        mask: BoolArray = np.zeros(self._vocab_size, np.bool_)
        if len(self._held) == len(generated):  # no end token yet
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask[self._ends] = self._matcher.is_accepting()
        if not mask.any():
            raise self._dead_end()
        return mask

    def valid_prefix(self, generated: Sequence[int], draft: Sequence[int]) -> int:
        """How many leading tokens of `draft` may follow `generated`, each after those before. Raises as `allowed`."""
        return self._follow([*generated, *draft], len(generated)) - len(generated)

    def _follow(self, tokens: Sequence[int], expected: int) -> int:
        """Move the cursor along `tokens` and return how many are allowed, which has to be `expected` at least."""
        tokens = list(tokens)
        common = min(len(self._held), len(tokens))
        while self._held[:common] != tokens[:common]:
            common -= 1
        # refused after an error, and by grammars with max_tokens or stop
        if not self._matcher.rollback(len(self._held) - common):
            self._matcher, common = self._fresh.deep_copy(), 0
        del self._held[common:]
        for token in tokens[common:]:
            if not self._consume(token):
                break
            self._held.append(token)
        position = len(self._held)
        if self._matcher.is_accepting():
            while position < len(tokens) and tokens[position] in self._ends:
                position += 1
        if position < expected:
            if self._matcher.is_error():
                raise self._dead_end()
            raise ValueError(f"token {tokens[position]} at position {position} of the answer was not allowed there")
        return position

    def _consume(self, token: int) -> bool:
        """Move the parser past one token, unless that is an end token or not allowed."""
        forced = self._matcher.compute_ff_tokens()  # the mask has nothing but the first of them
        if token in self._ends or not 0 <= token < self._known or (forced and token != forced[0]):
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def _dead_end(self) -> DeadEndError:
        problem = _line(self._matcher.get_error()) or "no token of the vocabulary fits"
        return DeadEndError(
            f"structured outputs leave no way on after {len(self._held)} tokens ({problem}): relax them"
        )


def _llguidance_grammar(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance takes it; whether it is valid shows when it is compiled."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    if params.choice is not None:  # Lark's literals are JSON's
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, params.choice))}")
    # llguidance's own default is any amount of white space, with which a sampled answer may never come to its end; the
    # schema's "x-guidance" can ask for it. Unimplemented keywords are errors, or with its `lenient` warnings.
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": " "})


def _schema_text(schema: object) -> str:
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema), allow_nan=False)
        problem = f"not {schema!r}"
    except (TypeError, ValueError, RecursionError) as exc:
        problem = f"which this is not: {exc}"
    raise RequestError(f"json must be a JSON schema, an object as text or mapping, {_line(problem)}")


def _line(problem: object) -> str:
    """What went wrong, on one line of bearable length, without the state that llguidance appends."""
    return shorten(str(problem).partition("\n<state>")[0], 200, placeholder=" ...")
