"""The part of llama-cpp-python that the driver uses, over `fake_peers.FakeModel`."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.fake_peers import VERSIONS, FakeModel

__version__ = VERSIONS["llama-cpp"]
llama_token = ctypes.c_int32


class Llama:
    """A context of `n_ctx` tokens; its `ctx`, which the low-level functions take, is itself."""

    def __init__(self, path: str, *, n_ctx: int, n_threads: int, n_threads_batch: int, logits_all: bool,
                 verbose: bool) -> None:  # fmt: skip
        assert n_threads == n_threads_batch
        assert not verbose
        self.fake = FakeModel.load(Path(path), n_threads)
        self.size, self.logits_all, self.ctx = n_ctx, logits_all, self
        self.open = True
        self.reset()

    def n_ctx(self) -> int:
        return self.size

    def n_vocab(self) -> int:
        return self.fake.vocab

    def reset(self) -> None:
        assert self.open
        self.tokens: list[int] = []
        self.logits = np.full((0, self.fake.vocab), np.nan, np.float32)

    def eval(self, tokens: list[int]) -> None:
        assert self.open
        assert len(self.tokens) + len(tokens) <= self.size, "the context is full"
        self.logits = np.concatenate([self.logits, self.fake.forward(self.tokens, tokens)])
        self.tokens += tokens

    @property
    def scores(self) -> np.ndarray:
        assert self.logits_all
        return np.concatenate([self.logits, np.full((self.size - len(self.logits), self.fake.vocab), np.nan)])

    def close(self) -> None:
        self.open = False

    def generate(self, tokens: list[int], *, temp: float, repeat_penalty: float) -> Iterator[int]:
        """One token a pass, as if nothing that is looked up were right."""
        assert (temp, repeat_penalty) == (0.0, 1.0)
        assert isinstance(self.draft_model, LlamaPromptLookupDecoding)
        assert self.logits_all, "fails on long prompts"
        while True:
            self.eval(tokens)
            tokens = [int(self.logits[-1].argmax())]
            yield tokens[0]


@dataclass
class LlamaPromptLookupDecoding:
    max_ngram_size: int
    num_pred_tokens: int


@dataclass
class Batch:
    tokens: ctypes.Array
    count: int


def llama_batch_get_one(tokens: ctypes.Array, count: int) -> Batch:
    return Batch(tokens, count)


def llama_decode(ctx: Llama, batch: Batch) -> int:
    assert not ctx.logits_all, "slower than it can be"
    ctx.eval(list(batch.tokens[: batch.count]))
    return 0


def llama_get_logits_ith(ctx: Llama, index: int) -> object:
    ctx.row = (ctypes.c_float * ctx.fake.vocab)(*ctx.logits[index])
    return ctypes.cast(ctx.row, ctypes.POINTER(ctypes.c_float))
