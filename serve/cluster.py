"""`specdec-serve --ray`: the application put onto a cluster until a signal comes, or written down for `serve deploy`.

Arguments of the application are the command's own options, by name, parsed by the command's own parser: the file and
the command line take and refuse the same. This module knows Ray's commands; what runs on the cluster is `ray.py`'s.
"""

import argparse
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import ray
import yaml
from ray import serve

from specdec.engines.command import SIGNALS, CommandParser
from specdec.engines.errors import EngineError, RequestError
from specdec.serve.cli import Replicas, make_parser, serve_options
from specdec.serve.logs import log, start_logging
from specdec.serve.options import KEYS_VARIABLE, ServeOptions

NAME = "specdec"
HEAD = """\
# For `serve deploy`. Arguments are the options of specdec-serve; the bundle, and a file of keys, have to lie at these
# paths on every node. What Ray Serve decides itself (autoscaling delays, resources, health checks) goes under
# `deployments`, for Engine, which has the model, and Front, which passes requests to the engine of their conversation.
"""
# Options of the command that are no arguments of the application.
ELSEWHERE = {
    "host": "http_options",
    "port": "http_options",
    "ray": "",
    "ray_address": "",
    "print_config": "",
    "debug": "",
}


class _Refusing(CommandParser):
    """Raises `RequestError` for wrong usage."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def parsed(arguments: Mapping[str, Any]) -> argparse.Namespace:
    """Parse options that are given by name, with underscores, as the command parses them. Raises `RequestError`."""
    if not isinstance(arguments.get("bundle"), str):
        raise RequestError("the argument bundle is missing: give the path of a bundle")
    parser = make_parser(_Refusing)
    defaults = vars(parser.parse_args(["--", "bundle"]))
    words = []
    for name, value in arguments.items():
        if name not in defaults or name in ELSEWHERE:
            where = f": it belongs into {ELSEWHERE[name]}" if ELSEWHERE.get(name) else ""
            raise RequestError(f"there is no argument {name!r}{where}")
        if isinstance(value, bool) != isinstance(defaults[name], bool) and value is not None:
            kind = "true or false" if isinstance(defaults[name], bool) else "a value"
            raise RequestError(f"the argument {name} is {value!r}: give {kind}")
        option = "--" + name.replace("_", "-")
        if name != "bundle" and value is not None and value is not False:
            words.append(option if value is True else f"{option}={value}")
    return parser.parse_args([*words, "--", arguments["bundle"]])


def arguments_of(args: argparse.Namespace) -> dict[str, Any]:
    """The inverse of `parsed`, with absolute paths: what `args` say, defaults included."""
    found = {}
    for name, value in vars(args).items():
        if name == "bundle" or isinstance(value, Path):
            value = str(Path(value).absolute())
        if name not in ELSEWHERE and value is not None and value is not False:
            found[name] = str(value) if isinstance(value, Replicas) else value
    return found


def open_options(args: argparse.Namespace) -> ServeOptions:
    """What an operator decided. Raises `RequestError` without keys: who reaches Ray's proxies is not known here."""
    options = serve_options(args)
    if not (options.api_keys or options.no_auth):
        raise RequestError(
            f"on a cluster the server needs keys (--api-key-file, or the variable {KEYS_VARIABLE}, on every node), or "
            "allow everyone with --no-auth"
        )
    return options


def config_of(args: argparse.Namespace) -> str:
    """YAML for `serve deploy`. Raises `RequestError`."""
    arguments = arguments_of(args)
    deployments = [{"name": "Engine", "ray_actor_options": {"num_cpus": args.threads or 1}}]
    application = {"name": NAME, "route_prefix": "/", "import_path": "specdec.serve.ray:build_app", "args": arguments,
                   "deployments": deployments}  # fmt: skip
    config = {"proxy_location": "EveryNode", "http_options": {"host": args.host, "port": args.port},
              "applications": [application]}  # fmt: skip
    return HEAD + str(yaml.safe_dump(config, sort_keys=False))


def run(args: argparse.Namespace) -> int:
    """Serve on a cluster until a signal ends the command; requests get `drain_seconds` then. Raises `RequestError`."""
    from specdec.serve.ray import build_app

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to Ray's makers unless it is asked for
    start_logging()
    application = build_app(arguments_of(args))
    _connect(args.ray_address)
    serve.start(proxy_location="EveryNode", http_options={"host": args.host, "port": args.port})
    try:
        try:
            serve.run(application, name=NAME, route_prefix="/")
        except RuntimeError as exc:  # with what a replica raised
            raise EngineError(f"no replica starts: {exc}") from exc
        log("ready", url=f"http://{args.host}:{args.port}/", replicas=str(args.replicas))
        threading.Event().wait()
    finally:
        log("draining", seconds=args.drain_seconds)
        serve.delete(NAME)
        log("stopped")
    return 0


def _connect(address: str | None) -> None:
    """Find a cluster, or start one. Ray puts handlers of its own, which abort, in place of the command's."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ray.init(address, namespace=NAME, log_to_driver=False)
    except (ConnectionError, ValueError) as exc:
        raise RequestError(f"there is no Ray cluster at {address}: {exc}") from exc
    for number, handler in handlers.items():
        signal.signal(number, handler)
