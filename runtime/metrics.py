"""Counters, gauges and histograms of a service: plain objects, and their text as Prometheus reads it.

Names and meanings are vLLM's where it has a counterpart, with `specdec:` in place of `vllm:`. All may be changed and
read from any thread. This module knows what is counted; it knows no server, no scheduler and no thread.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from threading import Lock
from typing import ClassVar, get_args

from specdec.runtime.request import FinishReason, Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `Metrics.render`, for HTTP
LATENCIES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS = tuple(float(2**n) for n in range(18))
LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


class Metric(ABC):
    """What counters, gauges and histograms share: a name, a line of help, and their text."""

    kind: ClassVar[str]

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self._lock = Lock()

    def render(self) -> str:
        """Lines of the Prometheus text format 0.0.4, each with its end."""
        text = self.text.replace("\\", r"\\").replace("\n", r"\n")
        head = f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n"
        with self._lock:
            return head + "".join(f"{self.name}{sample} {_number(value)}\n" for sample, value in self._samples())

    @abstractmethod
    def _samples(self) -> Iterator[tuple[str, float]]:
        """What follows the name (suffix and labels), and the value; `_lock` is held."""


class Counter(Metric):
    """A sum that only grows; with `label`, one sum for each value of that label, of which `values` are there at 0."""

    kind = "counter"

    def __init__(self, name: str, text: str, label: str | None = None, values: Sequence[str] = ()) -> None:
        super().__init__(name, text)
        self.label = label
        self._sums = dict.fromkeys(values if label else ("",), 0.0)

    def inc(self, amount: float = 1, of: str = "") -> None:
        """Add `amount` to the sum of label value `of`. Raises `ValueError` when it is negative."""
        if amount < 0:
            raise ValueError(f"{self.name} only grows: {amount} cannot be added")
        with self._lock:
            self._sums[of] = self._sums.get(of, 0.0) + amount

    def value(self, of: str = "") -> float:
        """The sum of label value `of`."""
        with self._lock:
            return self._sums.get(of, 0.0)

    def values(self) -> dict[str, float]:
        """The sums by label value; without a label there is one, of the empty text."""
        with self._lock:
            return dict(self._sums)

    def _samples(self) -> Iterator[tuple[str, float]]:
        for value, total in self._sums.items():
            yield (f'{{{self.label}="{_escaped(value)}"}}' if self.label else "", total)


class Gauge(Metric):
    """A value that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self._value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self._value = value

    @property
    def value(self) -> float:
        """The value."""
        with self._lock:
            return self._value

    def _samples(self) -> Iterator[tuple[str, float]]:
        yield "", self._value


class Histogram(Metric):
    """Observed values, counted by upper bounds: `buckets`, ascending, and infinity."""

    kind = "histogram"

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        super().__init__(name, text)
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"{name}: bounds of buckets ascend, {buckets} do not")
        self._bounds = (*buckets, inf)
        self._counts = [0] * len(self._bounds)  # of values above the bound before, not cumulative
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        with self._lock:
            return sum(self._counts)

    @property
    def sum(self) -> float:
        """Their sum."""
        with self._lock:
            return self._sum

    def buckets(self) -> list[tuple[str, int]]:
        """Upper bounds as Prometheus writes them, the last one infinite, and how many values were not above each."""
        with self._lock:
            return [(_number(bound), count) for bound, count in self._cumulative()]

    def _cumulative(self) -> Iterator[tuple[float, int]]:
        return zip(self._bounds, accumulate(self._counts), strict=True)

    def _samples(self) -> Iterator[tuple[str, float]]:
        for bound, count in self._cumulative():
            yield f'_bucket{{le="{_number(bound)}"}}', count
        yield "_sum", self._sum
        yield "_count", sum(self._counts)


class Metrics:
    """What a service counts of its requests, and what it holds now. Seconds and bytes.

    Requests count round by round, so that a long one shows before it ends. Mean accepted length of all requests:
    generation tokens over rounds; acceptance rate: accepted over proposed draft tokens.
    """

    def __init__(self) -> None:
        self.num_requests_running = Gauge("specdec:num_requests_running", "Requests that hold a row of the cache.")
        self.num_requests_waiting = Gauge("specdec:num_requests_waiting", "Requests that wait for a row.")
        self.kv_cache_usage_perc = Gauge(
            "specdec:kv_cache_usage_perc", "Share of the cache budget that running requests may grow to; 1 is all."
        )
        self.kv_cache_bytes = Gauge(
            "specdec:kv_cache_bytes", "Bytes that the caches of running requests may grow to, the draft's included."
        )
        self.prompt_tokens_total = Counter("specdec:prompt_tokens_total", "Prompt tokens of requests that were begun.")
        self.prefix_cache_queries_total = Counter(
            "specdec:prefix_cache_queries_total", "Prompt tokens that were looked for in the caches of earlier texts."
        )
        self.prefix_cache_hits_total = Counter(
            "specdec:prefix_cache_hits_total", "Prompt tokens whose cache an earlier text had left."
        )
        self.generation_tokens_total = Counter("specdec:generation_tokens_total", "Tokens that were generated.")
        self.request_success_total = Counter(
            "specdec:request_success_total",
            "Requests that ended, by the reason.",
            "finished_reason",
            get_args(FinishReason),
        )
        self.rounds_total = Counter(
            "specdec:rounds_total", "Target passes of requests; one for n requests together counts n times."
        )
        self.spec_decode_num_drafts_total = Counter(
            "specdec:spec_decode_num_drafts_total", "Drafts that were verified: rounds of requests with one."
        )
        self.spec_decode_num_draft_tokens_total = Counter(
            "specdec:spec_decode_num_draft_tokens_total", "Tokens that were drafted and verified."
        )
        self.spec_decode_num_accepted_tokens_total = Counter(
            "specdec:spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted and emitted."
        )
        self.spec_decode_num_accepted_tokens_per_pos_total = Counter(
            "specdec:spec_decode_num_accepted_tokens_per_pos_total",
            "Drafts that were kept to a position, the first one being 0, and beyond.",
            "position",
        )
        self.request_prompt_tokens = Histogram(
            "specdec:request_prompt_tokens", "Prompt tokens of requests with an answer.", TOKENS
        )
        self.request_generation_tokens = Histogram(
            "specdec:request_generation_tokens", "Generated tokens of requests with an answer.", TOKENS
        )
        self.request_queue_time_seconds = Histogram(
            "specdec:request_queue_time_seconds", "From submission until a row was free.", LATENCIES
        )
        self.time_to_first_token_seconds = Histogram(
            "specdec:time_to_first_token_seconds", "From submission to the first token.", LATENCIES
        )
        self.inter_token_latency_seconds = Histogram(
            "specdec:inter_token_latency_seconds",
            "Time since the round before over the tokens of a round, once for each of them; first rounds do not count.",
            GAPS,
        )
        self.e2e_request_latency_seconds = Histogram(
            "specdec:e2e_request_latency_seconds", "From submission to the end of requests with an answer.", LATENCIES
        )
        self.request_mean_accepted_length = Histogram(
            "specdec:request_mean_accepted_length",
            "Tokens per round of requests with an answer, the target's own token included.",
            LENGTHS,
        )

    def render(self) -> str:
        """All of them in the Prometheus text format 0.0.4 (`CONTENT_TYPE`)."""
        return "".join(metric.render() for metric in vars(self).values())


class Recorder:
    """Counts one request, `row`, into `metrics`: what is new since the last time."""

    def __init__(self, metrics: Metrics, row: Row) -> None:
        self._metrics, self._row = metrics, row
        self._tokens = self._rounds = self._proposed = self._accepted = 0
        self._last = row.submitted

    def record(self, now: float) -> None:
        """Count what happened until `now` (seconds of `perf_counter`); a row that has ended is recorded once."""
        metrics, stats, reason = self._metrics, self._row.stats, self._row.finish_reason
        if stats.new_tokens > self._tokens:
            self._record_times(stats.new_tokens - self._tokens, now)
        metrics.generation_tokens_total.inc(stats.new_tokens - self._tokens)
        metrics.rounds_total.inc(stats.rounds - self._rounds)
        for each in stats.history[self._rounds :]:
            metrics.spec_decode_num_drafts_total.inc(each.depth > 0)
            for position in range(each.kept):
                metrics.spec_decode_num_accepted_tokens_per_pos_total.inc(of=str(position))
        metrics.spec_decode_num_draft_tokens_total.inc(stats.draft_tokens_proposed - self._proposed)
        metrics.spec_decode_num_accepted_tokens_total.inc(stats.draft_tokens_accepted - self._accepted)
        self._tokens, self._rounds = stats.new_tokens, stats.rounds
        self._proposed, self._accepted = stats.draft_tokens_proposed, stats.draft_tokens_accepted
        if reason:
            metrics.request_success_total.inc(of=reason)
        if reason in ("stop", "length"):
            metrics.e2e_request_latency_seconds.observe(now - self._row.submitted)
            metrics.request_mean_accepted_length.observe(stats.mean_accepted_length)
            metrics.request_prompt_tokens.observe(stats.prompt_tokens)
            metrics.request_generation_tokens.observe(stats.new_tokens)

    def _record_times(self, tokens: int, now: float) -> None:
        """Count when the `tokens` of a round came."""
        metrics, stats = self._metrics, self._row.stats
        if self._tokens:
            metrics.inter_token_latency_seconds.observe((now - self._last) / tokens, tokens)
        else:
            metrics.prompt_tokens_total.inc(stats.prompt_tokens)
            metrics.prefix_cache_queries_total.inc(stats.prompt_tokens)
            metrics.prefix_cache_hits_total.inc(stats.reused_tokens)
            metrics.request_queue_time_seconds.observe(stats.queue_ms / 1000)
            metrics.time_to_first_token_seconds.observe(stats.ttft_ms / 1000)
        self._last = now


def _number(value: float) -> str:
    """As Prometheus writes it: 1.0, 0.005, +Inf."""
    return "+Inf" if value == inf else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
