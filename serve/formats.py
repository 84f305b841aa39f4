"""What the runtime hands out, as OpenAI's objects: whole answers and chunks, of chats and of completions.

One `Format` is made for each request. Pure: outputs and deltas in, objects out.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, cast

from msgspec import UNSET, UnsetType

from specdec.runtime.delivery import Delta
from specdec.runtime.request import RequestOutput
from specdec.runtime.sampling import Logprob
from specdec.runtime.vocabulary import TokenBytes
from specdec.serve.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    PromptTokensDetails,
    Speculation,
    TokenLogprob,
    TokenOrigins,
    TopLogprob,
    Usage,
)

LEAST_LOGPROB = -9999.0  # OpenAI's, for what JSON cannot say


class Format(ABC):
    """One request's answer.

    `head`: the fields `id`, `created`, `model`, `system_fingerprint`. `of_prompt`: choices of each prompt. `ends`: end
    tokens. `top`: how many likely tokens were asked for, None: no log-probabilities. `origins`, `with_usage`: whether
    choices say what their tokens are, and chunks that the usage comes last.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        of_prompt: int,
        token_bytes: TokenBytes,
        ends: Collection[int],
        top: int | None,
        origins: bool,
        with_usage: bool,
    ) -> None:
        self._head, self._of_prompt = head, of_prompt
        self._bytes, self._ends = token_bytes, ends
        self._top, self._origins = top, origins
        self._usage: UnsetType | None = None if with_usage else UNSET

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta, *, first: bool) -> list[Any]:
        """What a choice got, its `first` or later; empty when there is nothing to say yet."""

    @abstractmethod
    def last(self, outputs: Sequence[RequestOutput]) -> Any:
        """The chunk with the usage."""

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Of all choices together."""
        stats = [output.stats for output in outputs]
        prompts = stats[:: self._of_prompt]
        prompt, new = sum(each.prompt_tokens for each in prompts), sum(each.new_tokens for each in stats)
        rounds, proposed = sum(each.rounds for each in stats), sum(each.draft_tokens_proposed for each in stats)
        accepted = sum(each.draft_tokens_accepted for each in stats)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.reused_tokens for each in prompts)),
            specdec=Speculation(
                rounds=rounds,
                draft_tokens_proposed=proposed,
                draft_tokens_accepted=accepted,
                bonus_tokens=sum(each.bonus_tokens for each in stats),
                mean_accepted_length=round(new / rounds, 4) if rounds else 0.0,
                acceptance_rate=round(accepted / proposed, 4) if proposed else 0.0,
                lossless=all(each.lossless for each in stats),
            ),
        )

    def _silent(self, delta: Delta) -> bool:
        """Whether a chunk would say nothing."""
        told = delta.token_ids and (self._origins or self._top is not None)
        return not (delta.text or delta.finish_reason or told)

    def _token_origins(self, delta: Delta) -> TokenOrigins | UnsetType:
        if not self._origins:
            return UNSET
        return TokenOrigins(token_ids=delta.token_ids, origins=delta.origins, ends=delta.ends)

    def _content(self, logprobs: Sequence[Logprob]) -> Sequence[Logprob]:
        """Without the token that ended the answer, which is none of its text."""
        return logprobs[:-1] if logprobs and logprobs[-1].token_id in self._ends else logprobs

    def _text(self, token: int) -> str:
        raw = self._bytes[token]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(Format):
    """Of /v1/chat/completions."""

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """See `Format`."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=output.text),
                finish_reason=cast(Finish, output.finish_reason),
                logprobs=self._logprobs(output.logprobs or ()),
                specdec=self._token_origins(_all_of(output)),
            )
            for index, output in enumerate(outputs)
        ]
        return ChatCompletion(**self._head, choices=choices, usage=self.usage(outputs))

    def chunks(self, index: int, delta: Delta, *, first: bool) -> list[ChatChunk]:
        """See `Format`; the role comes in a chunk of its own, as OpenAI's does."""
        found = [self._chunk(index, ChatDelta(role="assistant", content=""))] if first else []
        if not self._silent(delta):
            content: str | UnsetType = delta.text if delta.text or not delta.finish_reason else UNSET
            found.append(self._chunk(index, ChatDelta(content=content), delta))
        return found

    def last(self, outputs: Sequence[RequestOutput]) -> ChatChunk:
        """See `Format`."""
        return ChatChunk(**self._head, choices=[], usage=self.usage(outputs))

    def _chunk(self, index: int, added: ChatDelta, delta: Delta | None = None) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=added)
        if delta is not None:
            choice = ChatChunkChoice(
                index=index,
                delta=added,
                finish_reason=cast(Finish | None, delta.finish_reason),
                logprobs=self._logprobs(delta.logprobs),
                specdec=self._token_origins(delta),
            )
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)

    def _logprobs(self, logprobs: Sequence[Logprob]) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs(content=[self._logprob(each) for each in self._content(logprobs)])

    def _logprob(self, each: Logprob) -> TokenLogprob:
        top = [TopLogprob(**self._told(token, logprob)) for token, logprob in each.top]
        return TokenLogprob(**self._told(each.token_id, each.logprob), top_logprobs=top)

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(self._bytes[token])}


class CompletionFormat(Format):
    """Of /v1/completions."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets: dict[int, int] = {}  # of choices, where their next token begins

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """See `Format`."""
        choices = [self._choice(index, _all_of(output)) for index, output in enumerate(outputs)]
        return Completion(**self._head, choices=choices, usage=self.usage(outputs))

    def chunks(self, index: int, delta: Delta, *, first: bool) -> list[Completion]:
        """See `Format`."""
        if self._silent(delta):
            return []
        return [Completion(**self._head, choices=[self._choice(index, delta)], usage=self._usage)]

    def last(self, outputs: Sequence[RequestOutput]) -> Completion:
        """See `Format`."""
        return Completion(**self._head, choices=[], usage=self.usage(outputs))

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=delta.text,
            finish_reason=cast(Finish | None, delta.finish_reason),
            logprobs=self._logprobs(index, delta),
            specdec=self._token_origins(delta),
        )

    def _logprobs(self, index: int, delta: Delta) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        found = self._content(delta.logprobs)
        begins = (self._offsets.get(index, 0), *delta.ends)
        self._offsets[index] = begins[-1]
        return CompletionLogprobs(
            tokens=[self._text(each.token_id) for each in found],
            token_logprobs=[max(each.logprob, LEAST_LOGPROB) for each in found],
            top_logprobs=[self._likely(each) for each in found] if self._top else None,
            text_offset=list(begins[: len(found)]),
        )

    def _likely(self, each: Logprob) -> dict[str, float]:
        return {self._text(token): max(logprob, LEAST_LOGPROB) for token, logprob in each.top}


def _all_of(output: RequestOutput) -> Delta:
    """A whole answer as one delta."""
    return Delta(
        output.text,
        output.token_ids,
        output.finish_reason,
        output,
        output.origins,
        output.ends,
        output.logprobs or (),
    )
