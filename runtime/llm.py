"""`LLM`: load a bundle, generate text. What applications call.

    llm = LLM("bundle")
    llm.generate(["..."], SamplingParams(max_new_tokens=64))   # a batch, in order
    for delta in llm.stream("...", SamplingParams()): ...      # as it comes

This module wires bundle, engines, drafter and scheduler together; the algorithm is `scheduler.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np

from specdec.engines.base import Engine, Heads
from specdec.engines.contract import HeadsSpec, IntArray, ModelSpec
from specdec.engines.errors import BundleError, RequestError
from specdec.engines.ids import read_ids
from specdec.engines.manifest import (
    BLOCKWISE,
    MEDUSA,
    LayerSkipDrafter,
    MedusaDrafter,
    Model,
    ModelDrafter,
    Variant,
    read_manifest,
    verify_files,
)
from specdec.engines.registry import EngineConfig, open_engine, open_heads, with_plans
from specdec.runtime import drafters
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.growth import Shape
from specdec.runtime.drafters.layerskip import LayerSkipDrafter as FirstLayers
from specdec.runtime.drafters.medusa import MedusaDrafter as MedusaHeads
from specdec.runtime.drafters.model import ModelDrafter as DraftModel
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.grammar import GrammarCompiler
from specdec.runtime.kv import BorrowedModel, CachedModel
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import FinishReason, Prompt, RequestOutput, Row, Watch, as_batch
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.text import Message, TextCodec

Mode = Literal["exact", "fast"]
Opener = Callable[[Path, ModelSpec, EngineConfig | None], Engine]
HeadsOpener = Callable[[Path, HeadsSpec, EngineConfig | None], Heads]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a round added to one answer. `output` is set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput | None


class LLM:
    """A bundle, loaded. Calls from several threads are independent of each other.

    `mode`: in `exact`, speculation, batching and prefill change no bit of the logits: no pass is narrower than the
    variant's `least_width`, as measured at export. `fast` allows passes of one token everywhere; where those take other
    kernels they are cheaper, and their logits differ (in the last bits in fp32, more when quantized). Default: `exact`
    where the variant's invariance gate passed, the engine is the one that it ran on (ONNX Runtime on the CPU) and
    drafts are chains, else `fast`.
    `verify`: compare every file's SHA-256 with the manifest (about a second per GB).
    `opener` and `heads_opener`: how a graph becomes an engine; for tests and for `specdec-verify`.
    `watch`: called for every emitted token with all tokens before it and the logits that it was chosen from.

    Raises `BundleError`, `EngineError`, `RequestError` (an option that the bundle cannot fulfil).
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        speculative: SpeculativeConfig | None = None,
        variant: str | None = None,
        mode: Mode | None = None,
        engine: EngineConfig | None = None,
        verify: bool = True,
        opener: Opener = open_engine,
        heads_opener: HeadsOpener = open_heads,
        watch: Watch | None = None,
    ) -> None:
        self.bundle = Path(bundle)
        self.manifest = read_manifest(self.bundle)
        self.speculative = speculative or SpeculativeConfig()
        self.method = self._choose_method()
        record = self.manifest.drafters.get(MEDUSA if self.method == BLOCKWISE else self.method or "")
        measured = isinstance(record, MedusaDrafter) and bool(record.accuracies)
        self.speculative.check(self.method, self.manifest.limits.max_tree - 1, measured=measured)
        if verify:
            verify_files(self.bundle, self.manifest)
        target = _pick(self.manifest.target, variant)
        exact = target.invariance.exact
        if mode == "exact" and not exact:
            raise RequestError(f"{target.precision} failed its invariance gate at export: mode exact is not to be had")
        if mode == "exact" and self.speculative.branches:
            raise RequestError("trees that branch are lossless in law, not in bits: use mode fast, or tree='chain'")
        self._engine_config, self._opener = engine or EngineConfig(), opener
        if isinstance(record, LayerSkipDrafter) and self._engine_config.backend != "ort":
            raise RequestError(f"drafter {self.method} shares the target's cache, which only backend ort can")
        earned = exact and self._engine_config.is_gated and not self.speculative.branches
        self.mode: Mode = mode or ("exact" if earned else "fast")
        self.watch = watch
        self.text = TextCodec(self.bundle, self.manifest.tokenizer)
        self._engines: dict[str, Engine] = {}
        self._heads: Heads | None = None
        if isinstance(record, MedusaDrafter):
            self._heads = heads_opener(self.bundle / record.graph, record.spec, self._engine_config)
        self._target, self._width = self._open(self.manifest.target.spec, target)
        self._draft: Callable[[CachedModel], Drafter] | None = None  # by the target's cache
        if isinstance(record, ModelDrafter):
            self._draft = partial(self._draft_model, record, *self._open(record.model.spec, _pick(record.model)))
        elif isinstance(record, LayerSkipDrafter):
            cut = _pick(record.model, variant)  # named as the target's
            self._draft = partial(self._first_layers, *self._open(record.model.spec, cut))
        elif isinstance(record, MedusaDrafter) and self._heads is not None:
            size = record.spec.logits_size
            ids = read_ids(self.bundle / record.ids, size, self.spec.logits_size) if record.ids else None
            self._draft = partial(self._medusa, record, self._heads, ids)
        elif record is not None:
            self._draft = partial(self._ngram, target.precision)

    @property
    def spec(self) -> ModelSpec:
        """Shape of the target."""
        return self._target.spec

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list of prompts (text or token ids); a list runs as one batch.

        `params` holds for all prompts, or is a list with one for each. Returns the outputs in the order of the prompts.
        Raises `RequestError` for an invalid prompt or parameter, before any work; `DeadEndError` (a request whose terms
        leave no token possible) and `EngineError` end the whole call.
        """
        batch = as_batch(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} sampling parameters for {len(batch)} prompts")
        rows = [self._row(prompt, own) for prompt, own in zip(batch, each, strict=True)]
        scheduler = self._scheduler(len(rows))
        for row in rows:
            scheduler.submit(row)
        while scheduler.busy:
            scheduler.step()
        return [row.output() for row in rows]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Generate for one prompt; yield what every round adds. An invalid prompt raises right here."""
        row = self._row(prompt, params or SamplingParams())
        scheduler = self._scheduler(1)
        scheduler.submit(row)
        return self._deltas(row, scheduler)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, through the bundle's chat template, ready for `generate`."""
        return self.text.encode(self.text.render_chat(messages), special=False)

    def close(self) -> None:
        """Release the engines."""
        for engine in self._engines.values():
            engine.close()
        if self._heads is not None:
            self._heads.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _deltas(self, row: Row, scheduler: Scheduler) -> Iterator[Delta]:
        while scheduler.busy:
            known = len(row.tokens)
            scheduler.step()
            reason = row.finish_reason
            text = row.stream.delta(last=reason is not None)
            yield Delta(text, tuple(row.tokens[known:]), reason, row.output() if reason else None)

    def _choose_method(self) -> str | None:
        method, known = self.speculative.method, self.manifest.methods()
        if method == "auto":
            return known[0] if known else None
        if method is not None and method not in known:
            raise RequestError(f"this bundle has no drafter {method!r}: choose one of {', '.join(['auto', *known])}")
        return method

    def _open(self, spec: ModelSpec, variant: Variant) -> tuple[Engine, int]:
        """Open a graph (once, if a target drafts for itself); return it and the positions of its narrowest pass."""
        if variant.graph not in self._engines:
            config = with_plans(self._engine_config, self.bundle, variant)
            self._engines[variant.graph] = self._opener(self.bundle / variant.graph, spec, config)
        return self._engines[variant.graph], variant.invariance.least_width if self.mode == "exact" else 1

    def _scheduler(self, requests: int) -> Scheduler:
        rows = min(requests, self.manifest.limits.max_batch)
        keeps = self._heads is not None
        target = CachedModel(self._target, max_rows=rows, min_width=self._width, keeps_hidden=keeps)
        return Scheduler(target, self._draft(target) if self._draft else None)

    def _draft_model(self, record: ModelDrafter, engine: Engine, width: int, target: CachedModel) -> Drafter:
        model = CachedModel(engine, max_rows=target.max_rows, min_width=width)
        size, shared = self.spec.vocab_size, record.shared_vocab
        return DraftModel(model, self._shape(), size, shared, deterministic=self._ranked)

    def _first_layers(self, engine: Engine, width: int, target: CachedModel) -> Drafter:
        return FirstLayers(BorrowedModel(engine, target, min_width=width), self._shape(), deterministic=self._ranked)

    def _medusa(self, record: MedusaDrafter, heads: Heads, ids: IntArray | None, target: CachedModel) -> Drafter:
        shape, ranked = self._shape(record.accuracies), self._ranked or self.method == BLOCKWISE
        return MedusaHeads(target, heads, shape, ids, min_rows=self._width, deterministic=ranked)

    def _shape(self, accuracies: Sequence[Sequence[float]] = ()) -> Shape:
        default = drafters.TREE_TOKENS if self.speculative.branches else drafters.MODEL_TOKENS
        return self.speculative.shape(self._at_most(default), accuracies)

    @property
    def _ranked(self) -> bool:
        return self.speculative.draft_sample_method == "greedy"

    def _ngram(self, precision: str, target: CachedModel) -> Drafter:
        config, threshold = self.speculative, self.speculative.confidence_threshold
        if threshold is None:
            threshold = drafters.NGRAM_THRESHOLDS.get(precision, drafters.NGRAM_THRESHOLD)
        count = config.num_speculative_tokens or self._at_most(drafters.NGRAM_TOKENS)
        return NgramDrafter(
            count,
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            threshold=threshold,
            always=self._width > 1,
            branching=config.branches,
        )

    def _at_most(self, default: int) -> int:
        return min(default, self.manifest.limits.max_tree - 1)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        tokenizer = self.bundle / "tokenizer.json"
        return GrammarCompiler(tokenizer, self.spec.vocab_size, self.manifest.tokenizer.eos_token_ids)

    def _row(self, prompt: Prompt, params: SamplingParams) -> Row:
        """Check a prompt and make it a row."""
        spec, limit = self.spec, self.manifest.limits.max_length
        params.check_vocabulary(spec.vocab_size)
        tokens = self.text.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise RequestError("the prompt is empty: it must have at least one token")
        for token in tokens:
            if not isinstance(token, int | np.integer):
                raise RequestError(f"a prompt of token ids holds integers, not {token!r}")
            if not 0 <= token < spec.vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {spec.vocab_size}")
        if len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with a context of {limit}, at most {limit - 1} fit"
            )
        structured = params.structured_outputs
        return Row(
            tuple(map(int, tokens)),
            params,
            self.text.stream(params.stop),
            frozenset(self.manifest.tokenizer.eos_token_ids),
            limit,
            bad_words=self.text.bad_words(params.bad_words),
            grammar=self._grammars.matcher(structured) if structured else None,
            watch=self.watch,
        )


def _pick(model: Model, name: str | None = None) -> Variant:
    """Return the variant of this name, or the first."""
    if not model.variants:
        raise BundleError("the manifest lists a model without variants; export the bundle again")
    if name is not None and name not in model.variants:
        raise RequestError(f"this bundle has no variant {name!r}: choose one of {', '.join(model.variants)}")
    return model.variants[name or next(iter(model.variants))]
