"""A real server on a loopback port, in a thread of the test: uvicorn, the application, and a tiny bundle behind it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from specdec.runtime import LLM
from specdec.serve import Backend, ServeOptions
from specdec.serve.server import Server, listen
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
    server, sock = Server(backend), listen("127.0.0.1", 0)
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
