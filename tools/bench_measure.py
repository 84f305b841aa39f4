"""One measurement of `specdec-bench`, from a bundle and options to a report.

This module knows the order of things: pass times, methods, runs, load, memory. It writes no file, and prints nothing
but progress.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from specdec.engines.base import Engine
from specdec.engines.costs import BATCHES, CAPACITY, PASSES, WIDTHS, PassCost, pass_costs
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import Manifest, read_manifest
from specdec.engines.prompts import PROMPTS
from specdec.engines.registry import EngineConfig, with_plans
from specdec.runtime.drafters.opening import pick_variant
from specdec.runtime.llm import Opener
from specdec.tools.bench_load import LoadFigures, offer
from specdec.tools.bench_memory import Task, peak_memory
from specdec.tools.bench_methods import Method, chosen_names, open_methods
from specdec.tools.bench_report import BundleFacts, MethodFacts, Report, Settings, machine
from specdec.tools.bench_run import Conversation, Generate, Unit, interleave, own_method, peer_method, units
from specdec.tools.bench_tokens import Sample, marked
from specdec.tools.figures import Costs, Figures, Run, baseline, pick, summarize
from specdec.tools.peers import open_peer_set
from specdec.tools.questions import Question, read_questions, select
from specdec.tools.roofline import Roofline, measure_roofline

OWN_PROMPTS = "built-in"  # in place of a file's name
QUICK = 6  # passes of each width, for predictions


class Measurement:
    """One run of the command: what was asked for, and everything that is open while it lasts (closed by `stack`)."""

    def __init__(self, args: argparse.Namespace, opener: Opener, stack: ExitStack) -> None:
        self.args, self._opener, self._stack = args, opener, stack
        self.manifest = read_manifest(args.bundle)
        self.engine = EngineConfig(backend=args.backend, provider=args.provider, threads=args.threads)
        self.questions = _questions(args)
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        self._sampling = {name: getattr(args, name) for name in names}
        most = self.manifest.limits.max_batch
        for rows in args.batch_size:
            if rows > most:
                raise RequestError(f"--batch-size {rows}: this bundle takes 1 to {most}")

    def run(self) -> Report:
        """Load every method, run them on the prompts, and say what was found."""
        args = self.args
        costs, roofline = self.passes() if args.pass_costs else (self.pass_costs(WIDTHS, (1,), QUICK), None)
        names = chosen_names(args.methods or (), self.manifest, args.variant, self.engine)
        methods = open_methods(
            args.bundle,
            names,
            self._sampling,
            tokens=args.num_speculative_tokens,
            variant=args.variant,
            engine=self.engine,
            opener=self._opener,
            stack=self._stack,
        )
        peers = open_peer_set(args, args.threads, self._stack, args.bundle)
        first = methods[0].llm
        turns = None if args.turns == "all" else 1
        own: dict[str, Generate] = {each.name: own_method(each.name, each.llm, each.params, turns) for each in methods}
        versions = {peer.driver.name: peer.version for peer in peers.peers}
        by_name = {peer.name: peer for peer in peers.peers}
        asked = {name: peer_method(peer, lambda question: Conversation(question).prompt(first))
                 for name, peer in by_name.items()}  # fmt: skip
        runs: list[Run] = []
        for rows in args.batch_size:
            work, ways = units(self.questions, rows), own | asked if rows == 1 else own
            runs += self._runs(work, ways, lambda name, reason: peers.drop(by_name[name], reason))
        greedy = self._sampling["temperature"] == 0
        repeatable = {each.name for each in methods if greedy or each.params.rule == "coupled"}
        repeatable |= set(asked) if greedy else set()
        least = {each.name: each.least_width for each in methods if not each.llm.speculative.branches}
        pass_ms = {cost.width: cost.best_ms for cost in costs if cost.batch == 1}
        figures = summarize(runs, costs=Costs(pass_ms=pass_ms, least=least), repeatable=repeatable)
        load, facts = self._load(methods), {each.name: self._facts(each) for each in methods}
        _progress("")
        return self.report(
            methods=facts,
            peers=versions,
            peer_failures=tuple(peers.failures),
            baseline=baseline([run for run in runs if run.batch_size == args.batch_size[0]]),
            figures=tuple(figures),
            load=tuple(load),
            pass_costs=costs,
            roofline=roofline,
            sample=self._sample(methods, runs, figures),
            runs=tuple(runs),
        )

    def report(self, **found: Any) -> Report:
        """A report of what was `found`, with bundle, machine and settings."""
        return Report(
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            bundle=bundle_facts(self.manifest, self.args.variant),
            machine=machine(),
            settings=self.settings(),
            **found,
        )

    def passes(self) -> tuple[tuple[PassCost, ...], Roofline | None]:
        """What `--pass-costs` shows: times of single passes, and on the CPU what the machine allows at best."""
        costs = self.pass_costs(WIDTHS, BATCHES, PASSES)
        if self.engine.provider != "cpu" or self.engine.backend != "ort":
            return costs, None
        graph, limits = pick_variant(self.manifest.target, self.args.variant).graph, self.manifest.limits
        weights = sum(file.bytes for name, file in self.manifest.files.items() if name.startswith(graph))
        with self._target() as engine:
            return costs, measure_roofline(engine, weights, self.args.threads, limits.max_tree, self._slots)

    def pass_costs(self, widths: Sequence[int], batches: Sequence[int], passes: int) -> tuple[PassCost, ...]:
        """Time single passes of the target, within the bundle's limits."""
        limits = self.manifest.limits
        widths = [width for width in widths if width <= limits.max_tree]
        batches = [batch for batch in batches if batch <= limits.max_batch]
        with self._target() as engine:
            return tuple(pass_costs(engine, widths, batches, passes, self._slots))

    @property
    def _slots(self) -> int:
        return min(CAPACITY, self.manifest.limits.max_length + self.manifest.limits.max_tree)

    @contextmanager
    def _target(self) -> Iterator[Engine]:
        """The target's engine, of its own."""
        variant = pick_variant(self.manifest.target, self.args.variant)
        config = with_plans(self.engine, self.args.bundle, variant)
        with closing(self._opener(self.args.bundle / variant.graph, self.manifest.target.spec, config)) as engine:
            yield engine

    def settings(self) -> Settings:
        """What was asked for."""
        args = self.args
        digest = hashlib.sha256(msgspec.json.encode(self.questions)).hexdigest()[:16]
        names = ("turns", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "backend", "provider", "threads",
                 "warmup", "repeat")  # fmt: skip
        return Settings(
            prompts=str(args.prompts) if args.prompts else OWN_PROMPTS,
            prompts_digest=digest,
            conversations=len(self.questions),
            batch_size=tuple(args.batch_size),
            load=tuple(args.load),
            **{name: getattr(args, name) for name in names},
        )

    def _runs(
        self, work: Sequence[Unit], methods: dict[str, Generate], leave_out: Callable[[str, EngineError], None]
    ) -> list[Run]:
        args, runs, left = self.args, list[Run](), dict(methods)

        def leave(name: str, reason: EngineError) -> None:
            del left[name]
            leave_out(name, reason)

        list(interleave(work[:1] * args.warmup, methods, args.max_new_tokens, 1, leave))
        for run in interleave(work, left.copy(), args.max_new_tokens, args.repeat, leave):
            runs.append(run)
            done, rows = f"{run.unit + 1} of {len(work)}", work[0].rows
            _progress(f"batch size {rows}: {done}" if rows > 1 else f"{done} prompts")
        return [run for run in runs if run.method in left]  # what answered some of the prompts cannot be compared

    def _load(self, methods: Sequence[Method]) -> list[LoadFigures]:
        args, found = self.args, list[LoadFigures]()
        for rate in args.load:
            for each in methods:
                prompts = [Conversation(question).prompt(each.llm) for question in self.questions]
                found.append(offer(each.name, each.llm, each.params, prompts, rate, args.seed))
                _progress(f"{rate:g} requests/s: {len(found)} of {len(args.load) * len(methods)}")
        return found

    def _facts(self, method: Method) -> MethodFacts:
        args = self.args
        peak: int | None = None
        if args.memory:
            longest = max((Conversation(question).prompt(method.llm) for question in self.questions), key=len)
            peak = peak_memory(
                Task(
                    bundle=str(args.bundle),
                    method=method.name,
                    tokens=args.num_speculative_tokens,
                    variant=args.variant,
                    backend=args.backend,
                    provider=args.provider,
                    threads=args.threads,
                    prompt=tuple(longest),
                    count=args.max_new_tokens,
                )
            )
        rule = "greedy" if method.params.temperature == 0 else method.params.rule
        return MethodFacts(
            mode=method.llm.mode, acceptance=rule, least_width=method.least_width, peak_memory_bytes=peak
        )

    def _sample(self, methods: Sequence[Method], runs: Sequence[Run], figures: Sequence[Figures]) -> Sample | None:
        """The answer to look at: of the fastest drafter's longer half, the one whose tokens a round are the median."""
        of_all = pick(figures, self.args.batch_size[0])
        drafting = [each for each in methods if each.llm.method is not None]
        if not drafting:
            return None
        best = max(drafting, key=lambda each: of_all[each.name].tokens_per_second)
        own = [answer for run in runs if run.method == best.name for answer in run.answers if answer.history]
        own = sorted(own, key=lambda answer: len(answer.token_ids))[len(own) // 2 :]
        own.sort(key=lambda answer: len(answer.token_ids) / len(answer.history))
        answer = own[len(own) // 2]
        question = next(each for each in self.questions if each.question_id == answer.question_id)
        stream, pieces = best.llm.text.stream(()), list[str]()
        for token in answer.token_ids:
            stream.push(token)
            pieces.append(stream.delta(last=False))
        stream.finish()
        pieces[-1] += stream.delta(last=True)
        return Sample(
            method=best.name,
            question_id=answer.question_id,
            category=question.category,
            prompt=question.turns[answer.turn - 1],
            rounds=marked(answer.history, pieces),
            accepted_length=len(answer.token_ids) / len(answer.history),
        )


def bundle_facts(manifest: Manifest, variant: str | None) -> BundleFacts:
    """Which bundle this is."""
    chosen = pick_variant(manifest.target, variant)
    hashes = "".join(record.sha256 for _, record in sorted(manifest.files.items()))
    return BundleFacts(
        name=manifest.source.name,
        family=manifest.source.family,
        variant=variant or next(iter(manifest.target.variants)),
        precision=chosen.precision,
        drafters=tuple(manifest.methods()),
        files=hashlib.sha256(hashes.encode()).hexdigest()[:16],
    )


def _questions(args: argparse.Namespace) -> list[Question]:
    """The prompts that were asked for: of a file, or our own."""
    if args.prompts:
        known = read_questions(args.prompts)
    else:
        known = [Question(each.name, "copying" if each.copies else "free", (each.text,)) for each in PROMPTS]
    return select(known, args.categories, args.per_category, args.limit)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
