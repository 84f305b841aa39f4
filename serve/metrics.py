"""Metrics for Prometheus: the runtime's, under vLLM's names where it has a counterpart, and the server's own.

Those of the runtime are read when they are asked for; nothing is counted twice. This module knows names and the text
format's library; what is counted is `specdec.runtime.metrics`'.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import Counter as HttpCounter
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from specdec.runtime.metrics import Counter, Gauge, Histogram
from specdec.serve.backend import Backend

# The runtime's that vLLM does not have; all others are vLLM's, of the same meaning.
OWN = {"kv_cache_bytes", "rounds_total", "request_mean_accepted_length"}


class RuntimeCollector(Collector):
    """What a backend's runtime counts, labelled with the model's name; nothing while there is no model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """Read all metrics."""
        for name, metric in vars(self._backend.metrics).items() if self._backend.metrics else ():
            yield self._family(("specdec:" if name in OWN else "vllm:") + name, metric)

    def _family(self, name: str, metric: object) -> Metric:
        model = [self._backend.name]
        match metric:
            case Counter():
                labels = ["model_name", *([metric.label] if metric.label else [])]
                counter = CounterMetricFamily(name, metric.text, labels=labels)
                for value, total in metric.values().items():
                    counter.add_metric([*model, *([value] if metric.label else [])], total)
                return counter
            case Gauge():
                gauge = GaugeMetricFamily(name, metric.text, labels=["model_name"])
                gauge.add_metric(model, metric.value)
                return gauge
            case Histogram():
                histogram = HistogramMetricFamily(name, metric.text, labels=["model_name"])
                histogram.add_metric(model, metric.buckets(), metric.sum)
                return histogram
        raise TypeError(f"{name} is no metric")


class HttpMetrics:
    """A registry with the runtime's metrics, the process's, and answers counted by path and status."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RuntimeCollector(backend))
        ProcessCollector(registry=self._registry)
        self._answers = HttpCounter(
            "specdec:http_requests",
            "Answers by path and status; 499 is a client that went away before.",
            ["path", "status"],
            registry=self._registry,
        )

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(path, str(status)).inc()

    def collect(self) -> list[Metric]:
        """All metrics as they are now."""
        return list(self._registry.collect())

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header asks for, and its content type."""
        return _rendered(self._registry, accept)


class ByReplica(Collector):
    """What several processes count, each sample with the label `replica`; `collected`: by the name of the replica."""

    def __init__(self, collected: Mapping[str, Sequence[Metric]]) -> None:
        self._collected = collected

    def collect(self) -> Iterator[Metric]:
        """A family of each name, with the samples of all."""
        families: dict[str, Metric] = {}
        for replica, metrics in self._collected.items():
            for each in metrics:
                family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type, each.unit))
                family.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in each.samples
                ]
        yield from families.values()

    def render(self, accept: str) -> tuple[bytes, str]:
        """See `HttpMetrics`."""
        registry = CollectorRegistry()
        registry.register(self)
        return _rendered(registry, accept)


def _rendered(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type
