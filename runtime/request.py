"""One request and its row: tokens, text, chance, what it counted, and when it ends.

A row's `tokens` are prompt and answer; the last one is pending (emitted, not in the target's cache). This module
decides where an accepted block is cut (end token, stop string, length); it does not know how the block came to be.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple

from specdec.engines.contract import FloatArray
from specdec.runtime.chance import PositionNoise, RandomDice, draw_without_replacement
from specdec.runtime.params import Acceptance, SamplingParams, is_lossless
from specdec.runtime.sampling import Grammar, LogitsPipeline, Logprob
from specdec.runtime.text import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]
Origin = Literal["accepted", "corrected", "bonus", "plain"]  # of a token: see `Round.origins`
Watch = Callable[[Sequence[int], FloatArray], None]  # (all tokens before an emitted one, logits [V] it was chosen from)


class Round(NamedTuple):
    """One target pass of a request: its draft was `depth` tokens deep and `kept` of them were accepted.

    The token after those is the target's own; what comes after the answer's end is dropped. `ms`: when its tokens were
    there, milliseconds after submission.
    """

    depth: int
    kept: int
    ms: float

    def origins(self) -> tuple[Origin, ...]:
        """How its tokens came to be: accepted drafts, and the target's own.

        That is corrected in place of a draft token that the target did not say, a bonus after a draft that was kept to
        its end, plain in a round without a draft.
        """
        own: Origin = "plain" if not self.depth else "bonus" if self.kept == self.depth else "corrected"
        drafted: Origin = "accepted"
        return (drafted,) * self.kept + (own,)


@dataclass(slots=True)
class Stats:
    """What one request cost. Token counts are of emitted tokens: new_tokens = draft_tokens_accepted + bonus_tokens.

    `reused_tokens`: of the prompt, those whose cache an earlier text left. `rounds`: target passes after the prompt.
    `bonus_tokens`: those that the target added itself, at most one a round. Times are milliseconds of wall clock.
    `queue_ms` runs from submission until a row was free, `ttft_ms` from submission to the first token. Rounds split
    into target engine, drafting, and host (packing, sampling, acceptance, text); rows of a batch share them.
    `proposed_at` and `accepted_at`: rounds whose draft was so deep, and that kept so much of it, for depth 1, 2, ...
    `history`: the rounds one by one, which tells how each token came to be, and when.
    `acceptance` is the rule that sampled drafts are verified by, `lossless` whether the text is distributed as the
    target's own.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0
    bonus_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    prefill_ms: float = 0.0
    target_ms: float = 0.0
    draft_ms: float = 0.0
    host_ms: float = 0.0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    history: list[Round] = field(default_factory=list)
    acceptance: Acceptance = "block"
    lossless: bool = True

    def count_draft(self, nodes: int, depth: int, kept: int, ms: float = 0.0) -> None:
        """Count a round: a draft of `nodes` nodes, `depth` deep, `kept` of them accepted, `ms` after submission."""
        self.rounds += 1
        self.history.append(Round(depth, kept, ms))
        self.draft_tokens_proposed += nodes
        for counts, reached in ((self.proposed_at, depth), (self.accepted_at, kept)):
            counts += [0] * (depth - len(counts))
            for place in range(reached):
                counts[place] += 1

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts which are so deep that were kept to depth 1, 2, ..."""
        return [kept / drafted for kept, drafted in zip(self.accepted_at, self.proposed_at, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """τ: tokens per target pass, the target's own token included."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens."""
        return self.draft_tokens_accepted / self.draft_tokens_proposed if self.draft_tokens_proposed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: new tokens over the time of their rounds."""
        seconds = (self.target_ms + self.draft_ms + self.host_ms) / 1000
        return self.new_tokens / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, float | str | list[float]]:
        """Return the figures under the names of the command line's JSON."""
        names = ("prompt_tokens", "reused_tokens", "new_tokens", "rounds", "draft_tokens_proposed",
                 "draft_tokens_accepted", "bonus_tokens", "mean_accepted_length", "acceptance_rate", "ttft_ms",
                 "tokens_per_second", "prefill_ms", "target_ms", "draft_ms", "host_ms", "acceptance",
                 "lossless")  # fmt: skip
        found = {name: round(value, 4) if isinstance(value := getattr(self, name), float) else value for name in names}
        return found | {"acceptance_by_position": [round(share, 4) for share in self.acceptance_by_position]}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `ends`: for each token, how many characters `text` has with it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] | None
    stats: Stats
    ends: tuple[int, ...] = ()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """How each token came to be; the answer may end within its last round."""
        return tuple(origin for each in self.stats.history for origin in each.origins())[: len(self.token_ids)]


@dataclass(slots=True, eq=False)
class Row:
    """A running request. `bad_words`: those of `params`, as token ids. `watch` is called for every emitted token.

    `submitted`: when it was made, in seconds of `perf_counter`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stream: TextStream
    eos_token_ids: frozenset[int]
    max_length: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    watch: Watch | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # with finish_reason "error"
    aborted: bool = False  # set by anyone, at any time: the row ends before its next round
    held: int = 0  # tokens of the prompt that the target holds
    stats: Stats = field(default_factory=Stats)
    pipeline: LogitsPipeline = field(init=False)
    dice: RandomDice = field(init=False)
    noise: PositionNoise | None = field(init=False)
    submitted: float = field(default_factory=perf_counter)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.pipeline = LogitsPipeline(
            self.params,
            len(self.prompt),
            eos_token_ids=self.eos_token_ids,
            bad_words=self.bad_words,
            grammar=self.grammar,
        )
        self.dice = RandomDice(self.params.seed)
        self.noise = PositionNoise(self.params.seed) if self.params.rule == "coupled" else None
        self.stats.prompt_tokens, self.stats.acceptance = len(self.prompt), self.params.rule
        self.stats.lossless = self.params.temperature == 0 or is_lossless(self.params.rule)

    @property
    def age_ms(self) -> float:
        """Milliseconds since submission."""
        return (perf_counter() - self.submitted) * 1000

    @property
    def pending(self) -> int:
        """The token that the target has not seen yet."""
        return self.tokens[-1]

    @property
    def filled(self) -> bool:
        """Whether the target holds all of the prompt but the pending token."""
        return self.held >= len(self.prompt) - 1

    @property
    def ready(self) -> bool:
        """Whether it takes part in rounds."""
        return self.filled and not self.finish_reason

    @property
    def spoiled(self) -> bool:
        """Whether it ended without anyone knowing what the caches hold of it."""
        return self.finish_reason in ("error", "abort")

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted, by the request's limit and the end of the context."""
        return min(self.params.max_new_tokens - self.stats.new_tokens, self.max_length - len(self.tokens))

    def draw(self, q: FloatArray, count: int, position: int) -> list[int]:
        """Draw up to `count` different tokens from q [V], without replacement, for `position` of the text."""
        if self.noise is not None:
            return self.noise.ranking(q, position, count)
        return draw_without_replacement(q, count, self.dice)

    def ends_in(self, draft: Sequence[int]) -> bool:
        """Whether the answer would have ended within `draft`."""
        return not self.params.ignore_eos and not self.eos_token_ids.isdisjoint(draft)

    def permitted(self, draft: list[int]) -> list[int]:
        """The beginning of a deterministic `draft` that the request's grammar allows."""
        if self.grammar is None:
            return draft
        return draft[: self.grammar.valid_prefix(self.tokens[len(self.prompt) :], draft)]

    def emit(self, block: Sequence[int], logits: FloatArray) -> None:
        """Append a round's tokens until one of them ends the request; what comes after it is dropped.

        block: accepted draft tokens and the target's own; logits [len(block), V] are those they were chosen from.
        """
        for index, token in enumerate(block):
            if self.watch is not None:
                self.watch(self.tokens, logits[index])
            if self.params.logprobs is not None:
                self.logprobs.append(self.pipeline.logprob(logits[index], self.tokens, token))
            self.tokens.append(token)
            self.stats.new_tokens += 1
            if index < len(block) - 1:
                self.stats.draft_tokens_accepted += 1
            else:
                self.stats.bonus_tokens += 1
            self.finish_reason = self._end(token)
            if self.finish_reason:
                break
        self.stats.ttft_ms = self.stats.ttft_ms or self.age_ms
        if self.finish_reason:
            self.stream.finish()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """While open, an error is this request's alone: it ends with it."""
        try:
            yield
        except Exception as exc:
            self.fail(exc)

    def fail(self, error: Exception) -> None:
        """End the request with `error`."""
        self.error, self.finish_reason = error, "error"

    def output(self) -> RequestOutput:
        """Return the finished request."""
        assert self.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.tokens[len(self.prompt) :]),
            text=self.stream.text,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            stats=self.stats,
            ends=self.ends(),
        )

    def ends(self, since: int = 0) -> tuple[int, ...]:
        """Of the answer's tokens from `since` on: see `TextStream.ends`. An end token adds nothing to the text."""
        found = self.stream.ends[since:]
        return (*found, *[len(self.stream.text)] * (len(self.tokens) - len(self.prompt) - since - len(found)))

    def _end(self, token: int) -> FinishReason | None:
        if token in self.eos_token_ids and not self.params.ignore_eos:
            return "stop"
        self.stream.push(token)
        if self.stream.stopped:
            return "stop"
        return "length" if self.remaining <= 0 else None
