"""Texts whose caches outlive their requests, for requests that begin alike: a system prompt, a chat's earlier turns.

An entry is a text, the target's keys and values of it, and what the drafter saved of it. What is looked for is the
longest common beginning, token by token; when bytes run out, the least recently used entry goes. This module knows
token ids, bytes and the order of use: no engine, no row, no drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np

from specdec.engines.contract import IntArray

LEAST = 32  # tokens below which a copy is not worth it


class Saved(Protocol):
    """What a drafter saved. Nobody changes it: an entry may be read by several rows, in several threads."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A text and what is known of it; nobody changes it.

    tokens [n]. kv [2 * layers, H_kv, n, D]: the target's keys and values of them (`KVBuffers.read`). `draft`: what the
    drafter saved of them, None when it needs nothing.
    """

    tokens: IntArray
    kv: np.ndarray
    draft: Saved | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens.nbytes + self.kv.nbytes + (0 if self.draft is None else self.draft.nbytes)


class PrefixStore:
    """Entries of `limit` bytes in all; texts and beginnings below `least` tokens are left alone. For several threads.

    `hits`: texts that began with what an entry held; `reused_tokens`: how many of their tokens came from entries.
    """

    def __init__(self, limit: int, *, least: int = LEAST) -> None:
        self.limit, self.least = limit, least
        self.hits = self.reused_tokens = 0
        self._entries: list[Prefix] = []  # the least recently used one first
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            return self._held()

    def match(self, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """Return the entry with the longest common beginning with `tokens`, and its length; the last used among equals.

        The length is less than that of `tokens`: the last one is pending, so a row's cache starts without it. None when
        nothing is as long as `least`. Changes nothing: see `used`.
        """
        text = np.asarray(tokens, np.int64)[:-1]
        with self._lock:
            entries = self._entries[::-1]
        lengths = [_common(text, entry.tokens) for entry in entries]
        length = max(lengths, default=0)
        return (entries[lengths.index(length)], length) if length >= self.least else None

    def used(self, entry: Prefix, tokens: int) -> None:
        """Count that `tokens` tokens of `entry`, which `match` gave, were put into a row."""
        with self._lock:
            self.hits += 1
            self.reused_tokens += tokens
            self._touch(entry)

    def wants(self, tokens: Sequence[int], nbytes: int) -> bool:
        """Whether to `add` an entry of `tokens`, of `nbytes` at least; one that holds them already counts as used."""
        if len(tokens) < self.least or nbytes > self.limit:
            return False
        text = np.asarray(tokens, np.int64)
        with self._lock:
            return not self._holds(text)

    def add(self, entry: Prefix) -> None:
        """Keep `entry` in place of those that it goes on from; the least recently used ones beyond `limit` go.

        One larger than `limit`, shorter than `least` or held already is not kept.
        """
        with self._lock:
            if entry.nbytes > self.limit or len(entry.tokens) < self.least or self._holds(entry.tokens):
                return
            self._entries = [old for old in self._entries if not _begins_with(entry.tokens, old.tokens)]
            self._entries.append(entry)
            while self._held() > self.limit:
                self._entries.pop(0)

    def _held(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def _holds(self, text: IntArray) -> bool:
        """Whether an entry begins with all of `text`; it counts as used."""
        entry = next((one for one in self._entries if _begins_with(one.tokens, text)), None)
        if entry is not None:
            self._touch(entry)
        return entry is not None

    def _touch(self, entry: Prefix) -> None:
        if entry in self._entries:  # another thread may have let go of it
            self._entries.remove(entry)
            self._entries.append(entry)


def _common(one: IntArray, other: IntArray) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def _begins_with(text: IntArray, beginning: IntArray) -> bool:
    return _common(text, beginning) == len(beginning)
