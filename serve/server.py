"""Runs the application: a socket, uvicorn, the model loaded beside it, and an orderly end.

SIGTERM or SIGINT: no more connections are taken, requests get `drain_seconds` to end and an error then. A second signal
ends at once. This module knows processes and signals; it knows no route.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from math import ceil
from time import perf_counter
from types import FrameType

import uvicorn

from specdec.engines.errors import RequestError
from specdec.runtime.llm import LLM
from specdec.serve.app import create_app
from specdec.serve.backend import Backend, warm_up
from specdec.serve.connection import Connection
from specdec.serve.logs import log

LAST_SECONDS = 5  # for what requests that have ended still have to send


class Server(uvicorn.Server):
    """uvicorn's, which drains a backend when it is told to stop, and ends at the second signal, whichever it is."""

    def __init__(self, backend: Backend) -> None:
        config = uvicorn.Config(
            create_app(backend),
            http=partial(Connection, seconds=backend.options.body_seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(backend.options.drain_seconds) + LAST_SECONDS,
        )
        super().__init__(config)
        self._backend = backend

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        again = self.should_exit
        super().handle_exit(sig, frame)
        self.force_exit = self.force_exit or again

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and close what is open."""
        log("draining", seconds=self._backend.options.drain_seconds)
        draining = asyncio.create_task(self._backend.drain())
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
            await self._backend.abort()
            if self.server_state.tasks:  # have their requests' ends to tell
                await asyncio.wait(self.server_state.tasks, timeout=LAST_SECONDS)
        await asyncio.wait([draining])
        log("stopped", at_once=self.force_exit)


def listen(host: str, port: int, seconds: float) -> socket.socket:
    """Open the socket; port 0 takes a free one. A client that reads nothing for `seconds` is cut off by the kernel.

    Raises `RequestError`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as exc:
        raise RequestError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ceil(1000 * seconds))  # connections inherit it
    return sock


async def serve(open_llm: Callable[[], LLM], backend: Backend, sock: socket.socket) -> None:
    """Serve on `sock` until a signal comes; the model is loaded meanwhile. Raises what `open_llm` raises."""
    server = Server(backend)
    host, port = sock.getsockname()[:2]
    log("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}/")
    serving = asyncio.create_task(server.serve([sock]))
    try:
        loading = asyncio.create_task(asyncio.to_thread(load, open_llm))
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        with await loading as llm:
            if not serving.done():
                async with backend.serving(llm):
                    log("ready", model=backend.name, mode=llm.mode, method=llm.method)
                    await serving
    finally:
        server.should_exit = True
        await serving


def load(open_llm: Callable[[], LLM]) -> LLM:
    """Open the model and warm it up; raises what `open_llm` raises."""
    started = perf_counter()
    llm = open_llm()
    problem = warm_up(llm)
    if problem is not None:
        log("no response_format", problem=problem)
    log("loaded", seconds=round(perf_counter() - started, 1))
    return llm
