"""Clients of a service, each in its own way, and whether they get what they should.

They read, read slowly, cancel, leave, disappear and ask for nonsense. Every answer has to be the one that the same
request gets alone; every failure has to be the planted one. This module knows `AsyncLLM` from outside, as an
application does.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import msgspec

from specdec.engines.errors import BusyError, RequestError
from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.delivery import Stream
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import RequestOutput

PLANTED = "planted by specdec.tools.soak"


class Case(msgspec.Struct, frozen=True):
    """A request, and what it is answered when it is alone."""

    prompt: tuple[int, ...]
    params: SamplingParams
    alone: RequestOutput


class Report(msgspec.Struct, kw_only=True):
    """What happened. `outcomes`: of requests, by what became of them; `wrong`: what should not have been, a line each.

    `memory`: bytes that the process held, second by second.
    """

    seconds: float = 0.0
    outcomes: dict[str, int] = msgspec.field(default_factory=Counter[str])
    tokens: int = 0
    faults: int = 0
    wrong: list[str] = msgspec.field(default_factory=list)
    memory: list[int] = msgspec.field(default_factory=list)

    @property
    def growth(self) -> float:
        """By how much the memory of the last quarter is more than that of the second; the first one warms up."""
        quarter = len(self.memory) // 4
        if not quarter:
            return 0.0
        return median(self.memory[-quarter:]) / median(self.memory[quarter : 2 * quarter]) - 1


async def ask_on(
    service: AsyncLLM, known: Sequence[Case], report: Report, random: Random, going_on: Callable[[], bool]
) -> None:
    """Ask one request after the other, each in a way of its own."""
    ways = (_read, _read, _read, _read_slowly, _cancel, _leave, _disappear)
    while going_on():
        case = random.choice(known)
        if random.random() < 0.06:
            _ask_nonsense(service, report)
            continue
        try:
            stream = service.submit(case.prompt, case.params)
        except BusyError:
            report.outcomes["refused: busy"] += 1
            await asyncio.sleep(random.random())
            continue
        try:
            outcome = await random.choice(ways)(stream, case, report, random)
        except Exception as exc:
            outcome = "failed as planted"
            if str(exc) != PLANTED:
                outcome = "failed"
                report.wrong.append(f"an error that nobody planted: {type(exc).__name__}: {exc}")
        report.outcomes[outcome] += 1


async def _read(stream: Stream, case: Case, report: Report, random: Random, pause: float = 0.0) -> str:
    """Read to the end: the answer has to be that of the request alone, in one piece and in its deltas."""
    text, tokens, output = "", list[int](), list[RequestOutput]()
    async for delta in stream:
        text, tokens = text + delta.text, [*tokens, *delta.token_ids]
        output += [delta.output] if delta.output else []
        if pause:
            await asyncio.sleep(random.random() * pause)
    report.tokens += len(tokens)
    whole = [(tuple(tokens), text)] + [(each.token_ids, each.text) for each in output]
    if len(output) != 1 or set(whole) != {(case.alone.token_ids, case.alone.text)}:
        report.wrong.append(f"{case.alone.token_ids} was to come, {len(output)} answers came: {whole}")
    return "answered"


async def _read_slowly(stream: Stream, case: Case, report: Report, random: Random) -> str:
    await _read(stream, case, report, random, pause=0.3)
    return "answered, read slowly"


async def _cancel(stream: Stream, case: Case, report: Report, random: Random) -> str:
    """Cancel after some deltas: what came is how the answer begins."""
    await _read_some(stream, case, report, random)
    stream.cancel()
    output = await stream.result()
    _check_beginning(output.token_ids, case, report)
    if output.finish_reason not in ("abort", case.alone.finish_reason):
        report.wrong.append(f"a cancelled request ended with {output.finish_reason}")
    return "cancelled" if output.finish_reason == "abort" else "cancelled too late"


async def _leave(stream: Stream, case: Case, report: Report, random: Random) -> str:
    async with stream:
        await _read_some(stream, case, report, random)
    return "left"


async def _disappear(stream: Stream, case: Case, report: Report, random: Random) -> str:
    """The reading task is cancelled, as a server does when its client is gone."""
    task = asyncio.create_task(_read(stream, case, report, random))
    await asyncio.sleep(random.random())
    task.cancel()
    found = await asyncio.gather(task, return_exceptions=True)
    if isinstance(found[0], asyncio.CancelledError):
        return "disappeared"
    if isinstance(found[0], BaseException):
        raise found[0]
    return "answered"


async def _read_some(stream: Stream, case: Case, report: Report, random: Random) -> None:
    tokens: tuple[int, ...] = ()
    for _ in range(random.randrange(6)):
        delta = await anext(stream, None)
        if delta is None:
            break
        tokens += delta.token_ids
    _check_beginning(tokens, case, report)


def _check_beginning(tokens: tuple[int, ...], case: Case, report: Report) -> None:
    if tokens != case.alone.token_ids[: len(tokens)]:
        report.wrong.append(f"{tokens} is not how {case.alone.token_ids} begins")


def _ask_nonsense(service: AsyncLLM, report: Report) -> None:
    try:
        service.submit([])
    except RequestError:
        report.outcomes["refused: invalid"] += 1
    else:
        report.wrong.append("an empty prompt was taken")
