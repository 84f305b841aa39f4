"""The server as a Ray Serve application: engines, fronts, and a router that keeps conversations together.

An `Engine` is one model with its threads behind the whole application of `app.py`, as `server.py` runs it. A `Front`
takes requests from Ray's HTTP proxy, and hands each to the engine that its conversation began on
(`ConversationRouter`).
Engines may die and be replaced: see `front.py`. This module knows Ray Serve; it knows no route of the API.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import ray
from prometheus_client.core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import ASGIApp, Message, Scope

from specdec.engines.manifest import read_manifest
from specdec.runtime.model_options import open_model
from specdec.serve.app import create_app
from specdec.serve.backend import HEADROOM, Backend
from specdec.serve.cluster import open_options, parsed
from specdec.serve.front import front_app
from specdec.serve.logs import start_logging
from specdec.serve.server import LAST_SECONDS, load

HEALTH_SECONDS = 2  # between health checks: a dead engine is noticed, and replaced, so soon
FRONT_REQUESTS = 64  # open requests of a front, on which their number scales


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """Ray Serve's application for options of `specdec-serve`, by name. Raises `RequestError`, `BundleError`."""
    args = parsed(arguments)
    options = open_options(args)
    rows = args.max_rows or read_manifest(Path(args.bundle)).limits.max_batch
    most = rows + options.max_queue + HEADROOM
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": options.drain_seconds + LAST_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "logging_config": {"enable_access_log": False},  # our own line says more
    }
    engines = _deployment(
        Engine,
        ray_actor_options={"num_cpus": args.threads or 1},
        max_ongoing_requests=most,
        request_router_config={
            "request_router_class": "specdec.serve.ray:ConversationRouter",
            "request_router_kwargs": {"rows": rows},
        },
        **_scaled(*args.replicas, target=args.target_requests or rows),
        **common,
    ).bind(arguments)
    open_requests = most * args.replicas.most
    return _deployment(
        serve.ingress()(Front),
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=open_requests + HEADROOM,
        **_scaled(*args.replicas, target=FRONT_REQUESTS),
        **common,
    ).bind(engines, arguments, open_requests)


def _deployment(kind: type, **options: Any) -> serve.Deployment:
    made: serve.Deployment = serve.deployment(**options)(kind)
    return made


def _scaled(least: int, most: int, *, target: int) -> dict[str, Any]:
    if least == most:
        return {"num_replicas": most}
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}}


class ConversationRouter(RequestRouter):
    """Sends requests of one session to one replica, as long as that has a free row; then to the next one that has.

    Rendezvous hashing: the order of replicas is that of a hash of session and replica, the same in every router, and a
    replica that comes or goes moves its own sessions alone. Where all rows are taken, or there is no session, the
    shortest queue is chosen.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Keywords of the configuration. `rows`: requests that run together on a replica."""
        self._rows: int = kwargs["rows"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas; Ray Serve takes from the first of them that accepts, the one with the shortest queue."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # before all are asked again
        session = pending_request.metadata.session_id
        if not session:
            return [candidate_replicas]
        free = [each for each in candidate_replicas if self._waiting(each) < self._rows]
        ordered = sorted(free, key=lambda each: _score(session, each.replica_id.unique_id), reverse=True)
        return [*([each] for each in ordered), candidate_replicas]

    def _waiting(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _score(session: str, replica: str) -> bytes:
    return sha256(f"{session}\0{replica}".encode()).digest()


class Engine:
    """A replica with the model: the application of a single server, asked through Ray in place of a socket."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        start_logging()
        args = parsed(arguments)
        args.threads = args.threads or max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
        self._backend = Backend(open_options(args))
        self._stack = AsyncExitStack()
        llm = await asyncio.to_thread(load, partial(open_model, args))
        await self._stack.enter_async_context(self._backend.serving(self._stack.enter_context(llm)))
        self._app = create_app(self._backend)

    async def __del__(self) -> None:
        await self._stack.aclose()

    async def check_health(self) -> None:
        """Ray Serve asks now and then, and replaces a replica that raises three times in a row."""
        await self._backend.check_health()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Name of the replica, and what it counts."""
        return replica_name(), self._app.state.metrics.collect()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Sequence[Message]]:
        """Answer a request; yield the application's messages, those together that are there together.

        Cancelled with the caller: the application sees a client that went away.
        """
        sent = asyncio.Queue[Message | None]()
        received = asyncio.Queue[Message]()
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        running = asyncio.create_task(self._app(scope, received.get, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            ended = False
            while not ended:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                ended = messages[-1] is None
                yield [each for each in messages if each is not None]
            await running
        finally:
            received.put_nowait({"type": "http.disconnect"})
            await asyncio.wait([running])


class Front:
    """A replica without a model: keys and limits of `guard.py`, and the way to the engines."""

    def __init__(self, engines: DeploymentHandle[Any], arguments: dict[str, Any], most_requests: int) -> None:
        start_logging()
        self._engines, self._options, self._most = engines, open_options(parsed(arguments)), most_requests

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Ray Serve runs."""
        return front_app(self._engines, self._options, self._most, replica_name())


def replica_name() -> str:
    """Of the replica that this code runs in, as Ray Serve's logs and metrics have it."""
    return serve.get_replica_context().replica_id.unique_id
