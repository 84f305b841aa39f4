"""The server on a Ray cluster of two nodes: what OpenAI's client sees while replicas come, die and change.

Ray takes seconds to import: only a test that runs does so.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest

from specdec.runtime import LLM, SamplingParams
from specdec.runtime.prefixes import LEAST
from support.bundles import shared_bundle
from support.gated import SECONDS

if TYPE_CHECKING:
    from support.on_ray import OnRay

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'specdec[ray]'"),
]

MODEL = "tiny"
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[OnRay]":
    """One replica, which a load of more than one request makes two."""
    from support.on_ray import two_nodes

    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0,
               "metrics_interval_s": 0.1, "look_back_period_s": 0.5}  # fmt: skip
    with two_nodes(tmp_path_factory.mktemp("ray")) as cluster:
        cluster.deploy(shared_bundle(), "--replicas", "1-2", "--max-rows", "4", autoscaling_config=scaling)
        yield cluster


def until(true: Callable[[], Any]) -> None:
    from support.on_ray import until as wait

    wait(true)


@pytest.fixture(scope="module")
def scaled(on_ray: "OnRay") -> "OnRay":
    """Two replicas, because there were more requests than one."""
    assert len(on_ray.replicas()) == 1
    streams = [on_ray.client().completions.create(model=MODEL, prompt=str(at), stream=True, **LONG) for at in range(4)]
    try:
        until(lambda: len(on_ray.replicas()) == 2)
    finally:
        for stream in streams:
            stream.close()
    until(lambda: not any(on_ray.metric("vllm:num_requests_running").values()))
    return on_ray


def test_a_load_makes_one_replica_two_on_two_nodes(scaled: "OnRay") -> None:
    assert len({each["node_id"] for each in scaled.replicas()}) == 2


def test_the_client_sees_what_a_single_server_shows(scaled: "OnRay") -> None:
    client, prompt = scaled.client(), "the quick brown fox"
    with LLM(shared_bundle()) as llm:
        expected = llm.generate([prompt], SamplingParams(max_new_tokens=30))[0].text
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "temperature": 0}
    raw = client.completions.with_raw_response.create(extra_headers={"x-request-id": "mine"}, **ask)
    assert raw.parse().choices[0].text == expected
    assert raw.headers["x-request-id"] == "mine"
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **ask)) == expected
    assert client.models.list().data[0].id == MODEL
    with pytest.raises(openai.BadRequestError, match="unknown field: colour"):
        client.completions.create(extra_body={"colour": 1}, **ask)
    with pytest.raises(openai.AuthenticationError):
        scaled.client(api_key="wrong").completions.create(**ask)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**ask, "model": "other"})
    assert httpx.get(f"{scaled.url}/ready").json() == {"status": "ready"}
    assert "<html" in httpx.get(f"{scaled.url}/").text


def test_a_second_turn_goes_to_the_replica_that_has_its_first(scaled: "OnRay") -> None:
    client = scaled.client()
    for number in range(8):  # by chance all of them would in one of 256 runs
        turns: list[Any] = [{"role": "user", "content": f"{number} quick brown foxes jump over the lazy dog " * 8}]
        first = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8, temperature=0)
        turns += [first.choices[0].message, {"role": "user", "content": "go on"}]
        second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8, temperature=0)
        assert second.usage.prompt_tokens_details.cached_tokens >= LEAST
    served = scaled.metric("vllm:generation_tokens_total")
    assert len(served) == 2
    assert all(served.values()), "both had some of them"


def test_a_conversation_whose_replica_is_full_is_answered_by_another(scaled: "OnRay") -> None:
    """Of eight streams that begin alike, four run on each: a replica has four rows."""
    ask = {"model": MODEL, "prompt": "all alike " * 6, "stream": True, **LONG}
    streams = [scaled.client().completions.create(**ask) for _ in range(8)]
    until(lambda: list(scaled.metric("vllm:num_requests_running").values()) == [4, 4])
    for stream in streams:
        stream.close()
    until(lambda: not any(scaled.metric("vllm:num_requests_running").values()))


def test_a_client_that_leaves_ends_its_request_in_the_replica(scaled: "OnRay") -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"'
    before = sum(scaled.metric(aborted).values())
    stream = scaled.client().completions.create(model=MODEL, prompt="a", stream=True, **LONG)
    next(iter(stream))
    stream.close()
    until(lambda: sum(scaled.metric(aborted).values()) == before + 1)
    assert not any(scaled.metric("vllm:num_requests_running").values())


class Load:
    """Clients that ask until they are told to stop. `ends`: answers, and the codes of errors."""

    def __init__(self, on_ray: "OnRay", **options: Any) -> None:
        self.ends: list[str] = []
        self.fingerprints = set[str]()
        self._on_ray, self._options, self._stop = on_ray, options, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(6)]

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _ask(self, number: int) -> None:
        client = self._on_ray.client()
        while not self._stop.is_set():
            ask = {"model": MODEL, "prompt": f"{number} " * 40, "max_tokens": 60, "temperature": 0, **self._options,
                   "extra_body": {"ignore_eos": True}}  # fmt: skip
            try:
                if number % 2:
                    answer = client.completions.create(**ask)
                    self.fingerprints.add(answer.system_fingerprint or "")
                    reason = answer.choices[0].finish_reason
                else:
                    *_, last = client.completions.create(stream=True, **ask)
                    reason = last.choices[0].finish_reason
                self.ends.append("answer" if reason == "length" else f"finish_reason {reason}")
            except openai.APIError as error:
                self.ends.append(f"{'whole' if number % 2 else 'stream'} {error.code}")


def test_a_replica_that_is_killed_under_load_costs_at_most_the_streams_it_had_begun(scaled: "OnRay") -> None:
    before = scaled.replicas()
    with Load(scaled) as load:
        until(lambda: len(load.ends) > 6)
        os.kill(before[0]["pid"], signal.SIGKILL)
        until(lambda: {each["pid"] for each in scaled.replicas()} - {each["pid"] for each in before})
        done = len(load.ends)
        until(lambda: len(load.ends) > done + 12)
    assert set(load.ends) <= {"answer", "stream replica_lost"}
    assert load.ends.count("stream replica_lost") <= 3
    assert load.ends[-6:] == ["answer"] * 6


def test_an_engine_that_has_ended_is_replaced(scaled: "OnRay") -> None:
    before = {each["actor_name"] for each in scaled.replicas()}
    scaled.end_an_engine()
    until(lambda: len({each["actor_name"] for each in scaled.replicas()} - before) == 1)


def test_the_command_updates_without_a_failed_request_and_lets_requests_end_at_a_signal(
    scaled: "OnRay", tmp_path: Path
) -> None:
    shutil.copytree(shared_bundle(), tmp_path / "next")
    manifest = json.loads((tmp_path / "next" / "specdec.json").read_text())
    manifest["source"]["name"] = "next"
    (tmp_path / "next" / "specdec.json").write_text(json.dumps(manifest))
    words = [sys.executable, "-m", "specdec.serve.cli", *scaled.command(tmp_path / "next", "--replicas", "2")]
    with Load(scaled) as load:
        until(lambda: len(load.ends) > 6)
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        told = [*takewhile(lambda line: '"event":"ready"' not in line, process.stderr)]
        assert process.poll() is None, told
        done = len(load.ends)
        until(lambda: len(load.ends) > done + 12)
    assert set(load.ends) == {"answer"}
    assert len(load.fingerprints) == 2

    stream = scaled.client().completions.create(model=MODEL, prompt="a", stream=True, **LONG)
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    _, rest = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, rest
    assert rest.splitlines()[-1] == "specdec-serve: stopped by SIGTERM"
    assert "specdec" not in scaled.applications()
