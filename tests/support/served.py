"""A real server on a loopback port, in a thread of the test: uvicorn, the application, and a tiny bundle behind it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from specdec.runtime import LLM
from specdec.serve import Backend, ServeOptions
from specdec.serve.server import Server, listen
from support.bundles import shared_bundle
from support.gated import SECONDS

MODEL = "tiny"


class Served:
    """A server that runs; `client()` is OpenAI's own."""

    def __init__(self, backend: Backend, server: Server, port: int) -> None:
        self.backend, self.server, self.port = backend, server, port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})


@contextmanager
def served(llm: LLM, **options: Any) -> Iterator[Served]:
    """Serve `llm` as `MODEL` until the block ends; it stays open."""
    backend = Backend(ServeOptions(**{"model": MODEL, **options}))
    server, sock = Server(backend), listen("127.0.0.1", 0, backend.options.body_seconds)
    ready = threading.Event()

    async def run() -> None:
        async with backend.serving(llm):
            ready.set()
            await server.serve([sock])

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield Served(backend, server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def is_idle(server: Served) -> bool:
    service = server.backend._service
    assert service is not None
    return not service._requests and not service._scheduler.busy and service._scheduler._target.rows == 0


def started(*options: str, **environment: str) -> tuple[subprocess.Popen[str], str, list[dict[str, Any]]]:
    """The command on a free port, once it is ready; its address, and its lines of log so far."""
    command = [sys.executable, "-m", "specdec.serve.cli", str(shared_bundle()), "--port", "0", "--method", "ngram"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, **environment})  # fmt: skip
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1]["event"] == "ready":
            return process, lines[0]["url"], lines
    raise AssertionError(lines)
