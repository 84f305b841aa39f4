"""Prompt files, recognized by what is in them: Spec-Bench and MT-bench JSONL, ShareGPT JSON, plain text.

    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}                          one a line
    [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}]  or one a line
    Write a haiku about rivers.                                                                  one a line

Of a recorded conversation only what the user said is read. This module knows questions and categories; how they become
token ids is the bundle's business.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from specdec.engines.errors import RequestError

TEXT, CONVERSATIONS = "text", "conversations"  # categories of files that have none
USERS = frozenset({"human", "user"})  # who asks, in ShareGPT files

_BETWEEN = re.compile(r"[\s,]*")  # items of an array

Record = TypeVar("Record", bound=msgspec.Struct)


class Question(msgspec.Struct, frozen=True):
    """A prompt: what the user says, turn by turn."""

    question_id: int | str
    category: str
    turns: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class _Said(msgspec.Struct, frozen=True, rename={"speaker": "from"}):
    speaker: str
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: tuple[_Said, ...]
    id: int | str | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(said.value for said in self.conversations if said.speaker in USERS)


def read_questions(path: Path) -> list[Question]:
    """Read a prompt file. Raises `RequestError` with the line that is wrong.

    Conversations in which no user says anything are passed over. Prompts of a text are numbered by their lines.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"the prompt file {path} cannot be read: {exc}") from exc
    questions: dict[int | str, Question] = {}
    for number, question in _questions(path, text):
        if question.question_id in questions:
            raise RequestError(f"{path}:{number}: question_id {question.question_id} comes twice")
        questions[question.question_id] = question
    return list(questions.values())


def _questions(path: Path, text: str) -> Iterator[tuple[int, Question]]:
    """Every prompt with the number of its line."""
    if re.match(r"\s*\[\s*[{\]]", text):
        yield from _conversations(path, _items(path, text))
        return
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not re.match(r'\s*\{(\s*["}]|\s*$)', lines[0][1]):
        yield from ((number, Question(number, TEXT, (line.strip(),))) for number, line in lines)
    elif f'"{CONVERSATIONS}"' in lines[0][1]:
        yield from _conversations(path, lines)
    else:
        for number, line in lines:
            yield number, _decode(path, number, line, Question, "a prompt with question_id, category and turns")


def _conversations(path: Path, items: Sequence[tuple[int, str]]) -> Iterator[tuple[int, Question]]:
    for place, (number, item) in enumerate(items, 1):
        found = _decode(path, number, item, _Conversation, "a conversation of texts with from and value")
        if found.asked:
            yield number, Question(place if found.id is None else found.id, CONVERSATIONS, found.asked)


def _decode(path: Path, number: int, item: str, kind: type[Record], wanted: str) -> Record:
    try:
        return msgspec.json.decode(item, type=kind)
    except msgspec.MsgspecError as exc:
        raise RequestError(f"{path}:{number}: not {wanted}: {exc}") from exc


def _items(path: Path, text: str) -> list[tuple[int, str]]:
    """The items of a JSON array, each as its text and the line on which it begins."""
    decoder, items = json.JSONDecoder(), list[tuple[int, str]]()
    place, line, counted = text.index("[") + 1, 1, 0
    while True:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # it matches everywhere
        line, counted = line + text.count("\n", counted, place), place
        if text.startswith("]", place):
            return items
        try:
            _, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as exc:
            raise RequestError(f"{path}:{exc.lineno}: not JSON: {exc.msg}") from exc
        items.append((line, text[place:end]))
        place = end


def select(
    questions: Sequence[Question], categories: Sequence[str], per_category: int | None, limit: int | None
) -> list[Question]:
    """Return the first questions of each wanted category (all: none named), in file order; at most `limit`."""
    known = list(dict.fromkeys(question.category for question in questions))
    for name in categories:
        if name not in known:
            raise RequestError(f"no prompt has the category {name!r}: choose from {', '.join(known)}")
    left = dict.fromkeys(categories or known, per_category or len(questions))
    chosen = []
    for question in questions:
        if left.get(question.category, 0):
            left[question.category] -= 1
            chosen.append(question)
    if not chosen:
        raise RequestError("no prompts to measure")
    return chosen[:limit]
