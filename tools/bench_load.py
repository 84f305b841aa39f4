"""Offered load: requests that arrive when they arrive (a Poisson process), whether the service keeps up or not.

Every method gets the same prompts at the same times. Latencies count from when a request was due, so a service that
holds its clients up does not look faster for it. This module knows `AsyncLLM` and clocks; it chooses no prompts.
"""

import asyncio
from collections.abc import Sequence
from time import perf_counter

import msgspec
import numpy as np

from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.tools.bench_run import as_answer
from specdec.tools.intervals import Percentiles, percentiles


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One method under one rate of requests. What each figure means: `bench_report.DEFINITIONS`."""

    method: str
    offered_per_second: float
    requests: int
    rows: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    queue_ms: Percentiles | None
    latency_ms: Percentiles | None
    most_waiting: int


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average; the first one at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *map(float, gaps.cumsum())]


def offer(
    method: str, llm: LLM, params: SamplingParams, prompts: Sequence[Sequence[int]], rate: float, seed: int
) -> LoadFigures:
    """Submit `prompts` at `rate` a second, read all answers, and say how long they took."""
    return asyncio.run(_offer(method, llm, params, prompts, arrivals(rate, len(prompts), seed), rate))


async def _offer(
    method: str, llm: LLM, params: SamplingParams, prompts: Sequence[Sequence[int]], due: Sequence[float], rate: float
) -> LoadFigures:
    async with AsyncLLM(llm, most_waiting=len(prompts)) as service:
        started, waiting = perf_counter(), list[float]()

        async def ask(prompt: Sequence[int], at: float) -> tuple[float, float, float, list[float], int]:
            """Milliseconds to the first token, in the queue, in all, between tokens; and tokens."""
            await asyncio.sleep(started + at - perf_counter())
            late = (perf_counter() - started - at) * 1000
            stream = service.submit(prompt, params)
            waiting.append(service.metrics.num_requests_waiting.value)
            answer = as_answer(await stream.result(), 0, 1)
            total = (perf_counter() - started - at) * 1000
            return late + answer.ttft_ms, late + answer.queue_ms, total, answer.gaps_ms, len(answer.token_ids)

        found = await asyncio.gather(*(ask(prompt, at) for prompt, at in zip(prompts, due, strict=True)))
        seconds = perf_counter() - started
        first, queue, total, gaps, tokens = zip(*found, strict=True)
        return LoadFigures(
            method=method,
            offered_per_second=rate,
            requests=len(prompts),
            rows=llm.manifest.limits.max_batch,
            seconds=seconds,
            requests_per_second=len(prompts) / seconds,
            tokens_per_second=sum(tokens) / seconds,
            ttft_ms=percentiles(first),
            inter_token_ms=percentiles([gap for of in gaps for gap in of]),
            queue_ms=percentiles(queue),
            latency_ms=percentiles(total),
            most_waiting=int(max(waiting)),
        )
