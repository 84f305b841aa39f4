"""Texts whose caches are reused: the store by itself, every drafter on the fake engine, real bundles to the bit."""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.engines.contract import Chunk, FloatArray
from specdec.engines.errors import EngineError, RequestError
from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.fallback import FallbackDrafter
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.kv import CachedModel
from specdec.runtime.prefixes import LEAST, Prefix, PrefixStore
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree
from specdec.tools import reuse
from support.bundles import TOKENIZER_SIZE, shared_bundle
from support.drafters import KINDS, VOCAB, drafter_of, target
from support.eagles import eagle_bundle
from support.fake_engine import FakeEngine, FakeKV, fake_spec
from support.heads import medusa_bundle
from support.rows import greedy, make_row, make_scheduler, run
from support.trace import recorded_logits

# The store


def entry(tokens: Sequence[int], kv: int = 0, draft: int | None = None) -> Prefix:
    """An entry of 8 bytes a token, `kv` bytes of keys and values, and `draft` bytes of the drafter's."""
    saved = None if draft is None else np.zeros(draft, np.int8)
    return Prefix(np.array(tokens, np.int64), np.zeros((1, 1, 1, kv), np.int8), saved)


def texts(store: PrefixStore) -> list[list[int]]:
    """What it holds, the least recently used first."""
    return [one.tokens.tolist() for one in store._entries]


def matched(store: PrefixStore, tokens: Sequence[int]) -> tuple[list[int], int] | None:
    found = store.match(tokens)
    return found and (found[0].tokens.tolist(), found[1])


def test_the_longest_common_beginning_is_found() -> None:
    store = PrefixStore(10_000, least=2)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6, 7], [8, 9, 1, 2]):
        store.add(entry(tokens))
    assert matched(store, [1, 2, 3, 4, 9]) == ([1, 2, 3, 4], 4)
    assert matched(store, [1, 2, 5, 6, 8, 8]) == ([1, 2, 5, 6, 7], 4)
    assert matched(store, [1, 2, 5, 6, 7, 1, 2, 3]) == ([1, 2, 5, 6, 7], 5)
    assert matched(store, [1, 2, 3, 4]) == ([1, 2, 3, 4], 3), "the last token is pending: never in a row's cache"
    assert matched(store, [1, 2, 3]) == ([1, 2, 5, 6, 7], 2)
    for none in ([1, 2], [1, 7, 7], [2, 3, 4], [5], []):
        assert matched(store, none) is None
    assert (store.hits, store.reused_tokens) == (0, 0), "to look is not to use"


def test_among_equals_the_last_used_one_is_found() -> None:
    store = PrefixStore(10_000, least=2)
    first, second = entry([1, 2, 3]), entry([1, 2, 4])
    store.add(first)
    store.add(second)
    assert store.match([1, 2, 9]) == (second, 2)
    store.used(first, 2)
    assert store.match([1, 2, 9]) == (first, 2)


def test_bytes_are_those_of_tokens_caches_and_what_drafters_saved() -> None:
    store = PrefixStore(1_000, least=1)
    assert entry([1, 2, 3], kv=70, draft=9).nbytes == 24 + 70 + 9
    store.add(entry([1, 2, 3], kv=70, draft=9))
    store.add(entry([2], kv=5))
    assert store.nbytes == 103 + 13


def test_the_least_recently_used_entry_goes_first() -> None:
    store = PrefixStore(300, least=1)  # three of 100 bytes
    first, second, third = (entry([n], kv=92) for n in (1, 2, 3))
    for one in (first, second, third):
        store.add(one)
    assert texts(store) == [[1], [2], [3]]
    store.used(first, 1)
    assert not store.wants([2], 0), "what is held counts as used"
    store.add(entry([4], kv=92))
    assert texts(store) == [[1], [2], [4]]
    store.add(entry([5], kv=192))
    assert texts(store) == [[4], [5]]
    assert store.nbytes == 300
    store.used(third, 1)  # gone meanwhile: counted, and not back
    assert texts(store) == [[4], [5]]
    assert (store.hits, store.reused_tokens) == (2, 2)


def test_an_entry_takes_the_place_of_those_that_it_goes_on_from() -> None:
    store = PrefixStore(10_000, least=1)
    for tokens in ([1, 2], [1, 3], [7], [1, 2, 3, 4]):
        store.add(entry(tokens))
    assert texts(store) == [[1, 3], [7], [1, 2, 3, 4]]
    store.add(entry([1, 2, 3]))
    assert texts(store) == [[1, 3], [7], [1, 2, 3, 4]]
    store.add(entry([7]))
    assert texts(store) == [[1, 3], [1, 2, 3, 4], [7]], "held already: used again"


def test_what_is_too_large_or_too_short_is_not_kept() -> None:
    store = PrefixStore(300, least=3)
    store.add(entry([1, 2, 3], kv=276))
    assert not store.wants([4, 5, 6], 301)
    assert not store.wants([4, 5], 10)
    assert store.wants([4, 5, 6], 300)
    store.add(entry([4, 5, 6], kv=277))
    store.add(entry([4, 5]))
    assert texts(store) == [[1, 2, 3]], "and nothing makes room for it"
    assert (store.nbytes, PrefixStore(1).least) == (300, LEAST)


def test_threads_share_a_store() -> None:
    store, errors = PrefixStore(2_000, least=2), []
    uses = [0] * 4

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for _ in range(400):
                tokens = rng.integers(0, 3, rng.integers(2, 12)).tolist()
                found = store.match(tokens)
                if found is not None:
                    assert found[0].tokens[: found[1]].tolist() == tokens[: found[1]]
                    store.used(*found)
                    uses[number] += 1
                if store.wants(tokens, 50):
                    store.add(entry(tokens, kv=int(rng.integers(1, 200))))
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.nbytes == sum(one.nbytes for one in store._entries) <= 2_000
    assert store.hits == sum(uses) > 100
    held = texts(store)
    assert not any(one is not other and other[: len(one)] == one for one in held for other in held)


# Every drafter on the fake engine

ALL = [*KINDS, "ngram+other", "ngram+skip"]
CHANCE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "coupled": {"temperature": 1.0, "acceptance": "coupled"},
}
OPENING = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 14)]


def kind_of(kind: str) -> Drafter | Callable[[CachedModel], Drafter] | None:
    """As in `support.drafters`; with "ngram+" before it, n-grams go first."""
    before, _, last = kind.rpartition("+")
    made = drafter_of(last)
    if not before:
        return made

    def both(model: CachedModel) -> Drafter:
        second = made(model) if callable(made) else made
        return FallbackDrafter(NgramDrafter(3, 2, 4, threshold=0.15, always=False), second)  # type: ignore[arg-type]

    return both


def answers(kind: str, store: PrefixStore | None, rows: Sequence[Row], **options: Any) -> list[list[int]]:
    """What the rows say on a new scheduler."""
    return run(make_scheduler(target(), kind_of(kind), prefixes=store, **options), *rows)


def rows_of(prompts: Sequence[Sequence[int]], counts: Sequence[int], chance: str, **params: Any) -> list[Row]:
    options = {"ignore_eos": "eos" not in params, **CHANCE[chance], **params}
    return [
        make_row(list(prompt), max_new_tokens=count, seed=seed, **options)
        for seed, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]


def figures(row: Row) -> tuple[object, ...]:
    """What a draft was worth."""
    stats = row.stats
    return stats.rounds, stats.draft_tokens_accepted, stats.proposed_at, stats.accepted_at


def check(kind: str, store: PrefixStore, prompts: Sequence[Sequence[int]], chance: str, **options: Any) -> list[Row]:
    """Answers to `prompts` with the store are those without, drafts too; returns the rows."""
    counts = [11, 6, 15, 3, 9][: len(prompts)]
    alone, rows = rows_of(prompts, counts, chance), rows_of(prompts, counts, chance)
    assert answers(kind, store, rows, **options) == answers(kind, None, alone, **options)
    if chance == "greedy":
        assert all(
            row.tokens == [*row.prompt, *greedy(target(), list(row.prompt), 15)][: len(row.tokens)] for row in rows
        )
    assert [figures(row) for row in rows] == [figures(row) for row in alone]
    return rows


@pytest.mark.parametrize("chance", CHANCE)
@pytest.mark.parametrize("kind", ALL)
def test_a_second_turn_is_what_it_is_without_reuse(kind: str, chance: str) -> None:
    """First turns end at an end token, in the middle of a draft too, or at their length."""
    store = PrefixStore(10**6, least=4)
    first = rows_of([OPENING, OPENING[3:], [1, 2]], (20, 17, 12), chance, eos=(3,))
    answers(kind, store, first)
    turns = [[*row.tokens, 5, 1, 2] for row in first]
    rows = check(kind, store, turns, chance, max_rows=2)
    held = [len(row.tokens) - (row.finish_reason == "length") for row in first]  # an end token may be in the cache
    assert all(row.stats.reused_tokens - most in (0, -1) for row, most in zip(rows, held, strict=True) if most > 4)
    assert sum(row.stats.reused_tokens for row in rows) == store.reused_tokens > 20
    assert store.hits == sum(row.stats.reused_tokens > 0 for row in rows)
    third = check(kind, store, [[*row.tokens, 2] for row in rows[:2]], chance)
    assert [row.stats.reused_tokens for row in third] == [len(row.tokens) - 1 for row in rows[:2]]


@pytest.mark.parametrize("chance", ["greedy", "coupled"])
@pytest.mark.parametrize("kind", ALL)
def test_a_shared_beginning_is_reused_as_far_as_it_goes(kind: str, chance: str) -> None:
    store = PrefixStore(10**6, least=4)
    answers(kind, store, rows_of([[*OPENING, 1, 2]], (8,), chance))
    prompts = [[*OPENING, 6, 6, 6], [*OPENING[:9], *[(OPENING[9] + 1) % VOCAB] * 3], OPENING[:5], OPENING[:4]]
    rows = check(kind, store, [*prompts, [(OPENING[0] + 1) % VOCAB, *OPENING]], chance, max_rows=3)
    assert [row.stats.reused_tokens for row in rows] == [14, 9, 4, 0, 0]


@pytest.mark.parametrize("kind", ALL)
def test_what_an_aborted_row_held_is_reused(kind: str) -> None:
    """One is aborted while its prompt is filled, one between rounds."""
    store = PrefixStore(10**6, least=4)
    scheduler = make_scheduler(target(), kind_of(kind), prefixes=store, prefill_tokens=6, max_rows=2)
    long = [7, 7, *OPENING, *OPENING, *OPENING]
    running, filling = make_row(OPENING[:6], max_new_tokens=30), make_row(long, max_new_tokens=9)
    for row in (running, filling):
        scheduler.submit(row)
    for _ in range(4):
        scheduler.step()
    held = [len(running.tokens) - 1, filling.held]
    assert held[0] >= 9
    assert held[1] == 19
    running.aborted = filling.aborted = True
    scheduler.step()
    assert sorted(map(len, texts(store))) == sorted(held)
    rows = check(kind, store, [[*running.tokens, 4, 4], long], "greedy")
    assert [row.stats.reused_tokens for row in rows] == held


class Broken(FakeEngine):
    """Fails in pass number `fails`; after texts that hold 6, logits are not numbers."""

    fails, passes = 0, 0

    def step(self, chunk: Chunk, kv: FakeKV, first_row: int = 0) -> FloatArray:
        self.passes += 1
        if self.passes == self.fails:
            raise EngineError("the chip is on fire")
        return super().step(chunk, kv, first_row)

    def logits_after(self, tokens: list[int]) -> FloatArray:
        return super().logits_after(tokens) * (np.nan if 6 in tokens else 1)


@pytest.mark.parametrize(("prompt", "fails"), [([1, 2, 3, 6, 1, 2], 0), ([1, 2, 3, 1, 2], 1), ([1, 2, 3, 1, 2], 3)])
def test_nothing_is_kept_of_a_row_that_failed(prompt: list[int], fails: int) -> None:
    store, engine = PrefixStore(10**6, least=1), Broken(fake_spec(VOCAB))
    engine.fails = fails
    scheduler = make_scheduler(engine, prefixes=store)
    row = make_row(prompt, max_new_tokens=9)
    scheduler.submit(row)
    while scheduler.busy:
        scheduler.step()
    assert row.finish_reason == "error"
    assert texts(store) == []


def test_a_cache_that_cannot_be_copied_is_an_error_of_that_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore(10**6, least=4)
    answers("plain", store, [make_row(OPENING, max_new_tokens=5)])

    def refuse(self: FakeKV, *_: object) -> None:
        raise EngineError("no way through")

    monkeypatch.setattr(FakeKV, "write", refuse)
    scheduler = make_scheduler(target(), prefixes=store)
    rows = [make_row([*OPENING, 3], max_new_tokens=5), make_row([5, 5, 5], max_new_tokens=5)]
    for row in rows:
        scheduler.submit(row)
    while scheduler.busy:
        scheduler.step()
    assert [row.finish_reason for row in rows] == ["error", "length"]
    assert str(rows[0].error) == "no way through"


def test_buffers_grow_once_for_rows_that_join_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sizes = PrefixStore(10**6, least=4), []
    answers("plain", store, [make_row(OPENING, max_new_tokens=5)])
    resize = FakeKV.resize
    monkeypatch.setattr(FakeKV, "resize", lambda kv, *size: (sizes.append(size), resize(kv, *size))[1])
    scheduler = make_scheduler(target(), prefixes=store)
    for token in range(4):
        scheduler.submit(make_row([*OPENING, token, 1], max_new_tokens=5))
    scheduler.step()
    assert sizes == []
    kv = scheduler._target.kv
    assert kv is not None
    assert kv.rows == 4


class Fixed(FakeEngine):
    """An engine whose buffers cannot be larger than a full row and a small tree need, as a plan's."""

    def allocate(self, rows: int, capacity: int) -> FakeKV:
        assert capacity <= 128
        return super().allocate(rows, capacity)


def test_buffers_get_no_larger_than_the_prompt_needs() -> None:
    store, engine = PrefixStore(10**6, least=4), Fixed(fake_spec(VOCAB, max_length=126))
    prompt = [*OPENING * 8, 1, 2]
    for reused in (0, 113, 113):
        row = make_row(prompt, max_length=126, max_new_tokens=9)
        assert run(make_scheduler(engine, prefixes=store), row) == [greedy(engine, prompt, 9)]
        assert row.stats.reused_tokens == reused


# Real bundles

NEW = 24
LONG = [
    np.random.default_rng(seed).integers(3, TOKENIZER_SIZE, size).tolist() for seed, size in enumerate((45, 70, 52))
]


class Recording:
    """A drafter whose proposals are written down, by the text that they were made for."""

    def __init__(self, drafter: Drafter, found: dict[tuple[int, ...], object]) -> None:
        self._drafter, self._found = drafter, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        trees = self._drafter.propose(rows, limits)
        for row, tree, limit in zip(rows, trees, limits, strict=True):
            if limit > 0:
                self._found[tuple(row.tokens)] = tree.tokens, tree.parents
        return trees


def talk(llm: LLM, **params: Any) -> list[list[RequestOutput]]:
    """Three batches: prompts; their next turns and a text that begins like one of them; the first prompts again."""
    each = [SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=seed, **params) for seed in range(4)]
    first = llm.generate(LONG, each[:3])
    turns = [[*output.prompt_token_ids, *output.token_ids, 9, 8, 7, 6, 5] for output in first]
    other = [*LONG[1][:37], (LONG[1][37] + 1) % TOKENIZER_SIZE, 11, 12]
    return [first, llm.generate([*turns, other], each), llm.generate(LONG, each[:3])]


def load(bundle: Path, prefix_bytes: int, **options: Any) -> tuple[LLM, dict[tuple[int, ...], object]]:
    """Also returns where its proposals will be."""
    found: dict[tuple[int, ...], object] = {}
    llm = LLM(bundle, speculative=SpeculativeConfig(**options), verify=False, prefix_bytes=prefix_bytes)
    make = llm._draft
    llm._draft = make and (lambda target: Recording(make(target), found))  # type: ignore[assignment]
    return llm, found


BUNDLES: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
    "plain": (shared_bundle, {"method": None}),
    "ngram+model": (shared_bundle, {"method": "ngram+model", "num_speculative_tokens": 3}),
    "layerskip": (
        lambda: shared_bundle(drafters=("ngram", "layerskip:1")),
        {"method": "layerskip:1", "num_speculative_tokens": 3},
    ),
    "eagle": (eagle_bundle, {"method": "eagle", "num_speculative_tokens": 3}),
    "eagle int8": (partial(eagle_bundle, "eagle3", "int8"), {"method": "eagle", "num_speculative_tokens": 3}),
    "ngram+eagle": (eagle_bundle, {"method": "ngram+eagle", "num_speculative_tokens": 3}),
    "medusa": (medusa_bundle, {"method": "medusa", "num_speculative_tokens": 3}),
}


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "acceptance": "coupled"}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", BUNDLES)
def test_texts_bits_and_proposals_are_those_without_reuse(name: str, params: dict[str, Any]) -> None:
    bundle, options = BUNDLES[name]
    without, drafts = load(bundle(), 0, **options)
    with without, recorded_logits() as expected:
        wanted = talk(without, **params)
    llm, found = load(bundle(), 10**9, **options)
    with llm, recorded_logits() as bits:
        got = talk(llm, **params)
    assert llm.mode == "exact"
    for turn, others in zip(got, wanted, strict=True):
        assert [output.token_ids for output in turn] == [output.token_ids for output in others]
        for output, other in zip(turn, others, strict=True):
            assert output.stats.rounds == other.stats.rounds
            assert output.stats.accepted_at == other.stats.accepted_at
    assert bits == expected
    assert found == drafts
    assert len(found) > 30 or name == "plain"
    reused = [[output.stats.reused_tokens for output in turn] for turn in got]
    less = int("eagle" in name)  # a pair joins two tokens
    sizes = [len(prompt) for prompt in LONG]
    again = [size - 1 - (less or name == "medusa") for size in sizes]  # heads need a state of this very pass
    assert reused == [[0, 0, 0], [*(size + NEW - 1 - less for size in sizes), 37 - less], again]
    assert llm.prefixes is not None
    assert (llm.prefixes.hits, llm.prefixes.reused_tokens) == (7, sum(map(sum, reused)))
    assert all(output.stats.reused_tokens == 0 for turn in wanted for output in turn)


@pytest.mark.parametrize("make", [shared_bundle, eagle_bundle, medusa_bundle], ids=["model", "eagle", "medusa"])
def test_plans_and_reuse_change_no_text_and_no_bit(make: Callable[[], Path]) -> None:
    """With the controller, whose drafts follow the clock, and both drafters."""
    without, _ = load(make(), 0, method=None)
    with without, recorded_logits() as expected:
        wanted = talk(without, temperature=1.0)
    llm, _ = load(make(), 10**9)
    with llm, recorded_logits() as bits:
        got = talk(llm, temperature=1.0)
    assert llm.controller is not None
    assert llm.prefixes is not None
    assert llm.prefixes.hits == 7
    assert [[one.token_ids for one in turn] for turn in got] == [[one.token_ids for one in turn] for turn in wanted]
    assert bits == expected


@pytest.mark.parametrize(
    ("name", "tree"), [("eagle", [[0], [1], [0, 0], [1, 0]]), ("medusa", [[0], [1], [0, 0], [0, 1], [1, 0]])]
)
def test_trees_are_those_without_reuse(name: str, tree: list[list[int]]) -> None:
    """Lossless in law, not in bits; in fp32 nothing comes so near to a tie that it would show."""
    bundle, options = BUNDLES[name]
    options = {"method": options["method"], "tree": tree}
    (without, drafts), (llm, found) = load(bundle(), 0, **options), load(bundle(), 10**9, **options)
    with without, llm:
        wanted, got = ([[output.token_ids for output in turn] for turn in talk(one)] for one in (without, llm))
        assert llm.prefixes is not None
        assert llm.prefixes.hits == 7
    assert got == wanted
    assert found == drafts


def test_a_store_belongs_to_all_calls_of_one_bundle() -> None:
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=None), verify=False) as llm:
        assert llm.prefixes is not None
        assert llm.prefixes.limit == 256 * 2**20
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        output = llm.generate(LONG[:1], params)[0]
        assert llm.prefixes.nbytes == llm.spec.kv_bytes(1, 45 + 7) + 8 * (45 + 7)
        *_, last = llm.stream([*LONG[0], *output.token_ids, 5], params)
        assert last.output is not None
        assert last.output.stats.reused_tokens == 45 + 7
        assert last.output.stats.as_dict()["reused_tokens"] == 45 + 7
        assert llm.generate([LONG[1][:30]], params)[0].stats.reused_tokens == 0


def test_no_memory_no_store() -> None:
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=None), verify=False, prefix_bytes=0) as llm:
        assert llm.prefixes is None
    with pytest.raises(RequestError, match="prefix_bytes must be 0"):
        LLM(shared_bundle(), prefix_bytes=-1)


def test_threads_reuse_what_others_left() -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method="model"), verify=False) as llm:
        prompts = [[*LONG[0], number] for number in range(6)]
        expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        got: dict[int, list[tuple[int, ...]]] = {}

        def work(number: int) -> None:
            got[number] = [llm.generate([prompts[number]], params)[0].token_ids for _ in range(3)]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[number] for number in range(6)] == [[text] * 3 for text in expected]
        assert llm.prefixes is not None
        assert llm.prefixes.hits == 5 + 18


# The tool


def test_the_tool_compares_second_turns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = [str(shared_bundle()), "--history", "200", "--repeat", "1", "--method", "ngram"]
    assert reuse.main(options) == 0
    report = capsys.readouterr().out
    assert re.search(r"second turn of \d{3} tokens, 2\d\d of them reused; ms to the first token:", report)
    assert re.search(r"without reuse \d+, with it \d+: \d\.\d\d\d\n", report)
    assert re.search(r"answers of \d+ tokens: identical, logits: identical to the bit\n", report)
    load = CachedModel.load
    monkeypatch.setattr(CachedModel, "load", lambda model, row, saved, *rest: load(model, row, saved * 0, *rest))
    assert reuse.main(options) == 1
    assert "logits: different bits" in capsys.readouterr().out
