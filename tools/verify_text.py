"""Does speculation give plain decoding's text, bit for bit? Whole answers to real prompts, on the real engine.

Greedy answers, and answers with coupled noise, have to be token for token those of plain decoding, one prompt at a
time; and plain decoding's own logits those of the whole text scored in one pass. In mode `exact` the bits of the logits
behind every token have to be the same, and the log-probabilities. Where bits may differ (other engines, trees that
branch), a first difference is a *tie* if the two tokens' scores are closer than twice the engine's noise, and a *fault*
otherwise.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from specdec.engines.base import Engine
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import FloatArray
from specdec.engines.errors import RequestError
from specdec.engines.manifest import BLOCKWISE
from specdec.engines.scoring import LEAST_WIDTH
from specdec.runtime import LLM, SamplingParams
from specdec.runtime.chance import PositionNoise
from specdec.runtime.sampling import softmax
from specdec.tools.tables import Text
from specdec.tools.verify_ground import Tree

Kind = Literal["greedy", "coupled"]
COUPLED_LENGTHS = (1, 3, 6)  # draft tokens a round that coupled answers are compared at


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Who generates: a method (None: plain decoding), with how many draft tokens (None: the default), in what batch.

    `rescored`: nobody does; plain decoding's texts are scored in one pass each.
    """

    kind: Kind
    method: str | None = None
    tree: Tree = "chain"
    draft_tokens: int | None = None
    batch: int = 1
    rescored: bool = False


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of a run compare with plain decoding's. `problem`: why it failed, None when it did not.

    `exact`: whether bits are compared and no difference is forgiven. `bits_equal` of `bits` logits were the same.
    """

    run: Run
    exact: bool
    prompts: int
    tokens: int
    identical: int
    ties: int
    bits: int
    bits_equal: int
    tau: float
    accepted: int
    problem: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing was found against the runtime."""
        return self.problem is None


class Answers(NamedTuple):
    """What a run gave: by prompt its tokens and their log-probabilities; by text the digest of the logits after it."""

    tokens: list[Text]
    logprobs: list[tuple[float, ...]]
    bits: dict[Text, bytes]
    rounds: int = 0
    accepted: int = 0


class Texts:
    """Compares runs over `prompts`. `open_llm` gives the runtime of a run; `engine` is the target's.

    noise(text, tree) gives estimates, each better than the one before, of how far a logit after `text` may be off for
    reasons of arithmetic.
    """

    def __init__(
        self,
        open_llm: Callable[[Run], LLM],
        engine: Engine,
        noise: Callable[[Text, bool], Iterable[float]],
        prompts: dict[Kind, list[list[int]]],
        tokens: dict[Kind, int],
        seed: int,
    ) -> None:
        self._open, self._engine, self._noise = open_llm, engine, noise
        self._prompts, self._tokens, self._seed = prompts, tokens, seed
        self._plain: dict[Kind, Answers] = {}

    def run(self, run: Run) -> TextResult:
        """Generate, and compare with plain decoding."""
        started, exact, prompts = perf_counter(), True, self._prompts[run.kind]
        found = Answers([], [], {})
        same = ties = equal = 0
        problem: str | None = None
        try:
            llm = self._open(run)
            exact = llm.mode == "exact"
            plain = self.plain(run.kind)
            found = self._rescore(run.kind, plain) if run.rescored else self._generate(llm, run)
            same = sum(one == other for one, other in zip(plain.tokens, found.tokens, strict=True))
            equal = sum(plain.bits.get(text) == digest for text, digest in found.bits.items())
            ties, problem = self._differences(run, plain, found, exact=exact)
            if exact and problem is None and equal < len(found.bits):
                problem = f"the bits of {len(found.bits) - equal} of {len(found.bits)} logits differ"
            if exact and problem is None and found.logprobs != plain.logprobs:
                problem = "log-probabilities differ"
        except RequestError:
            raise
        except Exception as exc:  # whatever a broken runtime raises
            problem = f"the runtime broke: {type(exc).__name__}: {' '.join(str(exc).split())}"
        tokens = sum(map(len, found.tokens))
        return TextResult(
            run=run,
            exact=exact,
            prompts=len(prompts),
            tokens=tokens,
            identical=same,
            ties=ties,
            bits=len(found.bits),
            bits_equal=equal,
            tau=tokens / found.rounds if found.rounds else 0.0,
            accepted=found.accepted,
            problem=problem,
            seconds=perf_counter() - started,
        )

    def plain(self, kind: Kind) -> Answers:
        """Plain decoding's answers, one prompt at a time: what all others have to equal."""
        if kind not in self._plain:
            run = Run(kind=kind)
            self._plain[kind] = self._generate(self._open(run), run)
        return self._plain[kind]

    def _params(self, kind: Kind, index: int, tokens: int | None = None) -> SamplingParams:
        count = tokens or self._tokens[kind]
        if kind == "greedy":
            return SamplingParams(max_new_tokens=count, logprobs=0)
        return SamplingParams(
            max_new_tokens=count, logprobs=0, temperature=1.0, acceptance="coupled", seed=self._seed + index
        )

    def _generate(self, llm: LLM, run: Run) -> Answers:
        prompts, bits = self._prompts[run.kind], dict[Text, bytes]()

        def watch(tokens: Sequence[int], logits: FloatArray) -> None:
            bits[tuple(tokens)] = _digest(logits)

        llm.watch = watch
        outputs = []
        for start in range(0, len(prompts), run.batch):
            part = range(start, min(start + run.batch, len(prompts)))
            params = [self._params(run.kind, index) for index in part]
            outputs += llm.generate([prompts[index] for index in part], params)
        return Answers(
            [output.token_ids for output in outputs],
            [tuple(one.logprob for one in output.logprobs or ()) for output in outputs],
            bits,
            sum(output.stats.rounds for output in outputs),
            sum(output.stats.draft_tokens_accepted for output in outputs),
        )

    def _rescore(self, kind: Kind, plain: Answers) -> Answers:
        """Logits behind plain decoding's tokens, each text in one pass: nothing of the runtime takes part."""
        spec, bits = self._engine.spec, dict[Text, bytes]()
        tokens: list[Text] = []
        for prompt, answer in zip(self._prompts[kind], plain.tokens, strict=True):
            text = (*prompt, *answer)
            kv = self._engine.allocate(1, len(text) + LEAST_WIDTH)
            inputs = [RowInput(text[:-1], len(answer))]
            (scored,) = self._engine.step(pack(inputs, np.zeros(1, np.int64), LEAST_WIDTH, spec.max_length), kv)
            chosen = []
            for index, logits in enumerate(scored[: len(answer), : spec.vocab_size]):
                history = text[: len(prompt) + index]
                bits[history] = _digest(logits)
                chosen.append(self._choice(kind, len(tokens), history, logits))
            tokens.append(tuple(chosen))
        return Answers(tokens, plain.logprobs, bits)

    def _choice(self, kind: Kind, index: int, history: Text, logits: FloatArray) -> int:
        """The token that plain decoding of prompt `index` chooses after `history`."""
        if kind == "greedy":
            return int(logits.argmax())
        return PositionNoise(self._seed + index).ranking(softmax(logits), len(history), 1)[0]

    def _differences(self, run: Run, plain: Answers, found: Answers, *, exact: bool) -> tuple[int, str | None]:
        """Count the ties among the first differences; the first fault in words."""
        ties = 0
        for index, (right, other) in enumerate(zip(plain.tokens, found.tokens, strict=True)):
            if right == other:
                continue
            place = next((i for i, (a, b) in enumerate(zip(right, other, strict=False)) if a != b), None)
            if place is None:
                return ties, f"prompt {index + 1}: {len(other)} tokens instead of {len(right)}"
            where = f"prompt {index + 1}: token {place + 1} is {other[place]} instead of {right[place]}"
            if exact:
                return ties, where
            history = (*self._prompts[run.kind][index], *right[:place])
            gap = self._gap(run.kind, index, history, right[place], other[place])
            for noise in self._noise(history, run.tree != "chain"):
                if is_tie(gap, noise):
                    break
            else:
                return ties, f"{where}, {gap:.3g} worse; the engine's noise is {noise:.3g}"
            ties += 1
        return ties, None

    def _gap(self, kind: Kind, index: int, history: Text, right: int, other: int) -> float:
        """By how much plain decoding preferred `right` to `other` after `history`."""
        run, caught = Run(kind=kind), dict[Text, FloatArray]()

        def watch(tokens: Sequence[int], logits: FloatArray) -> None:
            if len(tokens) == len(history):
                caught[tuple(tokens)] = logits.copy()

        llm = self._open(run)
        llm.watch = watch
        prompt = self._prompts[kind][index]
        llm.generate([prompt], self._params(kind, index, len(history) - len(prompt) + 1))
        logits = caught[history]
        if kind == "greedy":
            return float(logits[right]) - float(logits[other])
        return PositionNoise(self._seed + index).lead(softmax(logits), len(history), right, other)


def is_tie(gap: float, noise: float) -> bool:
    """Whether two scores this far apart may change places when each of them moves by `noise` at most."""
    return abs(gap) < 2 * noise


def text_runs(
    methods: Sequence[str], batches: Sequence[int], max_draft: int, *, trees: bool, coupled: bool
) -> list[Run]:
    """All runs: greedy ones, then coupled ones."""
    runs = [Run(kind="greedy", rescored=True)]
    runs += [Run(kind="greedy", batch=batch) for batch in batches if batch > 1]
    for method in methods:
        runs += [Run(kind="greedy", method=method, batch=batch) for batch in batches]
        if trees and method != BLOCKWISE:
            runs.append(Run(kind="greedy", method=method, tree="dynamic", batch=batches[-1]))
    if not coupled:
        return runs
    runs.append(Run(kind="coupled", rescored=True))
    runs += [Run(kind="coupled", batch=batch) for batch in batches if batch > 1]
    lengths = [length for length in COUPLED_LENGTHS if length <= max_draft]
    for method in methods:
        for length in lengths:
            for batch in batches if length == lengths[-1] else batches[-1:]:
                runs.append(Run(kind="coupled", method=method, draft_tokens=length, batch=batch))
    return runs


def _digest(logits: FloatArray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(logits).data, digest_size=16).digest()
