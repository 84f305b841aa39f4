"""The part of onnxruntime-genai that the driver uses, over `fake_peers.FakeModel`."""

import json
from pathlib import Path

import numpy as np

from support.fake_peers import END, VERSIONS, FakeModel

__version__ = VERSIONS["ort-genai"]


class Config:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def overlay(self, text: str) -> None:
        self.threads = json.loads(text)["model"]["decoder"]["session_options"]["intra_op_num_threads"]


class Model:
    def __init__(self, config: Config) -> None:
        self.fake = FakeModel.load(config.folder / "model.onnx", config.threads)


class GeneratorParams:
    def __init__(self, model: Model) -> None:
        self.fake = model.fake

    def set_search_options(self, *, do_sample: bool, min_length: int, max_length: int) -> None:
        assert not do_sample
        self.min_length, self.max_length = min_length, max_length

    def set_speculative_options(self, *, ngram_size: int, max_draft_tokens: int, min_adaptive_k: int = 0) -> None:
        assert ngram_size >= 2
        assert max_draft_tokens >= max(min_adaptive_k, 1)


class Generator:
    """Ends at an end token, made at `min_length` tokens or later and not handed out, and at `max_length`."""

    def __init__(self, model: Model, params: GeneratorParams) -> None:
        self.fake, self.params = model.fake, params
        self.tokens: list[int] = []
        self.pending: list[int] = []

    def append_tokens(self, tokens: np.ndarray) -> None:
        assert tokens.dtype == np.int32
        (self.pending,) = tokens.tolist()
        self._forward()

    def generate_next_token(self) -> None:
        assert len(self.tokens) < self.params.max_length, "the answer is full"
        assert not self.tokens or self.pending != [END], "the answer has ended"
        if self.pending:
            self._forward()
        logits = self.logits[-1].copy()
        if len(self.tokens) < self.params.min_length:
            logits[END] = -np.inf
        self.pending = [int(logits.argmax())]

    def get_sequence(self, index: int) -> np.ndarray:
        assert index == 0
        return np.array([*self.tokens, *(token for token in self.pending if token != END)], np.int32)

    def get_output(self, name: str) -> np.ndarray:
        assert name == "logits"
        return self.logits[None]

    def _forward(self) -> None:
        self.logits = self.fake.forward(self.tokens, self.pending)
        self.tokens += self.pending
        self.pending = []
