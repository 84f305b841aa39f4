"""Decoding speed of a bundle's methods on one set of prompts: a small precursor of specdec-bench.

Methods take turns, prompt by prompt, so that a machine that drifts favours none; of several repeats the fastest one
counts. Times are of decoding alone, the prompt's pass left out. What the runs add up to is in `figures.py`.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from specdec.engines.command import CommandParser, positive, run_command
from specdec.engines.costs import PASSES, PassCost, pass_costs
from specdec.engines.errors import RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.llm import LLM, Mode
from specdec.runtime.params import SamplingParams
from specdec.tools.figures import FAST, PEERS, PLAIN, Run, align, baseline, summarize, table
from specdec.tools.peers import Peer, add_peer_options, open_peers
from specdec.tools.questions import Question, read_questions, select

METHOD = "DRAFTER[@RULE][/TREE[/TOKENS[/THRESHOLD]]]"
_NAME = re.compile(
    r"(?P<drafter>[^@/]+)(@(?P<rule>[^/]+))?(/(?P<tree>[a-z]+)(/(?P<tokens>\d+)(/(?P<threshold>\d+(\.\d+)?))?)?)?"
)
PROG = "python -m specdec.tools.measure"
EXAMPLES = """examples:
  python -m specdec.tools.measure bundle --prompts question.jsonl --per-category 3 --json measured.json
  python -m specdec.tools.measure bundle --prompts question.jsonl --categories rag,qa --methods plain-fast,plain,ngram
  python -m specdec.tools.measure bundle --prompts question.jsonl --temperature 1 --methods model@token,model@block
  python -m specdec.tools.measure bundle --prompts question.jsonl --methods plain,eagle/chain/3/0.5,eagle/dynamic/8
  python -m specdec.tools.measure bundle --pass-costs
  python -m specdec.tools.measure bundle --prompts question.jsonl --llama-cpp model.gguf --llama-cpp-python PYTHON
"""

Generate = Callable[[Question, Sequence[int], int], Run]  # question, its token ids, most new tokens


def interleave(
    prompts: Sequence[tuple[Question, Sequence[int]]],
    methods: Mapping[str, Generate],
    count: int,
    repeat: int,
) -> Iterator[Run]:
    """Run every method on every prompt, each prompt starting with another method; yield the fastest repeat of each.

    Peers come last, taking turns as well, and generate as many tokens as the first method did.
    """
    own, peers = [name for name in methods if name not in PEERS], [name for name in methods if name in PEERS]
    for index, (question, ids) in enumerate(prompts):
        best: dict[str, Run] = {}
        for turn in range(index, index + repeat):
            for name in (*_rotated(own, turn), *_rotated(peers, turn)):
                run = methods[name](question, ids, len(best[own[0]].token_ids) if name in peers else count)
                if name not in best or run.seconds < best[name].seconds:
                    best[name] = run
        yield from (best[name] for name in methods)


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def cost_table(costs: Sequence[PassCost]) -> str:
    """Render pass costs as aligned plain text: a column for each width."""
    rows = [["ms per pass, tokens a row:", *(str(cost.width) for cost in costs if cost.batch == costs[0].batch)]]
    for batch in dict.fromkeys(cost.batch for cost in costs):
        of_batch = [cost for cost in costs if cost.batch == batch]
        rows.append([f"batch {batch}, best of {PASSES}", *(f"{cost.best_ms:.1f}" for cost in of_batch)])
        rows.append([f"batch {batch}, median", *(f"{cost.median_ms:.1f}" for cost in of_batch)])
    return align(rows, left=1)


def _config(name: str, tokens: int | None) -> tuple[SpeculativeConfig, str]:
    """How a method called `name` speculates, and the rule of acceptance it asks for ("": the default).

    A name is plain, plain-fast or DRAFTER[@RULE][/TREE[/TOKENS[/THRESHOLD]]]. `tokens`: where it says no number. Raises
    `RequestError` when it is no such name.
    """
    if name in (FAST, PLAIN):
        return SpeculativeConfig(method=None), ""
    found = _NAME.fullmatch(name)
    if found is None:
        raise RequestError(f"method {name} is not {METHOD}, as in eagle/dynamic/8 or eagle/chain/3/0.5")
    count, threshold = found["tokens"], found["threshold"]
    tree: Any = found["tree"] or "chain"
    config = SpeculativeConfig(
        method=found["drafter"],
        num_speculative_tokens=int(count) if count else tokens,
        tree=tree,
        confidence_threshold=float(threshold) if threshold else None,
    )
    return config, found["rule"] or ""


def _own_method(name: str, llm: LLM, params: SamplingParams) -> Generate:
    def generate(question: Question, ids: Sequence[int], count: int) -> Run:
        output = llm.generate(ids, replace(params, max_new_tokens=count))[0]
        stats = output.stats
        return Run(
            question_id=question.question_id,
            category=question.category,
            method=name,
            token_ids=output.token_ids,
            decoded=stats.new_tokens,
            seconds=(stats.target_ms + stats.draft_ms + stats.host_ms) / 1000,
            rounds=stats.rounds,
            proposed=stats.draft_tokens_proposed,
            accepted=stats.draft_tokens_accepted,
            host_ms=stats.host_ms,
            draft_ms=stats.draft_ms,
            proposed_at=tuple(stats.proposed_at),
            accepted_at=tuple(stats.accepted_at),
        )

    return generate


def _batch_method(name: str, llm: LLM, params: SamplingParams, rows: int) -> Generate:
    """Run groups of prompts as one continuous batch; a group is one run, its time is all but that of the prompts."""

    def generate(question: Question, ids: Sequence[Any], count: int) -> Run:
        started = perf_counter()
        outputs = llm.generate(ids, replace(params, max_new_tokens=count), max_rows=rows)
        seconds = perf_counter() - started - sum(output.stats.prefill_ms for output in outputs) / 1000
        return Run(
            question_id=question.question_id,
            category=question.category,
            method=name,
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            decoded=sum(output.stats.new_tokens for output in outputs),
            seconds=seconds,
            rounds=sum(output.stats.rounds for output in outputs),
            proposed=sum(output.stats.draft_tokens_proposed for output in outputs),
            accepted=sum(output.stats.draft_tokens_accepted for output in outputs),
        )

    return generate


def _grouped(prompts: Sequence[tuple[Question, Sequence[int]]], rows: int) -> list[tuple[Question, Sequence[Any]]]:
    """Four prompts a row together, of all categories, in the name of the first one."""
    count = max(len(prompts) // (4 * rows), 1)
    groups = [prompts[first::count] for first in range(count)]
    names = [msgspec.structs.replace(group[0][0], category=f"{rows} rows") for group in groups]
    return [(name, [ids for _, ids in group]) for name, group in zip(names, groups, strict=True)]


def _peer_method(peer: Peer) -> Generate:
    def generate(question: Question, ids: Sequence[int], count: int) -> Run:
        answer = peer.generate(ids, count)
        return Run(
            question_id=question.question_id,
            category=question.category,
            method=peer.driver.name,
            token_ids=answer.token_ids,
            decoded=len(answer.token_ids) - 1,
            seconds=answer.seconds,
        )

    return generate


def _measure(args: argparse.Namespace, engine: EngineConfig, report: dict[str, Any]) -> str:
    """Load every method, run them on the prompts, fill `report` and return its table."""
    questions = select(read_questions(args.prompts), args.categories, args.per_category, args.limit)
    names = args.methods or [FAST, PLAIN, *read_manifest(args.bundle).drafters]
    methods: dict[str, Generate] = {}
    with ExitStack() as stack:
        for name in names:
            config, rule = _config(name, args.num_speculative_tokens)
            sampling: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed}
            params = SamplingParams(**sampling | ({"acceptance": rule} if rule else {}))
            mode: Mode = "fast" if name == FAST or config.branches else "exact"
            own: dict[str, Any] = {"mode": mode, "engine": engine, "verify": not methods}
            llm = LLM(args.bundle, speculative=config, prefix_bytes=0, **own)
            stack.enter_context(llm)
            one_by_one = args.rows == 1
            methods[name] = (
                _own_method(name, llm, params) if one_by_one else _batch_method(name, llm, params, args.rows)
            )
        peers = open_peers(args, args.threads, stack)
        methods |= {peer.driver.name: _peer_method(peer) for peer in peers}
        report["peers"] = {peer.driver.name: peer.version for peer in peers}
        prompts: list[Any] = [(question, llm.text.encode_turn(question.turns[0])) for question in questions]
        if args.rows > 1:
            prompts = _grouped(prompts, args.rows)
        list(interleave(prompts[:1] * args.warmup, methods, args.max_new_tokens, 1))
        runs: list[Run] = []
        for run in interleave(prompts, methods, args.max_new_tokens, args.repeat):
            runs.append(run)
            if sys.stderr.isatty():
                done = f"{len(runs) // len(methods)} of {len(prompts)} prompts"
                print(f"\r{done}", end="" if len(runs) < len(prompts) * len(methods) else "\n", file=sys.stderr)
    groups, fastest = summarize(runs), baseline(runs)
    report |= {"baseline": fastest, "groups": groups, "runs": runs}
    return table(groups, fastest)


def _list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different names with commas between them")
    return names


def _parser() -> CommandParser:
    description = "Measure decoding speed of a bundle's methods on Spec-Bench prompts, one at a time."
    parser = CommandParser(PROG, description, EXAMPLES)
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="folder made by specdec-export")
    add("--prompts", metavar="FILE", type=Path, help="JSONL with question_id, category and turns (the first is asked)")
    add("--categories", metavar="A,B", type=_list, default=[], help="only these (default: all)")
    add("--per-category", metavar="N", type=positive, help="only the first N prompts of each")
    add("--limit", metavar="N", type=positive, help="only the first N prompts in all")
    add("--methods", metavar="A,B", type=_list, help=f"{FAST} (one-token passes), {PLAIN} (exact), drafters of the "
        f"bundle (default: all), each as {METHOD}: eagle@token/dynamic/8")  # fmt: skip
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", metavar="N", type=int, default=0, help="of sampling (default %(default)s)")
    add("--num-speculative-tokens", metavar="K", type=positive, help="most draft tokens a round")
    add("--max-new-tokens", metavar="N", type=positive, default=128, help="of each answer (default %(default)s)")
    add("--rows", metavar="N", type=positive, default=1, help="prompts that run at a time, as one continuous batch "
        "(default %(default)s)")  # fmt: skip
    add("--warmup", metavar="N", type=int, default=1, help="unmeasured runs of the first prompt (default %(default)s)")
    add("--repeat", metavar="N", type=positive, default=1, help="measured runs; the fastest counts (default 1)")
    add("--threads", metavar="N", type=positive, default=os.cpu_count() or 1, help="of every engine (default: one per "
        "core)")  # fmt: skip
    add("--pass-costs", action="store_true", help="time single passes of the target by width and batch")
    add_peer_options(parser)
    add("--json", metavar="FILE", type=Path, help="write the figures and every run to a file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.prompts and not args.pass_costs:
        parser.error("nothing to measure: give --prompts FILE, --pass-costs or both")
    if args.rows > 1 and (args.ort_genai or args.llama_cpp):
        parser.error("--rows: peers run one prompt at a time")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    engine = EngineConfig(threads=args.threads)
    report: dict[str, Any] = {"threads": args.threads, "max_new_tokens": args.max_new_tokens}
    if args.pass_costs:
        target = read_manifest(args.bundle).target
        graph = args.bundle / next(iter(target.variants.values())).graph
        with closing(open_engine(graph, target.spec, engine)) as opened:
            report["pass_costs"] = costs = pass_costs(opened)
        print(cost_table(costs))
    if args.prompts:
        print(_measure(args, engine, report))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
