"""One logits pipeline: logits and history in, a distribution out. Pure.

The target's p, the draft's q, the residual, the bonus token and the log-probabilities all come from here. Terms apply
in the order of transformers' processors: logit bias, repetition penalty, temperature, top-k, top-p, min-p. This module
knows one position at a time: nothing of drafts, trees or caches, except that a position's history includes the draft
tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from specdec.engines.contract import FloatArray, IntArray
from specdec.engines.errors import RequestError

_TYPES: dict[str, Any] = {
    "max_new_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real, "min_p": Real,
    "repetition_penalty": Real, "seed": Integral | None, "logprobs": Integral | None,
}  # fmt: skip
_NUCLEUS = 1024  # candidates that are sorted first for top-p; all of them only when these do not reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for. Invalid values raise `RequestError`.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 (Keskar et al.,
    arXiv:1909.05858) are off. `logit_bias` adds to the logits of token ids. `stop` strings end the text before them.
    `logprobs` n returns each token's log-probability and the n most probable ones'. `seed` None draws a fresh one.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                wanted = "a number" if kind is Real else "a whole number"
                raise RequestError(f"{name} must be {wanted}, not {value!r}")
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (np.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 (greedy) or more"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "between 1e-6 and 1e6"),
            (all(abs(bias) <= 1e6 for bias in self.logit_bias.values()), "logit_bias", "between -1e6 and 1e6"),
            (self.seed is None or self.seed >= 0, "seed", "0 or more"),
            (isinstance(self.stop, tuple) and all(self.stop), "stop", "a tuple of strings that are not empty"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more"),
        )
        for valid, name, rule in checks:
            if not valid:
                raise RequestError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` when a token id or count exceeds the model's vocabulary."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(f"logit_bias names token {token}, outside the vocabulary of {vocab_size}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise RequestError(f"logprobs {self.logprobs} exceeds the vocabulary of {vocab_size}")


class Logprob(NamedTuple):
    """Natural log-probability of an emitted token, and of the most probable ones (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def scores(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> FloatArray:
    """Apply logit bias and repetition penalty: what greedy decoding takes the argmax of.

    logits [V] (not changed), history: every token before this position, drafts included. Returns float32 [V].
    """
    if not params.logit_bias and params.repetition_penalty == 1.0:
        return logits.astype(np.float32, copy=False)
    out = logits.astype(np.float32)  # a copy
    for token, bias in params.logit_bias.items():
        out[token] += np.float32(bias)
    if params.repetition_penalty != 1.0 and len(history):
        seen = np.unique(np.asarray(history, np.int64))
        penalty = np.float32(params.repetition_penalty)
        out[seen] = np.where(out[seen] < 0, out[seen] * penalty, out[seen] / penalty)
    return out


def softmax(values: FloatArray) -> FloatArray:
    """Return softmax of float32 [V] as float64 that sums to 1; -inf gives exactly 0."""
    powers: FloatArray = np.exp(values - values.max()).astype(np.float64)
    return powers / powers.sum()  # type: ignore[no-any-return]


def probabilities(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> FloatArray:
    """Return the distribution that the request samples from at one position: float64 [V], sums to 1.

    At temperature 0 it is one-hot at the (first) argmax.
    """
    values = scores(logits, history, params)
    if params.temperature == 0:
        one_hot = np.zeros(len(values))
        one_hot[values.argmax()] = 1.0
        return one_hot
    values = values / np.float32(max(params.temperature, 1e-6))
    if 0 < params.top_k < len(values):
        kth = np.partition(values, -params.top_k)[-params.top_k]
        values = np.where(values < kth, -np.inf, values)
    p = softmax(values)
    if params.top_p < 1:
        p = _keep(p, _nucleus(p, params.top_p))
    if params.min_p > 0:
        p = _keep(p, np.flatnonzero(p >= params.min_p * p.max()))
    return p


def logprob(logits: FloatArray, history: Sequence[int], params: SamplingParams, token: int) -> Logprob:
    """Return the log-probability of `token` at one position and the `params.logprobs` most probable tokens.

    They are those of the distribution that was sampled from; for a greedy request, whose own distribution is one-hot,
    those at temperature 1 without filters.
    """
    greedy = params.temperature == 0
    p = softmax(scores(logits, history, params)) if greedy else probabilities(logits, history, params)
    top = most_probable(p, params.logprobs or 0)
    with np.errstate(divide="ignore"):
        return Logprob(token, float(np.log(p[token])), tuple((int(i), float(np.log(p[i]))) for i in top))


def most_probable(p: FloatArray, count: int) -> IntArray:
    """Ids of the `count` largest entries of p [V], descending; ties by id."""
    if count <= 0:
        return np.empty(0, np.int64)
    kth = np.partition(p, -count)[-count]
    candidates = np.flatnonzero(p >= kth)
    return candidates[np.argsort(-p[candidates], kind="stable")][:count]


def _nucleus(p: FloatArray, top_p: float) -> IntArray:
    """Smallest set of most probable ids whose mass reaches `top_p` (Holtzman et al., arXiv:1904.09751)."""
    count = min(_NUCLEUS, len(p))
    while True:
        order = most_probable(p, count)
        mass = np.cumsum(p[order])
        if mass[-1] >= top_p or count == len(p):
            return order[: int(np.searchsorted(mass, top_p)) + 1]
        count = len(p)


def _keep(p: FloatArray, ids: IntArray) -> FloatArray:
    """Return p restricted to `ids` and renormalized."""
    out = np.zeros_like(p)
    out[ids] = p[ids]
    return out / out.sum()  # type: ignore[no-any-return]
