"""What drafters learn from: texts that the target writes through the batched engine, with its hidden states.

Requests run in one continuous batch, in plain decoding; what the target wrote and the hidden states at its taps are
kept in shards of `SHARD` requests each, so an interrupted run goes on where it stopped and a larger one adds to a
smaller. A text depends on the seed and on its number only (the engine's bits do not depend on the batch). This module
knows rows and files; it knows no drafter.

A shard, `00000.safetensors` ...: `tokens` int32 [n] and `features` float16 [n, taps * H], rows one after another;
`starts` int32 [r + 1], where each row begins; `answers` int32 [r], index in its row of the first answered token.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from specdec.engines.contract import FloatArray, IntArray
from specdec.engines.errors import RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.runtime.kv import CachedModel
from specdec.runtime.request import Row
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.text import TextCodec
from specdec.runtime.tree import TokenTree
from specdec.train.prompts import ANSWER_TOKENS, Turn, answering, asking, usable

SHARD = 128  # requests
ROWS = 64  # of the batch: beyond it a pass on two cores gains nothing
HELD_OUT = 20  # one prompt of so many is never trained on
RECORD = "data.json"
Split = Literal["train", "held-out"]


class DataRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`data.json`: what the texts were made of. `target`: SHA-256 of its graph; `prompts`: of the file, or "own"."""

    target: str
    taps: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    prompts: str
    seed: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TextRow:
    """One text: tokens [n], the target's hidden states at each of them [n, taps * H], where the answer begins."""

    tokens: IntArray
    features: FloatArray
    answer: int

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on: a matter of its prompt alone, so the share stays when more is written."""
        digest = hashlib.blake2b(self.tokens[: self.answer].astype(np.int64).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT == 0


class Data:
    """A folder of shards. Raises `RequestError` when it is none."""

    def __init__(self, folder: Path) -> None:
        self.record = read_record(folder)
        self._shards = _shards(folder)
        self.tokens = sum(_count(path) for path in self._shards)

    @property
    def taps(self) -> tuple[str, ...]:
        """Where the features were read (`ModelSpec.taps`)."""
        return self.record.taps

    @property
    def vocab_size(self) -> int:
        """Token ids that the target knows."""
        return self.record.vocab_size

    def rows(self, split: Split) -> Iterator[TextRow]:
        """Rows of one share, in the order in which they were asked for; their features stay on the disk until read."""
        for path in self._shards:
            with safe_open(path, "pt") as shard:  # torch maps the file, NumPy would copy it
                starts, answers = shard.get_tensor("starts").tolist(), shard.get_tensor("answers").tolist()
                tokens, features = (
                    shard.get_tensor("tokens").numpy().astype(np.int64),
                    shard.get_tensor("features").numpy(),
                )
            for begin, end, answer in zip(starts, starts[1:], answers, strict=False):
                row = TextRow(tokens[begin:end], features[begin:end], answer)
                if row.held_out == (split == "held-out"):
                    yield row


def read_record(folder: Path) -> DataRecord:
    """Read `folder/data.json`. Raises `RequestError` when the folder holds no data, or that of another version."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=DataRecord)
    except FileNotFoundError as exc:
        raise RequestError(f"{folder} holds no training data: no {RECORD}") from exc
    except msgspec.MsgspecError as exc:
        raise RequestError(f"{folder / RECORD} is not of this version: {exc}; make the data again") from exc


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Data:
    """Let the target of `bundle` write until `folder` holds `tokens` tokens, or `minutes` have passed; whole shards.

    The target has taps. `prompts`: what it is asked, in turn (None: what it asks itself). progress(done, wanted).
    Raises `RequestError` when the folder holds data of another kind, when prompts run out, and when it writes none.
    """
    until = None if minutes is None else monotonic() + 60 * minutes
    writer = _Writer(bundle, prompts, seed, answer_tokens, threads)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, writer.record)
    shards = writer.shards(len(_shards(folder)))
    while (done := sum(map(_count, _shards(folder)))) < tokens and (until is None or monotonic() < until):
        progress(done, tokens)
        if (shard := next(shards, None)) is None:
            raise RequestError(
                f"the prompts are answered, with {done} of {tokens} tokens: give more, or fewer --tokens"
            )
        _save(folder / f"{shard[0]:05d}.safetensors", shard[1])
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
        self._asked = None if prompts is None else [tuple(self._text.encode(text, special=False)) for text in prompts]
        self._seed, self._answer_tokens = seed, answer_tokens
        self._eos, self._limit = frozenset(manifest.tokenizer.eos_token_ids), manifest.limits.max_length
        written = "own" if prompts is None else hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
        self.record = DataRecord(
            target=manifest.files[variant.graph].sha256,
            taps=spec.taps,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            prompts=written,
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
            for row in self._scheduler.step() if owners else ():
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


class _Recorder:
    """A drafter that proposes nothing and takes what the target's layers held when a row ends."""

    def __init__(self, target: CachedModel) -> None:
        self._target = target
        self._rows: list[Row] = []
        self.ended: dict[Row, FloatArray] = {}

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`."""
        self._rows.append(row)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """See `Drafter.propose`: nothing."""
        return [TokenTree()] * len(rows)

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`."""

    def release(self, index: int) -> None:
        """See `Drafter.release`; the target still has the row."""
        self.ended[self._rows[index]] = self._target.take_hidden(index).astype(np.float16)
        self._rows[index] = self._rows[-1]
        self._rows.pop()


def _claim(folder: Path, record: DataRecord) -> None:
    """Write the record of an empty folder; raise `RequestError` when it holds data of another kind."""
    if not (folder / RECORD).exists():
        if _shards(folder):
            raise RequestError(f"{folder} holds shards and no {RECORD}: choose another folder")
        _replace(folder / RECORD, lambda path: path.write_bytes(msgspec.json.encode(record)))
    elif (there := read_record(folder)) != record:
        names = [name for name in record.__struct_fields__ if getattr(there, name) != getattr(record, name)]
        raise RequestError(f"{folder} holds data of another {' and '.join(names)}: choose another folder")


def _save(path: Path, rows: Sequence[TextRow]) -> None:
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    tensors = {
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int32),
        "features": np.concatenate([row.features for row in rows]),
        "starts": starts.astype(np.int32),
        "answers": np.array([row.answer for row in rows], np.int32),
    }
    _replace(path, lambda part: save_file(tensors, part))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, then rename: it is whole or not there."""
    part = path.with_suffix(".part")
    write(part)
    os.replace(part, path)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]" * 5 + ".safetensors"))


def _count(path: Path) -> int:
    with safe_open(path, "numpy") as shard:
        return int(shard.get_slice("tokens").get_shape()[0])
