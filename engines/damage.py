"""What a precision costs in quality: how far an engine's next-token distributions are from a reference's.

Both are given the same texts (teacher forcing), a chunk at a time, so that no more than a chunk's logits are held. Only
numpy and the `Engine` protocol: where the reference comes from (PyTorch, another engine), and how much damage is too
much, is not known here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.engines.base import Engine, capacity_bucket
from specdec.engines.chunk import RowInput, pack
from specdec.engines.contract import FloatArray
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.scoring import LEAST_WIDTH

WIDTH = 32  # tokens of a pass: 34 MB of float32 logits with a vocabulary of 262,144
_MOST_NATS = 700.0  # per token, of a perplexity that float64 can hold


class Damage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine against a reference of the same model, over `tokens` tokens that were predicted from those before them.

    `mean_kl`: KL(reference || engine) in nats. `top1_agreement`: share of tokens, 0 to 1, where both have the same most
    probable one. `perplexity` of the engine, and `reference_perplexity`, on the texts' own tokens.
    """

    mean_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tokens: int


class Tally:
    """Sums up comparisons; `damage` is what they come to."""

    def __init__(self) -> None:
        self._kl = self._nats = self._reference_nats = 0.0
        self._agreed = self._tokens = 0

    def add(self, reference: FloatArray, logits: FloatArray, following: Sequence[int]) -> None:
        """Compare at n positions: reference and logits [n, V], following [n] the text's tokens after them.

        Both may be logits or log-probabilities: they are normalized, in float64, one position at a time. Raises
        `EngineError` when one of them is not a number, ValueError when shapes differ.
        """
        if not reference.shape == logits.shape == (len(following), *logits.shape[1:]):
            raise ValueError(f"{reference.shape} against {logits.shape} for {len(following)} tokens")
        if not (np.isfinite(reference).all() and np.isfinite(logits).all()):
            raise EngineError("logits are not numbers: the graph overflows, or the engine is broken; try another "
                              "precision")  # fmt: skip
        for expected, found, token in zip(reference, logits, following, strict=True):
            p, q = log_softmax(expected), log_softmax(found)
            self._kl += kl_divergence(p, q)
            self._agreed += int(np.argmax(expected) == np.argmax(found))
            self._nats -= float(q[token])
            self._reference_nats -= float(p[token])
            self._tokens += 1

    @property
    def damage(self) -> Damage:
        """Means over all that was added. Raises `RequestError` when that is nothing."""
        if not self._tokens:
            raise RequestError("there is nothing to compare: no text has two tokens; give longer texts")
        return Damage(
            mean_kl=self._kl / self._tokens,
            top1_agreement=self._agreed / self._tokens,
            perplexity=math.exp(min(self._nats / self._tokens, _MOST_NATS)),
            reference_perplexity=math.exp(min(self._reference_nats / self._tokens, _MOST_NATS)),
            tokens=self._tokens,
        )


def measure_damage(engine: Engine, texts: Iterable[tuple[Sequence[int], FloatArray]], *, width: int = WIDTH) -> Damage:
    """Damage of `engine` over `texts`: token ids [L], and the reference's logits or log-probabilities [L - 1, V].

    Row i of a reference is of the token after the first i + 1; V is the engine's `vocab_size` (cut padding off). Texts
    may be generated one by one: each is dropped before the next. Raises `RequestError` when no text has two tokens,
    and what `Tally.add` and the engine raise.
    """
    tally = Tally()
    for tokens, reference in texts:
        at = 0
        for following, logits in teacher_forced(engine, tokens, width):
            tally.add(reference[at : at + len(following)], logits, following)
            at += len(following)
        if at != len(reference):
            raise ValueError(f"a reference of {len(reference)} positions for a text of {len(tokens)} tokens")
        del reference  # while the next one is made
    return tally.damage


def compare_engines(
    reference: Engine, engines: Sequence[Engine], texts: Iterable[Sequence[int]], *, width: int = WIDTH
) -> list[Damage]:
    """Damage of each of `engines` over `texts` (token ids), all running side by side with `reference`.

    Holds one chunk's logits of every engine. Raises as `measure_damage`.
    """
    tallies = [Tally() for _ in engines]
    for tokens in texts:
        streams = [teacher_forced(engine, tokens, width) for engine in (reference, *engines)]
        for (following, expected), *found in zip(*streams, strict=True):
            for tally, (_, logits) in zip(tallies, found, strict=True):
                tally.add(expected, logits, following)
    return [tally.damage for tally in tallies]


def teacher_forced(engine: Engine, tokens: Sequence[int], width: int) -> Iterator[tuple[Sequence[int], FloatArray]]:
    """Feed a text in chunks of `width`; yield, for each, the tokens [n] that follow its positions, and logits [n, V].

    The logits, of the vocabulary without padding, are valid until the next chunk. Raises `RequestError` for a text that
    is longer than the model's context.
    """
    spec = engine.spec
    if len(tokens) > spec.max_length:
        raise RequestError(f"a text of {len(tokens)} tokens is beyond the model's {spec.max_length}: cut it")
    kv = engine.allocate(1, capacity_bucket(len(tokens) + width))
    for start in range(0, len(tokens) - 1, width):
        following = tokens[start + 1 : start + 1 + width]
        fed = tokens[start : start + len(following)]
        chunk = pack([RowInput(fed, len(fed))], np.array([start], np.int64), LEAST_WIDTH, spec.max_length)
        yield following, engine.step(chunk, kv)[0, : len(fed), : spec.vocab_size]


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities that `logits` [V] stand for, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def kl_divergence(log_p: npt.NDArray[np.float64], log_q: npt.NDArray[np.float64]) -> float:
    """KL(p || q) in nats, of log-probabilities [V] (Kullback and Leibler 1951); exactly 0 for equal arrays."""
    return float(np.exp(log_p) @ (log_p - log_q))
