"""`LLM`: load a bundle, generate text. What applications call.

    llm = LLM("bundle")
    llm.generate(["..."], SamplingParams(max_new_tokens=64))   # a batch, in order
    for delta in llm.stream("...", SamplingParams()): ...      # as it comes

This module wires bundle, engines, drafter and scheduler together; the algorithm is `scheduler.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from specdec.engines.base import Engine, Heads, capacity_bucket
from specdec.engines.contract import HeadsSpec, ModelSpec
from specdec.engines.costs import cost_curve
from specdec.engines.errors import RequestError
from specdec.engines.manifest import (
    BESIDE,
    BLOCKWISE,
    MEDUSA,
    EagleDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    ModelDrafter,
    Variant,
    read_manifest,
    verify_files,
)
from specdec.engines.registry import EngineConfig, open_engine, open_heads, with_plans
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.controller import CURVE_TRUST, Controller, PassTimes
from specdec.runtime.delivery import Delta
from specdec.runtime.drafters.opening import (
    Maker,
    Opening,
    check_backend,
    open_drafter,
    own_caches,
    pick_variant,
    reads_hidden,
)
from specdec.runtime.grammar import GrammarCompiler
from specdec.runtime.kv import CachedModel, KVBudget
from specdec.runtime.methods import auto_method, known_methods
from specdec.runtime.params import SamplingParams
from specdec.runtime.prefixes import PrefixStore
from specdec.runtime.request import RequestOutput, Row, Watch
from specdec.runtime.scheduler import PREFILL_TOKENS, Scheduler
from specdec.runtime.text import Message, Prompt, TextCodec, as_batch

Mode = Literal["exact", "fast"]
Opener = Callable[[Path, ModelSpec, EngineConfig | None], Engine]
HeadsOpener = Callable[[Path, HeadsSpec, EngineConfig | None], Heads]

PREFIX_BYTES = 256 * 2**20  # 5,800 tokens of SmolLM2-135M in fp32


class LLM:
    """A bundle, loaded. Calls from several threads are independent of each other.

    `mode`: in `exact`, speculation, batching and prefill change no bit of the logits: no pass is narrower than the
    variant's `least_width`, as measured at export. `fast` allows passes of one token everywhere; where those take other
    kernels they are cheaper, and their logits differ (in the last bits in fp32, more when quantized). Default: `exact`
    where the variant's invariance gate passed, the engine is the one that it ran on (ONNX Runtime on the CPU) and
    drafts are chains, else `fast`.
    `verify`: compare every file's SHA-256 with the manifest (about a second per GB).
    `prefix_bytes`: most memory for the caches of texts that have ended, for prompts that begin alike: a chat's earlier
    turns and a system prompt are computed once, by whichever call comes first; 0: nothing is kept. `prefixes` counts.
    The same bits in `exact`; in `fast` see `Scheduler`.
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
        prefix_bytes: int = PREFIX_BYTES,
        opener: Opener = open_engine,
        heads_opener: HeadsOpener = open_heads,
        watch: Watch | None = None,
    ) -> None:
        self.bundle = Path(bundle)
        self.manifest = read_manifest(self.bundle)
        self.speculative = speculative or SpeculativeConfig()
        self.method = self._choose_method()
        before, _, last = (self.method or "").rpartition("+")
        record = self.manifest.drafters.get(MEDUSA if last == BLOCKWISE else last)
        measured = isinstance(record, MedusaDrafter) and bool(record.accuracies)
        self.speculative.check(last, self.manifest.limits.max_tree - 1, measured=measured)
        if verify:
            verify_files(self.bundle, self.manifest)
        target = pick_variant(self.manifest.target, variant)
        exact = target.invariance.exact
        if prefix_bytes < 0:
            raise RequestError(f"prefix_bytes must be 0 (nothing is kept) or more, not {prefix_bytes}")
        if mode == "exact" and not exact:
            raise RequestError(f"{target.precision} failed its invariance gate at export: mode exact is not to be had")
        if mode == "exact" and self.speculative.branches:
            raise RequestError("trees that branch are lossless in law, not in bits: use mode fast, or tree='chain'")
        self._engine_config, self._opener = engine or EngineConfig(), opener
        check_backend(self.method or "", record, self._engine_config.backend)
        earned = exact and self._engine_config.is_gated and not self.speculative.branches
        self.mode: Mode = mode or ("exact" if earned else "fast")
        self.prefixes = PrefixStore(prefix_bytes) if prefix_bytes else None
        self.watch = watch
        self.text = TextCodec(self.bundle, self.manifest.tokenizer)
        self._engines: dict[str, Engine] = {}
        self._heads: Heads | None = None
        self._heads_opener = heads_opener
        self._target, self._width = self._open(self.manifest.target.spec, target)
        self._keeps_hidden = reads_hidden(record)
        self._cached = [self.spec, *own_caches(record)]
        self._draft: Maker | None = None
        self.controller: Controller | None = None
        if record is not None and self.speculative.adaptive:
            self.controller = Controller(self._pass_times(self.manifest.target.spec, target), self._width)
            if isinstance(record, ModelDrafter | LayerSkipDrafter | EagleDrafter):
                draft = pick_variant(record.model, variant if isinstance(record, BESIDE) else None)
                self.controller.levels = self._pass_times(record.model.spec, draft)
        if record is not None:
            opening = Opening(
                method=last,
                bundle=self.bundle,
                spec=self.spec,
                variant=variant,
                precision=target.precision,
                config=self.speculative,
                most=self.manifest.limits.max_tree - 1,
                width=self._width,
                open=self._open,
                open_heads=self._open_heads,
                controller=self.controller,
            )
            self._draft = open_drafter(record, opening, self.manifest.drafters.get(before))

    @property
    def spec(self) -> ModelSpec:
        """Shape of the target."""
        return self._target.spec

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_rows: int | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list of prompts (text or token ids); a list runs as one batch.

        `params` holds for all prompts, or is a list with one for each. `max_rows`: prompts that run at a time, the
        others follow as those end; None: as many as the engines take. Returns the outputs in the order of the prompts.
        Raises `RequestError` for an invalid prompt or parameter, before any work; `DeadEndError` (a request whose terms
        leave no token possible) and `EngineError` end the whole call.
        """
        batch = as_batch(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} sampling parameters for {len(batch)} prompts")
        rows = [self._row(prompt, own) for prompt, own in zip(batch, each, strict=True)]
        if max_rows is not None and max_rows < 1:
            raise RequestError(f"max_rows must be at least 1, not {max_rows}")
        # nobody reads a text before the last one ends, so no row is in a hurry: rounds run as full as they can be
        scheduler = self._scheduler(min(len(rows), max_rows or len(rows)), prefill_tokens=sys.maxsize)
        for row in rows:
            scheduler.submit(row)
        while scheduler.busy:
            scheduler.step_together()
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
            scheduler.step_together()
            yield Delta.since(row, known)

    def _choose_method(self) -> str | None:
        method, known = self.speculative.method, known_methods(self.manifest)
        if method == "auto":
            return auto_method(self.manifest)
        if method is not None and method not in known:
            raise RequestError(f"this bundle has no drafter {method!r}: choose one of {', '.join(['auto', *known])}")
        return method

    def _open(self, spec: ModelSpec, variant: Variant) -> tuple[Engine, int]:
        """Open a graph (once, if a target drafts for itself); return it and the positions of its narrowest pass."""
        if variant.graph not in self._engines:
            config = with_plans(self._engine_config, self.bundle, variant)
            self._engines[variant.graph] = self._opener(self.bundle / variant.graph, spec, config)
        return self._engines[variant.graph], variant.invariance.least_width if self.mode == "exact" else 1

    def _pass_times(self, spec: ModelSpec, variant: Variant) -> PassTimes:
        """What the passes of a graph take, measured on this machine."""
        (engine, width), limits = self._open(spec, variant), self.manifest.limits
        content, slots = self.manifest.files[variant.graph].sha256, limits.max_length + limits.max_tree
        return PassTimes(cost_curve(engine, content, width, limits.max_tree, slots), trust=CURVE_TRUST)

    def _open_heads(self, record: MedusaDrafter) -> Heads:
        self._heads = self._heads_opener(self.bundle / record.graph, record.spec, self._engine_config)
        return self._heads

    def _scheduler(
        self, requests: int, *, prefill_tokens: int = PREFILL_TOKENS, budget: KVBudget | None = None
    ) -> Scheduler:
        """A scheduler with a row for each of `requests`, or as many as the engines take."""
        rows = min(requests, self.manifest.limits.max_batch)
        target = CachedModel(
            self._target,
            max_rows=rows,
            min_width=self._width,
            keeps_hidden=self._keeps_hidden,
            times=self.controller.times if self.controller else None,
        )
        drafter = self._draft(target) if self._draft else None
        return Scheduler(target, drafter, prefill_tokens=prefill_tokens, budget=budget, prefixes=self.prefixes)

    def _budget(self, rows: int, limit: int | None) -> KVBudget:
        """`limit` bytes for all caches; None: what `rows` rows take that fill their contexts."""
        limits = self.manifest.limits
        slots = capacity_bucket(limits.max_length + limits.max_tree)
        most = sum(spec.kv_bytes(rows, slots) for spec in self._cached)
        return KVBudget(most if limit is None else limit, self._cached, limits.max_tree)

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
