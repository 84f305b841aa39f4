"""Prompt files: what is read, what is refused, what is chosen."""

from pathlib import Path

import pytest

from specdec.engines.errors import RequestError
from specdec.tools.questions import Question, read_questions, select

GOOD = '{"question_id": 81, "category": "rag", "turns": ["first", "second"], "reference": ["unused"]}'


def question(number: int, category: str) -> Question:
    return Question(number, category, (f"text {number}",))


QUESTIONS = [question(1, "qa"), question(2, "rag"), question(3, "qa"), question(4, "rag"), question(5, "qa")]


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_reading_skips_empty_lines_and_unused_fields(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", '{"question_id": "a", "category": "qa", "turns": ["één"]}', "")
    assert read_questions(path) == [Question(81, "rag", ("first", "second")), Question("a", "qa", ("één",))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"question_id": 1, "turns": ["x"]}', "Object missing required field `category`"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "Expected `array` of length >= 1 - at `$.turns`"),
        ('{"question_id": 1, "category": "qa", "turns": "x"}', "Expected `array`, got `str` - at `$.turns`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(RequestError) as error:
        read_questions(path)
    assert str(error.value) == f"{path}:2: not a prompt with question_id, category and turns: {reason}"


def test_a_question_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD)
    with pytest.raises(RequestError, match=r":2: question_id 81 comes twice$"):
        read_questions(path)


CHATS = """[
  {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"},
                                {"from": "human", "value": "two"}]},
  {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
  {"conversations": [{"from": "user", "value": "three"}]}
]
"""


def test_conversations_are_what_the_user_said(tmp_path: Path) -> None:
    path = write(tmp_path, CHATS)
    asked = [Question("a", "conversations", ("one", "two")), Question(3, "conversations", ("three",))]
    assert read_questions(path) == asked
    lines = [line.strip(" ,") for line in CHATS.replace("},\n                                {", "}, {").splitlines()]
    assert read_questions(write(tmp_path, *lines[1:-1])) == asked


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (CHATS.replace("nobody asked", "nobody", 1).replace('"from": "gpt", "value": "nobody"', '"from": "gpt"'), 4,
         "not a conversation of texts with from and value: Object missing required field `value`"),
        (CHATS.replace('"user",', '"user"'), 5, "not JSON: Expecting ',' delimiter"),
        (CHATS.rpartition("]")[0], 6, "not JSON: Expecting value"),
        (CHATS.replace('"b"', '"a"').replace('"gpt", "value": "nobody', '"human", "value": "some'), 4,
         "question_id a comes twice"),
    ],
)  # fmt: skip
def test_the_line_of_a_wrong_conversation_is_named(tmp_path: Path, text: str, place: int, reason: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RequestError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}:{place}: {reason}")


@pytest.mark.parametrize("first", ["Write a haiku.", "[INST] Write a haiku.", "{curly} words"])
def test_other_files_are_texts_with_a_prompt_a_line(tmp_path: Path, first: str) -> None:
    path = write(tmp_path, first, "", "  Name three rivers. ")
    assert read_questions(path) == [Question(1, "text", (first,)), Question(3, "text", ("Name three rivers.",))]


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent\.jsonl cannot be read"):
        read_questions(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="binary cannot be read"):
        read_questions(tmp_path / "binary")


@pytest.mark.parametrize(
    ("categories", "per_category", "limit", "ids"),
    [
        ([], None, None, [1, 2, 3, 4, 5]),
        ([], 1, None, [1, 2]),
        ([], 2, 3, [1, 2, 3]),
        (["rag"], None, None, [2, 4]),
        (["rag", "qa"], 1, None, [1, 2]),
        (["qa"], 9, 2, [1, 3]),
    ],
)
def test_select(categories: list[str], per_category: int | None, limit: int | None, ids: list[int]) -> None:
    assert [each.question_id for each in select(QUESTIONS, categories, per_category, limit)] == ids


def test_select_refuses_an_unknown_category_and_an_empty_file() -> None:
    with pytest.raises(RequestError, match="no prompt has the category 'math': choose from qa, rag"):
        select(QUESTIONS, ["qa", "math"], None, None)
    with pytest.raises(RequestError, match="no prompts to measure"):
        select([], [], None, None)
