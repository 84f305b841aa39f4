"""What the distribution tests stand on: a text to continue, the tokens that matter there, tables, and `LLM`s on them.

The text is made so that every drafter guesses there, sometimes right and sometimes wrong: its end has occurred before
(for n-grams, with two continuations), followed by a token that the model finds neither certain nor absurd. A draft that
is too close to the target, or too far from it, never loses or never wins a coin; then its logits are disturbed, which
no lossless rule minds. The exact distribution comes from here too, and no speculation takes part in it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from specdec.engines.base import Engine, Heads
from specdec.engines.contract import FloatArray, HeadsSpec, IntArray, ModelSpec
from specdec.engines.ids import read_ids
from specdec.engines.manifest import BESIDE, BLOCKWISE, MEDUSA, EagleDrafter, Manifest, MedusaDrafter, ModelDrafter
from specdec.engines.registry import EngineConfig, open_heads
from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.runtime.sampling import LogitsPipeline
from specdec.tools.tables import Book, Change, Table, TableEngine, Text
from specdec.tools.tables_bundle import bundle_view
from specdec.tools.tables_choice import best_ids, disturb, likely_tokens, repeating_text
from specdec.tools.tables_heads import HeadTable, TableHeads
from specdec.tools.tables_pairs import PairEngine, PairTable

Tree = Literal["chain", "dynamic"]
Drafts = Literal["sampled", "ranked", "looked up", "none"]
_PENALTY = 1.05  # of repetition: a larger one would rule out what n-grams guess
_NEAR, _FAR = 0.9, 0.2  # acceptance beyond which a draft's logits are disturbed
_SPREADS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)  # by about how much, so that
_WANTED = 0.5  # acceptance comes near this
_OF_HEADS = (MEDUSA, BLOCKWISE)


class Setting(msgspec.Struct, frozen=True):
    """What a request asks for. Temperature 0 is greedy.

    `terms`: with penalties that depend on the answer so far. `ends`: one of the likely tokens is an end token.
    """

    temperature: float
    top_k: int
    tokens: int
    terms: bool
    ends: bool


class DifferenceError(Exception):
    """The runtime chose a token from other logits than those of its exact text."""


class Ground:
    """Tables and `LLM`s for one bundle; `open_graph` gives the real engine of a graph (and keeps it).

    `words`: token ids of some text. `disturbed`: methods whose draft is disturbed.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        variant: str,
        open_graph: Callable[[Path, ModelSpec], Engine],
        words: Sequence[int],
        open_heads: Callable[[Path, HeadsSpec], Heads] = open_heads,
    ) -> None:
        self.manifest, self._variant, self._stack = manifest, variant, ExitStack()
        target = manifest.target
        self._engines = {"target": open_graph(bundle / target.variants[variant].graph, target.spec)}
        self._heads: tuple[Heads, IntArray | None] | None = None
        self._pairs: dict[int, Callable[[Table, Sequence[int] | None], PairTable]] = {}  # by engine, from the target's
        limit = target.spec.vocab_size
        for method, record in manifest.drafters.items():
            if isinstance(record, ModelDrafter):
                graph = next(iter(record.model.variants.values())).graph
                self._engines[f"drafters/{method}"] = open_graph(bundle / graph, record.model.spec)
                limit = min(limit, record.shared_vocab)
            elif isinstance(record, BESIDE):
                graph = record.model.variants[variant].graph
                engine = self._engines[f"drafters/{method}"] = open_graph(bundle / graph, record.model.spec)
                if isinstance(record, EagleDrafter):
                    ids = _ids(bundle, record.ids, record.model.spec.logits_size, target.spec)
                    self._pairs[id(engine)] = partial(PairTable, engine, record.taps, ids)
            elif isinstance(record, MedusaDrafter):
                ids = _ids(bundle, record.ids, record.spec.logits_size, target.spec)
                self._heads = open_heads(bundle / record.graph, record.spec), ids
        self._full: dict[int, Table] = {}  # by engine: a target that drafts for itself has one table
        self._few: dict[int, Table] = {}
        self._head_tables: dict[int, HeadTable] = {}
        self._book = Book()
        text = repeating_text(self._table(self._engines["target"], None), words, limit)
        likely: list[Table | HeadTable] = [self._table(engine, None) for engine in self._engines.values()]
        if self._heads is not None:
            likely.append(self._head_table(None))
        self.ids = [-1, *likely_tokens(likely, text, limit)]
        self._number = {token: index for index, token in enumerate(self.ids)}
        self._prompts = {"few": tuple(self._number[token] for token in text), "full": tuple(text)}
        self.boost = self._boost()
        end = self._end()
        self._ends = (end, self.ids[end])  # in the ids of the few tokens, and of the whole vocabulary
        drafts = [name.removeprefix("drafters/") for name in self._engines if name != "target"]
        drafts += _OF_HEADS if self._heads is not None else ()
        self.disturbed = {method: spread for method in drafts if (spread := self._disturbance(method)) is not None}
        self.watched = 0  # logits compared
        self.llm = cache(self._llm)
        self._plain: dict[tuple[Setting, bool], list[RequestOutput]] = {}

    def close(self) -> None:
        """Remove the folders."""
        self._stack.close()

    def prompt(self, *, full: bool) -> Text:
        """The text that is continued, in the ids of the whole vocabulary or of the few tokens."""
        return self._prompts["full" if full else "few"]

    def params(self, setting: Setting, **more: Any) -> SamplingParams:
        """The request of a setting."""
        terms: dict[str, Any] = (
            {"repetition_penalty": _PENALTY, "presence_penalty": self.boost} if setting.terms else {}
        )
        return SamplingParams(
            max_new_tokens=setting.tokens,
            temperature=setting.temperature,
            top_k=setting.top_k,
            ignore_eos=not setting.ends,
            **terms,
            **more,
        )

    def law(self, setting: Setting, *, full: bool) -> dict[Text, float]:
        """Probability of every possible answer: products of what the pipeline makes of the target's logits."""
        prompt, engine = self.prompt(full=full), self._engine("target", full=full)
        pipeline = LogitsPipeline(self.params(setting), len(prompt))
        law: dict[Text, float] = {(): 1.0}
        for _ in range(setting.tokens):
            going = [answer for answer in law if not (setting.ends and answer and answer[-1] == self._ends[full])]
            grown = {answer: mass for answer, mass in law.items() if answer not in going}
            engine.table.prepare((*prompt, *answer) for answer in going)
            for answer in going:
                text = (*prompt, *answer)
                p = pipeline.probabilities(engine.logits(text), text)
                grown |= {(*answer, int(token)): law[answer] * float(p[token]) for token in np.flatnonzero(p)}
            law = grown
        return law

    def plain(self, setting: Setting, seeds: Sequence[int], *, full: bool) -> list[RequestOutput]:
        """Plain decoding's answers with coupled sampling, a seed each; made anew only for more seeds than before."""
        known = self._plain.setdefault((setting, full), [])
        if len(known) < len(seeds):
            params = [self.params(setting, acceptance="coupled", seed=seed) for seed in seeds]
            llm = self.llm(None, "chain", "none", 1, full)
            known[:] = llm.generate([self.prompt(full=full)] * len(seeds), params)
        return known[: len(seeds)]

    def _llm(self, method: str | None, tree: Tree, drafts: Drafts, batch: int, full: bool) -> LLM:
        """The runtime on tables. Raises `DifferenceError` while it generates, for the first wrong bit."""
        target = self._engine("target", full=full)
        size, end = (None if full else len(self.ids)), self._ends[full]
        view = bundle_view(self.manifest, self._variant, size=size, end=end, max_batch=batch)
        folder = self._stack.enter_context(view)

        def opener(graph: Path, spec: ModelSpec, config: EngineConfig | None) -> Engine:
            name = graph.relative_to(folder).as_posix()
            return target if name == "target" else self._engine(name, full=full)

        def watch(tokens: Sequence[int], logits: FloatArray) -> None:
            self.watched += 1
            if not np.array_equal(target.logits(tuple(tokens)), logits):
                new = len(tokens) - len(self.prompt(full=full))
                raise DifferenceError(f"answer token {new + 1} was chosen from logits of another text")

        def heads_opener(graph: Path, spec: HeadsSpec, config: EngineConfig | None) -> Heads:
            return TableHeads(self._head_table(None if full else self.ids), self._book, self._change(MEDUSA))

        config = SpeculativeConfig(
            method=method,
            tree=tree,
            confidence_threshold=0.0 if tree == "chain" else None,  # chains of full length
            draft_sample_method="greedy" if drafts == "ranked" else "probabilistic",
        )
        options: dict[str, Any] = {"opener": opener, "heads_opener": heads_opener, "watch": watch}
        return LLM(folder, speculative=config, verify=False, prefix_bytes=0, **options)

    def _table(self, engine: Engine, ids: Sequence[int] | None) -> Table:
        tables = self._full if ids is None else self._few
        if id(engine) not in tables:
            pairs = self._pairs.get(id(engine))
            own = Table(engine, ids) if pairs is None else pairs(self._table(self._engines["target"], ids), ids)
            tables[id(engine)] = own
        return tables[id(engine)]

    def _engine(self, name: str, *, full: bool) -> TableEngine:
        table = self._table(self._engines[name], None if full else self.ids)
        change = self._change(name.removeprefix("drafters/"))
        if isinstance(table, PairTable):
            return PairEngine(table, self._book, change)
        return TableEngine(table, change, self._book)

    def _head_table(self, ids: Sequence[int] | None) -> HeadTable:
        """The Medusa heads on the target's table of these ids."""
        assert self._heads is not None, "the bundle has heads"
        table = self._table(self._engines["target"], ids)
        if id(table) not in self._head_tables:
            self._head_tables[id(table)] = HeadTable(*self._heads, table)
        return self._head_tables[id(table)]

    def _change(self, method: str) -> Change | None:
        spread = self.disturbed.get(method)
        return None if spread is None else partial(disturb, spread=spread)

    def _disturbance(self, method: str) -> float | None:
        """By how much a draft is disturbed: not at all if it is sometimes rejected and sometimes accepted."""
        own = self._acceptance(method, None)
        if _FAR <= own <= _NEAR:
            return None
        return min(_SPREADS, key=lambda spread: abs(self._acceptance(method, spread) - _WANTED))

    def _acceptance(self, method: str, spread: float | None) -> float:
        """Mean chance that a drawn token is accepted, at the first two positions."""
        prompt, pipeline = self.prompt(full=False), LogitsPipeline(SamplingParams(temperature=1.0, top_k=3), 0)
        target = self._table(self._engines["target"], self.ids)
        draft: Table | HeadTable
        if method in _OF_HEADS:
            draft = self._head_table(self.ids)
        else:
            draft = self._table(self._engines[f"drafters/{method}"], self.ids)
        p = pipeline.probabilities(target.logits(prompt), prompt)
        chances = []
        for text in (prompt, *((*prompt, int(token)) for token in np.flatnonzero(p))):
            q = draft.logits(text) if spread is None else disturb(text, draft.logits(text), spread)
            both = (pipeline.probabilities(logits, text) for logits in (target.logits(text), q))
            chances.append(np.minimum(*both).sum())
        return float(np.mean(chances))

    def _end(self) -> int:
        """The end token of settings that have one: likely as the second token of an answer, so within drafts."""
        prompt, table = self.prompt(full=False), self._table(self._engines["target"], self.ids)
        pipeline = LogitsPipeline(self.params(Setting(1.0, 3, 3, terms=True, ends=False)), len(prompt))
        first = best_ids(pipeline.scores(table.logits(prompt), prompt), 1)[0]
        text = (*prompt, first)
        return next(token for token in best_ids(pipeline.scores(table.logits(text), text), 2) if token != first)

    def _boost(self) -> float:
        """A presence penalty (negative) that makes a token about as likely right after itself as the best other one.

        Otherwise no token comes twice in a few, and whether a draft's own tokens count as history would not show.
        """
        prompt, table = self.prompt(full=False), self._table(self._engines["target"], self.ids)
        pipeline = LogitsPipeline(SamplingParams(repetition_penalty=_PENALTY), 0)
        gaps = []
        for token in best_ids(table.logits(prompt), 3):
            text = (*prompt, token)
            scores = pipeline.scores(table.logits(text), text)
            gaps.append(float(scores.max() - scores[token]))
        return -float(np.median(gaps))


def _ids(bundle: Path, file: str | None, count: int, target: ModelSpec) -> IntArray | None:
    """A drafter's ids, if it has its own."""
    return None if file is None else read_ids(bundle / file, count, target.logits_size)
