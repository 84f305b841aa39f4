"""What drafters learn from, on disk: texts that a target wrote, and its hidden states at each token.

A folder has `data.json` and shards, one for each few requests (`writing`), so that an interrupted run goes on where it
stopped and a larger one adds to a smaller. This module knows rows and files; it knows no engine and no drafter.

A shard, `00000.safetensors` ...: `tokens` int32 [n] and `features` float16 [n, taps * H], rows one after another;
`starts` int32 [r + 1], where each row begins; `answers` int32 [r], index in its row of the first answered token.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from specdec.engines.contract import FloatArray, IntArray
from specdec.engines.errors import RequestError
from specdec.engines.files import replace_file

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
        self._shards = shards(folder)
        self.tokens = sum(count_tokens(path) for path in self._shards)

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


def prompts_digest(prompts: Sequence[str] | None) -> str:
    """What `DataRecord.prompts` says of them."""
    return "own" if prompts is None else hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def claim(folder: Path, record: DataRecord) -> None:
    """Write the record of an empty folder; raise `RequestError` when it holds data of another kind."""
    if not (folder / RECORD).exists():
        if shards(folder):
            raise RequestError(f"{folder} holds shards and no {RECORD}: choose another folder")
        replace_file(folder / RECORD, lambda path: path.write_bytes(msgspec.json.encode(record)))
    elif (there := read_record(folder)) != record:
        names = [name for name in record.__struct_fields__ if getattr(there, name) != getattr(record, name)]
        raise RequestError(f"{folder} holds data of another {' and '.join(names)}: choose another folder")


def save_shard(path: Path, rows: Sequence[TextRow]) -> None:
    """Write a shard; it is whole or not there."""
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    tensors = {
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int32),
        "features": np.concatenate([row.features for row in rows]),
        "starts": starts.astype(np.int32),
        "answers": np.array([row.answer for row in rows], np.int32),
    }
    replace_file(path, lambda part: save_file(tensors, part))


def shards(folder: Path) -> list[Path]:
    """Files of the shards, in order."""
    return sorted(folder.glob("[0-9]" * 5 + ".safetensors"))


def count_tokens(path: Path) -> int:
    """Tokens of a shard."""
    with safe_open(path, "numpy") as shard:
        return int(shard.get_slice("tokens").get_shape()[0])
