"""One logits pipeline: logits and history in, a distribution out.

The target's p, the draft's q, the residual, the bonus token and the log-probabilities all come from here. Every term
depends on the history of its own position, earlier draft tokens included, and on nothing else. Terms apply in the order
of transformers' processors: logit bias, repetition penalty, (frequency and presence penalties, which transformers does
not have), bad words, minimum length, allowed tokens, grammar; then temperature, top-k, top-p, min-p. This module knows
one position at a time: nothing of drafts, trees or caches.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specdec.engines.contract import BoolArray, FloatArray, IntArray
from specdec.engines.errors import DeadEndError
from specdec.runtime.params import SamplingParams

_MINUS_INFINITY = np.float32(-np.inf)


class Grammar(Protocol):
    """What structured output asks of the next token."""

    def allowed(self, generated: Sequence[int]) -> BoolArray:
        """Tokens [V] that may follow `generated`, the answer so far."""
        ...

    def valid_prefix(self, generated: Sequence[int], draft: Sequence[int]) -> int:
        """How many leading tokens of `draft` may follow `generated`."""
        ...


class Logprob(NamedTuple):
    """Natural log-probability of an emitted token, and of the most probable ones (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogitsPipeline:
    """The terms of one request; a pure function of (logits, history).

    `prompt_length`: tokens of the history that the request did not generate. `bad_words`: the request's, as token ids.
    Histories are all tokens before the position, prompt included.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_length: int,
        *,
        eos_token_ids: Collection[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self._prompt_length = prompt_length
        self._eos = list(eos_token_ids)
        self._bad_words = bad_words
        self._grammar = grammar
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
        self._idle = not (
            params.logit_bias or bad_words or params.allowed_token_ids or grammar or params.min_new_tokens
            or params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )  # fmt: skip

    @property
    def ignores_history(self) -> bool:
        """Whether equal logits give equal distributions after any history: no term but temperature and filters."""
        return self._idle

    def scores(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Apply every term that greedy decoding knows: what it takes the argmax of.

        logits [V] (not changed). Returns float32 [V]; forbidden tokens have -inf. Raises `DeadEndError`.
        """
        if self._idle:
            return logits.astype(np.float32, copy=False)
        out = logits.astype(np.float32)  # a copy
        for token, bias in self.params.logit_bias.items():
            out[token] += np.float32(bias)
        self._penalize(out, history)
        for *before, last in self._bad_words:
            if not before or list(history[-len(before) :]) == before:
                out[last] = _MINUS_INFINITY
        generated = len(history) - self._prompt_length
        if generated < self.params.min_new_tokens:
            out[self._eos] = _MINUS_INFINITY
        if self._allowed is not None:
            kept = np.full_like(out, _MINUS_INFINITY)
            kept[self._allowed] = out[self._allowed]
            out = kept
        if self._grammar is not None:
            out[~self._grammar.allowed(history[self._prompt_length :])] = _MINUS_INFINITY
        if out.max() == _MINUS_INFINITY:
            raise DeadEndError(
                f"no token is possible after {generated} generated ones: bad_words, min_new_tokens, allowed_token_ids "
                "and structured_outputs exclude all of them together; relax one"
            )
        return out

    def best(self, logits: FloatArray, history: Sequence[int]) -> int:
        """The greedy token: the first argmax of `scores`."""
        return int(self.scores(logits, history).argmax())

    def probabilities(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Return the distribution that the request samples from at one position: float64 [V], sums to 1.

        At temperature 0 it is one-hot at the (first) argmax.
        """
        params, values = self.params, self.scores(logits, history)
        if params.temperature == 0:
            return _scatter(np.ones(1), np.array([values.argmax()]), len(values))
        size, ids = len(values), None
        if 0 < params.top_k < size:
            kth = np.partition(values, -params.top_k)[-params.top_k]
            ids = np.flatnonzero(values >= kth)
            values = values[ids]
        # in float32 like the logits; the floor keeps the largest differences finite
        p = softmax(values / np.float32(max(params.temperature, 1e-6)))
        if params.top_p < 1:
            p = _keep(p, _nucleus(p, params.top_p))
        if params.min_p > 0:
            p = _keep(p, np.flatnonzero(p >= params.min_p * p.max()))
        return p if ids is None else _scatter(p, ids, size)

    def logprob(self, logits: FloatArray, history: Sequence[int], token: int) -> Logprob:
        """Return the log-probability of `token` at one position and the `params.logprobs` most probable tokens.

        They are those of the distribution that was sampled from; for a greedy request, whose own distribution is
        one-hot, those at temperature 1 without filters.
        """
        greedy = self.params.temperature == 0
        p = softmax(self.scores(logits, history)) if greedy else self.probabilities(logits, history)
        top = most_probable(p, self.params.logprobs or 0)
        with np.errstate(divide="ignore"):
            return Logprob(token, float(np.log(p[token])), tuple((int(i), float(np.log(p[i]))) for i in top))

    def _penalize(self, out: FloatArray, history: Sequence[int]) -> None:
        """Apply the penalties of repetition, frequency and presence to `out` [V]."""
        params = self.params
        if params.repetition_penalty != 1 and len(history):
            seen = np.unique(np.asarray(history, np.int64))
            penalty = np.float32(params.repetition_penalty)
            out[seen] = np.where(out[seen] < 0, out[seen] * penalty, out[seen] / penalty)
        generated = history[self._prompt_length :]
        if (params.presence_penalty or params.frequency_penalty) and len(generated):
            seen, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
            out[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
            out[seen] -= np.float32(params.presence_penalty)


def softmax(values: FloatArray) -> FloatArray:
    """Return softmax of float32 [V] as float64 that sums to 1; -inf gives exactly 0."""
    powers: FloatArray = np.exp(values - values.max()).astype(np.float64)
    return powers / powers.sum()  # type: ignore[no-any-return]


def most_probable(p: FloatArray, count: int) -> IntArray:
    """Ids of the `count` largest entries of p [V], descending; ties by id."""
    count = min(count, len(p))
    if count <= 0:
        return np.empty(0, np.int64)
    candidates: IntArray = np.flatnonzero(p > 0)  # few, where a filter has been: partitions of zeros are slow
    if len(candidates) < count:
        candidates = np.arange(len(p))
    candidates = candidates[p[candidates] >= np.partition(p[candidates], -count)[-count]]
    return candidates[np.argsort(-p[candidates], kind="stable")][:count]


def _nucleus(p: FloatArray, top_p: float) -> IntArray:
    """Smallest set of most probable ids whose mass reaches `top_p` (Holtzman et al., arXiv:1904.09751).

    Only ids that can be in it are sorted. All below (1 - top_p) / (2 V) together have half of what may be left out.
    """
    floor = (1 - top_p) / (2 * len(p))
    least = max(min(0.01, p.max()), floor)
    likely: IntArray = np.flatnonzero(p >= least)
    while least > floor and p[likely].sum() < top_p:
        least = max(least / 16, floor)
        likely = np.flatnonzero(p >= least)
    order = likely[np.argsort(-p[likely], kind="stable")]
    mass = np.cumsum(p[order])
    return order[: int(np.searchsorted(mass, top_p)) + 1]


def _keep(p: FloatArray, ids: IntArray) -> FloatArray:
    """Return p restricted to `ids` and renormalized."""
    return _scatter(p[ids] / p[ids].sum(), ids, len(p))


def _scatter(p: FloatArray, ids: IntArray, size: int) -> FloatArray:
    out = np.zeros(size)
    out[ids] = p
    return out
