"""`specdec-generate`: stream text from a bundle. Arguments in, text or one JSON object out; the work is `LLM`'s."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import RequestError
from specdec.engines.registry import EngineConfig
from specdec.runtime.llm import LLM, Mode, SpeculativeConfig
from specdec.runtime.sampling import SamplingParams

PROG = "specdec-generate"
EXAMPLES = """examples:
  specdec-generate bundle -p "Write a haiku about rivers."
  specdec-generate bundle --raw -p "def fibonacci(n):" --max-new-tokens 64 --stop "def "
  specdec-generate bundle -p - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt
  specdec-generate bundle -p "..." --no-speculation --json | jq .stats.tokens_per_second
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage."""
    args = _parser().parse_args(argv)
    return run_command(PROG, partial(_generate, args), debug=args.debug)


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    speculative = SpeculativeConfig(
        method=None if args.no_speculation else args.method, num_speculative_tokens=args.num_speculative_tokens
    )
    text = _prompt(args.prompt)
    engine = EngineConfig(provider=args.provider, threads=args.threads)
    mode: Mode | None = "fast" if args.fast else None
    with LLM(args.bundle, speculative=speculative, variant=args.variant, mode=mode, engine=engine) as llm:
        chat = llm.text.has_chat_template if args.chat is None else args.chat
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
        for delta in llm.stream(prompt, params):
            if not args.json:
                print(delta.text, end="", flush=True)
            if delta.output is not None:
                output = delta.output
    if args.json:
        report = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stats": output.stats.as_dict(),
        }
        print(json.dumps(report, ensure_ascii=False))
    else:
        print()
    return 0


def _prompt(text: str) -> str:
    """The prompt, from standard input when it is "-"."""
    if text != "-":
        return text
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise RequestError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def _parser() -> argparse.ArgumentParser:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
    parser = CommandParser(PROG, "Generate text from a bundle, with speculative decoding.", EXAMPLES)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by specdec-export")
    parser.add_argument("-p", "--prompt", metavar="TEXT", required=True, help='prompt; "-" reads standard input')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="one user turn through the chat template "
                      "(default where the bundle has one)")  # fmt: skip
    form.add_argument("--raw", action="store_false", dest="chat", help="the prompt as it is")

    sampling = parser.add_argument_group("sampling")
    for name, kind, note in (
        ("max_new_tokens", int, "most tokens to generate"),
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "0 is off"),
        ("top_p", float, "1 is off"),
        ("min_p", float, "0 is off"),
        ("repetition_penalty", float, "1 is off"),
    ):
        option = "--" + name.replace("_", "-")
        sampling.add_argument(option, type=kind, default=defaults[name], help=f"{note} (default {defaults[name]})")
    sampling.add_argument("--seed", type=int, help="makes sampling repeatable")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )

    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--method", default="auto", help="a drafter of the bundle (default auto: its first)")
    speculation.add_argument("--num-speculative-tokens", type=int, metavar="K", help="most draft tokens a round")
    speculation.add_argument("--no-speculation", action="store_true", help="plain decoding")
    speculation.add_argument("--fast", action="store_true", help="allow one-token passes: faster plain decoding, gives "
                             "up bit equality with speculation and batches")  # fmt: skip

    engine = parser.add_argument_group("engine")
    engine.add_argument("--variant", help="precision of the target (default: the bundle's first)")
    engine.add_argument("--provider", default="cpu", help="cpu or cuda (default %(default)s)")
    engine.add_argument("--threads", type=int, help="threads of the engine (default: one per core)")

    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    return parser


if __name__ == "__main__":
    sys.exit(main())
