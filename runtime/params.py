"""What a request may ask for: `SamplingParams`, checked once, when it is made.

This module knows names, ranges and which rules are lossless; what the values do is said in `sampling.py` and
`accept.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

from specdec.engines.errors import RequestError
from specdec.runtime.grammar import StructuredOutputsParams

Acceptance = Literal["block", "token", "coupled", "lossy-typical"]
ACCEPTANCE_RULES: tuple[Acceptance, ...] = get_args(Acceptance)

_TYPES: dict[str, Any] = {
    "max_new_tokens": Integral, "min_new_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real,
    "min_p": Real, "repetition_penalty": Real, "presence_penalty": Real, "frequency_penalty": Real,
    "seed": Integral | None, "logprobs": Integral | None, "ignore_eos": bool, "logit_bias": Mapping,
    "structured_outputs": StructuredOutputsParams | None,
}  # fmt: skip
_WANTED = {Integral: "a whole number", Integral | None: "a whole number", Real: "a number", bool: "True or False",
           Mapping: "a mapping of token ids to numbers"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for. Invalid values raise `RequestError`. Names as in vLLM where it has one.

    Chance. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None draws a fresh one.
    `acceptance`: how sampled drafts are verified (docs/lossless.md). `block` and `token` are lossless; `coupled` is,
    and a seed then gives the same text with every drafter and without one; `lossy-typical` (Cai et al.,
    arXiv:2401.10774) changes the distribution. None: `coupled` with a seed, which is there to repeat a text, else
    `block`. With other rules than `coupled`, a seed gives the same text only if as much is drafted every time.

    Terms. `repetition_penalty` (Keskar et al., arXiv:1909.05858; 1 is off) counts prompt and answer;
    `presence_penalty` and `frequency_penalty` (OpenAI's definition; 0 is off) the answer only. `logit_bias` adds to the
    logits of token ids. `bad_words`: token sequences that never occur; a text stands for the tokenizer's own sequences
    of it, at a start and after a space. `allowed_token_ids`: no others occur. `structured_outputs`: the answer is of a
    JSON schema, regular expression, choice or grammar.

    Ends. No end token occurs before `min_new_tokens`; with `ignore_eos` none ends the answer; `stop` texts end it
    before them.
    `logprobs` n returns each token's log-probability and the n most probable ones'.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    seed: int | None = None
    acceptance: Acceptance | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                wanted = _WANTED.get(kind, "StructuredOutputsParams")
                raise RequestError(f"{name} must be {wanted}, not {value!r}")
        if not all(_whole(token) and isinstance(bias, Real) for token, bias in self.logit_bias.items()):
            raise RequestError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (self.min_new_tokens >= 0, "min_new_tokens", "0 or more"),
            (self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", f"at most max_new_tokens "
             f"({self.max_new_tokens})"),
            (0 <= self.temperature <= 1e6, "temperature", "0 (greedy) or more, at most 1e6"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 <= self.top_p <= 1, "top_p", "between 0 (the most probable token) and 1 (off)"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "between 1e-6 and 1e6"),
            (abs(self.presence_penalty) <= 1e6, "presence_penalty", "between -1e6 and 1e6"),
            (abs(self.frequency_penalty) <= 1e6, "frequency_penalty", "between -1e6 and 1e6"),
            (all(abs(bias) <= 1e6 for bias in self.logit_bias.values()), "logit_bias", "between -1e6 and 1e6"),
            (isinstance(self.bad_words, tuple) and all(map(_is_bad_word, self.bad_words)), "bad_words",
             "a tuple of texts or of tuples of token ids that are not empty"),
            (self.allowed_token_ids is None or (isinstance(self.allowed_token_ids, tuple) and self.allowed_token_ids
             and all(map(_whole, self.allowed_token_ids))), "allowed_token_ids", "a tuple of token ids, not empty"),
            (self.seed is None or self.seed >= 0, "seed", "0 or more"),
            (self.acceptance in (None, *ACCEPTANCE_RULES), "acceptance", f"one of {', '.join(ACCEPTANCE_RULES)}"),
            (isinstance(self.stop, tuple) and all(stop and isinstance(stop, str) for stop in self.stop), "stop",
             "a tuple of strings that are not empty"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more"),
            (not (self.ignore_eos and self.structured_outputs), "ignore_eos", "False with structured_outputs, whose "
             "end is an end token"),
        )  # fmt: skip
        for valid, name, rule in checks:
            if not valid:
                raise RequestError(f"{name} must be {rule}, not {getattr(self, name)!r}")

        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change its own

    @property
    def rule(self) -> Acceptance:
        """The rule that verifies sampled drafts."""
        return self.acceptance or ("block" if self.seed is None else "coupled")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` when a token id or count exceeds the model's vocabulary."""
        named = [("logit_bias", token) for token in self.logit_bias]
        named += [("allowed_token_ids", token) for token in self.allowed_token_ids or ()]
        named += [("bad_words", token) for word in self.bad_words if not isinstance(word, str) for token in word]
        for name, token in named:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} names token {token}, outside the vocabulary of {vocab_size}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise RequestError(f"logprobs {self.logprobs} exceeds the vocabulary of {vocab_size}")


def is_lossless(acceptance: Acceptance) -> bool:
    """Whether a rule keeps the target's distribution."""
    return not acceptance.startswith("lossy")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_bad_word(word: object) -> bool:
    return bool(word) and (isinstance(word, str) or (isinstance(word, tuple) and all(map(_whole, word))))
