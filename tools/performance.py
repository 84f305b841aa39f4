"""Write the figures of the documentation: every table between two marks in docs/*.md, from the results in docs/results.

A page says itself what it shows, `<!-- results: TABLE NAME ... -->`, and what stands between that mark and
`<!-- end -->` is made from `docs/results/NAME.json`. Everything else on the page is prose, written by hand. To show
newer figures, put the JSON that a tool wrote in the place of the old file, and run this again.

Of a result is kept what pages may show: no answers and rounds, no definitions, six digits of a number, names of files
without their folders, and categories only where neither other runtimes nor several batch sizes were measured. This
module knows files and marks; the tables are in `performance_tables.py` and `performance_peers.py`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import RequestError
from specdec.engines.files import replace_file
from specdec.tools.bench_report import Report
from specdec.tools.damage import Report as DamageReport
from specdec.tools.figures import ALL
from specdec.tools.performance_peers import damage, peers, precisions, standing
from specdec.tools.performance_tables import (
    Result,
    asked,
    batches,
    categories,
    gains,
    machine,
    memory,
    pass_costs,
    soak,
    speed,
    verdicts,
)
from specdec.tools.soak_clients import Report as SoakReport

PROG = "python -m specdec.tools.performance"
EXAMPLES = """examples:
  specdec-bench bundle --prompts question.jsonl --json docs/results/greedy-int8.json
  python -m specdec.tools.performance
  python -m specdec.tools.performance --check
"""
DIGITS = 6  # of a number that is kept
KINDS: dict[str, type[Result]] = {"figures": Report, "engines": DamageReport, "outcomes": SoakReport}  # by a field
TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "asked": asked,
    "batches": batches,
    "categories": categories,
    "damage": damage,
    "gains": gains,
    "machine": machine,
    "memory": memory,
    "pass-costs": pass_costs,
    "peers": peers,
    "precisions": precisions,
    "soak": soak,
    "speed": speed,
    "standing": standing,
    "verdicts": verdicts,
}
_MARKED = re.compile(r"(?P<mark><!-- results: (?P<what>[^\n]*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def read_result(path: Path) -> Result:
    """Read what a tool wrote, without what is not kept. Raises `RequestError` when it is no result of a known tool."""
    try:
        raw = path.read_bytes()
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        kind = next((kind for field, kind in KINDS.items() if field in fields), None)
        if kind is None:
            raise RequestError(f"{path} is no result of specdec-bench, specdec.tools.damage or specdec.tools.soak")
        kept = _kept(msgspec.json.decode(raw, type=kind))
        return msgspec.json.decode(msgspec.json.encode(_rounded(msgspec.to_builtins(kept))), type=kind)
    except OSError as exc:
        raise RequestError(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise RequestError(f"{path} is no result of this version: {exc}; measure it again") from exc


def to_bytes(result: Result) -> bytes:
    """The result as it is kept: JSON with a line for each field, and for each record of a list."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return b"{\n%s\n}\n" % b",\n".join(b'"%s": %s' % (name.encode(), _lines(fields[name])) for name in fields)


def _lines(value: Any) -> bytes:
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return b"[\n%s\n]" % b",\n".join(map(msgspec.json.encode, value))
    return msgspec.json.encode(value)


def render(page: str, results: Mapping[str, Result]) -> str:
    """Make every marked table of a page anew. Raises `RequestError` for a table or result that there is not."""

    def table(found: re.Match[str]) -> str:
        name, *wanted = found["what"].split()
        if name not in TABLES:
            raise RequestError(f"there is no table {name!r}: choose from {', '.join(TABLES)}")
        if missing := [each for each in wanted if each not in results]:
            raise RequestError(f"table {name} shows {missing[0]}: there is no docs/results/{missing[0]}.json")
        return f"{found['mark']}\n{TABLES[name]([results[each] for each in wanted])}\n\n{found['end']}"

    return _MARKED.sub(table, page)


def shown(page: str) -> set[str]:
    """Names of the results that a page shows."""
    return {name for found in _MARKED.finditer(page) for name in found["what"].split()[1:]}


def update(docs: Path) -> dict[Path, bytes]:
    """What the files of `docs` should hold and do not: results as they are kept, and pages that show them.

    Raises `RequestError` when a result is shown nowhere.
    """
    raw = {path: read_result(path) for path in sorted((docs / "results").glob("*.json"))}
    results = {path.stem: result for path, result in raw.items()}
    pages = {path: path.read_text() for path in sorted(docs.glob("*.md"))}
    if unused := sorted(results.keys() - set().union(*map(shown, pages.values()))):
        raise RequestError(f"no page shows {unused[0]}: name it in a mark, or remove docs/results/{unused[0]}.json")
    wanted = {path: to_bytes(result) for path, result in raw.items()}
    wanted |= {path: render(text, results).encode() for path, text in pages.items()}
    return {path: content for path, content in wanted.items() if path.read_bytes() != content}


def _kept(result: Result) -> Result:
    replace = msgspec.structs.replace
    if isinstance(result, Report):
        whole = result.settings.batch_size == (1,) and not result.peers
        figures = tuple(each for each in result.figures if whole or each.category == ALL)
        settings = replace(result.settings, prompts=Path(result.settings.prompts).name)
        return replace(result, figures=figures, settings=settings, runs=(), sample=None, definitions={})
    if isinstance(result, DamageReport):
        engines = [replace(each, bundle=Path(each.bundle).name) for each in result.engines]
        return replace(result, reference=Path(result.reference).name, engines=engines, note="")
    return result


def _rounded(value: Any) -> Any:
    """`value` with numbers of a few digits, down to its last list."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 (`--check`) a file is not what it should be, 2 wrong usage."""
    parser = CommandParser(PROG, "Write the figures of the documentation from docs/results/*.json.", EXAMPLES)
    parser.add_argument("--docs", metavar="DIR", type=Path, default=Path("docs"), help="default %(default)s")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something would change")
    args = parser.parse_args(argv)
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    if not (args.docs / "results").is_dir():
        raise RequestError(f"there is no folder {args.docs / 'results'}: run it where the sources are, or give --docs")
    changed = update(args.docs)
    for path, content in changed.items():
        if not args.check:
            replace_file(path, partial(Path.write_bytes, data=content))
        print(f"{path} {'is not what its results say' if args.check else 'written'}")
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
