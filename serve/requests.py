"""Requests as the API takes them: OpenAI's fields, and vLLM's for what the runtime can do besides.

Types are strict and unknown fields are refused. Fields that OpenAI has and this server has not are refused by name,
unless they ask for nothing. Ranges are the API's; an operator's limits and the model's are checked in `prepare.py`.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from specdec.runtime.text import Prompt, as_batch

MOST_ENTRIES = 300  # of `logit_bias`; no object of known fields has as many
# Fields of OpenAI's that are not supported, and the values (beside null) with which they ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "name": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "refusal": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}


def _whole(value: Any) -> Any:
    """JSON's integers are numbers without a fraction: 1.0 is one."""
    return int(value) if type(value) is float and value.is_integer() else value


def _few(value: Any) -> Any:
    """An object, before its entries are read."""
    if isinstance(value, dict) and len(value) > MOST_ENTRIES:
        raise PydanticCustomError("many", "an object may have at most {most} entries here", {"most": MOST_ENTRIES})
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, StringConstraints(min_length=1)]
Item = TypeVar("Item")
# A million wrong items are one error, as are too many entries (`_few`): to collect all would take seconds.
List = Annotated[list[Item], Field(fail_fast=True)]
Some = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
TokenId = Annotated[Int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class Strict(BaseModel):
    """No coercion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        _few(value)
        for name in value.keys() & _UNSUPPORTED.keys() - cls.model_fields.keys():
            asked, nothing = value[name], (None, *_UNSUPPORTED[name])
            if not any(asked == each and type(asked) is type(each) for each in nothing):
                raise PydanticCustomError("unsupported", "not supported", {"field": name})
        return {key: each for key, each in value.items() if key not in _UNSUPPORTED or key in cls.model_fields}


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema with a name. `strict` or not, the answer keeps to it."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuredOutputs(Strict):
    """vLLM's field of this name: what the answer has to be, exactly one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Some[Text] | None = None
    grammar: Text | None = None


class StreamOptions(Strict):
    """`include_usage`: a last chunk has the usage of the whole request."""

    include_usage: bool | None = None


class Sampling(Strict):
    """What both endpoints take. Null is a field's default."""

    model: str
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_ENTRIES),
            BeforeValidator(_few),
        ]
        | None
    ) = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    seed: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    stop: Text | List[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # vLLM's
    allowed_token_ids: Some[TokenId] | None = None
    bad_words: Annotated[List[Text], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[Int, Field(ge=0)] | None = None
    # our own
    return_token_origins: Annotated[
        bool | None, Field(description="Choices say in `specdec` which tokens they have and how each came to be.")
    ] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both say what the answer has to be: give one")
        return self


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a conversation. `developer` is what OpenAI calls `system` now."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | List[TextPart]

    def turn(self) -> dict[str, str]:
        """What the chat template gets."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Some[Message]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int | None:
        """How many likely tokens come with each log-probability; None: none are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens a choice may have, and what it says."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for requests with logprobs")
        return self


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: str | Some[TokenId] | Some[str] | Some[Some[TokenId]]
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int | None:
        """See `ChatRequest`."""
        return self.logprobs

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `ChatRequest`."""
        return "max_tokens", self.max_tokens

    def prompts(self) -> list[Prompt]:
        """One or several, each a text or token ids."""
        return as_batch(self.prompt)
