"""Which text the distribution tests continue, which tokens matter there, and how a draft is disturbed.

This module knows logits after texts; it knows no bundle and no speculation.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from specdec.engines.contract import FloatArray
from specdec.runtime.params import SamplingParams
from specdec.runtime.sampling import LogitsPipeline
from specdec.tools.tables import Text

_BASE = 14  # tokens of the text before its end is repeated
_TOKENS = 60  # that a table speaks of, at most, beside the text's own
_DISTURBED = 6  # so many of the best logits move


class Scores(Protocol):
    """Logits after texts: a table's, or those of heads on one."""

    def logits(self, text: Text) -> FloatArray:
        """Logits [V] after `text`."""
        ...

    def prepare(self, texts: Iterable[Text]) -> None:
        """Compute what is missing of `texts`."""
        ...


def disturb(text: Text, logits: FloatArray, spread: float) -> FloatArray:
    """Move the best few logits at random by about `spread`, always in the same way for the same text."""
    rng = np.random.default_rng(zlib.crc32(np.array(text, np.int64).tobytes()))
    out, best = logits.copy(), best_ids(logits, _DISTURBED)
    out[best] += (spread * rng.standard_normal(len(best))).astype(out.dtype)
    return out


def repeating_text(table: Scores, words: Sequence[int], limit: int) -> Text:
    """A text whose end occurred before, with a next token whose probability is as near to one half as can be found.

    It ends in a, b; the bigram a, b was followed by some tokens, and b alone, later on, by another one.
    """
    known = [token for token in words if token < limit] or [0]
    base = tuple(known[index % len(known)] for index in range(_BASE))
    *_, a, b = base
    first = best_ids(table.logits(base)[:limit], 4)
    found: list[tuple[float, Text]] = []
    pipeline = LogitsPipeline(SamplingParams(temperature=1.0, top_k=3), 0)
    for index, guess in enumerate(first[:3]):
        then = [guess]
        for _ in range(3):
            then.append(best_ids(table.logits((*base, *then))[:limit], 1)[0])
        text = (a, b, *then, b, first[index + 1], *base)
        p = pipeline.probabilities(table.logits(text)[:limit], text)
        found.append((abs(float(p[guess]) - 0.5), text))
    return min(found)[1]


def likely_tokens(tables: Sequence[Scores], text: Text, limit: int) -> list[int]:
    """The text's tokens, and those that are likely after it, after its continuations, and after those of these."""
    chosen = dict.fromkeys(text)
    level: list[Text] = [text]
    most = len(chosen) + _TOKENS
    for depth in range(3):
        following: list[Text] = []
        for table in dict.fromkeys(tables):
            table.prepare(level)
            for one in level:
                best = best_ids(table.logits(one)[:limit], 12 if depth < 2 else 4)
                for token in best:
                    if len(chosen) < most:
                        chosen.setdefault(token)
                following += [(*one, token) for token in best[:3]]
        level = list(dict.fromkeys(following))
    return list(chosen)


def best_ids(logits: FloatArray, count: int) -> list[int]:
    """Ids of the largest logits that are not -inf, descending."""
    order = np.argsort(-logits.astype(np.float32), kind="stable")[:count]
    return [int(token) for token in order if np.isfinite(logits[token])]
