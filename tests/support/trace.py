"""Watch what a run commits: the logits behind every emitted token, keyed by all tokens before it."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import numpy as np
import pytest

from specdec.runtime.request import Row

T = TypeVar("T")
Text = tuple[int, ...]


@contextmanager
def _recorded(digest: Callable[[np.ndarray], T]) -> Iterator[dict[Text, T]]:
    seen: dict[Text, T] = {}
    emit = Row.emit

    def recording(self: Row, block: tuple[int, ...], logits: np.ndarray) -> None:
        known = len(self.tokens)
        emit(self, block, logits)
        for index in range(len(self.tokens) - known):
            history = tuple(self.tokens[: known + index])
            value = digest(logits[index])
            assert np.array_equal(seen.setdefault(history, value), value), (
                f"two scorings of {len(history)} tokens differ"
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "emit", recording)
        yield seen


def recorded_logits() -> AbstractContextManager[dict[Text, str]]:
    """Digests of the logits' bits. Two rounds that score the same text must agree on them; a clash fails at once."""
    return _recorded(lambda logits: hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest())


def recorded_arrays() -> AbstractContextManager[dict[Text, np.ndarray]]:
    """The logits themselves [V]."""
    return _recorded(np.copy)
