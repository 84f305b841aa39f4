"""What stands before the API: request ids, keys, a bound on open requests, a limit for bodies, and a line of log each.

It refuses what it can before a byte of a body is read, and reads bodies whole, so that a slow or endless one costs its
sender alone. This module knows HTTP and `Limits`; it does not know what requests mean.
"""

import asyncio
import hashlib
import hmac
import logging
import re
from time import perf_counter
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.errors import GONE, ApiError, internal
from specdec.serve.logs import log
from specdec.serve.metrics import HttpMetrics
from specdec.serve.options import ServeOptions, is_loopback
from specdec.serve.streaming import ClientGoneError

API = "/v1/"
QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds: not worth a line
OPEN = (*QUIET, "/", "/openapi.json")  # to everyone: all other paths want what the API wants
PATHS = (*OPEN, "/v1/models", "/v1/completions", "/v1/chat/completions")
_REQUEST_ID = re.compile("[A-Za-z0-9._-]{1,64}")


class Limits(Protocol):
    """What a guard has to know of what it guards; see `Backend`."""

    @property
    def options(self) -> ServeOptions:
        """What an operator decided."""
        ...

    @property
    def most_requests(self) -> int:
        """Requests that may be open at a time."""
        ...

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request may be sent again."""
        ...


class Guard:
    """ASGI middleware around `app`. A scope's state gets `request_id`, and `fields` for its line of log."""

    def __init__(self, app: ASGIApp, backend: Limits, metrics: HttpMetrics) -> None:
        self._app, self._backend, self._metrics = app, backend, metrics
        self._keys = [_digest(key) for key in backend.options.api_keys]
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, fields=fields)
        started, status = perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._handle(scope, headers, receive, send_with_id)
        except ClientGoneError:
            status = GONE
        except ApiError as exc:
            fields["code"] = exc.code
            await Response(exc.body, exc.status, exc.headers, "application/json")(scope, receive, send_with_id)
        except Exception as exc:
            log("error", level=logging.ERROR, error=exc, request_id=request_id)
            if not status:
                status = 500
                error = internal(request_id)
                await Response(error.body, error.status, media_type="application/json")(scope, receive, send_with_id)
        finally:
            known = path if (path := _path(scope)) in PATHS else "other"
            self._metrics.count(known, status)
            if known not in QUIET:
                log("request", request_id=request_id, method=scope["method"], path=known, status=status,
                    ms=round(1000 * (perf_counter() - started), 1), **fields)  # fmt: skip

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if _path(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        self._check_key(headers)
        if self._open >= self._backend.most_requests:
            raise ApiError(429, "too many requests are open: try again later", code="too_many_requests",
                           retry=self._backend.retry_after)  # fmt: skip
        self._open += 1
        try:
            body = await self._read(headers, receive)
            await self._app(scope, _replayed(body, receive), send)
        finally:
            self._open -= 1

    def _check_key(self, headers: Headers) -> None:
        """Raise `ApiError` without a valid key or, where none is wanted, from a page that only seems to be local."""
        if self._keys:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = _digest(key.strip())
            matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, whichever it is
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                               code="invalid_api_key")  # fmt: skip
        elif not self._backend.options.no_auth and not _is_local(headers.get("host", "")):
            raise ApiError(403, "without API keys this server answers requests for localhost only", code="wrong_host")

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """A request's body. Raises `ApiError` when it is too large or takes too long, `ClientGoneError`."""
        options = self._backend.options
        too_large = ApiError(
            413, f"the body is larger than {options.max_body_bytes} bytes, the most that this server takes",
            code="body_too_large",
        )  # fmt: skip
        length = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,18}", length) or int(length) > options.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(options.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > options.max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as exc:
            seconds = f"{options.body_seconds:g}"
            raise ApiError(408, f"the body did not come within {seconds} s", code="body_timeout") from exc


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the app receives: the body, then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        for message in messages:
            return message
        return await receive()

    return replay


def _path(scope: Scope) -> str:
    """What routes see, wherever the app is mounted."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine: a page elsewhere that made its own name point here sends that name."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
