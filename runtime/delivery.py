"""What a round added to an answer, and its way from the engine thread to one reader on an event loop.

A mailbox holds one delta at most: what its reader has not taken yet grows by what comes. So a slow reader costs the
memory of its own answer, and nobody waits for it. This module knows threads and event loops; it does not know how
rows come to have tokens, nor who runs them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self
from uuid import uuid4

from specdec.engines.errors import RequestError
from specdec.runtime.request import FinishReason, Origin, RequestOutput, Row
from specdec.runtime.sampling import Logprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round, or several in a row, added to an answer. `output` is set on the last one.

    For each of `token_ids` there are the `origins` (`Round.origins`), the `ends` (characters of the whole answer's text
    up to it, as far as the text is known) and, when the request asked for them, the `logprobs`. The text may lag
    behind its tokens, while it could still become part of a stop string or of a character.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    origins: tuple[Origin, ...] = ()
    ends: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()

    @classmethod
    def since(cls, row: Row, known: int) -> Self:
        """What came to `row` since it had `known` tokens, prompt included; takes its text, so call it once a round."""
        reason, token_ids, done = row.finish_reason, tuple(row.tokens[known:]), known - len(row.prompt)
        text = row.stream.delta(last=reason is not None)
        origins = row.stats.history[-1].origins()[: len(token_ids)] if token_ids else ()
        output = row.output() if reason else None
        return cls(text, token_ids, reason, output, origins, row.ends(done), tuple(row.logprobs[done:]))

    def joined(self, later: "Delta") -> "Delta":
        """This delta and the one that follows it, as one."""
        return Delta(
            self.text + later.text,
            self.token_ids + later.token_ids,
            later.finish_reason,
            later.output,
            self.origins + later.origins,
            self.ends + later.ends,
            self.logprobs + later.logprobs,
        )


class Mailbox:
    """Hands the deltas of `row` from one writing thread to one reading task, and aborts the row when nobody can read.

    `output`: of the request, once its last delta was put.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.output: RequestOutput | None = None
        self._lock = threading.Lock()
        self._delta: Delta | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = _running_loop()

    def put(self, delta: Delta) -> None:
        """Add a delta to what the reader has not taken, and wake it if it waits."""
        with self._lock:
            self._tell()
            self._delta = self._delta.joined(delta) if self._delta else delta
            self.output = delta.output

    def fail(self, error: Exception) -> None:
        """End with `error`, which the reader gets after what it has not taken."""
        with self._lock:
            self._tell()
            self._error = error

    async def take(self) -> Delta | None:
        """Wait for something to read, and take it; None after the last delta.

        A task that is cancelled meanwhile aborts the row. Raises the error that ended the request, `RequestError` when
        another task waits already.
        """
        waiter = self._wait()
        if waiter is not None:
            try:
                await waiter
            except asyncio.CancelledError:
                self.row.aborted = True
                raise
            finally:
                with self._lock:
                    self._waiter = None
        with self._lock:
            delta, self._delta = self._delta, None
        if delta is None and self._error is not None:
            raise self._error
        return delta

    def _wait(self) -> asyncio.Future[None] | None:
        """What to wait for, None when there is something to take or no more will come."""
        with self._lock:
            if self._waiter is not None:
                raise RequestError("another task reads this stream already: let one task read it")
            if self._delta is None and self._error is None and self.output is None:
                self._loop = asyncio.get_running_loop()
                self._waiter = self._loop.create_future()
            return self._waiter

    def _tell(self) -> None:
        """Wake the reader of an empty mailbox; abort the row when the reader's loop is closed. `_lock` is held."""
        if self._loop is None:
            return
        try:
            if self._waiter is not None and self._delta is None:
                self._loop.call_soon_threadsafe(_release, self._waiter)
        except RuntimeError:  # closed: asyncio has no other error for it
            self.row.aborted = True
        if self._loop.is_closed():
            self.row.aborted = True


class Stream(AsyncIterator[Delta]):
    """The deltas of one request, for one task: `async for delta in stream`. The last one has the `output`.

    A reader that lags gets fewer and larger deltas: what it missed is joined to one. An error of the request is raised
    where it would have got the next one (`DeadEndError`, `EngineError`).
    The request is cancelled when its reader leaves `async with stream`, when the reading task is cancelled, when the
    event loop on which it was submitted or read is closed, and when the stream is dropped.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.request_id = uuid4().hex
        self._mailbox = mailbox

    def cancel(self) -> None:
        """End the request before its next round, with finish reason "abort"; from any thread, as often as you like.

        Its last delta still comes. A request that has ended stays as it is.
        """
        self._mailbox.row.aborted = True

    async def result(self) -> RequestOutput:
        """Read to the end and return the output. Raises the error that ended the request."""
        while await self._mailbox.take() is not None:
            pass
        assert self._mailbox.output is not None, "the last delta has it"
        return self._mailbox.output

    async def aclose(self) -> None:
        """Cancel the request, for `contextlib.aclosing`."""
        self.cancel()

    async def __anext__(self) -> Delta:
        delta = await self._mailbox.take()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # a thread without one: the loop is known when the stream is read
        return None


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
