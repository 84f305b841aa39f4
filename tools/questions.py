"""Prompt files: JSONL as Spec-Bench and MT-bench publish them (`question_id`, `category`, `turns`), read as they are.

This module knows questions and categories; how they become token ids is the bundle's business.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from specdec.engines.errors import RequestError


class Question(msgspec.Struct, frozen=True):
    """A line of a Spec-Bench or MT-bench file; only the first turn is asked."""

    question_id: int | str
    category: str
    turns: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL prompt file. Raises `RequestError` with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"the prompt file {path} cannot be read: {exc}") from exc
    questions: dict[int | str, Question] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.MsgspecError as exc:
            raise RequestError(f"{path}:{number}: not a prompt with question_id, category and turns: {exc}") from exc
        if question.question_id in questions:
            raise RequestError(f"{path}:{number}: question_id {question.question_id} comes twice")
        questions[question.question_id] = question
    return list(questions.values())


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
