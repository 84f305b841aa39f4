"""Does a service stay right, whole and small for long? Mixed requests for minutes, each answer compared with its own.

Passes of the engine fail on purpose meanwhile. What clients do and what they check is in `soak_clients.py`. This module
knows what is asked, how long, and what memory it took; it does not know what runs inside `AsyncLLM`.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import msgspec

from specdec.engines.base import Engine
from specdec.engines.command import CommandParser, check_folders, positive, run_command
from specdec.engines.contract import ModelSpec
from specdec.engines.errors import EngineError
from specdec.engines.files import replace_file
from specdec.engines.prompts import PROMPTS
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.tools.soak_clients import PLANTED, Case, Report, ask_on

PROG = "python -m specdec.tools.soak"
EXAMPLES = """examples:
  python -m specdec.tools.soak bundle --minutes 15
  python -m specdec.tools.soak bundle --minutes 1 --clients 64 --rows 4 --fault-every 0
"""
SECOND_TURN = "Say it again in other words."
GROWTH = 0.05  # of memory, between the second quarter of a run and the last, that is still flat


def cases(llm: LLM) -> list[Case]:
    """Requests of every kind, answered by `llm`, which runs one at a time without speculation."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.1},
        {"stop": (".",), "min_new_tokens": 4},
    )
    found = []
    for number, prompt in enumerate(PROMPTS):
        first = _ask(llm, [{"role": "user", "content": prompt.text}], prompt.text)
        for place, options in enumerate(kinds):
            params = SamplingParams(max_new_tokens=16 + 16 * ((number + place) % 4), **options)
            found.append(_answered(llm, first, params))
        said = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": found[-1].alone.text}]
        second = _ask(llm, [*said, {"role": "user", "content": SECOND_TURN}], f"{prompt.text} {SECOND_TURN}")
        found.append(_answered(llm, second, SamplingParams(max_new_tokens=32)))
    return found


def _ask(llm: LLM, messages: list[Any], text: str) -> tuple[int, ...]:
    ids = llm.chat_prompt(messages) if llm.text.has_chat_template else llm.text.encode(text, special=True)
    return tuple(ids)


def _answered(llm: LLM, prompt: tuple[int, ...], params: SamplingParams) -> Case:
    return Case(prompt, params, llm.generate(prompt, params)[0])


class Faults:
    """Opens engines of which one pass in `every` fails, while this is `armed`; 0: none does."""

    def __init__(self, every: int, seed: int) -> None:
        self.armed, self.count = False, 0
        self._every, self._random = every, Random(seed)

    def open(self, path: Path, spec: ModelSpec, config: EngineConfig | None) -> Engine:
        """See `registry.open_engine`."""
        engine = open_engine(path, spec, config)
        step = engine.step

        def failing(*inputs: Any) -> Any:
            if self.armed and self._every and self._random.randrange(self._every) == 0:
                self.count += 1
                raise EngineError(PLANTED)
            return step(*inputs)

        engine.step = failing  # type: ignore[assignment,method-assign]
        return engine


async def soak(llm: LLM, known: Sequence[Case], report: Report, *, clients: int, rows: int, seed: int,
               going_on: Callable[[], bool]) -> None:  # fmt: skip
    """Let `clients` ask `llm`, `rows` requests at a time, while `going_on()`; then see that nothing is left."""
    async with AsyncLLM(llm, max_rows=rows, most_waiting=max(clients // 2, 1)) as service:
        watcher = asyncio.create_task(_watch(report))
        asking = [ask_on(service, known, report, Random(f"{seed} {number}"), going_on) for number in range(clients)]
        await asyncio.gather(*asking)
        watcher.cancel()
        if not await service.drain(60):
            report.wrong.append("requests were left when no client was")
        metrics = service.metrics
        if left := metrics.num_requests_running.value + metrics.num_requests_waiting.value:
            report.wrong.append(f"the gauges end with {left} requests that run or wait")


async def _watch(report: Report) -> None:
    while True:
        report.memory.append(_resident())
        await asyncio.sleep(1)


def _resident() -> int:
    """Bytes of this process in memory; 0 where /proc does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@contextmanager
def armed(faults: Faults, report: Report) -> Iterator[None]:
    """Let passes fail meanwhile, and count them."""
    faults.armed = True
    try:
        yield
    finally:
        faults.armed = False
        report.faults = faults.count


def verdict(report: Report) -> str:
    """What was found, in lines for people."""
    total = sum(report.outcomes.values())
    lines = [f"{total} requests, {report.tokens} tokens of whole answers in {report.seconds:.0f} s, "
             f"{report.faults} passes failed on purpose"]  # fmt: skip
    lines += [f"  {count:>7} {outcome}" for outcome, count in sorted(report.outcomes.items())]
    if report.memory and report.memory[-1]:
        lines.append(f"memory: {report.memory[-1] / 2**20:.0f} MiB at the end, {report.growth:+.1%} from the second "
                     "quarter of the run to the last")  # fmt: skip
    lines += [f"WRONG: {line[:400]}" for line in report.wrong[:20]]
    lines.append(f"{len(report.wrong)} WRONG" if report.wrong else "nothing lost, mixed up or wrong")
    return "\n".join(lines)


def _parser() -> CommandParser:
    parser = CommandParser(PROG, "Run mixed requests for long and compare each answer with its own.", EXAMPLES)
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export")
    add("--minutes", metavar="X", type=float, default=15.0, help="of load (default %(default)s)")
    add("--clients", metavar="N", type=positive, default=24, help="that ask at a time (default %(default)s)")
    add("--rows", metavar="N", type=positive, default=8, help="requests that run at a time (default %(default)s)")
    add("--method", metavar="DRAFTER", default="auto", help="who drafts (default %(default)s)")
    add("--fault-every", metavar="N", type=int, default=500, help="passes of an engine, one of which fails on purpose; "
        "0: none (default %(default)s)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="of what clients do (default %(default)s)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="default: one per core")
    add("--json", metavar="FILE", type=Path, help="write the figures to a file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 all was right, 1 something was wrong or grew, 2 wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_folders(parser, args, "json")
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    config, report = EngineConfig(threads=args.threads), Report()
    with LLM(args.bundle, speculative=SpeculativeConfig(method=None), engine=config, prefix_bytes=0) as alone:
        known = cases(alone)
    faults = Faults(args.fault_every, args.seed)
    drafting = SpeculativeConfig(method=args.method)
    with LLM(args.bundle, speculative=drafting, engine=config, opener=faults.open) as llm, armed(faults, report):
        started = monotonic()
        end = started + 60 * args.minutes
        asyncio.run(soak(llm, known, report, clients=args.clients, rows=args.rows, seed=args.seed,
                         going_on=lambda: monotonic() < end))  # fmt: skip
        report.seconds = monotonic() - started
    print(verdict(report))
    if args.json:
        found = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
        replace_file(args.json, lambda part: part.write_bytes(found))
    return 1 if report.wrong or report.growth > GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
