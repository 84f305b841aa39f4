"""`AsyncLLM`: many requests at a time, from any event loop or thread, on one scheduler and one engine thread.

    async with AsyncLLM(llm) as service:
        async with service.submit("...", SamplingParams()) as stream:
            async for delta in stream: ...
        output = await service.generate("...")

The engine thread alone runs rounds, and sleeps while there are none. This module knows who asks and when to stop; it
knows neither the algorithm (`scheduler.py`) nor how deltas reach a loop (`delivery.py`), and no server.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Self

from specdec.engines.errors import BusyError, ClosedError, EngineError, RequestError
from specdec.runtime.delivery import Delta, Mailbox, Stream
from specdec.runtime.llm import LLM
from specdec.runtime.metrics import Metrics, Recorder
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import RequestOutput, Row
from specdec.runtime.scheduler import PREFILL_TOKENS, Scheduler
from specdec.runtime.text import Prompt

MOST_WAITING = 256


@dataclass(slots=True)
class _Request:
    """What the engine thread keeps of a row; `known`: tokens of it that are in the mailbox, prompt included."""

    mailbox: Mailbox
    recorder: Recorder
    known: int

    def delivery(self) -> Callable[[], None]:
        """What puts into the mailbox what the row got in a round, or its error."""
        row = self.mailbox.row
        if row.error is not None:
            return partial(self.mailbox.fail, row.error)
        known, self.known = self.known, len(row.tokens)
        return partial(self.mailbox.put, Delta.since(row, known))


class AsyncLLM:
    """Requests for `llm`, which has to stay open until this is closed; it is not closed with it.

    `max_rows`: requests that run together; None: as many as the bundle's engines take. `most_waiting`: requests that
    may wait for a row. `kv_bytes`: bytes that caches may take, the draft's included (`KVBudget`); None: no limit but
    `max_rows` full contexts. `prefill_tokens`: of prompts, a round, while other requests run.
    `metrics`: counted here, round by round.

    Requests share rounds, not fates: an error ends the request that it belongs to, one of the engine those of its pass.
    A slow reader makes no other request wait, and holds no more memory than its own answer: see `Stream`.
    All methods may be called from any thread and event loop. Raises `RequestError` for a number out of range.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_rows: int | None = None,
        most_waiting: int = MOST_WAITING,
        kv_bytes: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        most = llm.manifest.limits.max_batch
        rows = most if max_rows is None else max_rows
        if not 1 <= rows <= most:
            raise RequestError(f"max_rows must be from 1 to this bundle's {most}, not {rows}")
        least = {"most_waiting": most_waiting, "kv_bytes": kv_bytes, "prefill_tokens": prefill_tokens}
        for name, value in least.items():
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}")
        self.metrics = Metrics()
        self._llm = llm
        self._most_waiting = most_waiting
        self._budget = llm._budget(rows, kv_bytes)
        self._new_scheduler = partial(llm._scheduler, rows, prefill_tokens=prefill_tokens, budget=self._budget)
        self._scheduler: Scheduler = self._new_scheduler()
        self._changed = threading.Condition()  # guards what follows, and the scheduler's queue
        self._inbox: deque[Row] = deque()  # not known to the scheduler yet
        self._requests: dict[Row, _Request] = {}  # that have not ended
        self._refusal: str | None = None  # why no more are taken
        self._closing = False
        self._drained: list[Future[None]] = []  # wait until there are no requests
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Ask for one answer to a prompt (text or token ids); it is read from the stream.

        The prompt is tokenized here, and a grammar compiled. Raises `RequestError` for an invalid prompt or parameter
        and for what can never fit into `kv_bytes`, `BusyError` when `most_waiting` requests wait, `ClosedError` after
        `drain` or `aclose`.
        """
        row = self._llm._row(prompt, params or SamplingParams())
        self._budget.check(row)
        mailbox = Mailbox(row)
        with self._changed:
            if self._refusal is not None:
                raise ClosedError(self._refusal)
            if self._waiting >= self._most_waiting:
                raise BusyError(f"{self._waiting} requests wait already: try again later")
            self._requests[row] = _Request(mailbox, Recorder(self.metrics, row), len(row.tokens))
            self._inbox.append(row)
            self.metrics.num_requests_waiting.set(self._waiting)
            self._changed.notify()
        return Stream(mailbox)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Ask for one answer and wait for it. Raises as `submit` and `Stream` do; cancelled with the task."""
        async with self.submit(prompt, params) as stream:
            return await stream.result()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs: without it no request ends."""
        return self._thread.is_alive()

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait up to `timeout` seconds (None: for ever) until those there are have ended.

        Returns whether they have; those that have not go on.
        """
        with self._changed:
            self._refusal = self._refusal or "this AsyncLLM is being drained: send the request to another one"
        return await self._wait_until_drained(timeout)

    async def aclose(self) -> None:
        """Cancel all requests (finish reason "abort") and end the engine thread, after the round that it is in."""
        with self._changed:
            self._refusal = "this AsyncLLM is closed: make another one"
            self._closing = True
            for row in self._requests:
                row.aborted = True
            self._changed.notify()
        await self._wait_until_drained(None)
        self._thread.join()  # has nothing left to do

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _wait_until_drained(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until there are no requests; return whether there are none."""
        with self._changed:
            if not self._requests:
                return True
            drained: Future[None] = Future()
            self._drained.append(drained)
        try:
            done, _ = await asyncio.wait([asyncio.wrap_future(drained)], timeout=timeout)
            return bool(done)
        finally:
            drained.cancel()  # nobody waits for it any more

    @property
    def _waiting(self) -> int:
        """Requests that have no row yet, as far as is known while a round runs."""
        return len(self._inbox) + self._scheduler.waiting

    def _run(self) -> None:
        """The engine thread: rounds, as long as there are requests or may be."""
        while self._hand_over():
            try:
                self._deliver(self._scheduler.step())
            except Exception as exc:  # none of a row's or of the engine's: the scheduler keeps those
                self._start_over(exc)

    def _hand_over(self) -> bool:
        """Sleep until there is a request; give new ones to the scheduler. False: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._closing)
            while self._inbox:
                self._scheduler.submit(self._inbox.popleft())
            return bool(self._requests)

    def _deliver(self, rows: Sequence[Row]) -> None:
        """Count and hand out what a round gave `rows`, and forget those that ended.

        What can fail comes first, and readers are woken last: what is forgotten is delivered, and counted by then.
        """
        now = perf_counter()
        requests = [self._requests[row] for row in rows]
        deliveries = [request.delivery() for request in requests]
        for request in requests:
            request.recorder.record(now)
        with self._changed:
            for row in rows:
                if row.finish_reason:
                    del self._requests[row]
            self._show()
        for deliver in deliveries:
            deliver()
        self._tell_drained()

    def _start_over(self, cause: Exception) -> None:
        """End all requests with an error nobody foresaw, and leave the scheduler, whose state is not known any more."""
        with self._changed:
            self._scheduler = self._new_scheduler()
            failed = list(self._requests.values())
            self._requests.clear()
            self._inbox.clear()
            self._show()
        for request in failed:
            error = EngineError(f"a round failed ({type(cause).__name__}: {cause}): try again, and report it")
            error.__cause__ = cause
            request.mailbox.row.fail(error)
            request.recorder.record(perf_counter())
            request.delivery()()
        self._tell_drained()

    def _show(self) -> None:
        """Set the gauges; `_changed` is held."""
        running = self._scheduler.running
        used = self._budget.needed(running) if running else 0
        self.metrics.num_requests_running.set(len(running))
        self.metrics.num_requests_waiting.set(self._waiting)
        self.metrics.kv_cache_bytes.set(used)
        self.metrics.kv_cache_usage_perc.set(used / self._budget.limit)

    def _tell_drained(self) -> None:
        """Wake who waits in `drain`, when there is no request left."""
        with self._changed:
            drained = [] if self._requests else self._drained
            self._drained = self._drained if self._requests else []
        for future in drained:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
