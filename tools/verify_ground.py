"""What the distribution tests stand on: a text to continue, the tokens that matter there, tables, and `LLM`s on them.

The text is made so that every drafter guesses there, sometimes right and sometimes wrong: its end has occurred before
(for n-grams, with two continuations), followed by a token that the model finds neither certain nor absurd. A draft that
is too close to the target, or too far from it, never loses or never wins a coin; then its logits are disturbed, which
no lossless rule minds. The exact distribution comes from here too, and no speculation takes part in it.
"""

import zlib
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
from specdec.engines.manifest import BLOCKWISE, MEDUSA, LayerSkipDrafter, Manifest, MedusaDrafter, ModelDrafter
from specdec.engines.registry import EngineConfig, open_heads
from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.runtime.sampling import LogitsPipeline
from specdec.tools.tables import Change, Table, TableEngine, Text
from specdec.tools.tables_heads import HeadTable, TableHeads
from specdec.tools.tables_view import bundle_view

Tree = Literal["chain", "dynamic"]
Drafts = Literal["sampled", "ranked", "looked up", "none"]
_BASE = 14  # tokens of the text before its end is repeated
_TOKENS = 60  # that a table speaks of, at most, beside the text's own
_PENALTY = 1.05  # of repetition: a larger one would rule out what n-grams guess
_NEAR, _FAR = 0.9, 0.2  # acceptance beyond which a draft's logits are disturbed
_DISTURBED, _SPREADS = 6, (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)  # so many of the best logits move, by about so much,
_OF_HEADS = (MEDUSA, BLOCKWISE)
_WANTED = 0.5  # so that acceptance comes near this


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
        limit = target.spec.vocab_size
        for method, record in manifest.drafters.items():
            if isinstance(record, ModelDrafter):
                graph = next(iter(record.model.variants.values())).graph
                self._engines[f"drafters/{method}"] = open_graph(bundle / graph, record.model.spec)
                limit = min(limit, record.shared_vocab)
            elif isinstance(record, LayerSkipDrafter):
                graph = record.model.variants[variant].graph
                self._engines[f"drafters/{method}"] = open_graph(bundle / graph, record.model.spec)
            elif isinstance(record, MedusaDrafter):
                size, most = record.spec.logits_size, target.spec.logits_size
                ids = read_ids(bundle / record.ids, size, most) if record.ids else None
                self._heads = open_heads(bundle / record.graph, record.spec), ids
        self._full: dict[int, Table] = {}  # by engine: a target that drafts for itself has one table
        self._few: dict[int, Table] = {}
        self._head_tables: dict[int, HeadTable] = {}
        text = _repeating_text(self._table(self._engines["target"], None), words, limit)
        likely: list[Table | HeadTable] = [self._table(engine, None) for engine in self._engines.values()]
        if self._heads is not None:
            likely.append(self._head_table(None))
        self.ids = [-1, *_likely_tokens(likely, text, limit)]
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
            return TableHeads(self._head_table(None if full else self.ids), self._change(MEDUSA))

        config = SpeculativeConfig(
            method=method, tree=tree, draft_sample_method="greedy" if drafts == "ranked" else "probabilistic"
        )
        return LLM(folder, speculative=config, verify=False, opener=opener, heads_opener=heads_opener, watch=watch)

    def _table(self, engine: Engine, ids: Sequence[int] | None) -> Table:
        tables = self._full if ids is None else self._few
        if id(engine) not in tables:
            tables[id(engine)] = Table(engine, ids)
        return tables[id(engine)]

    def _engine(self, name: str, *, full: bool) -> TableEngine:
        table = self._table(self._engines[name], None if full else self.ids)
        return TableEngine(table, self._change(name.removeprefix("drafters/")))

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
        first = _best(pipeline.scores(table.logits(prompt), prompt), 1)[0]
        text = (*prompt, first)
        return next(token for token in _best(pipeline.scores(table.logits(text), text), 2) if token != first)

    def _boost(self) -> float:
        """A presence penalty (negative) that makes a token about as likely right after itself as the best other one.

        Otherwise no token comes twice in a few, and whether a draft's own tokens count as history would not show.
        """
        prompt, table = self.prompt(full=False), self._table(self._engines["target"], self.ids)
        pipeline = LogitsPipeline(SamplingParams(repetition_penalty=_PENALTY), 0)
        gaps = []
        for token in _best(table.logits(prompt), 3):
            text = (*prompt, token)
            scores = pipeline.scores(table.logits(text), text)
            gaps.append(float(scores.max() - scores[token]))
        return -float(np.median(gaps))


def disturb(text: Text, logits: FloatArray, spread: float) -> FloatArray:
    """Move the best few logits at random by about `spread`, always in the same way for the same text."""
    rng = np.random.default_rng(zlib.crc32(np.array(text, np.int64).tobytes()))
    out, best = logits.copy(), _best(logits, _DISTURBED)
    out[best] += (spread * rng.standard_normal(len(best))).astype(out.dtype)
    return out


def _repeating_text(table: Table, words: Sequence[int], limit: int) -> Text:
    """A text whose end occurred before, with a next token whose probability is as near to one half as can be found.

    It ends in a, b; the bigram a, b was followed by some tokens, and b alone, later on, by another one.
    """
    known = [token for token in words if token < limit] or [0]
    base = tuple(known[index % len(known)] for index in range(_BASE))
    *_, a, b = base
    first = _best(table.logits(base)[:limit], 4)
    found: list[tuple[float, Text]] = []
    pipeline = LogitsPipeline(SamplingParams(temperature=1.0, top_k=3), 0)
    for index, guess in enumerate(first[:3]):
        then = [guess]
        for _ in range(3):
            then.append(_best(table.logits((*base, *then))[:limit], 1)[0])
        text = (a, b, *then, b, first[index + 1], *base)
        p = pipeline.probabilities(table.logits(text)[:limit], text)
        found.append((abs(float(p[guess]) - 0.5), text))
    return min(found)[1]


def _likely_tokens(tables: Sequence[Table | HeadTable], text: Text, limit: int) -> list[int]:
    """The text's tokens, and those that are likely after it, after its continuations, and after those of these."""
    chosen = dict.fromkeys(text)
    level: list[Text] = [text]
    most = len(chosen) + _TOKENS
    for depth in range(3):
        following: list[Text] = []
        for table in dict.fromkeys(tables):
            table.prepare(level)
            for one in level:
                best = _best(table.logits(one)[:limit], 12 if depth < 2 else 4)
                for token in best:
                    if len(chosen) < most:
                        chosen.setdefault(token)
                following += [(*one, token) for token in best[:3]]
        level = list(dict.fromkeys(following))
    return list(chosen)


def _best(logits: FloatArray, count: int) -> list[int]:
    """Ids of the largest logits that are not -inf, descending."""
    order = np.argsort(-logits.astype(np.float32), kind="stable")[:count]
    return [int(token) for token in order if np.isfinite(logits[token])]
