"""What HTTP costs: tokens per second of `specdec-serve` under so many clients, over those of `AsyncLLM` alone.

Both answer the same questions with the same tokens; passes of one and of the other take turns, and the fastest of each
counts. The server is a process of its own, as it is in use; while one side answers, the other one waits. This module
knows the API's completions as bytes on a socket, and `AsyncLLM`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from specdec.engines.command import CommandParser, positive, run_command
from specdec.engines.errors import SpecdecError
from specdec.engines.registry import EngineConfig
from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.tools.questions import read_questions

PROG = "python -m specdec.tools.bench_http"
EXAMPLES = """examples:
  python -m specdec.tools.bench_http bundle --prompts question.jsonl --clients 16 --limit 32
"""
NAME = "model"  # what the server calls it

Ask = Callable[[list[int]], Awaitable[int]]  # a prompt's answer, read to its end; its tokens


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[int]:
    """A server of the bundle, on the port that this gives."""
    options = ["--port", "0", "--model", NAME, "--method", args.method, "--threads", str(args.threads)]
    options += ["--max-queue", str(args.clients)]
    command = [sys.executable, "-m", "specdec.serve.cli", str(args.bundle), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port, said = 0, ""
        for said in process.stderr:
            event = json.loads(said) if said.startswith("{") else {}
            port = urlsplit(event["url"]).port if event.get("event") == "listening" else port
            if event.get("event") == "ready":
                break
        else:
            raise SpecdecError(f"the server did not start: {said.strip()}")
        log = threading.Thread(target=process.stderr.read)  # or its pipe would be full one day
        log.start()
        try:
            yield port
        finally:
            process.terminate()
            log.join()


async def _ask_server(port: int, tokens: int, prompt: list[int]) -> int:
    """Stream a completion; its tokens, as its usage says."""
    body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                       "stream": True, "stream_options": {"include_usage": True}}).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            last = line
    writer.close()
    usage = json.loads(last[6:] or b"{}").get("usage")
    if usage is None:
        raise SpecdecError(f"the server broke an answer off: {last.decode().strip() or 'no event came'}")
    return int(usage["completion_tokens"])


async def _ask_service(service: AsyncLLM, params: SamplingParams, prompt: list[int]) -> int:
    count = 0
    async with service.submit(prompt, params) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
    return count


async def _rate(ask: Ask, prompts: Sequence[list[int]], clients: int) -> float:
    """Tokens per second when so many clients have the prompts answered, each one after the other."""
    waiting = iter(prompts)

    async def client() -> int:
        return sum([await ask(prompt) for prompt in waiting])

    started = perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return tokens / (perf_counter() - started)


async def _measure(args: argparse.Namespace, llm: LLM) -> list[tuple[float, float]]:
    prompts = [llm.text.encode_turn(each.turns[0]) for each in read_questions(args.prompts)[: args.limit]]
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    rates = []
    with _server(args) as port:
        async with AsyncLLM(llm, most_waiting=args.clients) as service:
            for _ in range(args.repeat + 1):
                alone = await _rate(partial(_ask_service, service, params), prompts, args.clients)
                served = await _rate(partial(_ask_server, port, args.tokens), prompts, args.clients)
                rates.append((alone, served))
    return rates[1:]  # the first pass warms both


def _parser() -> CommandParser:
    parser = CommandParser(PROG, "Measure what HTTP costs: specdec-serve against AsyncLLM alone.", EXAMPLES)
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export")
    add("--prompts", metavar="FILE", type=Path, required=True, help="questions, as specdec-bench reads them")
    add("--limit", metavar="N", type=positive, default=16, help="questions a pass (default %(default)s)")
    add("--tokens", metavar="N", type=positive, default=64, help="of each answer (default %(default)s)")
    add("--clients", metavar="N", type=positive, default=4, help="at a time (default %(default)s)")
    add("--method", metavar="DRAFTER", default="auto", help="who drafts (default %(default)s)")
    add("--repeat", metavar="N", type=positive, default=3, help="passes of each side (default %(default)s)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="default: one per core")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 an error, 2 wrong usage."""
    args = _parser().parse_args(argv)
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    speculative, engine = SpeculativeConfig(method=args.method), EngineConfig(threads=args.threads)
    with LLM(args.bundle, speculative=speculative, engine=engine) as llm:
        rates = asyncio.run(_measure(args, llm))
    alone, served = map(max, zip(*rates, strict=True))
    each = " ".join(f"{over / one:.3f}" for one, over in rates)
    print(f"{args.clients} clients, tokens/s: AsyncLLM {alone:.1f}, specdec-serve {served:.1f}: {served / alone:.3f} "
          f"(pass by pass {each})")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
