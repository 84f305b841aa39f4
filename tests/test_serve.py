"""The server as OpenAI's own client sees it, over a real socket."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from support.bundles import MAX_LENGTH, SPECIAL, shared_bundle
from support.served import MODEL, Served, served

PROMPT = "one, two, three; one, two, three; one,"
MESSAGES = [{"role": "system", "content": "count"}, {"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Drafts of three tokens from the target's own twin: many rounds, and most of them keep some."""
    speculative = SpeculativeConfig(method="model", num_speculative_tokens=3)
    with LLM(shared_bundle(), speculative=speculative, verify=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def expected(llm: LLM, prompt: Any, **options: Any) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(**options))[0]


def test_the_model_is_listed(client: OpenAI, server: Served) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created) == (MODEL, "model", server.backend.created)
    assert model.model_dump()["max_model_len"] == MAX_LENGTH
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


SAMPLINGS = {
    "greedy": ({"temperature": 0}, {}),
    "seeded": ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
    "filtered": (
        {"temperature": 1.2, "seed": 3, "top_p": 0.8, "extra_body": {"top_k": 9, "min_p": 0.01}},
        {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 9, "min_p": 0.01},
    ),
    "penalties": (
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"70": 4, "71": -100},
         "extra_body": {"repetition_penalty": 1.3, "bad_words": ["the"], "min_tokens": 12, "ignore_eos": False}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {70: 4, 71: -100},
         "repetition_penalty": 1.3, "bad_words": ("the",), "min_new_tokens": 12},
    ),
    "allowed": (
        {"temperature": 1, "seed": 1, "extra_body": {"allowed_token_ids": [70, 71, 72]}},
        {"temperature": 1, "seed": 1, "allowed_token_ids": (70, 71, 72)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_the_runtimes_own(client: OpenAI, llm: LLM, name: str) -> None:
    """Whole and streamed, chats and completions."""
    fields, options = SAMPLINGS[name]
    alone = expected(llm, PROMPT, max_new_tokens=40, **options)
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, **fields)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (alone.text, alone.finish_reason)
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [alone.finish_reason]
    alone = expected(llm, llm.chat_prompt(MESSAGES), max_new_tokens=40, **options)
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=40, **fields)
    assert (chat.choices[0].message.role, chat.choices[0].message.content) == ("assistant", alone.text)
    events = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, stream=True, **fields))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == alone.text
    assert events[-1].choices[0].finish_reason == alone.finish_reason


def test_prompts_are_texts_or_tokens_and_several(client: OpenAI, llm: LLM) -> None:
    ids = llm.text.encode(PROMPT, special=True)
    texts = [expected(llm, prompt, max_new_tokens=8).text for prompt in (PROMPT, "the quick")]
    ask = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    assert client.completions.create(prompt=ids, **ask).choices[0].text == texts[0]
    found = client.completions.create(prompt=[PROMPT, "the quick"], n=2, **ask)
    assert [(choice.index, choice.text) for choice in found.choices] == list(enumerate([texts[0]] * 2 + [texts[1]] * 2))
    assert found.usage.prompt_tokens == len(ids) + len(llm.text.encode("the quick", special=True))
    assert found.usage.completion_tokens == 32
    both = client.completions.create(prompt=[ids, ids[:3]], **ask)
    assert both.choices[1].text == expected(llm, ids[:3], max_new_tokens=8).text


def test_the_choices_of_a_seed_are_those_of_the_next_seeds(client: OpenAI, llm: LLM) -> None:
    texts = [expected(llm, PROMPT, max_new_tokens=24, temperature=1.0, seed=5 + i).text for i in range(3)]
    assert len(set(texts)) == 3
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "seed": 5, "n": 3}  # temperature 1 is the default
    assert [choice.text for choice in client.completions.create(**ask).choices] == texts
    streamed = ["", "", ""]
    for chunk in client.completions.create(stream=True, **ask):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_a_completion_has_sixteen_tokens_by_default_and_a_chat_fills_the_context(client: OpenAI) -> None:
    ask = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(prompt=PROMPT, **ask).usage.completion_tokens == 16
    assert client.chat.completions.create(messages=MESSAGES, **ask).usage.total_tokens == MAX_LENGTH


def test_stop_texts_cut_the_answer(client: OpenAI, llm: LLM) -> None:
    text = expected(llm, PROMPT, max_new_tokens=40).text
    stop = text[20:23]
    for stops in (stop, [stop, "never said"]):
        ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stops}
        choice = client.completions.create(**ask).choices[0]
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        streamed = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **ask)]
        assert "".join(streamed) == text[: text.index(stop)]


def test_usage_counts_tokens_and_says_what_speculation_did(client: OpenAI, llm: LLM) -> None:
    alone = expected(llm, PROMPT, max_new_tokens=30).stats
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    usage = client.completions.create(**ask).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (alone.prompt_tokens, alone.new_tokens)
    assert usage.total_tokens == alone.prompt_tokens + alone.new_tokens
    figures = usage.model_dump()["specdec"]
    assert figures == {
        "rounds": alone.rounds,
        "draft_tokens_proposed": alone.draft_tokens_proposed,
        "draft_tokens_accepted": alone.draft_tokens_accepted,
        "bonus_tokens": alone.bonus_tokens,
        "mean_accepted_length": round(alone.mean_accepted_length, 4),
        "acceptance_rate": round(alone.acceptance_rate, 4),
        "lossless": True,
    }
    assert alone.draft_tokens_accepted > 0
    *chunks, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.model_dump()["specdec"]) == ([], figures)
    assert all("usage" not in chunk.model_fields_set for chunk in client.completions.create(stream=True, **ask))


def test_a_second_turn_reuses_the_first_ones_cache(client: OpenAI, llm: LLM) -> None:
    assert llm.prefixes is not None
    long = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 8}]
    first = client.chat.completions.create(model=MODEL, messages=long, max_tokens=8, temperature=0)
    again = [*long, first.choices[0].message, {"role": "user", "content": "go on"}]  # as clients send it back
    second = client.chat.completions.create(model=MODEL, messages=again, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= llm.prefixes.least


def test_there_is_an_event_for_each_round(client: OpenAI, llm: LLM) -> None:
    alone = expected(llm, PROMPT, max_new_tokens=30)
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True}
    chunks = list(client.completions.create(extra_body={"return_token_origins": True}, **ask))
    assert len(chunks) <= alone.stats.rounds < 30, "a reader that lags gets fewer"


def test_tokens_say_how_they_came_to_be_and_where_they_end(client: OpenAI, llm: LLM) -> None:
    alone = expected(llm, PROMPT, max_new_tokens=30)
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0,
           "extra_body": {"return_token_origins": True}}  # fmt: skip
    told = client.completions.create(**ask).choices[0].model_dump()["specdec"]
    assert told == {"token_ids": list(alone.token_ids), "origins": list(alone.origins), "ends": list(alone.ends)}
    assert told["origins"].count("accepted") == alone.stats.draft_tokens_accepted
    assert told["ends"][-1] == len(alone.text)
    streamed: dict[str, list[Any]] = {"token_ids": [], "origins": []}
    for chunk in client.completions.create(stream=True, **ask):
        part = chunk.choices[0].model_dump()["specdec"]
        for name, found in streamed.items():
            found += part[name]
    assert streamed == {name: told[name] for name in streamed}
    messages = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"return_token_origins": True})
    assert set(messages.choices[0].model_dump()["specdec"]["origins"]) <= {"accepted", "corrected", "bonus", "plain"}


def test_logprobs_of_a_chat(client: OpenAI, llm: LLM) -> None:
    alone = expected(llm, llm.chat_prompt(MESSAGES), max_new_tokens=20, logprobs=3)
    assert alone.logprobs is not None
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logprobs": True,
           "top_logprobs": 3}  # fmt: skip
    choice = client.chat.completions.create(**ask).choices[0]
    content = choice.logprobs.content
    assert [each.logprob for each in content] == pytest.approx([each.logprob for each in alone.logprobs])
    assert [len(each.top_logprobs) for each in content] == [3] * len(content)
    shown = [each for each in content if each.token not in SPECIAL]  # which are tokens, and no text
    assert b"".join(bytes(each.bytes) for each in shown).decode(errors="replace") == choice.message.content
    streamed = [each for chunk in client.chat.completions.create(stream=True, **ask) if chunk.choices[0].logprobs
                for each in chunk.choices[0].logprobs.content]  # fmt: skip
    assert streamed == content
    ask["top_logprobs"] = 0
    bare = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [(each.token, each.logprob, each.top_logprobs) for each in bare] == [
        (each.token, each.logprob, []) for each in content
    ]


def test_logprobs_of_a_completion(client: OpenAI, llm: LLM) -> None:
    alone = expected(llm, PROMPT, max_new_tokens=20, logprobs=2)
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 2}
    choice = client.completions.create(**ask).choices[0]
    assert choice.logprobs.token_logprobs == pytest.approx([each.logprob for each in alone.logprobs or ()])
    assert [len(each) for each in choice.logprobs.top_logprobs] == [2] * 20
    assert choice.logprobs.text_offset == [0, *alone.ends[:-1]]
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **ask)]
    assert [each for part in streamed for each in part.tokens] == choice.logprobs.tokens
    assert [each for part in streamed for each in part.text_offset] == choice.logprobs.text_offset


def test_what_json_cannot_say_is_a_number(client: OpenAI) -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 5,
           "extra_body": {"allowed_token_ids": [70, 71]}}  # fmt: skip
    top = client.chat.completions.create(**ask).choices[0].logprobs.content[0].top_logprobs
    assert [each.logprob for each in top[2:]] == [-9999.0] * 3


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client: OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    ask = {"model": MODEL, "messages": MESSAGES, "temperature": 1, "max_tokens": 60, "response_format": form}
    for seed in range(3):
        if stream:
            chunks = client.chat.completions.create(stream=True, seed=seed, **ask)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = client.chat.completions.create(seed=seed, **ask).choices[0].message.content
        found = json.loads(text)
        assert set(found) == {"ok", "n"}
        assert isinstance(found["ok"], bool)
        assert found["n"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"response_format": {"type": "json_object"}}, "{"),
        ({"response_format": {"type": "text"}}, ""),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, ("a", "b")),
        ({"structured_outputs": {"choice": ["fox", "dog"]}}, ("fox", "dog")),
        ({"structured_outputs": {"json": SCHEMA}}, "{"),
    ],
)
def test_other_forms(client: OpenAI, fields: dict[str, Any], begins: Any) -> None:
    text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, extra_body=fields).choices[0].text
    assert text.startswith(begins)


PARTS = [
    {"role": "developer", "content": [{"type": "text", "text": "co"}, {"type": "text", "text": "unt"}]},
    MESSAGES[1],
]


def test_parts_and_developers_are_what_the_template_knows(client: OpenAI, llm: LLM) -> None:
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    found = client.chat.completions.create(messages=PARTS, **ask)
    assert found.choices[0].message.content == expected(llm, llm.chat_prompt(MESSAGES), max_new_tokens=12).text


REFUSED: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"frequencypenalty": 1}, "frequencypenalty", "unknown_parameter", "unknown field: frequencypenalty"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "tools is not supported by this server"),
    ({"user": "me"}, "user", "unsupported_parameter", "user is not supported"),
    ({"temperature": "hot"}, "temperature", "invalid_value", "temperature: Input should be a valid number"),
    ({"temperature": 3}, "temperature", "invalid_value", "less than or equal to 2"),
    ({"n": 0}, "n", "invalid_value", "n: Input should be greater than or equal to 1"),
    ({"n": True}, "n", "invalid_value", "valid integer"),
    ({"n": 17}, "n", "too_many_choices", "this server gives 1 to 16 choices"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "greater than or equal to 1"),
    ({"max_tokens": MAX_LENGTH}, "max_tokens", "context_length_exceeded", f"the context has {MAX_LENGTH}"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, None, "invalid_value", "give one"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value", "at most 4 texts"),
    ({"stop": "x" * 257}, "stop", "invalid_value", "at most 256 characters"),
    ({"stop": ""}, "stop", "invalid_value", "at least 1 character"),
    ({"logit_bias": {"abc": 1}}, "logit_bias.abc", "invalid_value", "pattern"),
    ({"logit_bias": {"99999": 1}}, None, "invalid_request", "outside the vocabulary"),
    ({"seed": -1}, "seed", "invalid_value", "greater than or equal to 0"),
    ({"top_logprobs": 2}, None, "invalid_value", "top_logprobs is for requests with logprobs"),
    ({"stream_options": {"include_usage": True}}, None, "invalid_value", "stream_options is for requests with stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "unknown field"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wrong"}}}},
     None, "invalid_request", "structured outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name", "invalid_value", "pattern"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "invalid_request", "exactly one"),
    ({"messages": []}, "messages", "invalid_value", "at least 1 item"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value", "Input should be"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "invalid_value", "Input should be 'text'"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "unsupported_parameter",
     "messages[0].name is not supported"),
    ({"messages": [{"role": "user", "content": "the quick " * MAX_LENGTH}]}, "messages", "context_length_exceeded",
     f"at most {MAX_LENGTH - 1}"),
    ({"model": "gpt-4"}, "model", "model_not_found", "this server has 'tiny'"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value", "exceeds the 8"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused_by_name(
    client: OpenAI, server: Served, fields: dict[str, Any], param: str | None, code: str, says: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    error = refused.value
    assert (error.param, error.code) == (param, code)
    assert says in error.body["message"]  # type: ignore[index]
    assert set(error.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
    assert server.backend._service is not None
    assert server.backend._service._requests == {}


def test_fields_that_ask_for_nothing_are_taken(client: OpenAI, llm: LLM) -> None:
    nothing = {"tools": [], "tool_choice": "none", "user": None, "store": False, "modalities": ["text"], "seed": None,
               "stop": None, "logit_bias": {}, "n": None}  # fmt: skip
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    found = client.chat.completions.create(messages=MESSAGES, extra_body=nothing, **ask)
    assert found.choices[0].message.content == expected(llm, llm.chat_prompt(MESSAGES), max_new_tokens=12).text
    old = client.completions.create(prompt=PROMPT, extra_body={"echo": False, "best_of": 1, "suffix": None}, **ask)
    assert old.choices[0].text == expected(llm, PROMPT, max_new_tokens=12).text


def test_empty_prompts_and_impossible_terms(client: OpenAI) -> None:
    for prompt in ("", [], [""], [MAX_LENGTH * 1000]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=prompt)
    dead = {"allowed_token_ids": [70], "logit_bias": {}, "structured_outputs": {"regex": "[0-9]"}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no token is possible"):
            client.completions.create(model=MODEL, prompt=PROMPT, extra_body=dead, stream=stream)


def test_the_schema_says_what_is_taken_and_sent(llm: LLM) -> None:
    """Every reference leads somewhere, requests list their fields, and no field is taken that is not listed."""
    with served(llm) as server:
        schema = httpx.get(f"{server.url}/openapi.json").json()
    parts = schema["components"]["schemas"]
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', json.dumps(schema)))
    assert references
    assert references <= parts.keys()
    asked = ("/v1/chat/completions", "/v1/completions")
    assert {"/v1/models", "/health", "/ready", "/metrics", *asked} <= schema["paths"].keys()
    for name, fields in (("ChatRequest", {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}),
                         ("CompletionRequest", {"prompt", "max_tokens", "logprobs"})):  # fmt: skip
        assert parts[name]["additionalProperties"] is False
        fields |= {"model", "temperature", "response_format", "seed", "stream"}
        assert fields <= parts[name]["properties"].keys()
    for path in asked:
        answers = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "413", "429", "500", "503", "504"} <= answers.keys()
        assert answers["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
