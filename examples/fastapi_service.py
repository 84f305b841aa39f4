"""Streams a bundle's answers over HTTP: `SPECDEC_BUNDLE=bundle uvicorn --app-dir examples fastapi_service:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from specdec.engines.errors import RequestError, SpecdecError
from specdec.runtime import LLM, AsyncLLM, SamplingParams, Stream


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with LLM(os.environ["SPECDEC_BUNDLE"]) as llm:
        async with AsyncLLM(llm) as app.state.service:
            yield
            await app.state.service.drain(timeout=30)


app = FastAPI(lifespan=lifespan)


async def ask(prompt: Annotated[str, Body()], max_new_tokens: Annotated[int, Body()] = 128) -> AsyncIterator[Stream]:
    try:
        stream = app.state.service.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens))
    except SpecdecError as exc:
        raise HTTPException(400 if isinstance(exc, RequestError) else 503, str(exc)) from exc
    async with stream:  # left when the response ends: a client that goes away cancels its request
        yield stream


@app.post("/generate")
async def generate(stream: Annotated[Stream, Depends(ask)]) -> StreamingResponse:
    return StreamingResponse((delta.text async for delta in stream), media_type="text/plain")
