"""Answers on their way: until they are there or the client is gone, whole or as server-sent events.

This module knows connections, time limits and the order of events; what an event says is `formats.py`'s.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.runtime.delivery import Delta, Stream
from specdec.runtime.request import RequestOutput
from specdec.serve.answers import encode
from specdec.serve.backend import Backend
from specdec.serve.errors import ApiError, draining, internal
from specdec.serve.formats import Format

ERROR_SECONDS = 1.0  # for the event that tells of a missed deadline, to a reader that may be the reason

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client went away before its answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client goes away. Raises `ClientGoneError`, and what `work` raises.

    The request's body has to have been read.
    """
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGoneError
        return running.result()
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.wait({running, gone})  # what was cancelled has to let go of its streams


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Deadline:
    """`seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._when = seconds, asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """While open, what takes longer is cancelled. Raises `ApiError` then."""
        try:
            async with asyncio.timeout_at(self._when):
                yield
        except TimeoutError as exc:
            raise ApiError(504, f"the answer took more than {self._seconds:g} s", code="deadline_exceeded") from exc


async def whole(streams: Sequence[Stream]) -> list[RequestOutput]:
    """Wait for all choices. Raises the first error."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        outputs = await asyncio.gather(*(stream.result() for stream in streams))
    return [_finished(output) for output in outputs]


class EventStream(Response):
    """A response of server-sent events, one for each delta of a choice.

    It begins with the first of them: what fails before that is an answer with a status of its own, and what fails later
    is an event. `told`: called with the outputs when all have ended.
    """

    def __init__(
        self, streams: Sequence[Stream], form: Format, backend: Backend, deadline: Deadline, *,
        with_usage: bool, told: Callable[[Sequence[RequestOutput]], None],
    ) -> None:  # fmt: skip
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._outputs: dict[int, RequestOutput] = {}
        self._streams, self._form, self._with_usage = streams, form, with_usage
        self._backend, self._deadline, self._told = backend, deadline, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything. Raises what fails before anything was sent, `ClientGoneError`, and what nobody foresaw."""
        await while_connected(receive, self._send_all(send, scope["state"]["request_id"]))

    async def _send_all(self, send: Send, request_id: str) -> None:
        begun = False
        try:
            async with self._deadline.kept(), aclosing(self._events()) as events:
                async for event in events:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_event(send, event)
        except Exception as exc:
            if not begun:
                raise
            error = exc if isinstance(exc, ApiError) else internal(request_id)
            try:
                async with asyncio.timeout(ERROR_SECONDS):
                    await _send_event(send, error.body)
            except TimeoutError:
                raise ClientGoneError from exc
            await _send_end(send)
            if error is not exc:
                raise
        else:
            self._told(self._in_order())
            await _send_end(send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The data of all events."""
        begun = set[int]()
        with self._backend.told():
            async with aclosing(merged(self._streams)) as deltas:
                async for index, delta in deltas:
                    if delta.output is not None:
                        self._outputs[index] = _finished(delta.output)
                    chunks = self._form.chunks(index, delta, first=index not in begun)
                    begun.add(index)
                    for chunk in chunks:
                        yield encode(chunk)
        if self._with_usage:
            yield encode(self._form.last(self._in_order()))
        yield b"[DONE]"

    def _in_order(self) -> list[RequestOutput]:
        return [self._outputs[index] for index in sorted(self._outputs)]


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several streams as they come, each with its stream's index; all are cancelled in the end."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, delta
            return
        waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
        stack.callback(lambda: [task.cancel() for task in waiting])
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, got = waiting.pop(task), task.result()
                if got is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, got


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _finished(output: RequestOutput) -> RequestOutput:
    """An output with an answer; one that was aborted while its client waited was so by the server."""
    if output.finish_reason == "abort":
        raise draining(1)
    return output
