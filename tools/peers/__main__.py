"""Set up peers for a bundle and run them on prompts: every mode in turn, their damage, and one table.

Our own answers are made once for each prompt, for the number of tokens and to compare with; how fast ours are is not
measured here.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from specdec.engines.command import CommandParser, check_folders, positive, run_command
from specdec.engines.errors import RequestError
from specdec.engines.files import replace_file
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.tools.peers.options import add_peer_options, open_peer_set
from specdec.tools.peers.peer_set import PeerSet
from specdec.tools.peers.report import PeerReport, PeerRun, peer_table
from specdec.tools.questions import read_questions, select

PROG = "python -m specdec.tools.peers"
EXAMPLES = """examples:
  python -m specdec.tools.peers int8 --peers transformers,ort-genai,llama-cpp,openvino --peer-model model.gguf
  python -m specdec.tools.peers int8 --peers ort-genai,llama-cpp:plain --peer-model model.gguf \\
      --prompts question.jsonl --reference fp32 --max-new-tokens 64
"""


def _run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        peers = open_peer_set(args, args.threads, stack, args.bundle)
        runs, ours = _runs(args, peers) if args.prompts else ([], {})
        if args.reference:
            _compare(args, peers)
        reports = peers.report(runs, ours)
    print(peer_table(reports))
    if args.json:
        found = msgspec.json.format(msgspec.json.encode({"peers": reports, "runs": runs}), indent=1) + b"\n"
        replace_file(args.json, lambda part: part.write_bytes(found))
    return int(not any(_works(report) for report in reports))


def _works(report: PeerReport) -> bool:
    return report.version is not None and not report.failure


def _runs(args: argparse.Namespace, peers: PeerSet) -> tuple[list[PeerRun], dict[int | str, Sequence[int]]]:
    runs: list[PeerRun] = []
    ours: dict[int | str, Sequence[int]] = {}
    config, engine = SpeculativeConfig(method=None), EngineConfig(threads=args.threads)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    with LLM(args.bundle, speculative=config, engine=engine) as llm:
        for question in select(read_questions(args.prompts), [], args.per_category, args.limit):
            prompt = llm.text.encode_turn(question.turns[0])
            ours[question.question_id] = tokens = llm.generate(prompt, params)[0].token_ids
            runs += peers.run(question.question_id, prompt, len(tokens))
    return runs, ours


def _compare(args: argparse.Namespace, peers: PeerSet) -> None:
    target = read_manifest(args.reference).target
    variant = next((each for each in target.variants.values() if each.precision == "fp32"), None)
    if variant is None:
        raise RequestError(f"{args.reference} has no target in fp32: export one with --precision fp32")
    texts = [question.turns[0] for question in select(read_questions(args.prompts), [], args.per_category, args.limit)]
    with LLM(args.reference, speculative=SpeculativeConfig(method=None)) as llm:
        tokens = [llm.text.encode_turn(text)[: args.max_tokens] for text in texts]
    config = EngineConfig(threads=args.threads)
    with closing(open_engine(args.reference / variant.graph, target.spec, config)) as reference:
        peers.compare(reference, tokens)


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG, "Install other runtimes, give them a bundle's model, and run them on prompts.", EXAMPLES
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export: the precision to run in")
    add_peer_options(parser)
    add(
        "--prompts", metavar="FILE", type=Path, help="JSONL with question_id, category and turns (default: set up only)"
    )
    add("--per-category", metavar="N", type=positive, help="only the first N prompts of each")
    add("--limit", metavar="N", type=positive, help="only the first N prompts in all")
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="of each answer (default %(default)s)")
    add(
        "--reference", metavar="BUNDLE", type=Path, help="the same model in fp32: measure damage on the prompts' tokens"
    )
    add("--max-tokens", metavar="N", type=positive, default=80, help="of each such text (default %(default)s)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="of every runtime (default: one per "
        "core)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="write the reports and every run to a file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 a peer works, 1 none does, 2 wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_folders(parser, args, "json")
    if not args.peers:
        parser.error("give --peers")
    if args.reference and not args.prompts:
        parser.error("--reference needs --prompts")
    return run_command(PROG, partial(_run, args), debug=args.debug)


if __name__ == "__main__":
    sys.exit(main())
