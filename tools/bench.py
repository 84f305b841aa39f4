"""`specdec-bench`: how fast a bundle's methods decode, how sure that is, and what it is made of.

This module knows options and what is written where. How it is measured is in `bench_measure.py`, what it adds up to in
`figures.py`, what is shown in `bench_report.py` and `bench_html.py`, what got worse in `bench_compare.py`.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from specdec.engines.command import CommandParser, check_folders, positive, run_command
from specdec.engines.files import replace_file
from specdec.engines.registry import backends, open_engine
from specdec.runtime.llm import Opener
from specdec.tools.bench_compare import COMPARED, THRESHOLD, check_same, compare, to_text
from specdec.tools.bench_html import to_html
from specdec.tools.bench_measure import Measurement
from specdec.tools.bench_methods import METHOD
from specdec.tools.bench_report import Report, cost_table, failure_lines, load_table, read_report, table, to_json
from specdec.tools.figures import FAST, PLAIN
from specdec.tools.peers import add_peer_options

PROG = "specdec-bench"
EXAMPLES = """examples:
  specdec-bench bundle --html report.html
  specdec-bench bundle --prompts question.jsonl --per-category 3 --json measured.json
  specdec-bench bundle --prompts question.jsonl --categories rag,qa --methods plain-fast,plain,ngram --repeat 3
  specdec-bench bundle --prompts question.jsonl --temperature 1 --methods model@token,model@block
  specdec-bench bundle --prompts chats.json --turns all --batch-size 1,4 --load 0.5,1
  specdec-bench bundle --prompts question.jsonl --compare measured.json     # exit code 1 when it got worse
  specdec-bench bundle --pass-costs
  specdec-bench bundle --prompts question.jsonl --peers ort-genai,llama-cpp --peer-model model.gguf

exit code: 0 done, 1 failed or worse than --compare allows, 2 wrong usage
"""

T = TypeVar("T")


def main(argv: Sequence[str] | None = None, *, opener: Opener = open_engine) -> int:
    """Run the command; return its exit code: 0 done, 1 failed or regressed, 2 wrong usage. `opener`: for tests."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.ort_genai or args.llama_cpp or args.peers) and (args.turns == "all" or 1 not in args.batch_size):
        parser.error("peers answer first turns, one prompt at a time: use --turns first and a --batch-size of 1")
    check_folders(parser, args, "json", "html")
    if args.pass_costs and not args.prompts and (args.html or args.compare or args.load):
        parser.error("--pass-costs alone measures no answers: give --prompts FILE as well")
    return run_command(PROG, partial(_run, args, opener), debug=args.debug)


def _run(args: argparse.Namespace, opener: Opener) -> int:
    old = read_report(args.compare) if args.compare else None
    with ExitStack() as stack:
        measurement = Measurement(args, opener, stack)
        if args.pass_costs and not args.prompts:
            costs, roofline = measurement.passes()
            report = measurement.report(pass_costs=costs, roofline=roofline)
        else:
            report = measurement.run()
    print("\n\n".join(_shown(report, costs=args.pass_costs)))
    if args.json:
        replace_file(args.json, lambda part: part.write_bytes(to_json(report)))
    if args.html:
        replace_file(args.html, lambda part: part.write_text(to_html(report), encoding="utf-8"))
    if old is None:
        return 0
    notes = check_same(old, report, args.compare_figures)
    changes = compare(old, report, args.compare_figures, args.threshold)
    print("\n" + to_text(changes, notes, args.threshold))
    return 1 if any(change.regressed for change in changes) else 0


def _shown(report: Report, *, costs: bool) -> list[str]:
    """The tables that there is something to show in."""
    tables = [cost_table(report.pass_costs, report.roofline)] if costs else []
    tables += [table(report.figures, report.baseline)] if report.figures else []
    tables += [failure_lines(report.peer_failures)] if report.peer_failures else []
    return [*tables, *([load_table(report.load)] if report.load else [])]


def _list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different names with commas between them")
    return names


def _each(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Type of an option that is a list of `kind`, with commas."""
    return lambda text: [kind(item) for item in _list(text)]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def _figure(text: str) -> str:
    if text not in COMPARED:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be compared: choose from {', '.join(COMPARED)}")
    return text


def _parser() -> CommandParser:
    description = "Measure a bundle's methods: speed, acceptance, latencies, with plain decoding in turn."
    parser = CommandParser(PROG, description, EXAMPLES)
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export")
    prompts = parser.add_argument_group("prompts")
    add = prompts.add_argument
    add("--prompts", metavar="FILE", type=Path, help="Spec-Bench or MT-bench JSONL, ShareGPT JSON, or a text with one "
        "prompt a line (default: prompts of our own)")  # fmt: skip
    add("--categories", metavar="A,B", type=_list, default=[], help="only these (default: all)")
    add("--per-category", metavar="N", type=positive, help="only the first N prompts of each")
    add("--limit", metavar="N", type=positive, help="only the first N prompts in all")
    add("--turns", choices=("first", "all"), default="first", help="of each conversation; the next turn follows the "
        "model's own answer (default %(default)s)")  # fmt: skip

    methods = parser.add_argument_group("methods")
    add = methods.add_argument
    add("--methods", metavar="A,B", type=_list, help=f"{FAST} (one-token passes), {PLAIN} (always there), drafters of "
        f"the bundle (default: all, and what auto takes), each as {METHOD}: eagle@token/dynamic/8")  # fmt: skip
    add("--num-speculative-tokens", metavar="K", type=positive, help="most draft tokens a round")
    add("--max-new-tokens", metavar="N", type=positive, default=128, help="of each answer (default %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", metavar="K", type=int, default=0, help="0 is off (default)")
    add("--top-p", metavar="P", type=float, default=1.0, help="1 is off (default)")
    add("--seed", metavar="N", type=int, default=0, help="of sampling and arrivals (default %(default)s)")

    running = parser.add_argument_group("running")
    add = running.add_argument
    add("--batch-size", metavar="N,M", type=_each(positive), default=[1], help="prompts that run at a time, as one "
        "continuous batch; one after the other (default 1)")  # fmt: skip
    add("--load", metavar="RATE,...", type=_each(_rate), default=[], help="also offer the prompts at RATE requests a "
        "second, Poisson arrivals, to as many rows as the bundle takes")  # fmt: skip
    add(
        "--warmup",
        metavar="N",
        type=_count,
        default=1,
        help="unmeasured runs of the first prompt (default %(default)s)",
    )
    add("--repeat", metavar="N", type=positive, default=1, help="measured runs; the fastest counts (default 1)")
    add(
        "--pass-costs",
        action="store_true",
        help="time single passes of the target by width and batch, and show them beside what the machine allows",
    )
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure each method's peak memory in a "
        "process of its own (default: yes)")  # fmt: skip

    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--variant", metavar="V", help="precision of the target (default: the bundle's first)")
    add("--backend", choices=backends(), default="ort", help="default %(default)s")
    add("--provider", metavar="P", default="cpu", help="of ort: cpu, cuda, tensorrt, ... (default %(default)s)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="of every engine (default: one per "
        "core)")  # fmt: skip

    results = parser.add_argument_group("results")
    add = results.add_argument
    add("--json", metavar="FILE", type=Path, help="write the figures, their definitions and every run")
    add("--html", metavar="FILE", type=Path, help="write a page to look at: one file, without a network")
    add("--compare", metavar="OLD.json", type=Path, help="exit with 1 when this run is worse than that one")
    add("--threshold", metavar="PERCENT", type=_rate, default=THRESHOLD, help="how much worse, where the interval "
        "excludes no change (default %(default)g)")  # fmt: skip
    add("--compare-figures", metavar="A,B", type=_each(_figure), default=list(COMPARED), help="of "
        f"{', '.join(COMPARED)} (default: all)")  # fmt: skip
    add_peer_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
