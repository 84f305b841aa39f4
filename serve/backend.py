"""The model behind the API: absent while it is loaded, then asked by many, then drained.

It is the only place where the server meets `LLM` and `AsyncLLM`. This module knows states and requests; it knows no
HTTP.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Literal

import msgspec

from specdec.engines.errors import BusyError, EngineError, RequestError, SpecdecError
from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.delivery import Stream
from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.llm import LLM
from specdec.runtime.metrics import Metrics
from specdec.runtime.params import SamplingParams
from specdec.serve.errors import ApiError, draining, from_runtime
from specdec.serve.options import ServeOptions
from specdec.serve.prepare import Body, choices_of

State = Literal["loading", "ready", "busy", "draining"]

TOKENIZER_THREADS = 2
LONGEST_RETRY = 60  # seconds
PROBE_SECONDS = 5  # for one token, of an engine that failed
HEADROOM = 64  # requests that arrive, are refused or are still being sent, beyond those that run and wait


class Backend:
    """One model under one name, with the limits of `options`."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.created = int(time.time())
        self.name = options.model or ""  # of the model; the bundle's once it is known
        self.fingerprint = ""
        self._llm: LLM | None = None
        self._service: AsyncLLM | None = None
        self._rows = 1
        self._stopping = False
        self._failures = 0.0  # requests that the engine had failed when it was last known to answer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "specdec-tokenize")

    @asynccontextmanager
    async def serving(self, llm: LLM) -> AsyncIterator[None]:
        """Take requests for `llm` while open, and cancel those that are left then. Raises `RequestError`."""
        options = self.options
        async with AsyncLLM(
            llm, max_rows=options.max_rows, most_waiting=options.max_queue, kv_bytes=options.kv_bytes
        ) as service:
            self.name = options.model or llm.manifest.source.name
            self.fingerprint = _fingerprint(llm)
            self._rows = options.max_rows or llm.manifest.limits.max_batch
            self._llm, self._service = llm, service
            try:
                yield
            finally:
                self._stopping = True
                self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def state(self) -> State:
        """What a request would meet."""
        if self._stopping:
            return "draining"
        if self._service is None:
            return "loading"
        waiting = self._service.metrics.num_requests_waiting.value
        return "busy" if waiting >= self.options.max_queue else "ready"

    @property
    def llm(self) -> LLM:
        """The model. Raises `ApiError` while there is none."""
        if self._llm is None:
            raise ApiError(503, "the model is being loaded: try again later", code="loading", retry=1)
        return self._llm

    @property
    def metrics(self) -> Metrics | None:
        """What the runtime counts, once there is a model."""
        return self._service.metrics if self._service else None

    @property
    def most_requests(self) -> int:
        """Requests that may be open at a time: sent, waiting, running or being read."""
        return self._rows + self.options.max_queue + HEADROOM

    @property
    def retry_after(self) -> int:
        """Seconds after which a row may be free: the mean time of an answer, over the rows."""
        latency = self.metrics.e2e_request_latency_seconds if self.metrics else None
        mean = latency.sum / latency.count if latency and latency.count else 1.0
        return max(1, min(LONGEST_RETRY, math.ceil(mean / self._rows)))

    async def submit(self, body: Body) -> list[Stream]:
        """Check a request and let it run; return a stream for each choice, those of the first prompt first.

        Prompts are tokenized in another thread. Raises `ApiError`.
        """
        with self.told():
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._submit, body)

    @contextmanager
    def told(self) -> Iterator[None]:
        """While open, errors of the runtime are raised as `ApiError`."""
        try:
            yield
        except SpecdecError as exc:
            raise from_runtime(exc, self.retry_after) from exc

    async def check_health(self) -> None:
        """Raise `EngineError` when no request ends any more; after an engine's error, what asking for one token raises.

        An engine that is too busy to say in time counts as healthy, and is asked the next time.
        """
        service = self._service
        if service is None:
            return
        if not service.alive:
            raise EngineError("the engine thread has ended: start the server again")
        failures = service.metrics.request_success_total.value("error")
        if failures == self._failures:
            return
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await service.generate([self.llm.manifest.tokenizer.eos_token_ids[0]], SamplingParams(max_new_tokens=1))
            self._failures = failures
        except (BusyError, TimeoutError):
            pass

    async def drain(self) -> None:
        """Take no more requests; those that still run after `drain_seconds` are ended with an error."""
        self._stopping = True
        if self._service and not await self._service.drain(self.options.drain_seconds):
            await self._service.aclose()

    async def abort(self) -> None:
        """Take no more requests, and end those that run with an error."""
        self._stopping = True
        if self._service:
            await self._service.aclose()

    def _submit(self, body: Body) -> list[Stream]:
        if self._stopping:
            raise draining(1)
        llm, service = self.llm, self._service
        assert service is not None, "it comes with the model"
        if body.model != self.name:
            raise ApiError(
                404, f"there is no model {body.model!r}: this server has {self.name!r}", code="model_not_found",
                param="model",
            )  # fmt: skip
        choices = choices_of(body, llm, self.options)
        streams: list[Stream] = []
        try:
            for choice in choices:
                streams.append(service.submit(choice.prompt, choice.params))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams


def warm_up(llm: LLM) -> str | None:
    """Answer once, so that no request pays for what is made at first use; return why grammars are not to be had."""
    prompt, form = [llm.manifest.tokenizer.eos_token_ids[0]], StructuredOutputsParams(json_object=True)
    llm.generate(prompt, SamplingParams(max_new_tokens=2))
    try:
        llm.generate(prompt, SamplingParams(max_new_tokens=2, structured_outputs=form))
    except RequestError as exc:
        return str(exc)
    return None


def _fingerprint(llm: LLM) -> str:
    """What decides an answer besides the request: version, bundle, mode."""
    parts = (version("specdec"), msgspec.json.encode(llm.manifest).decode(), llm.mode)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
