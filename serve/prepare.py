"""From a request to what the runtime runs: prompts as tokens, `SamplingParams`, an operator's limits.

It tokenizes, so it belongs into a thread of its own. This module knows fields and limits; it runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.serve.errors import ApiError
from specdec.serve.options import ServeOptions
from specdec.serve.requests import ChatRequest, CompletionRequest, JsonObjectFormat, JsonSchemaFormat

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions; a chat may fill the context

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a request: a prompt as token ids, and what it asks for."""

    prompt: Sequence[int]
    params: SamplingParams


def choices_of(body: Body, llm: LLM, options: ServeOptions) -> list[Choice]:
    """The choices of a request, those of the first prompt first. Raises `ApiError`, `RequestError`."""
    count = body.n or 1
    texts = 1 if isinstance(body, ChatRequest) else len(body.prompts())
    if not 1 <= texts * count <= options.max_choices:
        many = f"{texts} prompts with n {count}" if texts != 1 else f"n {count}"
        raise ApiError(
            400, f"{many}: this server gives 1 to {options.max_choices} choices a request", code="too_many_choices",
            param="n" if texts == 1 else "prompt",
        )  # fmt: skip
    stop = _stop(body, options)
    structured = _structured(body)
    found = []
    for prompt in _prompts(body, llm):
        most = _most_tokens(body, len(prompt), llm, options)
        for number in range(count):
            found.append(Choice(prompt, _params(body, most, number, stop, structured)))
    return found


def _prompts(body: Body, llm: LLM) -> list[list[int]]:
    if isinstance(body, CompletionRequest):
        return [llm.text.encode(each, special=True) if isinstance(each, str) else list(each) for each in body.prompts()]
    if not llm.text.has_chat_template:
        raise ApiError(400, "this model has no chat template: use /v1/completions", code="no_chat_template")
    return [llm.chat_prompt([message.turn() for message in body.messages])]


def _most_tokens(body: Body, prompt: int, llm: LLM, options: ServeOptions) -> int:
    """Tokens that a choice may have, after a prompt of so many."""
    context = llm.manifest.limits.max_length
    most = options.max_prompt_tokens or context - 1
    if prompt > most:
        raise ApiError(
            400, f"the prompt has {prompt} tokens: this server takes at most {most}", code="context_length_exceeded",
            param="messages" if isinstance(body, ChatRequest) else "prompt",
        )  # fmt: skip
    name, asked = body.limit
    room = context - prompt
    limit = options.max_tokens or context
    if asked is None:
        return min(room, limit, context if isinstance(body, ChatRequest) else COMPLETION_TOKENS)
    if asked > limit:
        raise ApiError(400, f"{name} {asked}: this server gives at most {limit}", code="invalid_value", param=name)
    if asked > room:
        raise ApiError(
            400, f"{name} {asked} after a prompt of {prompt} tokens: the context has {context}, {room} are left",
            code="context_length_exceeded", param=name,
        )  # fmt: skip
    return asked


def _stop(body: Body, options: ServeOptions) -> tuple[str, ...]:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > options.max_stop or any(len(text) > options.max_stop_characters for text in stop):
        raise ApiError(
            400, f"stop: this server takes at most {options.max_stop} texts of at most {options.max_stop_characters} "
            "characters", code="invalid_value", param="stop",
        )  # fmt: skip
    return stop


def _structured(body: Body) -> StructuredOutputsParams | None:
    match body.response_format:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case JsonSchemaFormat(json_schema=wanted):
            return StructuredOutputsParams(json=wanted.schema_)
    if body.structured_outputs is None:
        return None
    given = body.structured_outputs
    return StructuredOutputsParams(
        json=given.json_,
        json_object=given.json_object or False,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
    )


def _params(
    body: Body, most: int, number: int, stop: tuple[str, ...], structured: StructuredOutputsParams | None
) -> SamplingParams:
    """What choice `number` of a prompt asks for. Its seed is the request's, plus its number."""
    least = body.min_tokens or 0
    if least > most:
        raise ApiError(400, f"min_tokens {least} exceeds the {most} that a choice may have", code="invalid_value",
                       param="min_tokens")  # fmt: skip
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=least,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        structured_outputs=structured,
        seed=None if body.seed is None else body.seed + number,
        stop=stop,
        logprobs=body.top,
        ignore_eos=body.ignore_eos or False,
    )
