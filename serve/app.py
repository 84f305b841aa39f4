"""The ASGI application: routes, and what each of them answers.

`create_app` makes one for a `Backend`, whoever runs it: `server.py`, or another ASGI server. Its schema (OpenAPI) has
the answers' from the very objects that are sent.
"""

import re
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from specdec.runtime.request import RequestOutput
from specdec.serve import answers
from specdec.serve.answers import Model, ModelList, encode
from specdec.serve.backend import Backend
from specdec.serve.errors import ApiError, from_validation
from specdec.serve.formats import ChatFormat, CompletionFormat, Format
from specdec.serve.guard import API, Guard
from specdec.serve.metrics import HttpMetrics
from specdec.serve.prepare import Body
from specdec.serve.requests import ChatRequest, CompletionRequest
from specdec.serve.streaming import Deadline, EventStream, while_connected, whole

PAGE = Path(__file__).with_name("page.html")
REFERENCE = "#/components/schemas/{name}"
SENT = (answers.ChatCompletion, answers.ChatChunk, answers.Completion, Model, ModelList, answers.Error)
ERRORS = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)


def create_app(backend: Backend) -> FastAPI:
    """Make the application. It answers before `backend` has a model: then with 503."""
    metrics = HttpMetrics(backend)
    app = FastAPI(
        title="specdec",
        description="OpenAI's API for one bundle, with speculative decoding.",
        docs_url=None,  # its page is on outside hosts
        redoc_url=None,
        middleware=[Middleware(Guard, backend=backend, metrics=metrics)],
        exception_handlers={RequestValidationError: _refuse_body, HTTPException: _refuse_route},
    )
    app.state.metrics = metrics
    _add_api(app, backend)
    _add_operations(app, backend, metrics)
    app.openapi = partial(_schema, app, keys=bool(backend.options.api_keys))  # type: ignore[method-assign]
    return app


def _add_api(app: FastAPI, backend: Backend) -> None:
    """What OpenAI's clients ask."""

    def model() -> Model:
        return Model(id=backend.name, created=backend.created, max_model_len=backend.llm.manifest.limits.max_length)

    @app.get("/v1/models", responses=_responses(ModelList), summary="The model that is served")
    async def models() -> Response:
        return _json(ModelList(data=[model()]))

    @app.get("/v1/models/{name:path}", responses=_responses(Model), summary="One model")
    async def model_of(name: str) -> Response:
        found = model()
        if name != found.id:
            raise ApiError(404, f"there is no model {name!r}", code="model_not_found", param="model")
        return _json(found)

    @app.post(
        "/v1/chat/completions",
        responses=_responses(answers.ChatCompletion, answers.ChatChunk),
        summary="Answer a conversation",
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(backend, request, body)

    @app.post("/v1/completions", responses=_responses(answers.Completion, answers.Completion), summary="Continue texts")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(backend, request, body)


def _add_operations(app: FastAPI, backend: Backend, metrics: HttpMetrics) -> None:
    """What operators and their tools ask, and a page for people."""
    page, headers = _page(PAGE.read_text(encoding="utf-8"))

    @app.get("/health", summary="Is the process alive?")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Would a request be taken?", responses={503: {"description": "Not now"}})
    async def ready() -> Response:
        state = backend.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def prometheus(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, headers=headers)


async def _answer(backend: Backend, request: Request, body: Body) -> Response:
    """Run a request; its answer is there, or comes event by event."""
    fields, deadline = request.state.fields, Deadline(backend.options.deadline_seconds)
    fields |= {"stream": bool(body.stream)}
    if backend.options.log_prompts:
        fields["body"] = body.model_dump(exclude_unset=True)
    async with deadline.kept():
        streams = await backend.submit(body)
    form = _format(backend, request.state.request_id, body)
    told = partial(_tell, fields, form, texts=backend.options.log_prompts)
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(streams, form, backend, deadline, with_usage=with_usage, told=told)
    with backend.told():
        async with deadline.kept():
            outputs = await while_connected(request.receive, whole(streams))
    told(outputs)
    return _json(form.whole(outputs))


def _format(backend: Backend, request_id: str, body: Body) -> Format:
    chat = isinstance(body, ChatRequest)
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "created": int(time.time()),
        "model": backend.name,
        "system_fingerprint": backend.fingerprint,
    }
    return (ChatFormat if chat else CompletionFormat)(
        head,
        of_prompt=body.n or 1,
        token_bytes=backend.llm.text.token_bytes,
        ends=backend.llm.manifest.tokenizer.eos_token_ids,
        top=body.top,
        origins=bool(body.return_token_origins),
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _tell(fields: dict[str, Any], form: Format, outputs: Sequence[RequestOutput], *, texts: bool) -> None:
    """Put what a request came to into its line of log."""
    usage = form.usage(outputs)
    fields |= {
        "choices": len(outputs),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "rounds": usage.specdec.rounds,
        "finish_reasons": sorted({output.finish_reason for output in outputs}),
    }
    if texts:
        fields["texts"] = [output.text for output in outputs]


def _json(content: msgspec.Struct) -> Response:
    return Response(encode(content), media_type="application/json")


async def _refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    raise from_validation(error.errors()) from error


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code)
    if code is None:
        message = "the body cannot be read: send JSON in UTF-8, not too deep, without numbers of thousands of digits"
        raise ApiError(400, message, code="invalid_json") from error
    refusal = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
    refusal.headers |= error.headers or {}  # 405 says which methods there are
    raise refusal


def _page(page: str) -> tuple[str, dict[str, str]]:
    """The page and its headers: it may run its own script and style, ask this server, and nothing else."""

    def allowed(tag: str) -> str:
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"{tag}-src 'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"

    policy = ("default-src 'none'", allowed("script"), allowed("style"), "connect-src 'self'", "img-src data:",
              "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")  # fmt: skip
    return page, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _responses(sent: type, event: type | None = None) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of a route's answers; `event`: of a stream."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(name=sent.__name__)}}}
    if event is not None:
        content["text/event-stream"] = {"itemSchema": _event(event)}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}
    refusal = {"description": "Error", "content": error}
    return {200: {"description": "Done", "content": content}, **dict.fromkeys(ERRORS, refusal)}


def _event(sent: type) -> dict[str, Any]:
    """What OpenAPI 3.2 says of a server-sent event: its data is JSON, but for that of the last one, [DONE]."""
    data = {"type": "string", "contentMediaType": "application/json",
            "contentSchema": {"$ref": REFERENCE.format(name=sent.__name__)}}  # fmt: skip
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _schema(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """OpenAPI's; `keys`: whether the API wants some."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, sent = msgspec.json.schema_components(SENT, ref_template=REFERENCE)
        schema["components"]["schemas"] |= sent
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which ours are in place of
                operation["security"] = [{"key": []}] if keys and path.startswith(API) else []
        app.openapi_schema = schema
    return app.openapi_schema
