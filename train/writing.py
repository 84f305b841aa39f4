"""How training data comes to be: the target asks itself, or is asked, and answers in one continuous batch.

Requests run in plain decoding through the runtime's own scheduler; a recorder stands where a drafter would, and takes
what the target's layers held when a row ends. A text depends on the seed and on its number only: the engine's bits do
not depend on the batch. This module knows rows; what is kept of them is `data`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from specdec.engines.contract import FloatArray
from specdec.engines.errors import RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime.drafters.base import Stateless
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.text import TextCodec
from specdec.runtime.tree import TokenTree
from specdec.train.data import Data, DataRecord, TextRow, claim, count_tokens, prompts_digest, save_shard, shards
from specdec.train.prompts import ANSWER_TOKENS, Turn, answering, asking, usable

SHARD = 128  # requests
ROWS = 64  # of the batch: beyond it a pass on two cores gains nothing


def make_data(
    bundle: Path,
    folder: Path,
    *,
    tokens: int,
    minutes: float | None = None,
    prompts: Sequence[str] | None = None,
    seed: int = 0,
    answer_tokens: int = ANSWER_TOKENS,
    threads: int | None = None,
    at_most: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Data:
    """Let the target of `bundle` write until `folder` holds `tokens` tokens, or `minutes` have passed; whole shards.

    The target has taps. `prompts`: what it is asked, in turn (None: what it asks itself); with `at_most` it is no error
    when they run out. progress(done, wanted). Raises `RequestError` when the folder holds data of another kind, when
    prompts run out, and when it writes none.
    """
    until = None if minutes is None else monotonic() + 60 * minutes
    writer = _Writer(bundle, prompts, seed, answer_tokens, threads)
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, writer.record)
    made = writer.shards(len(shards(folder)))
    while (done := sum(map(count_tokens, shards(folder)))) < tokens and (until is None or monotonic() < until):
        progress(done, tokens)
        if (shard := next(made, None)) is None:
            if at_most and done:
                break
            raise RequestError(
                f"the prompts are answered, with {done} of {tokens} tokens: give more, or fewer --tokens"
            )
        save_shard(folder / f"{shard[0]:05d}.safetensors", shard[1])
    return Data(folder)


class _Writer:
    """Asks and answers in one continuous batch, and gives shards in order."""

    def __init__(
        self, bundle: Path, prompts: Sequence[str] | None, seed: int, answer_tokens: int, threads: int | None
    ) -> None:
        manifest = read_manifest(bundle)
        spec, variant = manifest.target.spec, next(iter(manifest.target.variants.values()))
        if not spec.taps:
            raise RequestError(f"{bundle} hands out no hidden states: export it with --tap")
        self._text = TextCodec(bundle, manifest.tokenizer)
        self._turn = Turn.of(self._text)
        if prompts is None and not self._turn.before:
            raise RequestError("the model has no chat template, so it cannot write prompts: give some with --prompts")
        self._asked = None if prompts is None else [tuple(self._text.encode(text, special=False)) for text in prompts]
        self._seed, self._answer_tokens = seed, answer_tokens
        self._eos, self._limit = frozenset(manifest.tokenizer.eos_token_ids), manifest.limits.max_length
        self.record = DataRecord(
            target=manifest.files[variant.graph].sha256,
            taps=spec.taps,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            prompts=prompts_digest(prompts),
            seed=seed,
            answer_tokens=answer_tokens,
        )
        engine = open_engine(bundle / variant.graph, spec, EngineConfig(threads=threads))
        self._target = CachedModel(engine, max_rows=ROWS, min_width=variant.invariance.least_width, keeps_hidden=True)
        self._recorder = _Recorder(self._target)
        self._scheduler = Scheduler(self._target, self._recorder)

    def shards(self, first: int) -> Iterator[tuple[int, list[TextRow]]]:
        """Yield (number, rows) of shard `first` and of those behind it, in order, as long as there are prompts."""
        owners: dict[Row, tuple[int, bool]] = {}  # number of the request, and whether it is the answer
        found: dict[int, TextRow | None] = {}  # requests that have ended
        following, due = first * SHARD, first
        while True:
            while len(owners) < 2 * ROWS and self._has(following):
                self._submit(owners, following)
                following += 1
            if not owners and len(found) == 0:
                return
            for row in self._scheduler.step_together() if owners else ():
                if row.finish_reason:
                    self._ended(owners, found, row)
            whole = range(due * SHARD, (due + 1) * SHARD)
            if all(number in found or not self._has(number) for number in whole):
                rows = [text for number in whole if (text := found.pop(number, None)) is not None]
                if not rows:
                    raise RequestError(f"the model wrote {SHARD} prompts and none that ends: give some with --prompts")
                yield due, rows
                due += 1

    def _has(self, number: int) -> bool:
        return self._asked is None or number < len(self._asked)

    def _submit(self, owners: dict[Row, tuple[int, bool]], number: int) -> None:
        if self._asked is None:
            self._queue(owners, number, self._turn.before, answer=False)
        else:
            self._answer(owners, number, self._asked[number])

    def _answer(self, owners: dict[Row, tuple[int, bool]], number: int, said: Sequence[int]) -> None:
        room = self._limit - self._answer_tokens - len(self._turn.before) - len(self._turn.after)
        if room < 1:
            raise RequestError(f"a context of {self._limit} tokens has no room for an answer of {self._answer_tokens}")
        self._queue(owners, number, (*self._turn.before, *said[:room], *self._turn.after), answer=True)

    def _queue(self, owners: dict[Row, tuple[int, bool]], number: int, tokens: Sequence[int], *, answer: bool) -> None:
        params = answering(number, self._seed, self._answer_tokens) if answer else asking(number, self._seed)
        row = Row(tuple(tokens), params, self._text.stream(()), self._eos, self._limit)
        owners[row] = number, answer
        self._scheduler.submit(row)

    def _ended(self, owners: dict[Row, tuple[int, bool]], found: dict[int, TextRow | None], row: Row) -> None:
        """Answer a prompt that has been written, keep an answer."""
        number, answered = owners.pop(row)
        features, said = self._recorder.ended.pop(row), row.tokens[len(row.prompt) :]
        if answered:  # the last token has no hidden state: nothing followed it
            found[number] = TextRow(np.array(row.tokens[:-1], np.int64), features, len(row.prompt))
        elif usable(said, row.finish_reason):
            self._answer(owners, number, said[:-1])
        else:
            found[number] = None


class _Recorder(Stateless):
    """A drafter that proposes nothing and takes what the target's layers held when a row ends."""

    def __init__(self, target: CachedModel) -> None:
        self._target = target
        self.ended: dict[Row, FloatArray] = {}

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: what the target keeps is taken at the end."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`: nothing."""
        return [TokenTree()] * len(rows)

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`."""

    def reusable(self, row: Row, saved: Any, count: int) -> int:
        """See `Drafter.reusable`: nothing, every state of the text is wanted."""
        return 0

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`; the target still has the row."""
        states = self._target.take_hidden(index)
        if np.abs(states).max(initial=0) > np.finfo(np.float16).max:
            raise RequestError("hidden states are beyond float16 at one of the taps: choose others with --taps")
        self.ended[row] = states.astype(np.float16)
