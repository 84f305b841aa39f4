"""The way from a client to an engine on a cluster: which engine, and what becomes of a request whose engine dies.

A request whose engine dies before its answer has begun is sent to another one, once: it changed nothing. A stream that
had begun ends with an event that is an error. This module knows requests by their beginnings (`conversation.py`) and
answers as messages of ASGI; it does not know what they mean.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.backend import Backend
from specdec.serve.conversation import conversation_key
from specdec.serve.errors import ApiError
from specdec.serve.guard import API, Guard
from specdec.serve.logs import log
from specdec.serve.metrics import ByReplica, HttpMetrics
from specdec.serve.options import ServeOptions
from specdec.serve.streaming import Deadline, while_connected

LOST = (RayActorError, NodeDiedError, ObjectLostError)
ATTEMPTS = 2
QUICK_SECONDS = 5.0  # for what is no request of the API: whether a replica is ready, and what all of them count
# Of a scope: what an engine's application reads, and can be sent.
SENT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
        "client", "server")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Limits:
    """See `guard.Limits`."""

    options: ServeOptions
    most_requests: int
    retry_after: int = 1


def front_app(engines: DeploymentHandle[Any], options: ServeOptions, most_requests: int, replica: str) -> ASGIApp:
    """Make the application of a front named `replica`, with up to `most_requests` open at a time."""
    metrics = HttpMetrics(Backend(options))
    limits = _Limits(options, most_requests)
    everything = Route("/{path:path}", _Forward(engines, options, metrics, replica))
    app = Starlette(routes=[everything], middleware=[Middleware(Guard, backend=limits, metrics=metrics)])
    return _WithoutRequestId(app)


class _WithoutRequestId:
    """Leaves out the header x-request-id, which Ray's proxy adds: it is the one that the guard took from there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without if scope["type"] == "http" else send)


class _Forward:
    """An ASGI application that has an engine answer."""

    def __init__(
        self, engines: DeploymentHandle[Any], options: ServeOptions, metrics: HttpMetrics, replica: str
    ) -> None:
        self._engines, self._options, self._metrics, self._replica = engines, options, metrics, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            await (await self._counted(scope))(scope, receive, send)
            return
        body = (await receive()).get("body", b"") if scope["path"].startswith(API) else b""
        plain = {name: scope[name] for name in SENT if name in scope}
        await while_connected(receive, self._answer(plain, body, send))

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        deadline = Deadline(self._options.deadline_seconds if scope["path"].startswith(API) else QUICK_SECONDS)
        engines = self._engines.options(stream=True, session_id=conversation_key(body))
        for attempt in range(ATTEMPTS):
            relay = _Relay(send)
            try:
                async with aclosing(_messages(engines, scope, body)) as messages:
                    async with deadline.kept():
                        relay.hold(await anext(messages))
                    await relay.all(messages)
                return
            except LOST as exc:
                log("replica lost", level=logging.WARNING, begun=relay.begun, attempt=attempt + 1, error=exc)
                lost = ApiError(503, "the replica that was to answer is gone: send the request again",
                                code="replica_lost", retry=1)  # fmt: skip
                if relay.begun:
                    await send({"type": "http.response.body", "body": b"data: " + lost.body + b"\n\n"})
                    return
                if attempt + 1 == ATTEMPTS:
                    raise lost from exc
            except DeploymentUnavailableError as exc:
                raise ApiError(503, "no replica starts: see `serve status`", code="no_replica", retry=10) from exc

    async def _counted(self, scope: Scope) -> Response:
        """What this front and all engines count."""
        replies = await self._engines.broadcast("metrics").results_async(
            timeout_s=QUICK_SECONDS, return_exceptions=True
        )
        collected = dict(each for each in replies if not isinstance(each, BaseException))
        collected[self._replica] = self._metrics.collect()
        body, content_type = ByReplica(collected).render(Headers(scope=scope).get("accept", ""))
        return Response(body, headers={"content-type": content_type})


class _Relay:
    """Sends on what an engine sends: the beginning with the first part of a stream, the end when the engine is done.

    So nothing is sent (`begun`) of an answer that is no stream before all of it is there.
    """

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send
        self._held: list[Message] = []

    def hold(self, message: Message) -> None:
        """Take a message, to be sent before the next one."""
        self._held.append(message)

    async def all(self, messages: AsyncIterator[Message]) -> None:
        """Send what was held, and `messages`."""
        async for message in messages:
            self.hold(message)
            if message.get("more_body"):
                await self._release()
        await self._release()

    async def _release(self) -> None:
        self.begun = True
        held, self._held = self._held, []
        for message in held:
            await self._send(message)


async def _messages(engines: DeploymentHandle[Any], scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """The messages of an engine's answer; the request is cancelled when they are not read to their end."""
    replies = cast(DeploymentResponseGenerator[Sequence[Message]], engines.answer.remote(scope, body))
    try:
        async for together in replies:
            for message in together:
                yield message
    finally:
        replies.cancel()  # type: ignore[no-untyped-call]
