"""Answers as they go over the wire: OpenAI's objects, whole and in chunks, and `specdec`, our own fields in them.

Encoded by msgspec, once for each delta; nothing here is checked, since all of it is our own. Null stands where OpenAI
has null, and a field that was not asked for is not there.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from specdec.runtime.request import Origin

Finish = Literal["stop", "length"]

encode = msgspec.json.Encoder().encode


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.specdec`: what speculation did, over all choices. Figures as in `specdec-generate --json`."""

    rounds: int
    draft_tokens_proposed: int
    draft_tokens_accepted: int
    bonus_tokens: int
    mean_accepted_length: float
    acceptance_rate: float
    lossless: bool


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: of the prompt, those whose cache an earlier text had left."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole request, each prompt counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    specdec: Speculation


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer, and every event of a streamed one, begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenOrigins(msgspec.Struct, frozen=True, kw_only=True):
    """`specdec` of a choice: its tokens, how each came to be, and how many characters the choice's text has with it."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    ends: tuple[int, ...]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was possible. `token` is its text or, where its bytes are none, these as `bytes:\\xe2\\x80`."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """The token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a message, or a part of one."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a choice."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of `n`."""

    index: int
    message: ChatMessage
    finish_reason: Finish
    logprobs: ChatLogprobs | None
    specdec: TokenOrigins | UnsetType = UNSET


class ChatCompletion(_Head, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None
    specdec: TokenOrigins | UnsetType = UNSET


class ChatChunk(_Head, frozen=True, kw_only=True):
    """An event of a streamed chat. The last one has the usage, when it was asked for, and no choice."""

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's older form. `text_offset`: where each token begins in the text of its choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of `n` for one of the prompts, or what a chunk adds to it."""

    index: int
    text: str
    finish_reason: Finish | None
    logprobs: CompletionLogprobs | None
    specdec: TokenOrigins | UnsetType = UNSET


class Completion(_Head, frozen=True, kw_only=True):
    """Answer of /v1/completions, and an event of a streamed one."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be asked; `max_model_len`, its context in tokens, is vLLM's."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "specdec"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is an error, and the event that ends a stream with one."""

    error: ErrorDetail
