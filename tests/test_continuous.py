"""Requests that join, leave, fail and are aborted between rounds: each answer is the one that it gets alone."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.engines.contract import Chunk, FloatArray
from specdec.engines.errors import DeadEndError, EngineError, RequestError
from specdec.runtime.drafters.fallback import FallbackDrafter
from specdec.runtime.drafters.growth import StaticShape
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.kv import KVBudget
from specdec.runtime.prefixes import PrefixStore
from specdec.runtime.request import Row
from specdec.runtime.scheduler import Scheduler
from support.drafters import KINDS, VOCAB, drafter_of, target
from support.fake_engine import FakeEngine, FakeKV, fake_spec
from support.rows import WatchedModel, greedy, make_row, make_scheduler, run

LONG = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 40)]


def scheduler_of(kind: str, engine: FakeEngine | None = None, *, max_rows: int = 4, **options: object) -> Scheduler:
    """`kind`: as in `support.drafters`; with "ngram+" before it, n-grams go first."""
    before, _, last = kind.rpartition("+")
    model = WatchedModel(engine or target(), max_rows=max_rows, min_width=2)
    drafter = drafter_of(last, max_rows=max_rows)
    if callable(drafter):
        drafter = drafter(model)
    if before and drafter is not None:
        drafter = FallbackDrafter(NgramDrafter(3, 2, 4, threshold=0.15, always=False), drafter)
    return Scheduler(model, drafter, **options)  # type: ignore[arg-type]


def finish(scheduler: Scheduler) -> list[Row]:
    """Step to the end; return the rows in the order in which they ended."""
    ended = []
    while scheduler.busy:
        ended += [row for row in scheduler.step() if row.finish_reason]
    return ended


# Prompts in parts


@pytest.mark.parametrize("kind", [*KINDS, "ngram+other", "ngram+skip"])
@pytest.mark.parametrize("prefill_tokens", [1, 3, 16])
def test_a_prompt_that_comes_in_parts_changes_no_text(kind: str, prefill_tokens: int) -> None:
    """Rows run before, beside and behind one that is still being filled, and end meanwhile."""
    rows = [
        make_row(prompt, max_new_tokens=count)
        for prompt, count in (([1, 2, 3], 3), ([4, 4, 1], 20), (LONG, 12), ([5], 6), (LONG[5:30], 9), ([2, 6], 2))
    ]
    got = run(scheduler_of(kind, prefill_tokens=prefill_tokens), *rows)
    assert got == [greedy(target(), list(row.prompt), row.params.max_new_tokens) for row in rows]


def test_others_get_tokens_while_a_long_prompt_is_filled() -> None:
    scheduler = scheduler_of("plain", prefill_tokens=4)
    first, second = make_row([1, 2], max_new_tokens=30), make_row(LONG, max_new_tokens=2)
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(second)
    for round_ in range(1, 10):
        scheduler.step()
        assert (len(first.tokens), second.held) == (2 + 1 + round_, 4 * round_)
        assert second.stats.new_tokens == 0
    scheduler.step()
    assert (second.held, second.stats.new_tokens) == (39, 1)
    assert (first.stats.rounds, second.stats.rounds) == (11, 1)


def test_a_round_fills_several_short_prompts_and_no_more_than_it_may() -> None:
    scheduler = scheduler_of("plain", max_rows=8, prefill_tokens=10)
    for row in (rows := [make_row([1, 2, 3, 4, 5], max_new_tokens=9) for _ in range(6)]):
        scheduler.submit(row)
    filled = []
    for _ in range(3):
        scheduler.step()
        filled.append([row.held for row in rows])
    assert filled == [[4, 4, 2, 0, 0, 0], [4, 4, 4, 4, 4, 0], [4] * 6]


# Errors and aborts


class Failing(FakeEngine):
    """Raises in the passes that are named; logits are not numbers after texts that hold `poison`."""

    fails: frozenset[int] = frozenset()
    poison: int | None = None
    passes = 0

    def step(self, chunk: Chunk, kv: FakeKV, first_row: int = 0) -> FloatArray:
        self.passes += 1
        if self.passes in self.fails:
            raise EngineError("the chip is on fire")
        return super().step(chunk, kv, first_row)

    def logits_after(self, tokens: list[int]) -> FloatArray:
        logits = super().logits_after(tokens)
        return logits * np.nan if self.poison in tokens else logits


def dead_end() -> Row:
    """A request whose terms leave no token possible."""
    return make_row([1, 2, 3], allowed_token_ids=(4,), bad_words=((4,),), temperature=1.0)


@pytest.mark.parametrize("kind", ["plain", "ngram", "other", "other tree", "skip", "ngram+other"])
def test_a_request_that_fails_ends_alone(kind: str) -> None:
    scheduler = scheduler_of(kind)
    rows = [make_row([1, 2, 3], max_new_tokens=9), dead_end(), make_row([7, 3], max_new_tokens=12), dead_end()]
    for row in rows:
        scheduler.submit(row)
    finish(scheduler)
    assert [row.finish_reason for row in rows] == ["length", "error", "length", "error"]
    assert isinstance(rows[1].error, DeadEndError)
    for row in (rows[0], rows[2]):
        assert row.tokens[len(row.prompt) :] == greedy(target(), list(row.prompt), row.params.max_new_tokens)


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_logits_of_one_row_that_are_no_numbers_end_that_row(broken: str) -> None:
    """Token 9 is in one prompt only: whatever engine it upsets, the other rows go on."""
    spec = fake_spec(12)
    bad, good = Failing(spec, order=None), FakeEngine(spec, order=2)
    bad.poison = 9
    draft = WatchedModel(bad if broken == "draft" else good, max_rows=4, min_width=2)
    drafter = ModelDrafter(draft, StaticShape.chain(2), 12, 12)
    scheduler = make_scheduler(bad if broken == "target" else good, drafter)
    allowed = {"allowed_token_ids": tuple(range(9)), "max_new_tokens": 10}
    rows = [make_row([1, 2], **allowed), make_row([1, 9, 2], **allowed), make_row([3], **allowed)]
    for row in rows:
        scheduler.submit(row)
    finish(scheduler)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert "logits that are not numbers, in row 1 after" in str(rows[1].error)


def test_an_engine_that_fails_ends_the_rows_of_that_pass_and_no_others() -> None:
    engine = Failing(fake_spec(VOCAB), order=2, min_width=2)
    scheduler = scheduler_of("ngram", engine, max_rows=2)
    rows = [make_row([1, 2, 3], max_new_tokens=5) for _ in range(4)]
    for row in rows:
        scheduler.submit(row)
    engine.fails = frozenset({4})  # two prompts, one round, and then this
    finish(scheduler)
    assert [row.finish_reason for row in rows] == ["error", "error", "length", "length"]
    assert [str(row.error) for row in rows[:2]] == ["the chip is on fire"] * 2
    assert all(row.tokens[3:] == greedy(target(), [1, 2, 3], 5) for row in rows[2:])


def test_an_engine_that_fails_on_a_prompt_ends_that_row() -> None:
    engine = Failing(fake_spec(VOCAB), order=2, min_width=2)
    scheduler = scheduler_of("plain", engine)
    rows = [make_row([1, 2, 3], max_new_tokens=5), make_row([4, 5], max_new_tokens=5)]
    engine.fails = frozenset({1})
    for row in rows:
        scheduler.submit(row)
    finish(scheduler)
    assert [row.finish_reason for row in rows] == ["error", "length"]
    assert rows[0].stats.new_tokens == 0
    assert rows[1].tokens[2:] == greedy(target(), [4, 5], 5)


def test_an_aborted_row_leaves_before_its_next_round_wherever_it_is() -> None:
    scheduler = scheduler_of("other", max_rows=2, prefill_tokens=4)
    running, filling, waiting = (make_row(prompt, max_new_tokens=30) for prompt in ([1, 2], LONG, [3, 4]))
    other = make_row([5, 6], max_new_tokens=8)
    for row in (running, filling, waiting, other):
        scheduler.submit(row)
    scheduler.step()
    assert (running.ready, filling.held < 39, waiting.held) == (True, True, 0)
    known = len(running.tokens)
    for row in (running, filling, waiting):
        row.aborted = True
    ended = scheduler.step()
    assert {row.finish_reason for row in (running, filling, waiting)} == {"abort"}
    assert set(ended) == {running, filling, waiting, other}
    assert len(running.tokens) == known
    finish(scheduler)
    assert other.tokens[2:] == greedy(target(), [5, 6], 8)


# Memory


def test_rows_join_when_all_can_grow_to_their_ends_within_the_budget() -> None:
    """A row of 100 slots takes a bucket of 128; the fake engine's slot 8 bytes (a key and a value in float32)."""
    spec = fake_spec(VOCAB, max_length=200)
    engine = FakeEngine(spec, order=2)
    rows = [make_row([1, 2, 3], max_length=200, max_new_tokens=count) for count in (20, 20, 20, 150)]
    budget = KVBudget(2 * spec.kv_bytes(1, 128), [spec], spare=4)
    scheduler = scheduler_of("plain", engine, budget=budget)
    for row in rows:
        scheduler.submit(row)
    together = []
    while scheduler.busy:
        scheduler.step()
        together.append(sum(row.held > 0 and not row.finish_reason for row in rows))
    assert together[:19] == [2] * 19, "two of them in the first 19 rounds, the third in the next 19, the last one alone"
    assert together[20:39] == [1] * 19
    assert together[40:189] == [1] * 149
    assert [row.finish_reason for row in rows] == ["length"] * 4
    with pytest.raises(RequestError, match=r"3 tokens and up to 190 new ones need .* MiB of cache"):
        scheduler_of("plain", engine, budget=KVBudget(spec.kv_bytes(1, 128), [spec], spare=4)).submit(
            make_row([1, 2, 3], max_length=200, max_new_tokens=190)
        )


def test_buffers_shrink_when_long_rows_have_left() -> None:
    engine = FakeEngine(fake_spec(VOCAB, max_length=600), order=2, min_width=2)
    scheduler = scheduler_of("plain", engine)
    short = make_row([1, 2], max_length=600, max_new_tokens=40)
    long = [make_row(LONG * 10, max_length=600, max_new_tokens=3) for _ in range(3)]
    for row in (*long, short):
        scheduler.submit(row)
    scheduler.step()
    kv = scheduler._target.kv
    assert kv is not None
    assert (kv.rows, kv.capacity) == (4, 512)
    finish(scheduler)
    assert (kv.rows, kv.capacity) == (1, 128)
    assert short.tokens[2:] == greedy(engine, [1, 2], 40)


# Anything in any order


class Service(RuleBasedStateMachine):
    """One scheduler under a random load; what every request should say is known from the engine's definition."""

    @initialize(
        kind=st.sampled_from(["plain", "ngram", "other", "short", "other tree", "skip", "skip dynamic", "ngram+other"]),
        prefill_tokens=st.sampled_from([1, 5, 100]),
        max_rows=st.sampled_from([1, 3]),
        kept=st.sampled_from([0, 1500, 10**6]),
    )
    def open(self, kind: str, prefill_tokens: int, max_rows: int, kept: int) -> None:
        """`kept`: bytes for the caches of texts that have ended; 1500 are those of some 40 to 60 tokens."""
        self.engine = Failing(fake_spec(VOCAB), order=2, min_width=2)
        self.store = PrefixStore(kept, least=2) if kept else None
        options = {"max_rows": max_rows, "prefill_tokens": prefill_tokens, "prefixes": self.store}
        self.scheduler = scheduler_of(kind, self.engine, **options)
        self.expected: dict[Row, list[int]] = {}
        self.doomed: list[Row] = []
        self.ended: list[Row] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        count=st.integers(1, 12),
        seed=st.none() | st.integers(0, 3),
    )
    def submit(self, prompt: list[int], count: int, seed: int | None) -> None:
        """A greedy request, or a coupled one, whose seed fixes its text."""
        chance = {} if seed is None else {"temperature": 1.0, "seed": seed, "acceptance": "coupled"}
        alone, row = (make_row(prompt, max_new_tokens=count, **chance) for _ in range(2))
        self.expected[row] = run(make_scheduler(target()), alone)[0]
        self.scheduler.submit(row)

    @precondition(lambda self: self.ended)
    @rule(
        data=st.data(),
        dropped=st.integers(0, 8),
        more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        count=st.integers(1, 12),
        seed=st.none() | st.integers(0, 3),
    )
    def submit_what_goes_on_from_an_earlier_text(
        self, data: st.DataObject, dropped: int, more: list[int], count: int, seed: int | None
    ) -> None:
        """The next turn of one that ended, however it did, or a text that begins like it."""
        text = data.draw(st.sampled_from(self.ended)).tokens[:40]
        self.submit([*text[: max(len(text) - dropped, 1)], *more], count, seed)

    @rule()
    def submit_one_that_fails(self) -> None:
        row = dead_end()
        self.doomed.append(row)
        self.scheduler.submit(row)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.ended += [row for row in self.scheduler.step() if row.finish_reason]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.live())).aborted = True

    @precondition(lambda self: self.scheduler.busy)
    @rule()
    def engine_fails(self) -> None:
        self.engine.fails = frozenset({self.engine.passes + 1})

    @invariant()
    def every_row_is_where_it_belongs(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        model, rows = self.scheduler._target, self.scheduler._rows
        assert model.rows == len(rows) <= model.max_rows
        for index, row in enumerate(rows):
            assert not row.finish_reason
            assert model.lens[index] == (len(row.tokens) - 1 if row.filled else row.held)
        assert len(set(self.ended)) == len(self.ended), "a request ends once"
        if self.store is not None:
            assert self.store.nbytes <= self.store.limit
            assert self.store.reused_tokens == sum(row.stats.reused_tokens for row in (*self.ended, *rows))

    def live(self) -> list[Row]:
        return [row for row in (*self.expected, *self.doomed) if not row.finish_reason and not row.aborted]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.ended += finish(self.scheduler)
        assert set(self.ended) == {*self.expected, *self.doomed}, "no request is lost"
        for row, text in self.expected.items():
            got = row.tokens[len(row.prompt) :]
            if row.finish_reason == "length":
                assert got == text
            else:
                assert row.finish_reason == "abort" if row.aborted else isinstance(row.error, EngineError)
                assert got == text[: len(got)]


TestService = Service.TestCase
TestService.settings = settings(max_examples=150, stateful_step_count=30)
