"""What a server refuses, ends and survives: keys, limits, queues, deadlines, clients that leave, engines that fail."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from specdec.engines.contract import Chunk
from specdec.engines.errors import EngineError, RequestError
from specdec.runtime import LLM, SamplingParams
from specdec.serve import ServeOptions
from specdec.serve.options import read_keys
from support.bundles import shared_bundle
from support.gated import SECONDS, Gate, gated_llm
from support.served import MODEL, is_idle, served, started, until

ASK: dict[str, Any] = {"model": MODEL, "prompt": "d", "max_tokens": 200, "temperature": 0,
                       "extra_body": {"ignore_eos": True}}  # fmt: skip


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def llm(gate: Gate) -> Iterator[LLM]:
    with gated_llm(shared_bundle(), gate) as llm:
        yield llm


def test_keys_are_wanted_where_there_are_some(llm: LLM) -> None:
    with served(llm, api_keys=("first", "second")) as server:
        for key in ("wrong", "", "first ", "FIRST"):
            with pytest.raises(openai.APIError) as refused:
                server.client(api_key="none", default_headers={"Authorization": f"Bearer {key}x"}).models.list()
            assert isinstance(refused.value, openai.AuthenticationError)
        for key in ("first", "second"):
            assert server.client(api_key=key).models.list().data[0].id == MODEL
        bare = httpx.get(f"{server.url}/v1/models")
        assert (bare.status_code, bare.headers["www-authenticate"]) == (401, "Bearer")
        assert bare.json()["error"]["code"] == "invalid_api_key"
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready", "/metrics", "/")] == [
            200
        ] * 4


def test_without_keys_only_local_names_are_served_and_no_other_page(llm: LLM) -> None:
    with served(llm) as server:
        rebound = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "wrong_host")
        for host in ("localhost", "127.0.0.1:1", "[::1]:80"):
            found = httpx.get(f"{server.url}/v1/models", headers={"host": host, "origin": "http://evil.example"})
            assert found.status_code == 200
            assert "access-control-allow-origin" not in found.headers
    with served(llm, no_auth=True) as server:
        assert httpx.get(f"{server.url}/v1/models", headers={"host": "any.example"}).status_code == 200


def test_others_are_served_with_keys_or_on_purpose(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="others could use the server"):
        ServeOptions().check_host("0.0.0.0")
    for options in (ServeOptions(api_keys=("k",)), ServeOptions(no_auth=True)):
        options.check_host("0.0.0.0")
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        ServeOptions().check_host(host)
    file = tmp_path / "keys"
    file.write_text("# mine\none\n\n two \n")
    assert read_keys(file, {"SPECDEC_API_KEYS": "three, four,"}) == ("three", "four", "one", "two")
    file.write_text("# none\n")
    with pytest.raises(RequestError, match="has no key"):
        read_keys(file, {})
    with pytest.raises(RequestError, match="max_queue must be at least 1"):
        ServeOptions(max_queue=0)


def test_bodies_are_bounded_in_size_and_time(llm: LLM) -> None:
    with served(llm, max_body_bytes=1000, body_seconds=0.2) as server:
        url = f"{server.url}/v1/completions"
        large = httpx.post(url, content=b"x" * 1001)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        chunked = httpx.post(url, content=iter([b"x" * 600] * 2))
        assert chunked.status_code == 413
        for body, code in ((b"{", "invalid_json"), (b"[1]", "invalid_value"), (b"", "invalid_value"),
                           (b'{"model": "tiny"}', "invalid_value"), (b"\xff", "invalid_json")):  # fmt: skip
            found = httpx.post(url, content=body, headers={"content-type": "application/json"})
            assert (found.status_code, found.json()["error"]["code"]) == (400, code), body
        assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["code"] == "no_such_route"
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        assert server.client().models.list().data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(llm: LLM, gate: Gate, stream: bool) -> None:
    with served(llm) as server:
        gate.close()
        body = {**ASK, **ASK["extra_body"], "n": 2, "stream": stream}
        del body["extra_body"]
        raw = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(raw) + raw)  # fmt: skip
        gate.arrive()
        gate.let(3)
        if stream:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.close()
        service = server.backend._service
        assert service is not None
        until(lambda: all(row.aborted for row in service._requests))
        gate.open()
        until(lambda: is_idle(server))
        assert service.metrics.request_success_total.value(of="abort") == 2
        assert service.metrics.generation_tokens_total.value() < 20
        assert 'status="499"' in httpx.get(f"{server.url}/metrics").text


def test_a_full_queue_is_told_with_a_time_to_come_back(llm: LLM, gate: Gate) -> None:
    with served(llm, max_rows=1, max_queue=1) as server:
        gate.close()
        answers: list[str] = []

        def ask() -> None:
            answers.append(server.client().completions.create(**ASK).choices[0].text)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        gate.arrive()
        threads[1].start()
        service = server.backend._service
        assert service is not None
        until(lambda: len(service._requests) == 2)
        assert httpx.get(f"{server.url}/ready").json() == {"status": "busy"}
        with pytest.raises(openai.RateLimitError) as refused:
            server.client().completions.create(**ASK)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "queue_full"
        gate.open()
        for thread in threads:
            thread.join()
        assert answers[0] == answers[1]
        assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(llm: LLM, gate: Gate, stream: bool) -> None:
    with served(llm, deadline_seconds=0.5) as server:
        gate.close()
        with pytest.raises(openai.APIError) as late:
            server.client().completions.create(stream=stream, **ASK)
        assert isinstance(late.value, openai.InternalServerError)
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        gate.open()
        until(lambda: is_idle(server))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_those_of_its_pass_and_the_server_lives(llm: LLM, gate: Gate, stream: bool) -> None:
    passes = []

    def fail(chunk: Chunk) -> None:
        passes.append(chunk)
        if len(passes) == 6:
            raise ValueError("planted")

    expected = llm.generate("d", SamplingParams(max_new_tokens=200, ignore_eos=True))[0].text
    with served(llm) as server:
        gate.fault = fail
        ask = server.client().completions.create
        with pytest.raises(openai.APIError) as failed:
            list(ask(stream=stream, **ASK))  # a stream has begun by then
        assert failed.value.code == "internal_error"  # as an event, where the answer has begun
        assert "an error of the server: its log has more, at request" in failed.value.message
        if not stream:
            assert failed.value.status_code == 500  # type: ignore[attr-defined]
        assert server.client().completions.create(**ASK).choices[0].text == expected


def test_an_engine_that_fails_is_unhealthy_until_it_answers_again(llm: LLM, gate: Gate) -> None:
    def fail(chunk: Chunk) -> None:
        raise ValueError("planted")

    with served(llm) as server:
        asyncio.run(server.backend.check_health())
        gate.fault = fail
        with pytest.raises(openai.APIError):
            server.client().completions.create(**ASK)
        for _ in range(2):
            with pytest.raises(ValueError, match="planted"):
                asyncio.run(server.backend.check_health())
        gate.fault = None
        asyncio.run(server.backend.check_health())
        metrics = server.backend.metrics
        assert metrics is not None
        rounds = metrics.rounds_total.value()
        asyncio.run(server.backend.check_health())
        assert metrics.rounds_total.value() == rounds, "nothing is asked of one that answers"


def test_a_server_whose_engine_thread_has_ended_is_unhealthy(llm: LLM) -> None:
    with served(llm) as server:
        asyncio.run(server.backend.abort())
        with pytest.raises(EngineError, match="the engine thread has ended"):
            asyncio.run(server.backend.check_health())


def test_metrics_carry_vllms_names(llm: LLM) -> None:
    with served(llm) as server:
        server.client().completions.create(**ASK)
        text = httpx.get(f"{server.url}/metrics").text
    for line in (
        "vllm:num_requests_running{model_name=\"tiny\"} 0.0",
        "vllm:generation_tokens_total{model_name=\"tiny\"} 200.0",
        "vllm:request_success_total{finished_reason=\"length\",model_name=\"tiny\"} 1.0",
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\"} 1.0",
        "vllm:e2e_request_latency_seconds_bucket{le=\"+Inf\",model_name=\"tiny\"} 1.0",
        "vllm:spec_decode_num_drafts_total{model_name=\"tiny\"} 0.0",
        "specdec:rounds_total{model_name=\"tiny\"} 200.0",
        "specdec:http_requests_total{path=\"/v1/completions\",status=\"200\"} 1.0",
    ):  # fmt: skip
        assert line in text


def test_the_command_serves_drains_and_keeps_secrets_out_of_its_logs() -> None:
    process, url, _ = started(SPECDEC_API_KEYS="hidden-key")
    client = openai.OpenAI(base_url=url + "v1", api_key="hidden-key", max_retries=0)
    model = client.models.list().data[0].id
    stream = client.completions.create(model=model, prompt="hidden words", max_tokens=600, stream=True, temperature=0,
                                       extra_body={"ignore_eos": True})  # fmt: skip
    first = next(iter(stream)).choices[0].text
    process.send_signal(signal.SIGTERM)
    rest = [chunk.choices[0] for chunk in stream]
    assert rest[-1].finish_reason == "length", "what had begun was finished"
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert "hidden" not in err
    assert first + "".join(choice.text for choice in rest) not in err
    *lines, last = err.splitlines()
    events = [json.loads(line) for line in lines]
    (told,) = (each for each in events if each["event"] == "request" and each["path"] == "/v1/completions")
    assert (told["status"], told["completion_tokens"], told["finish_reasons"]) == (200, 600, ["length"])
    assert [each["event"] for each in events][-1] == "stopped"
    assert last == "specdec-serve: stopped by SIGTERM"


def test_what_does_not_end_in_time_gets_an_error_and_a_second_signal_ends_at_once() -> None:
    for second in (False, True):
        process, url, _ = started("--drain-seconds", "1000" if second else "0.01")
        client = openai.OpenAI(base_url=url + "v1", api_key="x", max_retries=0)
        ask = {"model": client.models.list().data[0].id, "prompt": ["a"] * 8, "max_tokens": 1000, "stream": True,
               "extra_body": {"ignore_eos": True}}  # fmt: skip
        stream = client.completions.create(**ask)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        if second:
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
        with pytest.raises((openai.APIError, httpx.HTTPError)) as ended:
            list(stream)
        if not second:
            assert "shutting down" in str(ended.value)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
        process.communicate()
