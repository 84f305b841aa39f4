"""Examples run as they stand."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from specdec.runtime import LLM, SamplingParams
from support.bundles import shared_bundle
from support.gated import Gate, gated_llm

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "fastapi_service.py"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SPECDEC_BUNDLE", str(shared_bundle()))
    spec = importlib.util.spec_from_file_location("fastapi_service", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_the_service_answers_refuses_and_drains(service: ModuleType) -> None:
    from fastapi.testclient import TestClient

    with LLM(shared_bundle()) as llm:
        expected = llm.generate("the quick", SamplingParams(max_new_tokens=20))[0].text
    with TestClient(service.app) as client:
        answer = client.post("/generate", json={"prompt": "the quick", "max_new_tokens": 20})
        assert (answer.status_code, answer.text) == (200, expected)
        refused = client.post("/generate", json={"prompt": ""})
        assert refused.status_code == 400
        assert refused.json()["detail"].startswith("the prompt is empty")
        assert client.post("/generate", json={"prompt": "a", "max_new_tokens": 0}).status_code == 400
        engine = service.app.state.service
        asyncio.run(engine.drain())
        late = client.post("/generate", json={"prompt": "a"})
        assert late.status_code == 503
        assert late.json()["detail"].startswith("this AsyncLLM is being drained")
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_goes_away_cancels_its_request(
    service: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Servers tell by a message, or since ASGI 2.4 by an error of `send`."""
    gate = Gate()
    monkeypatch.setattr(service, "LLM", lambda bundle: gated_llm(Path(bundle), gate))

    async def main() -> None:
        gone = asyncio.Event()
        requests = iter([{"type": "http.request", "body": b'{"prompt": "d", "max_new_tokens": 900}'}])

        async def receive() -> dict[str, object]:
            for message in requests:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                gone.set()
                if version == "2.4":
                    raise OSError("the client is gone")

        scope = {"type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate", "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": version}}  # fmt: skip
        async with service.lifespan(service.app):
            engine = service.app.state.service
            gate.close()
            request = asyncio.create_task(service.app(scope, receive, send))
            await asyncio.to_thread(gate.arrive)
            while not gone.is_set():
                await asyncio.to_thread(gate.let, 1)
            await asyncio.wait([request])
            gate.open()
            assert await engine.drain()
            assert engine.metrics.request_success_total.value(of="abort") == 1
            assert engine.metrics.generation_tokens_total.value() < 900
            assert type(request.exception()).__name__ == ("ClientDisconnect" if version == "2.4" else "NoneType")

    asyncio.run(main())
