"""What a target is asked, so that its answers are what a drafter learns from: a file, or prompts that it writes itself.

A model tuned to follow a chat template has also learned what stands where the user speaks: given the template up to
there, it writes a user's turn (Xu et al., Magpie, arXiv:2406.08464). This module knows templates and texts; it knows no
engine and no drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engines.errors import RequestError
from specdec.runtime.params import SamplingParams
from specdec.runtime.text import TextCodec

PROMPT_TOKENS = 128  # of a prompt that the target writes itself
ANSWER_TOKENS = 256
_MARK = "\ue000user\ue000"  # stands in the template where the user speaks


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation's text around what the user says, in token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, text: TextCodec) -> "Turn":
        """The turn of the bundle's chat template; nothing around it where there is none.

        Raises `RequestError` when the template cannot be split.
        """
        if not text.has_chat_template:
            return cls((), ())
        parts = text.render_chat([{"role": "user", "content": _MARK}]).split(_MARK)
        if len(parts) != 2:
            raise RequestError("the chat template changes what the user says, or repeats it: it cannot be trained with")
        before, after = (tuple(text.encode(part, special=False)) for part in parts)
        return cls(before, after)


def asking(index: int, seed: int) -> SamplingParams:
    """How the prompt of request `index` is drawn."""
    return SamplingParams(max_new_tokens=PROMPT_TOKENS, temperature=0.9, min_p=0.02, seed=_seed(seed, 2 * index))


def answering(index: int, seed: int, tokens: int) -> SamplingParams:
    """How request `index` is answered: every other one greedily, as most applications decode, the rest by chance."""
    temperature = (0.0, 0.7, 0.0, 1.0)[index % 4]
    return SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=_seed(seed, 2 * index + 1))


def usable(answer: Sequence[int], finish_reason: str | None) -> bool:
    """Whether what the target wrote as a user's turn can be answered: it came to an end, and says something."""
    return finish_reason == "stop" and len(answer) >= 4


def _seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % 2**31
