"""Text at the edges: the bundle's tokenizer and chat template, incremental detokenization, stop strings.

Templates run in jinja2's sandbox, since they come with checkpoints. This module knows strings and token ids; what
chose the ids is not its business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.engines.errors import BundleError, RequestError
from specdec.engines.manifest import Tokenizer as TokenizerRecord
from specdec.runtime.vocabulary import TokenBytes

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]  # text, or token ids


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of integers is one prompt of token ids; any other list is a batch."""
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Prompt] = []
    tokens: list[int] = []
    for item in prompts:
        if isinstance(item, int | np.integer):
            tokens.append(int(item))
        else:
            batch.append(item)
    if tokens and batch:
        raise RequestError("a list of prompts holds texts or lists of token ids, not single token ids")
    return [tokens] if tokens else batch


class TextCodec:
    """Tokenizer and chat template of a bundle."""

    def __init__(self, bundle: Path, record: TokenizerRecord) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        except Exception as exc:  # tokenizers raises bare Exception
            raise BundleError(f"{bundle}/tokenizer.json cannot be read: {exc}") from exc
        template = bundle / "chat_template.jinja"
        self._record = record
        self._template = template.read_text(encoding="utf-8") if record.has_chat_template else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._template is not None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer adds around a text (such as a begin token)."""
        # not `encode`, which stops all other threads meanwhile
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def bad_words(self, words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of `words`: a text is written as at the start of a line, and as after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if isinstance(word, str):
                sequences = [tuple(self.encode(text, special=False)) for text in (word, " " + word.lstrip(" "))]
            else:
                sequences = [word]
            if not all(sequences):
                raise RequestError(f"bad_words: the tokenizer has no tokens for {word!r}")
            found |= dict.fromkeys(sequences)
        return tuple(found)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Render `messages` and the opening of the answer through the bundle's chat template."""
        if self._template is None:
            raise RequestError("this bundle has no chat template: use raw prompts (--raw)")
        try:
            special = self._record.special_tokens
            return self._compiled.render(messages=messages, add_generation_prompt=True, **special)
        except RequestError:
            raise
        except Exception as exc:  # a template is foreign code and raises what it likes
            raise RequestError(f"the chat template fails on these messages: {exc}") from exc

    def encode_turn(self, text: str) -> list[int]:
        """Token ids of one user turn: through the chat template, where there is one."""
        if self._template is None:
            return self.encode(text, special=True)
        return self.encode(self.render_chat([{"role": "user", "content": text}]), special=False)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of single tokens."""
        return TokenBytes(self._tokenizer)

    @cached_property
    def _compiled(self) -> Template:
        return _template_environment().from_string(self._template or "")

    def stream(self, stop: Sequence[str]) -> TextStream:
        """Start the text of one answer."""
        return TextStream(self._tokenizer, stop)


def _template_environment() -> Environment:
    """The sandbox that templates run in, with what transformers gives them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise RequestError(f"the chat template refuses these messages: {message}")

    def tojson(value: Any, indent: int | None = None) -> str:  # jinja2's own escapes HTML
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class TextStream:
    """Text of one answer, token by token. Text that could still become part of a stop string is held back.

    Each step decodes the last few tokens with those before them as context, and hands out what the new ones add once it
    ends in a whole character. Where later bytes change how earlier ones are read (malformed UTF-8 of a byte-fallback
    vocabulary), the text that was handed out stands.

    `ends`: for each token the length of the text with it, as far as it is known: a token that only begins a character
    ends where the text did. What is held back counts; when a stop string cuts it, no end lies behind the cut.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._context = 0  # tokens from here on are decoded
        self._done = 0  # tokens up to here are in the text
        self._emitted = 0  # characters handed out
        self.text = ""
        self.ends: list[int] = []
        self.stopped = False

    def push(self, token: int) -> None:
        """Add one token; `stopped` is set, and the text cut before it, when it completes a stop string."""
        self._ids.append(token)
        new = self._new_text()
        if new and not new.endswith("\ufffd"):
            self._context, self._done = self._done, len(self._ids)
            self._append(new)
        self.ends.append(len(self.text))

    def finish(self) -> None:
        """Add what was held back (an unfinished character), unless a stop string has cut the text."""
        if not self.stopped:
            self._append(self._new_text())
        self.ends[-1:] = [len(self.text)] if self.ends else []

    def delta(self, *, last: bool) -> str:
        """Return text that is not handed out yet and is certain (all of it when `last`)."""
        end = len(self.text) if last or self.stopped else len(self.text) - self._undecided()
        delta = self.text[self._emitted : end]
        self._emitted = max(end, self._emitted)
        return delta

    def _new_text(self) -> str:
        """What the tokens that are not in the text yet add to it."""
        before = self._decode(self._ids[self._context : self._done])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _append(self, new: str) -> None:
        """Add text; cut at the first stop string that the new characters complete."""
        searched = len(self.text)
        self.text += new
        found = [self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
        starts = [position for position in found if position >= 0]
        if starts:
            self.text = self.text[: min(starts)]
            self.ends = [min(end, len(self.text)) for end in self.ends]
            self.stopped = True

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
