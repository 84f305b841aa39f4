"""`specdec-serve`: an OpenAI-compatible server for a bundle. Arguments in, a server until a signal comes."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from specdec.engines.command import CommandParser, positive, run_command
from specdec.engines.errors import RequestError
from specdec.runtime.model_options import add_model_options, open_model
from specdec.serve.options import KEYS_VARIABLE, ServeOptions, read_keys

PROG = "specdec-serve"
EXAMPLES = f"""examples:
  specdec-serve bundle                                    # http://127.0.0.1:8000/, for this machine alone
  specdec-serve bundle --host 0.0.0.0 --api-key-file keys.txt
  {KEYS_VARIABLE}=secret specdec-serve bundle --port 9000 --model my-model --max-queue 64
  specdec-serve bundle --ray --replicas 1-4 --threads 4 --api-key-file keys.txt
  specdec-serve bundle --ray --no-auth --print-config > serve.yaml     # then: serve deploy serve.yaml

Logs are lines of JSON on standard error. SIGTERM lets requests end first, a second one does not.
"""
_LIMITS = (
    ("max_rows", int, "requests that run together (default: the bundle's)"),
    ("max_queue", int, "requests that may wait; more are refused with 429 (default %(default)s)"),
    ("kv_bytes", int, "bytes that caches may take (default: all rows with full contexts)"),
    ("max_body_bytes", int, "of a request (default %(default)s)"),
    ("max_prompt_tokens", int, "of a prompt (default: the context)"),
    ("max_tokens", int, "of an answer (default: the context)"),
    ("max_choices", int, "n times prompts, of a request (default %(default)s)"),
    ("max_stop", int, "stop texts of a request (default %(default)s)"),
    ("max_stop_characters", int, "of a stop text (default %(default)s)"),
    ("deadline_seconds", float, "for a whole answer (default %(default)s)"),
    ("body_seconds", float, "for a request to be sent, and for its client to read on (default %(default)s)"),
    ("drain_seconds", float, "for running requests after SIGTERM (default %(default)s)"),
)
_ON_RAY = ("ray_address", "replicas", "target_requests", "print_config")


class Replicas(NamedTuple):
    """How many replicas there are: a number, or from one to another, as the load asks for."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage, 130 and 143 ended by a signal."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name in () if args.ray else _ON_RAY:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for --ray: give both")
    return run_command(PROG, partial(_serve_on_ray if args.ray else _serve, args), debug=args.debug)


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """What an operator decided, of parsed arguments. Raises `RequestError`."""
    return ServeOptions(
        **{name: getattr(args, name) for name, *_ in _LIMITS},
        model=args.model,
        api_keys=read_keys(args.api_key_file),
        no_auth=args.no_auth,
        log_prompts=args.log_prompts,
    )


def _serve_on_ray(args: argparse.Namespace) -> int:
    try:
        from specdec.serve.cluster import config_of, run
    except ImportError as exc:
        raise RequestError(f'--ray needs {exc.name}: pip install "specdec[ray]"') from exc
    if args.print_config:
        print(config_of(args), end="")
        return 0
    return run(args)


def _serve(args: argparse.Namespace) -> int:
    try:
        from specdec.serve.backend import Backend
        from specdec.serve.logs import start_logging
        from specdec.serve.server import listen, serve
    except ImportError as exc:
        raise RequestError(f'the server needs {exc.name}: pip install "specdec[serve]"') from exc
    options = serve_options(args)
    options.check_host(args.host)
    start_logging()
    with listen(args.host, args.port, options.body_seconds) as sock:
        asyncio.run(serve(partial(open_model, args), Backend(options), sock))
    return 0


def make_parser(kind: type[CommandParser] = CommandParser) -> CommandParser:
    """The command's parser, of a `kind` that decides what becomes of wrong usage."""
    defaults = {field.name: field.default for field in fields(ServeOptions)}
    parser = kind(PROG, "Serve a bundle over HTTP, as OpenAI's API.", EXAMPLES)
    add_model_options(parser)
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    network.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    network.add_argument("--model", metavar="NAME", help="name of the model in requests (default: the bundle's)")
    network.add_argument("--api-key-file", metavar="FILE", type=Path, help="keys, one a line; those of the variable "
                         f"{KEYS_VARIABLE} (with commas) are valid too")  # fmt: skip
    network.add_argument("--no-auth", action="store_true", help="serve everyone who reaches it, without keys")
    network.add_argument("--log-prompts", action="store_true", help="log what is asked and answered")
    limits = parser.add_argument_group("limits")
    for name, number, note in _LIMITS:
        option, metavar = "--" + name.replace("_", "-"), "SECONDS" if number is float else "N"
        limits.add_argument(option, type=number, metavar=metavar, default=defaults[name], help=note)
    ray = parser.add_argument_group("many machines")
    ray.add_argument("--ray", action="store_true", help="serve through Ray Serve, on a cluster; limits are those of a "
                     "replica")  # fmt: skip
    ray.add_argument("--ray-address", metavar="ADDRESS", help="of the cluster (default: RAY_ADDRESS, one on this "
                     "machine, or a new one)")  # fmt: skip
    ray.add_argument("--replicas", type=_replicas, metavar="N|MIN-MAX", default=Replicas(1, 1), help="each with its "
                     "own engine, and --threads of it (default %(default)s)")  # fmt: skip
    ray.add_argument("--target-requests", type=positive, metavar="N", help="of a replica, on which --replicas MIN-MAX "
                     "scales (default: as many as run together)")  # fmt: skip
    ray.add_argument("--print-config", action="store_true", help="print a file for `serve deploy`, and serve nothing")
    return parser


def _replicas(text: str) -> Replicas:
    least, _, most = text.partition("-")
    found = Replicas(positive(least), positive(most or least))
    if found.least > found.most:
        raise argparse.ArgumentTypeError(f"{text!r} has its ends the wrong way round")
    return found


if __name__ == "__main__":
    sys.exit(main())
