"""`specdec-generate`: stream text from a bundle. Arguments in, text or one JSON object out; the work is `LLM`'s."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from specdec.engines.command import CommandParser, check_folders, run_command
from specdec.engines.errors import RequestError
from specdec.engines.files import replace_file
from specdec.runtime.controller import Plan
from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.llm import LLM
from specdec.runtime.model_options import add_model_options, open_model
from specdec.runtime.params import ACCEPTANCE_RULES, SamplingParams

PROG = "specdec-generate"
_NUMBERS = (
    ("max_new_tokens", int, "most tokens to generate"),
    ("min_new_tokens", int, "no end before so many"),
    ("temperature", float, "0 is greedy"),
    ("top_k", int, "0 is off"),
    ("top_p", float, "1 is off"),
    ("min_p", float, "0 is off"),
    ("repetition_penalty", float, "of prompt and answer; 1 is off"),
    ("presence_penalty", float, "of the answer; 0 is off"),
    ("frequency_penalty", float, "of the answer, for each time; 0 is off"),
)
EXAMPLES = """examples:
  specdec-generate bundle -p "Write a haiku about rivers."
  specdec-generate bundle --raw -p "def fibonacci(n):" --max-new-tokens 64 --stop "def "
  specdec-generate bundle -p - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt
  specdec-generate bundle -p "A person, as JSON." --json-schema person.json --temperature 1
  specdec-generate bundle -p "..." --no-speculation --json | jq .stats.tokens_per_second
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_folders(parser, args, "trace")
    return run_command(PROG, partial(_generate, args), debug=args.debug)


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        **{name: getattr(args, name) for name, *_ in _NUMBERS},
        bad_words=tuple(args.bad_word),
        structured_outputs=_structured_outputs(args),
        acceptance=args.acceptance,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    text = _prompt(args.prompt)
    with open_model(args) as llm:
        chat = llm.text.has_chat_template if args.chat is None else args.chat
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
        plans = _watched(llm) if args.trace else []
        for delta in llm.stream(prompt, params):
            if not args.json:
                print(delta.text, end="", flush=True)
            if delta.output is not None:
                output = delta.output
    if args.trace:
        lines = b"".join(msgspec.json.encode({"kind": plan.kind} | msgspec.to_builtins(plan)) + b"\n" for plan in plans)
        replace_file(args.trace, lambda part: part.write_bytes(lines))
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
    if not output.stats.lossless:
        print(f"{PROG}: note: {params.rule} is lossy: this is not the target's own distribution", file=sys.stderr)
    return 0


def _watched(llm: LLM) -> list[Plan]:
    """Where the plans of the rounds to come will be."""
    if llm.controller is None:
        raise RequestError("--trace: nothing is planned without a drafter, or with a given number or shape of tokens")
    plans = list[Plan]()
    llm.controller.watch = plans.append
    return plans


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """The answer's form, None when it is free."""
    if args.json_schema is not None:
        return StructuredOutputsParams(json=_read(args.json_schema))
    if args.grammar is not None:
        return StructuredOutputsParams(grammar=_read(args.grammar))
    return StructuredOutputsParams(regex=args.regex) if args.regex is not None else None


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"{name} cannot be read: {exc}") from exc


def _prompt(text: str) -> str:
    """The prompt, from standard input when it is "-"."""
    if text != "-":
        return text
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise RequestError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def _parser() -> CommandParser:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
    parser = CommandParser(PROG, "Generate text from a bundle, with speculative decoding.", EXAMPLES)
    speculation = add_model_options(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", required=True, help='prompt; "-" reads standard input')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="one user turn through the chat template "
                      "(default where the bundle has one)")  # fmt: skip
    form.add_argument("--raw", action="store_false", dest="chat", help="the prompt as it is")

    sampling = parser.add_argument_group("sampling")
    for name, kind, note in _NUMBERS:
        option = "--" + name.replace("_", "-")
        sampling.add_argument(option, type=kind, default=defaults[name], help=f"{note} (default {defaults[name]})")
    sampling.add_argument("--seed", type=int, help="makes sampling repeatable")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    sampling.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="forbid its tokens; repeatable"
    )
    form = sampling.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="the answer is JSON of this schema")
    form.add_argument("--regex", metavar="PATTERN", help="the answer matches this regular expression")
    form.add_argument("--grammar", metavar="FILE", help="the answer is of this Lark grammar")

    speculation.add_argument("--acceptance", choices=ACCEPTANCE_RULES, default=defaults["acceptance"],
                             help="how sampled drafts are verified: with coupled a seed gives the same text with and "
                             "without speculation; lossy-typical is lossy (default: coupled with --seed, else block)"
                             )  # fmt: skip
    speculation.add_argument("--trace", metavar="FILE", type=Path, help="write what was planned, and what each kind of "
                             "round promised (tokens a millisecond): a line of JSON a round")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    return parser


if __name__ == "__main__":
    sys.exit(main())
