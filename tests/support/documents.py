"""The project's pages as its tests read them: blocks of code, the commands in them, links and headings."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (".", "docs", "drafters", "examples")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
LAYERS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values())
SHELL = ("", "sh", "bash", "yaml")  # languages of blocks that may hold commands
PROGRAM = re.compile(r"^(specdec-\w|python -m |make |pip |pytest |git |\w+=\S+ pytest )")
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """A command of a page: what it runs and with what."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def name(page: Path) -> str:
    """A page as people call it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks in one of the languages ("" is none)."""
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return _BLOCK.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Inline code."""
    return _SPAN.findall(prose(page))


def links(page: Path) -> list[str]:
    """Where the page refers to, outside of code."""
    return [first or second for first, second in _LINK.findall(_SPAN.sub("", prose(page)))]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def commands(page: Path) -> list[Command]:
    """Every command in the page's blocks, those inside `$(...)` too."""
    return [Command(name(page), words) for block in blocks(page, *SHELL) for words in commands_in(block)]


def commands_in(text: str) -> Iterator[tuple[str, ...]]:
    """The words of every command in lines of a shell."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if PROGRAM.match(line.strip()):
            yield from _parts(line.strip())


def _parts(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a line: without comments, assignments and redirections."""
    for inner in re.findall(r"\$\(([^)]*)\)", line):
        yield tuple(shlex.split(inner))
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "PATH", line), posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    skip = False
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&"):
            if words:
                yield tuple(words)
            words = []
        elif set(word) <= set("<>"):
            skip = True
        elif not skip and (words or not re.fullmatch(r"\w+=.*", word)):
            words.append(word)
        else:
            skip = False


def told_messages() -> set[str]:
    """Every text in the sources that may be a message, `…` for what is put in."""
    found = set()
    for layer in LAYERS:
        for path in (ROOT / layer).glob("**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    pieces = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.add("".join(map(str, pieces)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found
