"""What prefix reuse is worth: the time to the first token of a chat's second turn, with and without it.

The history is a question of a given length and the bundle's own answer to it. Both ways take turns in one process, on
one engine, and have to say the same; in mode `exact`, from the same bits of logits. The fastest of several repeats
counts.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from specdec.engines.command import CommandParser, positive, run_command
from specdec.engines.contract import FloatArray
from specdec.engines.registry import EngineConfig
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.runtime.prefixes import PrefixStore

PROG = "python -m specdec.tools.reuse"
EXAMPLES = """examples:
  python -m specdec.tools.reuse bundle
  python -m specdec.tools.reuse bundle --history 4000 --method ngram --repeat 5
"""
ANSWER = 64  # most tokens of an answer
LIMIT = 2**32  # bytes of the store: nothing is evicted


class Second(NamedTuple):
    """A second turn: tokens of its prompt and those reused, ms to the first token, the answer, its logits' digest."""

    prompt: int
    reused: int
    ttft_ms: float
    answer: tuple[int, ...]
    digest: str


class Chat:
    """A chat with `llm` whose first turn, answer included, has `history` tokens at least."""

    def __init__(self, llm: LLM, history: int) -> None:
        self._llm, self._params = llm, SamplingParams(max_new_tokens=ANSWER)
        self._digest = hashlib.sha256()
        llm.watch = self._watch
        house = "House {n} on this road has {n} windows, a red door, and a garden with {n} trees. "
        said, houses = "Describe the road.", 0
        while len(llm.chat_prompt([{"role": "user", "content": said}])) < history - ANSWER // 2:
            houses += 1
            said = house.format(n=houses) + said
        self._messages = [{"role": "user", "content": said}]

    def second(self, *, reuse: bool) -> Second:
        """Have the first turn, and the second one with or without what the first one left."""
        llm = self._llm
        llm.prefixes = PrefixStore(LIMIT)
        (first,) = llm.generate(llm.chat_prompt(self._messages), self._params)
        if not reuse:
            llm.prefixes = None
        answered = [*self._messages, {"role": "assistant", "content": first.text}]
        self._digest = hashlib.sha256()
        prompt = llm.chat_prompt([*answered, {"role": "user", "content": "How many trees are there in all?"}])
        (output,) = llm.generate(prompt, self._params)
        stats = output.stats
        return Second(len(prompt), stats.reused_tokens, stats.ttft_ms, output.token_ids, self._digest.hexdigest())

    def _watch(self, tokens: Sequence[int], logits: FloatArray) -> None:
        self._digest.update(logits.tobytes())


def _parser() -> CommandParser:
    parser = CommandParser(PROG, "Measure what prefix reuse saves on the second turn of a chat.", EXAMPLES)
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export, with a chat template")
    add("--history", metavar="N", type=positive, default=1000, help="tokens of the first turn (default %(default)s)")
    add("--method", metavar="DRAFTER", help="who drafts (default: plain decoding)")
    add("--repeat", metavar="N", type=positive, default=3, help="of each way; the fastest counts (default %(default)s)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="default: one per core")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 when reuse changed something, 2 wrong usage."""
    args = _parser().parse_args(argv)
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    speculative, engine = SpeculativeConfig(method=args.method), EngineConfig(threads=args.threads)
    with LLM(args.bundle, speculative=speculative, engine=engine) as llm:
        chat = Chat(llm, args.history)
        pairs = [(chat.second(reuse=False), chat.second(reuse=True)) for _ in range(args.repeat)]
        exact = llm.mode == "exact"
    (without, reusing) = (min(ways, key=lambda one: one.ttft_ms) for ways in zip(*pairs, strict=True))
    print(f"second turn of {without.prompt} tokens, {reusing.reused} of them reused; ms to the first token:")
    print(
        f"without reuse {without.ttft_ms:.0f}, with it {reusing.ttft_ms:.0f}: {reusing.ttft_ms / without.ttft_ms:.3f}"
    )
    every = [one for pair in pairs for one in pair]
    same_text, same_bits = len({one.answer for one in every}) == 1, len({one.digest for one in every}) == 1
    print(f"answers of {len(without.answer)} tokens: {'identical' if same_text else 'DIFFERENT'}, "
          f"logits: {'identical to the bit' if same_bits else 'different bits'}")  # fmt: skip
    return 0 if same_bits or (same_text and not exact) else 1


if __name__ == "__main__":
    sys.exit(main())
