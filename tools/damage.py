"""What quantization costs: quality, size and speed of bundles' engines against the same model in fp32, and what drafts
of each precision are worth to targets of each. Models of peers are held against the same fp32 logits.

All engines of all bundles are open at once; of logits, a chunk of each is held (of a peer, a text's). The arithmetic is
in `engines/damage.py`. This module knows what to compare with what, and the tables; it judges nothing.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from specdec.engines.base import Engine
from specdec.engines.command import CommandParser, positive, run_command
from specdec.engines.contract import ModelSpec
from specdec.engines.costs import PassCost, pass_costs
from specdec.engines.damage import WIDTH, Damage, compare_engines
from specdec.engines.errors import RequestError
from specdec.engines.prompts import PROMPTS
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime import SamplingParams, SpeculativeConfig
from specdec.runtime.text import TextCodec
from specdec.tools.figures import align
from specdec.tools.pairs import DRAFT, TARGET, Content, Open, Pair, Subject, run_pair, subjects
from specdec.tools.peers import PLAIN, Peer, add_peer_options, open_peer_set
from specdec.tools.peers.damage import peer_damage
from specdec.tools.questions import read_questions

PROG = "python -m specdec.tools.damage"
REFERENCE = "fp32"  # the precision that a reference must have
TEMPERATURES = (0.0, 1.0)  # of the pairs
SHOWN_WIDTHS = (1, 4)  # tokens of a pass, in the table; --json has all that were timed
NOTE = (
    "Lossless is relative to the target as it is quantized: a drafter, of whatever precision, does not change its text "
    "(sampled: its distribution).\nThe target's own precision does, by the damage above."
)
EXAMPLES = """examples:
  python -m specdec.tools.damage smollm2-int8 smollm2-int4 --reference smollm2-fp32
  python -m specdec.tools.damage smollm2-int4 --reference smollm2-fp32 --prompts texts.jsonl --no-pairs --json
  python -m specdec.tools.damage smollm2-int8 --reference smollm2-fp32 --llama-cpp model.gguf --llama-cpp-python PYTHON
"""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine costs. `damage` None: a draft of which the reference has no equal. `size` in bytes.

    Of a peer: `bundle` is its model, `role` its name and version, and its precision is not known.
    """

    bundle: str
    role: str
    precision: str | None
    size: int
    damage: Damage | None
    pass_costs: list[PassCost]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured. `seed`: of the first prompt's sampled answer; the n-th one's is n more."""

    reference: str
    texts: int
    seed: int
    engines: list[Cost]
    pairs: list[Pair]
    note: str = NOTE


def damages(
    reference: Path, compared: Sequence[Subject], opened: Open, texts: Sequence[Sequence[int]]
) -> dict[Content, Damage]:
    """Damage of each subject on `texts` (token ids) against the model of its shape that `reference` has in fp32.

    `compared` holds that bundle's own subjects, too. A draft that has no such model is left out. Raises `RequestError`
    when `reference` has no fp32 target, or a target has no such model.
    """
    known = _known(reference, compared)
    if not any(each.role == TARGET for each in known):
        raise RequestError(f"{reference} has no target in {REFERENCE}: export one with --precision {REFERENCE}")
    groups: dict[Content, tuple[Subject, dict[Content, Subject]]] = {}
    for each in compared:
        equal = next((own for own in known if _shape(own) == _shape(each)), None)
        family = each.manifest.source.family == known[0].manifest.source.family
        if each.role == TARGET and (equal is None or not family):
            raise RequestError(f"{each.bundle} is of another model than {reference}: give the same one's fp32 bundle")
        if equal is not None:
            groups.setdefault(equal.content, (equal, {}))[1][each.content] = each
    found: dict[Content, Damage] = {}
    for own, group in groups.values():
        results = compare_engines(opened(own), [opened(each) for each in group.values()], texts, width=_width(compared))
        found |= zip(group, results, strict=True)
    return found


def peer_costs(peers: Sequence[Peer], reference: Engine, texts: Sequence[Sequence[int]], width: int) -> list[Cost]:
    """What each peer costs on `texts` (token ids). Raises as `peer_damage`."""
    return [
        Cost(
            bundle=str(peer.model),
            role=f"{peer.driver.name} {peer.version}",
            precision=None,
            size=peer.size,
            damage=damage,
            pass_costs=[],
        )
        for peer, damage in zip(peers, peer_damage(peers, reference, texts, width), strict=True)
    ]


def to_text(report: Report) -> str:
    """The report as aligned plain text: a line for each engine, one for each pair, and what lossless means here."""
    shown = SHOWN_WIDTHS if any(each.pass_costs for each in report.engines) else ()
    rows = [["bundle", "model", "precision", "MB", "KL (nats)", "top-1", "perplexity", f"in {REFERENCE}", "tokens",
             *(f"ms/pass of {width}" for width in shown)]]  # fmt: skip
    for each in report.engines:
        of, times = each.damage, {cost.width: cost.best_ms for cost in each.pass_costs if cost.batch == 1}
        quality = ["-"] * 5 if of is None else [
            f"{of.mean_kl:.4f}", f"{of.top1_agreement:.1%}", f"{of.perplexity:.3f}", f"{of.reference_perplexity:.3f}",
            str(of.tokens),
        ]  # fmt: skip
        names = [each.bundle, each.role, each.precision or "-", f"{each.size / 1e6:.1f}"]
        rows.append([*names, *quality, *(f"{times[width]:.1f}" if times else "-" for width in shown)])
    tables = [align(rows, left=3)]
    if report.pairs:
        pairs = [["target", "draft", "T", "mode", "prompts", "tokens", "accepted", "τ"]]
        for pair in report.pairs:
            counts = [f"{pair.temperature:g}", pair.mode, str(pair.prompts), str(pair.tokens)]
            worth = [f"{pair.acceptance_rate:.1%}", f"{pair.mean_accepted_length:.2f}"]
            pairs.append([pair.target, pair.draft, *counts, *worth])
        tables.append(align(pairs, left=2))
    return "\n\n".join((*tables, report.note))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage."""
    args = _parser().parse_args(argv)
    return run_command(PROG, partial(_run, args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        report = _measure(args, stack)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else to_text(report))
    return 0


def _measure(args: argparse.Namespace, stack: ExitStack) -> Report:
    texts = _texts(args.prompts)[: args.limit]
    compared = subjects(list(dict.fromkeys((args.reference, *args.bundles))))
    codec = TextCodec(args.reference, compared[0].manifest.tokenizer)
    longest = min(args.max_tokens, *(each.model.spec.max_length for each in compared))
    tokens = [codec.encode_turn(text)[:longest] for text in texts]
    engines: dict[Content, Engine] = {}

    def opened(subject: Subject) -> Engine:
        if subject.content not in engines:
            graph, config = subject.bundle / subject.variant.graph, EngineConfig(threads=args.threads)
            engines[subject.content] = stack.enter_context(closing(open_engine(graph, subject.model.spec, config)))
        return engines[subject.content]

    with ExitStack() as lent:
        opened_peers = open_peer_set(args, args.threads or os.cpu_count() or 1, lent, args.bundles[0])
        peers = [peer for peer in opened_peers.peers if peer.mode == PLAIN]
        quality = damages(args.reference, compared, opened, tokens)
        truth = next(each for each in _known(args.reference, compared) if each.role == TARGET)
        of_peers = peer_costs(peers, opened(truth), tokens, _width(compared))
    once = {each.content: each for each in compared}
    times = {content: pass_costs(opened(each)) for content, each in once.items() if args.pass_costs}
    costs = [
        Cost(
            bundle=str(each.bundle),
            role=each.role,
            precision=each.variant.precision,
            size=each.size,
            damage=quality.get(each.content),
            pass_costs=times.get(each.content, []),
        )
        for each in compared
    ] + of_peers
    config = SpeculativeConfig(
        method="model", num_speculative_tokens=args.num_speculative_tokens, confidence_threshold=0.0
    )
    params = SamplingParams(seed=args.seed, max_new_tokens=args.max_new_tokens)
    asked = [prompt.text for prompt in PROMPTS][: args.limit]
    pairs = [
        pair
        for target in compared
        for draft in compared
        if args.pairs and target.role == TARGET and draft.role == DRAFT
        for pair in run_pair(target, draft, opened, asked, config=config, params=params, temperatures=TEMPERATURES)
    ]
    return Report(reference=str(args.reference), texts=len(texts), seed=args.seed, engines=costs, pairs=pairs)


def _known(reference: Path, compared: Sequence[Subject]) -> list[Subject]:
    """The subjects of the reference's bundle that are in fp32."""
    return [each for each in compared if each.bundle == reference and each.variant.precision == REFERENCE]


def _width(compared: Sequence[Subject]) -> int:
    """Tokens of a pass that all of them take."""
    return min(WIDTH, *(each.manifest.limits.max_tree for each in compared))


def _shape(subject: Subject) -> ModelSpec:
    """What all precisions of a model have in common."""
    return msgspec.structs.replace(subject.model.spec, dtype="float32", max_length=1)


def _texts(path: Path | None) -> list[str]:
    if path is None:
        return [prompt.text for prompt in PROMPTS]
    texts = [question.turns[0] for question in read_questions(path)]
    if not texts:
        raise RequestError(f"the prompt file {path} holds no prompt")
    return texts


def _parser() -> CommandParser:
    parser = CommandParser(PROG, "Measure what quantization costs: quality, size, speed, and acceptance.", EXAMPLES)
    add = parser.add_argument
    add("bundles", metavar="BUNDLE", type=Path, nargs="+", help="folders made by specdec-export, of one model")
    add("--reference", metavar="BUNDLE", type=Path, required=True, help="the same model in fp32")
    add("--prompts", metavar="FILE", type=Path, help="JSONL with question_id, category and turns: the first turns are "
        "the texts that logits are compared on (default: own ones)")  # fmt: skip
    add("--limit", metavar="N", type=positive, help="only the first N texts, and prompts of pairs")
    add("--max-tokens", metavar="N", type=positive, default=256, help="of each text (default %(default)s)")
    add("--pass-costs", action=argparse.BooleanOptionalAction, default=True, help="time single passes")
    add("--pairs", action=argparse.BooleanOptionalAction, default=True, help="every draft for every target, on own "
        "prompts")  # fmt: skip
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="of each answer (default %(default)s)")
    add("--num-speculative-tokens", metavar="K", type=positive, help="most draft tokens a round")
    add("--seed", metavar="N", type=int, default=0, help="of sampled answers (default %(default)s)")
    add("--threads", metavar="N", type=positive, help="of every engine (default: one per core)")
    add_peer_options(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
