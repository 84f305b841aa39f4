"""Prompts of our own for demonstration, tests and measurements: short, and of every kind that matters to drafting.

`copies` says whether a good answer repeats much of its prompt (a summary, an edit), which is where looking up the
prompt pays. This module knows no model.
"""

from dataclasses import dataclass

_REPORT = (
    "The harbour ferry Alma left Port Ellis at 7:40 on Tuesday with 62 passengers and 14 cars on board. Twenty "
    "minutes later the captain, Ruth Hansen, noticed that the port engine was losing oil pressure and slowed the "
    "ferry to six knots. The coast guard sent the tug Merrow, which reached the ferry at 8:35. The ferry arrived at "
    "Graham Island at 9:10 with nobody hurt. The company said that the engine had been serviced in March and that "
    "the ferry would stay in port until Friday."
)
_CODE = """def total_price(items, tax):
    price = 0
    for item in items:
        price = price + item.price * item.count
    price = price + price * tax
    return price
"""
_LETTER = (
    "Dear Mr. Olsen, thank you for you're letter of the third of May. We are glad that the kettel arrived in good "
    "order. The wrong lid will be replaced at no cost, and we hope that you will be pleased with the new one. Yours "
    "sincerely, Anna Berg"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn."""

    name: str
    text: str
    copies: bool = False


PROMPTS = (
    Prompt("summary", f"Summarize this report in three sentences.\n\n{_REPORT}", copies=True),
    Prompt("edit", f"Rename the variable price to amount and return the whole function.\n\n{_CODE}", copies=True),
    Prompt(
        "extraction",
        "List every name and number of this text, one per line, with what it stands for.\n\n" + _REPORT,
        copies=True,
    ),
    Prompt(
        "correction",
        f"Correct the spelling of this letter and repeat it in full: {_LETTER}",
        copies=True,
    ),
    Prompt("question", f"{_REPORT}\n\nQuestion: When did the tug reach the ferry, and why was it sent?", copies=True),
    Prompt("list", "Name the planets of the solar system in order, and say one thing about each."),
    Prompt("story", "Write a short story about a lighthouse keeper who finds a letter in a bottle."),
    Prompt("explanation", "Explain to a child why the sky is blue."),
    Prompt("arithmetic", "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Think step by step."),
    Prompt("code", "Write a Python function that returns the n-th Fibonacci number, and explain it."),
    Prompt("advice", "I slept badly. Give me five tips for a calm morning."),
    Prompt("short", "Hi!"),
)
