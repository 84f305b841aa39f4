"""Clients at their worst, all at once: what each of them sees, and that nothing of them is left."""

import asyncio
import json
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.routing import Mount

from specdec.engines.contract import Chunk
from specdec.engines.errors import RequestError
from specdec.runtime import LLM, SamplingParams
from specdec.serve import Backend, ServeOptions, create_app
from specdec.serve.connection import HEAD_BYTES
from specdec.serve.requests import ChatRequest, CompletionRequest
from support.bundles import shared_bundle
from support.gated import SECONDS, Gate, gated_llm
from support.served import MODEL, Served, is_idle, served, started, until

ASK: dict[str, Any] = {"model": MODEL, "prompt": "d", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
CLIENTS = 200
LOAD = 16  # clients of a command that is told to stop


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def llm(gate: Gate) -> Iterator[LLM]:
    with gated_llm(shared_bundle(), gate) as llm:
        yield llm


def posted(server: Served, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which `body` was sent as a request for completions."""
    raw, client = json.dumps(body).encode(), socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n" % len(raw) + raw)  # fmt: skip
    return client


def connections(server: Served) -> Any:
    return server.server.server_state.connections


def alone(llm: LLM, tokens: int = 200) -> str:
    return llm.generate("d", SamplingParams(max_new_tokens=tokens, ignore_eos=True))[0].text


def test_two_hundred_clients_that_leave_cost_the_one_that_stays_nothing(llm: LLM, gate: Gate) -> None:
    """Some leave while they wait, some in the middle of their answers, and one reads on."""
    expected = alone(llm)
    with served(llm, max_queue=CLIENTS) as server:
        gate.close()
        stays = posted(server, {**ASK, "stream": True})
        gate.arrive()  # it has a row
        leave = [posted(server, {**ASK, "stream": number % 2 == 0}) for number in range(CLIENTS)]
        service = server.backend._service
        assert service is not None
        until(lambda: len(service._requests) == CLIENTS + 1)
        gate.let(5)
        for client in leave:
            client.close()
        until(lambda: sum(row.aborted for row in service._requests) >= CLIENTS)
        gate.open()
        text = "".join(event["choices"][0]["text"] for event in events(stays))
        assert text == expected
        until(lambda: is_idle(server))
        until(lambda: not server.server.server_state.tasks and not connections(server))
        assert service.metrics.request_success_total.value(of="abort") == CLIENTS
        counted = httpx.get(f"{server.url}/metrics").text
        assert f'specdec:http_requests_total{{path="/v1/completions",status="499"}} {CLIENTS}.0' in counted
        assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}


def events(client: socket.socket) -> list[dict[str, Any]]:
    """Read a stream to its end; its events."""
    client.settimeout(SECONDS)
    with client, client.makefile("rb") as lines:
        found = []
        for line in lines:
            if line == b"data: [DONE]\n":
                return found
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    raise AssertionError(f"the stream broke after {len(found)} events")


def test_clients_that_read_nothing_hold_up_nobody_and_are_cut_off(llm: LLM, gate: Gate) -> None:
    """Their answers are some ten times what sockets hold; what the server keeps of them is one buffer each."""
    expected = alone(llm)
    with served(llm, body_seconds=2) as server:
        large = {**ASK, "max_tokens": 900, "n": 4, "logprobs": 20, "stream": True}
        slow = [posted(server, large, receive_buffer=4096) for _ in range(2)]
        most = 0

        def write_buffers() -> list[int]:
            nonlocal most
            found = [each.transport.get_write_buffer_size() for each in list(connections(server))]
            most = max(most, *found, 0)
            return found

        until(lambda: len(write_buffers()) == 2 and not is_idle(server))
        assert (
            httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=SECONDS).json()["choices"][0]["text"]
            == expected
        )
        until(lambda: is_idle(server) and not write_buffers())  # by the kernel: see `listen`
        assert most < 2**18
        until(lambda: not server.server.server_state.tasks)
        for client in slow:
            client.close()
        assert 'status="499"} 2.0' in httpx.get(f"{server.url}/metrics").text


def test_an_engine_that_fails_under_load_ends_those_of_its_pass_alone(llm: LLM, gate: Gate) -> None:
    """Each of many clients gets its whole answer or an error, as an answer or as an event, and the server goes on."""
    expected = alone(llm, 100)
    passes = []

    def fail(chunk: Chunk) -> None:
        passes.append(chunk)
        if len(passes) % 150 == 0:
            raise ValueError("planted")

    async def ask(client: httpx.AsyncClient, stream: bool) -> str:
        answer = await client.post("/v1/completions", json={**ASK, "max_tokens": 100, "stream": stream})
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.json()['error']['code']}"
        if not stream:
            return "whole" if answer.json()["choices"][0]["text"] == expected else answer.text
        parts = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        if parts[-1] != "[DONE]":
            return f"event {json.loads(parts[-1])['error']['code']}"
        return (
            "whole" if "".join(json.loads(part)["choices"][0]["text"] for part in parts[:-1]) == expected else "wrong"
        )

    async def ask_all() -> Counter[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS) as client:
            return Counter(await asyncio.gather(*(ask(client, stream=number % 2 == 0) for number in range(24))))

    with served(llm, max_rows=3) as server:
        gate.fault = fail
        seen = asyncio.run(ask_all())
        gate.fault = None
        assert seen.keys() == {"whole", "500 internal_error", "event internal_error"}, seen
        until(lambda: is_idle(server))
        assert asyncio.run(ask_all()) == {"whole": 24}


JSON = {"content-type": "application/json"}
FINE = b'"model": "tiny", "prompt": "a", "max_tokens": 4'
MALFORMED: dict[str, tuple[bytes, dict[str, str], str]] = {
    "text": (b"{%s}" % FINE, {"content-type": "text/plain"}, "content-type: application/json"),
    "form": (b"model=tiny", {"content-type": "application/x-www-form-urlencoded"}, "content-type: application/json"),
    "no type": (b"{%s}" % FINE, {}, "content-type: application/json"),
    "no object": (b"[1]", JSON, "must be a JSON object"),
    "nothing": (b"", JSON, "must be a JSON object"),
    "no UTF-8": (b'{%s, "stop": "\xff"}' % FINE, JSON, "UTF-8"),
    "deep": (b'{%s, "stop": %s}' % (FINE, b"[" * 10**5 + b"]" * 10**5), JSON, "not too deep"),
    "deep, and parsed": (b'{%s, "stop": %s}' % (FINE, b"[" * 500 + b"]" * 500), JSON, "stop"),
    "deep schema": (b'{%s, "structured_outputs": {"json": %s}}' % (FINE, b'{"items": ' * 500 + b"{}" + b"}" * 500),
                    JSON, "recursion limit"),
    "digits": (b'{%s, "seed": %s}' % (FINE, b"9" * 5000), JSON, "thousands of digits"),
    "large integer": (b'{%s, "seed": %s}' % (FINE, b"9" * 50), JSON, "seed: Input should be less than"),
    "large number": (b'{%s, "temperature": 1e999}' % FINE, JSON, "temperature: Input should be a finite number"),
    "NaN": (b'{%s, "top_p": NaN}' % FINE, JSON, "top_p: Input should be a finite number"),
    "NaN inside": (b'{%s, "structured_outputs": {"json": {"const": NaN}}}' % FINE, JSON, "not JSON compliant"),
    "half a pair": (b'{%s, "stop": "\\ud800"}' % FINE, JSON, "stop: Input should be a valid string"),
    "half a pair inside": (b'{%s, "structured_outputs": {"json": {"const": "\\ud800"}}}' % FINE, JSON, "hex escape"),
    "half a pair of a name": (b'{%s, "\\ud800": 1}' % FINE, JSON, "valid string"),
    "too large": (b"x" * (2**20 + 1), JSON, "larger than 1048576 bytes"),
    "fraction": (b'{%s, "n": 1.5}' % FINE, JSON, "n: Input should be a valid integer"),
}  # fmt: skip


def test_malformed_bodies_are_refused_in_one_line_while_another_request_goes_on(llm: LLM, gate: Gate) -> None:
    expected = alone(llm, 900)
    with served(llm) as server:
        gate.close()
        other = posted(server, {**ASK, "max_tokens": 900, "stream": True})
        gate.arrive()
        gate.let(2)
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            whole = {name: client.post("/v1/completions", content=body, headers=headers)
                     for name, (body, headers, _) in MALFORMED.items()}  # fmt: skip
            parts = {name: client.post("/v1/completions", content=iter([body[:7], body[7:]]), headers=headers)
                     for name, (body, headers, _) in MALFORMED.items()}  # fmt: skip
        gate.open()
        assert "".join(event["choices"][0]["text"] for event in events(other)) == expected
        until(lambda: is_idle(server))
    for sent in (whole, parts):
        for name, answer in sent.items():
            message = answer.json()["error"]["message"]
            assert answer.status_code == (413 if "larger" in message else 400), name
            assert MALFORMED[name][2] in message, name
            assert "\n" not in message, name


@pytest.mark.parametrize("unusual", [b'{"model": "gpt", %s}', b'{%s, "n": 1.0}'], ids=["twice", "whole number"])
def test_unusual_bodies_are_taken(llm: LLM, unusual: bytes) -> None:
    """Of a name that comes twice the last one counts; 1.0 is an integer."""
    with served(llm) as server:
        answer = httpx.post(f"{server.url}/v1/completions", content=unusual % FINE, headers=JSON)
        assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")


@pytest.mark.parametrize(
    ("request_type", "fields"),
    [
        (CompletionRequest, {"prompt": ["a", 1] * 1000}),
        (CompletionRequest, {"prompt": [[-1] * 1000] * 3}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 1000, "allowed_token_ids": [-1] * 1000}),
        (CompletionRequest, {"prompt": "a", **{f"unknown{number}": 1 for number in range(1000)}}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"x{number}": 1 for number in range(1000)}}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_a_body_of_wrong_items_is_not_read_to_its_end(request_type: type, fields: dict[str, Any]) -> None:
    """A mebibyte of them held up all streams for seconds, each being told with its place."""
    with pytest.raises(ValidationError) as found:
        TypeAdapter(request_type).validate_python({"model": MODEL, **fields})
    assert found.value.error_count() <= 5


def test_heads_are_bounded_in_size_and_time(llm: LLM) -> None:
    with served(llm, body_seconds=0.5) as server:
        for head in (b"GET /health HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES, b"GET /" + b"x" * 2 * HEAD_BYTES):
            with socket.create_connection(("127.0.0.1", server.port), SECONDS) as large:
                large.sendall(head)
                assert large.recv(4096).startswith(b"HTTP/1.1 400")
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as silent:
            silent.sendall(b"GET /health HTTP/1.1\r\n")
            assert cut_off(silent), "half a head"
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as again:
            again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert again.recv(4096).startswith(b"HTTP/1.1 200")
            again.sendall(b"\r\n")
            assert cut_off(again), "a second head that never begins"
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as refused:
            refused.sendall(b"POST /v1/models HTTP/1.1\r\nHost: other\r\nContent-Length: 9\r\n\r\n")
            assert refused.recv(4096).startswith(b"HTTP/1.1 403")
            refused.sendall(b"{")
            assert cut_off(refused), "half of a body that is not read"
        assert httpx.get(f"{server.url}/health", headers={"x": "x" * (HEAD_BYTES // 2)}).status_code == 200
        until(lambda: not connections(server))


def cut_off(client: socket.socket) -> bool:
    """Whether the server ends the connection, after what it still sends."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def send_for_ever(client: socket.socket, data: bytes) -> None:
    while True:
        client.sendall(data)


def test_a_body_without_end_is_answered_and_not_read_on(llm: LLM) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with served(llm, body_seconds=2, max_body_bytes=2**16) as server:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as announced:
            announced.sendall(head + b"Content-Length: " + b"9" * 18 + b"\r\n\r\n")
            assert announced.recv(4096).startswith(b"HTTP/1.1 413")
            assert cut_off(announced)
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as endless:
            endless.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                send_for_ever(endless, b"10000\r\n" + b"x" * 2**16 + b"\r\n")
        until(lambda: not connections(server))
        assert 'path="/v1/completions",status="413"} 2.0' in httpx.get(f"{server.url}/metrics").text


def test_keys_are_wanted_wherever_the_application_is_mounted(llm: LLM) -> None:
    async def statuses() -> list[int]:
        async with backend.serving(llm):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://any") as client:
                keys = {"authorization": "Bearer secret"}
                found = [await client.get("/llm/v1/models"), await client.get("/llm/v1/models", headers=keys),
                         await client.get("/llm/health")]  # fmt: skip
            return [answer.status_code for answer in found]

    backend = Backend(ServeOptions(model=MODEL, api_keys=("secret",)))
    app = Starlette(routes=[Mount("/llm", create_app(backend))])
    assert asyncio.run(statuses()) == [401, 200, 200]
    for key in ("clé", "two words", ""):
        with pytest.raises(RequestError, match="printable ASCII"):
            ServeOptions(api_keys=(key,))


@pytest.mark.parametrize("second", [False, True])
def test_sigterm_under_load_ends_every_request_whole_or_with_an_error(second: bool) -> None:
    """`second`: a second signal does not wait for them."""
    process, url, _ = started("--drain-seconds", "1000", "--max-rows", "4", "--max-queue", "100")
    seen: list[str] = []

    def ask(stream: bool) -> None:
        body = {**ASK, "model": model, "max_tokens": 900 if second else 100, "n": 2, "stream": stream}
        try:
            answer = client.post("v1/completions", json=body)
        except httpx.HTTPError as exc:
            seen.append(f"broken: {type(exc).__name__}")
            return
        if answer.status_code != 200:
            seen.append(f"{answer.status_code} {answer.json()['error']['code']}")
        elif not stream:
            seen.append("whole" if len(answer.json()["choices"]) == 2 else answer.text)
        else:
            last = answer.text.splitlines()[-2].removeprefix("data: ")
            seen.append("whole" if last == "[DONE]" else f"event {json.loads(last)['error']['code']}")

    def taken() -> bool:
        names = "num_requests_running", "num_requests_waiting", "request_success_total"
        found = re.findall(rf"^vllm:(?:{'|'.join(names)}){{.*}} (.*)", client.get("metrics").text, re.MULTILINE)
        return sum(map(float, found)) == 2 * LOAD

    with httpx.Client(base_url=url, timeout=SECONDS, limits=httpx.Limits(max_connections=64)) as client:
        model = client.get("v1/models").json()["data"][0]["id"]
        threads = [threading.Thread(target=ask, args=[number % 2 == 0]) for number in range(LOAD)]
        for thread in threads:
            thread.start()
        until(taken)
        process.send_signal(signal.SIGTERM)
        if second:
            assert process.stderr is not None
            assert any('"draining"' in line for line in process.stderr)  # until it has taken the first
            process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert len(seen) == LOAD
    if not second:
        assert set(seen) == {"whole"}
    else:
        ended = {
            "whole",
            "503 shutting_down",
            "event shutting_down",
            "broken: RemoteProtocolError",
            "broken: ReadError",
        }
        assert set(seen) <= ended
        assert set(seen) != {"whole"}, "it did not wait"
