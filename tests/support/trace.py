"""Watch what a run commits: the logits' bits behind every emitted token, keyed by everything before it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from specdec.runtime.request import Row

Bits = dict[tuple[int, ...], str]


@contextmanager
def recorded_logits() -> Iterator[Bits]:
    """Collect a digest of the logits that each token was emitted from, by the tokens before it.

    Two rows or rounds that score the same text must agree on its bits; a clash fails at once.
    """
    bits: Bits = {}
    emit = Row.emit

    def recording(self: Row, block: tuple[int, ...], logits: np.ndarray) -> None:
        known = len(self.tokens)
        emit(self, block, logits)
        for index in range(len(self.tokens) - known):
            history = tuple(self.tokens[: known + index])
            digest = hashlib.sha256(np.ascontiguousarray(logits[index]).tobytes()).hexdigest()
            assert bits.setdefault(history, digest) == digest, f"two scorings of {len(history)} tokens differ"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "emit", recording)
        yield bits
