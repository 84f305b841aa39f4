"""A connection that bounds what its client may cost while there is no request: uvicorn takes heads of any size, and
waits for one that has begun, and for the rest of a body that was answered already, for ever.

It is made of httptools' and asyncio's callbacks, and of uvicorn's `cycle` and `send_400_response`; where another
version has not got them, `mypy` and tests/test_serve_faults.py say so. This module knows bytes and seconds; it knows no
request.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 2**16  # of a request line and its headers; as much as uvicorn's other parser takes


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits. `seconds`: for the first head, and for others from their first byte.

    A head that is too large gets 400. A client that is too slow is cut off.
    """

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._head: int | None = 0  # bytes of the one that is coming; None: it is there
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; nothing was asked yet."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client's."""
        of_head = self._head is not None  # all of them; not when they end a body too
        super().data_received(data)
        if of_head and self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of a request may have {HEAD_BYTES} bytes.")
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._head = None
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = asyncio.get_running_loop().call_later(self._seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
