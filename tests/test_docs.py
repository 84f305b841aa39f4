"""Documentation is true: links lead somewhere, files and options exist, commands are taken, examples run.

Every command of every page is parsed by the command itself. Those that a tiny model can answer in seconds are run as
well (`slow`); `PARSED_ONLY` says which are not, and why.
"""

import argparse
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.bundles import blocks_checkpoint, shared_bundle, shared_checkpoint
from support.documents import (
    LAYERS,
    PAGES,
    ROOT,
    Command,
    anchors,
    blocks,
    commands,
    commands_in,
    links,
    name,
    spans,
    told_messages,
)


def is_ours(words: tuple[str, ...]) -> bool:
    return re.match(r"specdec-|python -m specdec\.", " ".join(words)) is not None


COMMANDS = [command for page in PAGES for command in commands(page)]
OURS = [each for each in COMMANDS if is_ours(each.words)]
OTHERS = {"git", "cd", "curl", "python", "pytest", "make", "pip"}  # checked below as far as they can be, or not
PARSED_ONLY = {
    "--peers": "installs other runtimes from the network",
    "specdec-train": "trains for as long as it is told",
    "specdec-serve": "serves until it is told to stop; test_serve_safety.py starts it",
    "--minutes": "takes minutes",
    "specdec-verify": "takes minutes; test_readme.py runs one",
    "tensorrt-rtx": "needs a GPU, or the library that builds for one",
    "specdec.tools.models": "fetches a real model",
    "eagle": "needs the model that the trained drafter is of",
    "specdec.tools.performance": "writes into the documentation; test_performance.py runs it",
    "main.json": "compares with the report of another run",
    "--history": "needs a context of more than a thousand tokens",
    "--batch-size": "needs a bundle of 16 rows",
}


class TakenError(Exception):
    """A command has come to its parser, which took its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def main_of(words: tuple[str, ...]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The function behind a command, and its arguments."""
    if words[0] == "python":
        module = importlib.import_module(words[2])
        if not hasattr(module, "main"):
            module = importlib.import_module(f"{words[2]}.__main__")
        return module.main, list(words[3:])
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=words[0])
    return entry.load(), list(words[1:])


def parser_of(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], *, parse: bool) -> argparse.ArgumentParser:
    """Let a command parse its arguments (or not even that) and do nothing else."""
    original = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        if parse:
            original(self, *args, **kwargs)
        raise TakenError(self)

    main, arguments = main_of(words)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(TakenError) as caught:
            main(arguments)
    return caught.value.parser


def unknown_programs(found: list[Command]) -> list[str]:
    return [str(each) for each in found if each not in OURS and each.words[0] not in OTHERS]


def test_pages_are_found_with_their_commands() -> None:
    assert {"README.md", "docs/performance.md"} <= {name(page) for page in PAGES}
    assert len(OURS) > 20
    assert unknown_programs(COMMANDS) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in (each for each in links(page) if not re.match(r"\w+:", each)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    layers = "|".join((*LAYERS, "tests", "examples"))
    named = [span for span in spans(page) if re.fullmatch(rf"(?:{layers})/[\w/.-]+", span)]
    assert [span for span in named if not (ROOT / span.rstrip("/")).exists()] == []


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_is_taken(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        parser_of(monkeypatch, command.words, parse=True)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def programs() -> set[tuple[str, ...]]:
    """Our commands, and the modules that pages run."""
    scripts = importlib.metadata.entry_points(group="console_scripts")
    found: set[tuple[str, ...]] = {(each.name,) for each in scripts if each.name.startswith("specdec-")}
    return found | {each.words[:3] for each in OURS if each.words[0] == "python"}


def test_examples_that_commands_give_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    helps = (parser_of(monkeypatch, program, parse=False).epilog or "" for program in sorted(programs()))
    examples = [words for text in helps for words in commands_in(re.sub(r"(?<=\S) {3,}.*", "", text))]
    ours = [words for words in examples if is_ours(words)]
    assert len(ours) > 20
    for words in ours:
        parser_of(monkeypatch, words, parse=True)


def test_options_that_are_named_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {option for program in programs() for option in options(parser_of(monkeypatch, program, parse=False))}
    known |= {"--check", "--strict"}  # of ruff and mypy
    named = {(name(page), option) for page in PAGES for span in spans(page)
             for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}  # fmt: skip
    assert len(named) > 40
    assert sorted((page, option) for page, option in named if option not in known) == []


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """All options of a parser and its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)


def test_targets_extras_and_test_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wrong = []
    for command in COMMANDS:
        program, *arguments = command.words
        plain = [each for each in arguments if not each.startswith("-") and "=" not in each]
        if program == "make":
            wrong += [str(command) for each in plain if not re.search(rf"^{each}:", makefile, re.MULTILINE)]
        if program == "pip":
            extras = [extra for each in plain for extra in re.findall(r"specdec\[([\w,]+)\]", each)]
            known = project["optional-dependencies"]
            wrong += [str(command) for each in extras if not set(each.split(",")) <= known.keys()]
        if program == "pytest":
            wrong += [str(command) for each in plain if "/" in each and not (ROOT / each).exists()]
    assert wrong == []


MESSAGES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def test_messages_that_are_explained_exist() -> None:
    """A row may stop where the message goes on; `…` is what the message fills in."""
    sources = told_messages()
    assert len(MESSAGES) > 50
    assert [each for each in MESSAGES if not any(quotes(each, source) for source in sources)] == []
    assert not any(quotes("the prompt is vacant: it must have at least one token", source) for source in sources)


def quotes(quoted: str, source: str) -> bool:
    """Whether `quoted` is how `source` begins; a blank at its end may be filled in with anything."""
    pieces = [re.escape(piece) for piece in quoted.removesuffix("…").split("…")]
    return re.match(".*?".join(pieces), source, re.DOTALL) is not None and quoted.strip("… :;(),") != ""


EXAMPLES = [(page, at, block) for page in PAGES for at, block in enumerate(blocks(page, "python"))]


@pytest.mark.parametrize(("page", "at", "block"), EXAMPLES, ids=[f"{name(page)}-{at}" for page, at, _ in EXAMPLES])
def test_an_example_runs_and_says_something(page: Path, at: int, block: str, tmp_path: Path) -> None:
    (tmp_path / "bundle").symlink_to(shared_bundle())
    (tmp_path / "my-model").symlink_to(shared_checkpoint())
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's commands are run: what they name is there, and small."""
    (tmp_path / "my-model").symlink_to(blocks_checkpoint())
    (tmp_path / "bundle").symlink_to(shared_bundle())
    questions = [{"question_id": at, "category": "qa", "turns": [text]}
                 for at, text in enumerate(("the quick brown fox", "a target and a draft"))]  # fmt: skip
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reason(command: Command) -> str | None:
    """Why a command is parsed only; None: it is run."""
    return next((why for what, why in PARSED_ONLY.items() if what in " ".join(command.words)), None)


RUN: dict[str, list[Command]] = {}  # by page; README has a test of its own
for each in OURS:
    if not reason(each) and each.page != "README.md":
        RUN.setdefault(each.page, []).append(each)


def test_every_reason_not_to_run_a_command_holds_for_one() -> None:
    lines = [" ".join(command.words) for command in OURS]
    assert [what for what in PARSED_ONLY if not any(what in line for line in lines)] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_a_pages_commands_run_in_their_order(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in RUN[page]:
        main, arguments = main_of(command.words)
        named = dict(pairwise(arguments))
        output = folder / named.get("-o", "none")
        if output.is_symlink():
            output.unlink()
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
        written = [named[option] for option in ("-o", "--json", "--html") if option in named]
        assert [file for file in written if not (folder / file).exists()] == []
