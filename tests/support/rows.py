"""Requests on the fake engine: a tokenizer whose text is the token ids, rows, schedulers, expected answers."""

from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer, decoders, models

from specdec.runtime.drafters.base import Drafter
from specdec.runtime.kv import CachedModel
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import Row
from specdec.runtime.sampling import LogitsPipeline
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.text import TextStream
from support.fake_engine import FakeEngine


@cache
def letters(vocab_size: int = 64) -> Tokenizer:
    """Token i is written chr(97 + i): 0 is "a", 1 is "b", ..."""
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(vocab_size)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class WatchedModel(CachedModel):
    """Tells the fake engine which passes are prefill, where every token counts though none is scored."""

    def prefill(self, row: int, tokens: list[int]) -> None:
        self.engine.prefilling = True
        super().prefill(row, tokens)
        self.engine.prefilling = False


def make_row(prompt: list[int], *, eos: tuple[int, ...] = (), max_length: int = 64, **params: object) -> Row:
    """`bad_words` are token ids here, which need no tokenizer."""
    sampling = SamplingParams(**params)
    stream = TextStream(letters(), sampling.stop)
    return Row(tuple(prompt), sampling, stream, frozenset(eos), max_length, bad_words=sampling.bad_words)


def run(scheduler: Scheduler, *rows: Row) -> list[list[int]]:
    """Run the rows together; return what each generated."""
    for row in rows:
        scheduler.submit(row)
    while scheduler.busy:
        scheduler.step_together()
    return [row.tokens[len(row.prompt) :] for row in rows]


def make_scheduler(
    target: FakeEngine,
    drafter: Drafter | Callable[[CachedModel], Drafter] | None = None,
    *,
    max_rows: int = 4,
    min_width: int = 2,
    **options: object,
) -> Scheduler:
    """`drafter`: one, or what makes one that drafts in the target's cache. `options`: the scheduler's own."""
    model = WatchedModel(target, max_rows=max_rows, min_width=min_width, keeps_hidden=bool(target.spec.taps))
    return Scheduler(model, drafter(model) if callable(drafter) else drafter, **options)  # type: ignore[arg-type]


def greedy(engine: FakeEngine, prompt: list[int], count: int, **params: object) -> list[int]:
    """What plain greedy decoding must give, straight from the engine's definition."""
    tokens = list(prompt)
    pipeline = LogitsPipeline(SamplingParams(**params), len(prompt))
    for _ in range(count):
        tokens.append(pipeline.best(engine.logits_after(tokens)[: engine.spec.vocab_size], tokens))
    return tokens[len(prompt) :]
