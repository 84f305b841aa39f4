"""Counters, gauges, histograms: what they count, and their text to the byte."""

import threading

import pytest

from specdec.runtime.metrics import Counter, Gauge, Histogram, Metrics, Recorder
from support.rows import make_row


def test_a_counter_adds_up_and_is_written_as_prometheus_reads_it() -> None:
    counter = Counter("specdec:tokens_total", "Tokens.")
    counter.inc()
    counter.inc(2.5)
    assert counter.value() == 3.5
    assert counter.render() == (
        "# HELP specdec:tokens_total Tokens.\n# TYPE specdec:tokens_total counter\nspecdec:tokens_total 3.5\n"
    )


def test_a_counter_only_grows() -> None:
    counter = Counter("n_total", "N.")
    with pytest.raises(ValueError, match="n_total only grows: -1 cannot be added"):
        counter.inc(-1)
    assert counter.value() == 0


def test_labels_start_at_zero_and_everything_is_escaped() -> None:
    counter = Counter("ends_total", "A \\ and\na line.", "reason", ("stop",))
    counter.inc(2, of='a "\\\n')
    assert counter.value(of="stop") == 0
    assert counter.value(of="never") == 0
    assert counter.render() == (
        "# HELP ends_total A \\\\ and\\na line.\n"
        "# TYPE ends_total counter\n"
        'ends_total{reason="stop"} 0.0\n'
        'ends_total{reason="a \\"\\\\\\n"} 2.0\n'
    )


def test_a_gauge_holds_the_last_value() -> None:
    gauge = Gauge("running", "Running.")
    gauge.set(3)
    gauge.set(0.25)
    assert gauge.value == 0.25
    assert gauge.render() == "# HELP running Running.\n# TYPE running gauge\nrunning 0.25\n"


def test_a_histogram_is_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram("seconds", "Seconds.", (0.005, 1, 2.5))
    for value in (0.0, 0.005, 0.25, 1.0, 3.995):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert (histogram.count, histogram.sum) == (8, 11.25)
    assert histogram.render() == (
        "# HELP seconds Seconds.\n"
        "# TYPE seconds histogram\n"
        'seconds_bucket{le="0.005"} 2.0\n'
        'seconds_bucket{le="1.0"} 4.0\n'
        'seconds_bucket{le="2.5"} 7.0\n'
        'seconds_bucket{le="+Inf"} 8.0\n'
        "seconds_sum 11.25\n"
        "seconds_count 8.0\n"
    )


@pytest.mark.parametrize("buckets", [(1.0, 0.5), (1.0, 1.0)])
def test_bounds_that_do_not_ascend_are_refused(buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="bounds of buckets ascend"):
        Histogram("seconds", "Seconds.", buckets)


def test_threads_lose_no_count() -> None:
    counter, histogram = Counter("n_total", "N."), Histogram("h", "H.", (1.0,))

    def work() -> None:
        for _ in range(5000):
            counter.inc()
            histogram.observe(2.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.value(), histogram.count, histogram.sum) == (20000, 20000, 40000)


def test_the_names_are_these() -> None:
    """What dashboards are built on."""
    kinds = {metric.name: metric.kind for metric in vars(Metrics()).values()}
    assert kinds == {
        "specdec:num_requests_running": "gauge",
        "specdec:num_requests_waiting": "gauge",
        "specdec:kv_cache_usage_perc": "gauge",
        "specdec:kv_cache_bytes": "gauge",
        "specdec:prompt_tokens_total": "counter",
        "specdec:prefix_cache_queries_total": "counter",
        "specdec:prefix_cache_hits_total": "counter",
        "specdec:generation_tokens_total": "counter",
        "specdec:request_success_total": "counter",
        "specdec:rounds_total": "counter",
        "specdec:spec_decode_num_drafts_total": "counter",
        "specdec:spec_decode_num_accepted_tokens_per_pos_total": "counter",
        "specdec:request_prompt_tokens": "histogram",
        "specdec:request_generation_tokens": "histogram",
        "specdec:spec_decode_num_draft_tokens_total": "counter",
        "specdec:spec_decode_num_accepted_tokens_total": "counter",
        "specdec:request_queue_time_seconds": "histogram",
        "specdec:time_to_first_token_seconds": "histogram",
        "specdec:inter_token_latency_seconds": "histogram",
        "specdec:e2e_request_latency_seconds": "histogram",
        "specdec:request_mean_accepted_length": "histogram",
    }


def test_every_metric_is_rendered_under_its_attributes_name() -> None:
    metrics = Metrics()
    text = metrics.render()
    assert text == "".join(metric.render() for metric in vars(metrics).values())
    assert [f"specdec:{name}" for name in vars(metrics)] == [metric.name for metric in vars(metrics).values()]
    for reason in ("stop", "length", "abort", "error"):
        assert f'specdec:request_success_total{{finished_reason="{reason}"}} 0.0\n' in text


def test_a_request_is_counted_round_by_round() -> None:
    """Two rounds of three and two tokens, half a second apart, of a request that was submitted at 10 s."""
    metrics, row = Metrics(), make_row([1, 2, 3])
    row.submitted = 10.0
    recorder, stats = Recorder(metrics, row), row.stats
    stats.queue_ms, stats.ttft_ms = 250.0, 1000.0
    stats.new_tokens, stats.rounds, stats.draft_tokens_proposed, stats.draft_tokens_accepted = 3, 1, 4, 2
    recorder.record(11.0)
    assert metrics.prompt_tokens_total.value() == 3
    assert metrics.generation_tokens_total.value() == 3
    assert metrics.request_queue_time_seconds.sum == 0.25
    assert metrics.time_to_first_token_seconds.sum == 1.0
    assert metrics.inter_token_latency_seconds.count == 0
    assert metrics.e2e_request_latency_seconds.count == 0
    stats.new_tokens, stats.rounds, stats.draft_tokens_proposed, stats.draft_tokens_accepted = 5, 2, 7, 3
    row.finish_reason = "length"
    recorder.record(11.5)
    assert metrics.prompt_tokens_total.value() == 3
    assert metrics.generation_tokens_total.value() == 5
    assert metrics.rounds_total.value() == 2
    assert metrics.spec_decode_num_draft_tokens_total.value() == 7
    assert metrics.spec_decode_num_accepted_tokens_total.value() == 3
    gaps = metrics.inter_token_latency_seconds
    assert (gaps.count, gaps.sum) == (2, 0.5)
    assert metrics.time_to_first_token_seconds.count == metrics.request_queue_time_seconds.count == 1
    assert (metrics.e2e_request_latency_seconds.count, metrics.e2e_request_latency_seconds.sum) == (1, 1.5)
    assert (metrics.request_mean_accepted_length.count, metrics.request_mean_accepted_length.sum) == (1, 2.5)
    assert metrics.request_success_total.value(of="length") == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_without_an_answer_has_no_latency_and_no_length(reason: str) -> None:
    metrics, row = Metrics(), make_row([1, 2, 3])
    row.finish_reason = reason
    Recorder(metrics, row).record(row.submitted + 1)
    assert metrics.request_success_total.value(of=reason) == 1
    assert metrics.prompt_tokens_total.value() == 0, "it was not begun"
    for histogram in ("request_queue_time_seconds", "e2e_request_latency_seconds", "request_mean_accepted_length"):
        assert getattr(metrics, histogram).count == 0
