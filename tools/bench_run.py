"""Who answers what, and when: methods take turns, unit by unit, so that a machine that drifts favours none.

A unit is one conversation, or prompts that run together as one continuous batch. Of several repeats the fastest one
counts. Times are of decoding alone, the prompts' passes left out. What the runs add up to is in `figures.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from specdec.engines.errors import EngineError
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import RequestOutput
from specdec.runtime.text import Message
from specdec.tools.figures import ALL, Answer, Run, peer_of
from specdec.tools.peers import Peer
from specdec.tools.questions import Question

ROUNDS_OF_ROWS = 4  # prompts of a batch for each of its rows: most of its time it is full


@dataclass(frozen=True)
class Unit:
    """What a method does in one go: `questions`, up to `rows` of them at a time."""

    number: int
    category: str
    questions: tuple[Question, ...]
    rows: int = 1


Generate = Callable[[Unit, int], Run]  # unit, most new tokens of an answer


@dataclass
class Conversation:
    """What was said so far, for the next prompt: the user's turns and the model's own answers."""

    question: Question
    answers: list[str] = field(default_factory=list)

    def prompt(self, llm: LLM) -> list[int]:
        """Token ids of what was said and the next turn; without a chat template, texts with empty lines between."""
        turns = self.question.turns[: len(self.answers) + 1]
        if not llm.text.has_chat_template:
            said = [text for pair in zip(turns, self.answers, strict=False) for text in pair]
            return llm.text.encode("\n\n".join([*said, turns[-1]]), special=True)
        messages: list[Message] = []
        for turn, answer in zip(turns, self.answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return llm.chat_prompt([*messages, {"role": "user", "content": turns[-1]}])


def units(questions: Sequence[Question], rows: int) -> list[Unit]:
    """One unit for each question; several rows: units of prompts of all categories, `ROUNDS_OF_ROWS` a row."""
    if rows == 1:
        return [Unit(number, question.category, (question,)) for number, question in enumerate(questions)]
    count = max(len(questions) // (ROUNDS_OF_ROWS * rows), 1)
    return [Unit(first, ALL, tuple(questions[first::count]), rows) for first in range(count)]


def interleave(
    work: Sequence[Unit],
    methods: Mapping[str, Generate],
    count: int,
    repeat: int,
    leave_out: Callable[[str, EngineError], None],
) -> Iterator[Run]:
    """Run every method on every unit, each unit starting with another method; yield the fastest repeat of each.

    Peers come last, taking turns as well, and generate as many tokens as the first method did. One that fails is left
    out from there on: `leave_out` is told, and why.
    """
    own, peers = [name for name in methods if not peer_of(name)], [name for name in methods if peer_of(name)]
    for index, unit in enumerate(work):
        best: dict[str, Run] = {}
        for turn in range(index, index + repeat):
            for name in (*_rotated(own, turn), *_rotated(peers, turn)):
                most = len(best[own[0]].answers[0].token_ids) if name in peers else count
                try:
                    run = methods[name](unit, most)
                except EngineError as exc:
                    if name in own:
                        raise
                    peers.remove(name)
                    best.pop(name, None)
                    leave_out(name, exc)
                    continue
                if name not in best or run.seconds < best[name].seconds:
                    best[name] = run
        yield from (best[name] for name in methods if name in best)


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def own_method(name: str, llm: LLM, params: SamplingParams, turns: int | None) -> Generate:
    """A method of this package; `turns`: at most, of each conversation (None: all).

    The seconds of a prompt alone are those of its rounds; of a batch, all but those of its prompts.
    """

    def generate(unit: Unit, count: int) -> Run:
        talks = [Conversation(question) for question in unit.questions]
        most, seconds, answers = replace(params, max_new_tokens=count), 0.0, list[Answer]()
        for turn in range(1, 1 + max(len(talk.question.turns[:turns]) for talk in talks)):
            asking = [talk for talk in talks if len(talk.question.turns) >= turn]
            prompts = [talk.prompt(llm) for talk in asking]
            started = perf_counter()
            outputs = llm.generate(prompts, most, max_rows=unit.rows)
            wall = perf_counter() - started
            alone = unit.rows == 1 and len(outputs) == 1
            seconds += _rounds_ms(outputs) / 1000 if alone else wall - _prefill_ms(outputs) / 1000
            for talk, output in zip(asking, outputs, strict=True):
                talk.answers.append(output.text)
                answers.append(as_answer(output, talk.question.question_id, turn))
        return Run(
            method=name,
            batch_size=unit.rows,
            unit=unit.number,
            category=unit.category,
            seconds=seconds,
            answers=tuple(answers),
        )

    return generate


def peer_method(peer: Peer, prompt: Callable[[Question], Sequence[int]]) -> Generate:
    """A peer, which answers the first turn; the first of its tokens come from the prompt's pass and are not timed."""

    def generate(unit: Unit, count: int) -> Run:
        (question,) = unit.questions
        found = peer.generate(prompt(question), count)
        answer = Answer(question_id=question.question_id, token_ids=found.token_ids, decoded=found.decoded)
        return Run(method=peer.name, unit=unit.number, category=unit.category, seconds=found.seconds, answers=(answer,))

    return generate


def as_answer(output: RequestOutput, question_id: int | str, turn: int) -> Answer:
    """What is kept of an output."""
    stats = output.stats
    return Answer(
        question_id=question_id,
        turn=turn,
        token_ids=output.token_ids,
        decoded=stats.new_tokens,
        prompt_tokens=stats.prompt_tokens,
        draft_tokens_proposed=stats.draft_tokens_proposed,
        draft_tokens_accepted=stats.draft_tokens_accepted,
        bonus_tokens=stats.bonus_tokens,
        ttft_ms=stats.ttft_ms,
        queue_ms=stats.queue_ms,
        prefill_ms=stats.prefill_ms,
        target_ms=stats.target_ms,
        draft_ms=stats.draft_ms,
        host_ms=stats.host_ms,
        history=tuple(stats.history),
    )


def _rounds_ms(outputs: Sequence[RequestOutput]) -> float:
    return sum(each.stats.target_ms + each.stats.draft_ms + each.stats.host_ms for each in outputs)


def _prefill_ms(outputs: Sequence[RequestOutput]) -> float:
    return sum(each.stats.prefill_ms for each in outputs)
