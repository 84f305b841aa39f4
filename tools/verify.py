"""`specdec-verify`: is speculation with this bundle lossless, on this machine, with this engine?

Checks come in the order in which they find faults fastest: the engine's bits, the distribution of short answers, greedy
texts, texts with coupled noise. `--plant` breaks the runtime on purpose, to see that the command notices. This module
knows options and the order of things; what each check does is in the modules `verify_*`.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from specdec.engines.base import Engine, Heads
from specdec.engines.command import CommandParser, run_command
from specdec.engines.contract import HeadsSpec, ModelSpec
from specdec.engines.errors import RequestError
from specdec.engines.invariance import kernel_noise, tree_noise
from specdec.engines.manifest import read_manifest, verify_files
from specdec.engines.prompts import PROMPTS
from specdec.engines.registry import EngineConfig, backends, open_engine, open_heads, with_plans
from specdec.runtime import LLM, SpeculativeConfig
from specdec.runtime.methods import auto_method, known_methods
from specdec.runtime.params import ACCEPTANCE_RULES, Acceptance, is_lossless
from specdec.runtime.text import TextCodec
from specdec.tools.faults import FAULTS, planted
from specdec.tools.probes import cpu
from specdec.tools.questions import read_questions
from specdec.tools.tables import Text
from specdec.tools.verify_engine import EngineResult, check_engine
from specdec.tools.verify_ground import Ground, Tree
from specdec.tools.verify_law import Case, LawResult, plan, run
from specdec.tools.verify_report import Planted, Report, Result, name_of, to_json, to_text
from specdec.tools.verify_text import Run, TextResult, Texts, text_runs

PROG = "specdec-verify"
FALSE_ALARM = 1e-6  # of all distribution tests of a run together
EXAMPLES = """examples:
  specdec-verify bundle
  specdec-verify bundle --method ngram --acceptance block --prompts question.jsonl --limit 20
  specdec-verify bundle --quick --json | jq .verdict
  specdec-verify bundle --plant residual-from-p      # must fail: shows that the command would notice

exit code: 0 all checks passed, 1 a check failed, 2 wrong usage

faults for --plant:
""" + "".join(f"  {name:27} {fault.breaks}\n" for name, fault in FAULTS.items())


class Size(msgspec.Struct, frozen=True):
    """How much is done by default: samples of a distribution test, prompts, their tokens, all or few scorings."""

    samples: int
    prompts: int
    tokens: int
    coupled_prompts: int
    coupled_tokens: int
    thorough: bool


FULL, QUICK = Size(1500, 6, 24, 3, 16, True), Size(250, 2, 12, 1, 8, False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(PROG, partial(_verify, args), debug=args.debug)


def _verify(args: argparse.Namespace) -> int:
    fault = planted(args.plant) if args.plant else nullcontext()
    with ExitStack() as stack:
        verification = Verification(args, stack)
        breaks = stack.enter_context(fault)
        report = verification.run(Planted(args.plant, breaks.breaks) if breaks else None)
    print(to_json(report).decode() if args.json else to_text(report))
    return 0 if report.passed else 1


class Verification:
    """One run of the command: what was asked for, and everything that is open while it lasts (closed by `stack`)."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.started = perf_counter()
        self.args, self._stack = args, stack
        self.bundle = Path(args.bundle)
        self.manifest = read_manifest(self.bundle)
        self.variant = _chosen(args.variant, list(self.manifest.target.variants), "variant")
        known, auto = known_methods(self.manifest), auto_method(self.manifest)
        self.methods = [_chosen(name, known, "drafter") for name in args.method]
        self.methods = self.methods or list(dict.fromkeys([*self.manifest.methods(), *([auto] if auto else [])]))
        self.size = QUICK if args.quick else FULL
        self.samples = _positive(args.samples, self.size.samples, "--samples")
        self.batches = sorted(set(args.batch_size or [1, min(4, self.manifest.limits.max_batch)]))
        for batch in self.batches:
            if not 1 <= batch <= self.manifest.limits.max_batch:
                raise RequestError(f"--batch-size {batch}: this bundle takes 1 to {self.manifest.limits.max_batch}")
        self.rules: list[Acceptance] = args.acceptance or [rule for rule in ACCEPTANCE_RULES if is_lossless(rule)]
        self.config = EngineConfig(backend=args.backend, provider=args.provider, threads=args.threads)
        self.texts = _texts(args.prompts)[: _positive(args.limit, self.size.prompts, "--limit")]
        self.tokens = _positive(args.max_new_tokens, self.size.tokens, "--max-new-tokens")
        self.graph = cache(self._graph)
        self.heads = cache(self._open_heads)
        self.llm = cache(self._llm)
        verify_files(self.bundle, self.manifest)

    def run(self, fault: Planted | None) -> Report:
        """Do the checks, to the first that fails unless the user wants all."""
        args = self.args
        cases = plan(self.manifest, self.methods, self.rules, self.batches, self.samples, trees=args.trees)
        runs = text_runs(
            self.methods, self.batches, self.manifest.limits.max_tree - 1, trees=args.trees,
            coupled="coupled" in self.rules,
        )  # fmt: skip
        planned = 1 + len(cases) + len(runs)
        engine: EngineResult | None = None
        distribution: list[LawResult] = []
        texts: list[TextResult] = []
        for result in self._checks(cases, runs, thorough=self.size.thorough and fault is None):
            match result:
                case EngineResult():
                    engine = result
                case LawResult():
                    distribution.append(result)
                case TextResult():
                    texts.append(result)
            self._progress(result, 1 + len(distribution) + len(texts), planned)
            if not result.passed and not args.keep_going:
                break
        return Report(
            bundle=str(self.bundle),
            variant=self.variant,
            mode=self.llm(None, "chain", None).mode,
            methods=tuple(self.methods),
            planted=fault,
            cpu=cpu(),
            specdec=importlib.metadata.version("specdec"),
            seed=args.seed,
            false_alarm=FALSE_ALARM,
            planned=planned,
            engine=engine,
            distribution=tuple(distribution),
            texts=tuple(texts),
            seconds=perf_counter() - self.started,
        )

    def _checks(self, cases: Sequence[Case], runs: Sequence[Run], *, thorough: bool) -> Iterator[Result]:
        args, target = self.args, self.manifest.target
        codec = TextCodec(self.bundle, self.manifest.tokenizer)
        words = codec.encode(PROMPTS[0].text, special=False)
        variant = target.variants[self.variant]
        graph = self.bundle / variant.graph
        measured = check_engine(
            lambda: self.graph(graph, target.spec),
            variant,
            words,
            threads=args.threads,
            again=self._again if thorough else None,
            trees=args.trees,
            promised=not args.fast,
        )
        yield measured
        engine = self.graph(graph, target.spec)
        if cases:
            ground = self._stack.enter_context(
                closing(Ground(self.bundle, self.manifest, self.variant, self.graph, words, self.heads))
            )
            chance = FALSE_ALARM / sum(bool(case.setting.temperature) for case in cases)
            seeds = np.random.SeedSequence(args.seed).generate_state(self.samples, np.uint64).tolist()
            for case in cases:
                yield run(ground, case, chance, seeds[: case.samples])
        prompts = [codec.encode_turn(text) for text in self.texts]
        texts = Texts(
            lambda run: self.llm(run.method, run.tree, run.draft_tokens),
            engine,
            partial(self._noise, engine, measured),
            {"greedy": prompts, "coupled": prompts[: self.size.coupled_prompts]},
            {"greedy": self.tokens, "coupled": min(self.tokens, self.size.coupled_tokens)},
            args.seed,
        )
        yield from map(texts.run, runs)

    def _graph(self, graph: Path, spec: ModelSpec) -> Engine:
        """Open a graph; all that use it share it, and nobody else closes it."""
        return self._stack.enter_context(closing(open_engine(graph, spec, self._plans(graph))))

    def _open_heads(self, graph: Path, spec: HeadsSpec) -> Heads:
        return self._stack.enter_context(closing(open_heads(graph, spec, self.config)))

    def _again(self, threads: int) -> Engine:
        variant = self.manifest.target.variants[self.variant]
        graph = self.bundle / variant.graph
        return open_engine(graph, self.manifest.target.spec, replace(self._plans(graph), threads=threads))

    def _plans(self, graph: Path) -> EngineConfig:
        """How to open `graph`: the user's choice, and the plans that were compiled from it."""
        variants = (variant for _, model in self.manifest.models() for variant in model.variants.values())
        made_from_it = next(variant for variant in variants if self.bundle / variant.graph == graph)
        return with_plans(self.config, self.bundle, made_from_it)

    def _llm(self, method: str | None, tree: Tree, draft_tokens: int | None) -> LLM:
        return LLM(
            self.bundle,
            speculative=SpeculativeConfig(method=method, tree=tree, num_speculative_tokens=draft_tokens),
            variant=self.variant,
            mode="fast" if self.args.fast else None,
            engine=self.config,
            verify=False,
            prefix_bytes=0,  # every text is computed, none is taken from the one before
            opener=lambda graph, spec, config: self.graph(graph, spec),
            heads_opener=lambda graph, spec, config: self.heads(graph, spec),
        )

    @staticmethod
    def _noise(engine: Engine, measured: EngineResult, text: Text, tree: bool) -> Iterator[float]:
        """How far a logit may be off: as measured before, then as measured on this very text."""
        yield measured.noise(tree=tree)
        own = 0.0 if measured.exact and measured.least_width == 1 else kernel_noise(engine, [text])
        yield max(own, tree_noise(engine, text).max_abs_diff if tree else 0.0)

    def _progress(self, result: Result, done: int, planned: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == planned or not result.passed else ""
            print(f"\r\x1b[K{done}/{planned} {name_of(result)}", end=end, file=sys.stderr, flush=True)


def _chosen(name: str | None, known: Sequence[str], kind: str) -> str:
    """The name that the user gave, or the first one."""
    if name is not None and name not in known:
        raise RequestError(f"this bundle has no {kind} {name!r}: choose one of {', '.join(known) or 'none'}")
    return name or known[0]


def _positive(value: int | None, default: int, option: str) -> int:
    if value is not None and value < 1:
        raise RequestError(f"{option} must be at least 1, not {value}")
    return value or default


def _texts(name: str | None) -> list[str]:
    """First turns of a prompt file. None: our own, short ones first."""
    if name is None:
        return [prompt.text for prompt in (*PROMPTS[1::2], *PROMPTS[::2])]
    texts = [question.turns[0] for question in read_questions(Path(name))]
    if not texts:
        raise RequestError(f"the prompt file {name} holds no prompt")
    return texts


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(PROG, "Check that speculation with a bundle is lossless, on this machine.", EXAMPLES)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by specdec-export")
    what = parser.add_argument_group("what is checked")
    what.add_argument("--method", action="append", default=[], metavar="M", help="a drafter, or ngram+DRAFTER; "
                      "repeatable (default: all, and what auto takes)")  # fmt: skip
    what.add_argument("--acceptance", action="append", choices=ACCEPTANCE_RULES, metavar="RULE", help="how drafts are "
                      "verified: block, token, coupled; repeatable (default: all that are lossless)")  # fmt: skip
    what.add_argument("--batch-size", action="append", type=int, metavar="N", help="repeatable (default: 1 and 4)")
    what.add_argument("--trees", action=argparse.BooleanOptionalAction, default=True, help="trees that branch, too")
    what.add_argument("--prompts", metavar="FILE", help="JSONL as of Spec-Bench, ShareGPT JSON, or text with a "
                      "prompt a line (default: own ones)")  # fmt: skip
    size = parser.add_argument_group("how much")
    size.add_argument("--quick", action="store_true", help=f"smaller numbers everywhere: {_sizes(QUICK)}")
    size.add_argument("--samples", type=int, metavar="N", help=f"of each distribution test (default {FULL.samples})")
    size.add_argument("--limit", type=int, metavar="N", help=f"prompts (default {FULL.prompts})")
    size.add_argument("--max-new-tokens", type=int, metavar="N", help=f"of an answer (default {FULL.tokens})")
    size.add_argument("--seed", type=int, default=0, help="of everything random: a run repeats (default %(default)s)")
    size.add_argument("--keep-going", action="store_true", help="do all checks, also after one that failed")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--variant", help="precision of the target (default: the bundle's first)")
    engine.add_argument("--backend", default="ort", help=f"{' | '.join(backends())} (default %(default)s)")
    engine.add_argument("--provider", default="cpu", help="of ort: cpu, cuda, tensorrt, ... (default %(default)s)")
    engine.add_argument("--threads", type=int, help="threads of the engine (default: one per core)")
    engine.add_argument("--fast", action="store_true", help="mode fast, which promises no bits")
    parser.add_argument("--plant", choices=FAULTS, metavar="FAULT", help="break the runtime on purpose, to see that "
                        "this command notices (faults below)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _sizes(size: Size) -> str:
    return f"{size.samples} samples, {size.prompts} prompts, {size.tokens} tokens"


if __name__ == "__main__":
    sys.exit(main())
